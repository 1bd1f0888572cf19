"""vLLM's KV cache as our layout, or the reasons why they cannot be served.

vLLM's blocks come from one pool whatever their group, so a block id stands for the same bytes in every group; what they mean
depends on the group that owns the block at the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cargohold.cache.rows import ALIGNMENT, MAX_ROWS
from cargohold.integrations.vllm import compat
from cargohold.integrations.vllm.groups import Groups, groups_of, is_latent, layer_specs, named_specs
from cargohold.integrations.vllm.identity import served_model
from cargohold.option_values import format_count
from cargohold.process import can_share_memory
from cargohold.protocol import AttentionKind, KVCacheGroup, KVCacheLayout

_HEADS_FIRST = ("BHLNC", "LHBNC")
"""Layouts in which a layer's part of a block is in several pieces."""
_KEPT_AT_ENDS = frozenset({AttentionKind.SLIDING_WINDOW, AttentionKind.RECURRENT})
"""Kinds of which vLLM's prefix cache keeps only what ends where requests are likely to go on."""


NO_GROUPS: Final = Groups((), (), bear_full_hits=False)


@dataclass(frozen=True, slots=True)
class Translation:
    """The result of translating a KV-cache configuration.

    Attributes:
        groups: the groups; none if there are ``obstacles``.
        obstacles: reasons why the configuration cannot be served, as sentences.
    """

    groups: Groups
    obstacles: tuple[str, ...]


def translate(vllm_config: Any, kv_cache_config: Any, *, reports_requests: bool) -> Translation:
    """Translate the KV-cache groups that vLLM made of a model's layers, or find out why they cannot be served.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: its KV-cache configuration for the model's layers.
        reports_requests: whether this version lets a failed load be reported by request.
    """
    obstacles = _parallel_obstacles(vllm_config.parallel_config) + _latent_obstacles(vllm_config, kv_cache_config)
    if not getattr(vllm_config.model_config, "is_prefix_caching_supported", True):
        obstacles.append(
            "vLLM itself reuses no prefix of this model: its pooling or attention needs all tokens at once"
        )
    found = groups_of(kv_cache_config)
    if isinstance(found, list):
        obstacles += found
    groups = NO_GROUPS if isinstance(found, list) else found
    if not kv_cache_config.kv_cache_groups:
        obstacles.append("the model keeps no KV")
    elif not kv_cache_config.kv_cache_tensors or int(kv_cache_config.num_blocks) < 1:
        obstacles.append("vLLM's KV-cache configuration has no memory for the KV")
    caches_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
    if not caches_prefixes and any(group.kind is AttentionKind.RECURRENT for group in groups.served):
        obstacles.append(
            "recurrent state is kept at block boundaries only with prefix caching: --enable-prefix-caching"
        )
    if not reports_requests and any(group.kind is not AttentionKind.FULL or group.index > 0 for group in groups.served):
        # vLLM would go on from the first block that failed. With a window, the tokens before it, which its queries see, may not
        # have been loaded either.
        obstacles.append(
            "with windows, recurrent state or several KV-cache groups this vLLM does not accept that a load failed; "
            "0.30 and later can"
        )
    return Translation(NO_GROUPS if obstacles else groups, tuple(obstacles))


def may_load(vllm_config: Any) -> bool:
    """Whether vLLM protects loads in its role.

    Where steps overlap, a step in flight may still write blocks of a request that has ended. For consumers vLLM frees them
    only then (``defer_block_free``); for a producer it would give them to a load at once.
    """
    do_steps_overlap = getattr(vllm_config, "max_concurrent_batches", 2) > 1
    return bool(vllm_config.kv_transfer_config.is_kv_consumer or not do_steps_overlap)


def make_layout(
    groups: Sequence[KVCacheGroup],
    vllm_config: Any,
    kv_cache_config: Any,
    hash_block_tokens: int,
    *,
    may_differ: bool = True,
) -> KVCacheLayout:
    """The layout that scheduler and workers agree on; raises ``ValueError`` if it contradicts itself.

    It says how much of a block each group uses if they ``may_differ`` in that.
    """
    sizes = zip(groups, _planned_sizes(kv_cache_config, groups), strict=True)
    sized = [replace(group, block_bytes=size) for group, size in sizes]
    return KVCacheLayout(
        groups=tuple(sized if may_differ else groups),
        num_blocks=int(kv_cache_config.num_blocks),
        block_bytes=block_bytes(kv_cache_config),
        hash_block_tokens=hash_block_tokens,
        world_size=int(vllm_config.parallel_config.world_size),
        model=served_model(vllm_config, kv_cache_config),
        num_replicas=replicas(vllm_config, kv_cache_config)[0],
        has_tails=len(groups) == len(kv_cache_config.kv_cache_groups)
        and _has_tails(vllm_config, groups, hash_block_tokens),
    )


def _has_tails(vllm_config: Any, groups: Sequence[KVCacheGroup], hash_block_tokens: int) -> bool:
    """Whether vLLM's prefix cache finds what a prompt leaves inside a block, in groups that all end their blocks together.

    With a draft model that reads the target's hidden states it finds less of attention, which is not followed here.
    """
    kinds, sizes = {group.kind for group in groups}, {group.block_tokens for group in groups}
    has_states = AttentionKind.RECURRENT in kinds and kinds <= {AttentionKind.RECURRENT, AttentionKind.FULL}
    return has_states and len(sizes) == 1 and hash_block_tokens < min(sizes) and not dropped_tokens(vllm_config, groups)


def replicas(vllm_config: Any, kv_cache_config: Any) -> tuple[int, str]:
    """How many workers hold the same KV and share what is kept of it.

    Since 0.32 vLLM says so of all layers together. Without that it is known of latent attention: it is not split, all workers
    project the same hidden states with the same weights. So do workers that hold the same heads, where there are fewer KV
    heads than workers; but of these vLLM says that it is not known (``max_tp_shards``). See ``_alike_heads``.

    Returns:
        Their number; and, if there are such workers but they do not share, the reason as a sentence, else nothing.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    num_alike = int(getattr(kv_cache_config, "kv_tp_replicas", 1))
    if num_alike == 1:
        layers = [layer for group in kv_cache_config.kv_cache_groups for layer in layer_specs(group)]
        num_latent = sum(map(is_latent, layers))
        num_alike = int(getattr(parallel, "tensor_parallel_size", 1))
        if num_alike == 1 or not num_latent or not getattr(model, "use_mla", False):
            num_alike, reason = _alike_heads(vllm_config, layers, num_alike)
            if num_alike == 1:
                return 1, reason
        elif num_latent < len(layers):
            return 1, "the model also keeps KV that differs between them"
    if parallel.distributed_executor_backend != "mp" or may_span_machines(parallel):
        return 1, "they may run on several machines; with mp and one node they do not"
    if compat.tensor_parallel_group is None or not can_share_memory():
        return 1, "they cannot share memory here"
    return num_alike, ""


_EQUAL_LAYERS: Final = frozenset(
    f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe")
)
"""Models of which vLLM's own code gives each layer the configuration's number of KV heads, and neighbours the same ones.

That number is for the whole model. Layers of others may have others (Step-3.5), though on each worker each of them has one.
"""


def _alike_heads(vllm_config: Any, layers: Sequence[Any], num_workers: int) -> tuple[int, str]:
    """How many neighbouring workers hold the same heads; and, if there are such but it is not known which, that as a sentence.

    With quantized weights, workers may round the same head's in ways of their own; a draft model may be split otherwise.
    """
    model = vllm_config.model_config
    num_heads = getattr(model, "get_total_num_kv_heads", int)()
    if not 0 < num_heads < num_workers:
        return 1, ""
    is_known = (
        getattr(model, "architecture", "") in _EQUAL_LAYERS
        and getattr(model, "quantization", None) is None
        and getattr(getattr(model, "model_arch_config", None), "per_layer_overrides", None) is None
        and getattr(vllm_config, "speculative_config", None) is None
        and all(getattr(layer, "num_kv_heads", 0) == 1 for layer in layers)
        and num_workers % num_heads == 0
    )
    if is_known:
        return num_workers // num_heads, ""
    heads = format_count(num_heads, "KV head")
    return 1, f"there are {num_workers} and {heads}, but of this model it is not known which hold the same"


def may_span_machines(parallel_config: Any) -> bool:
    """Whether an engine's workers may be on several machines."""
    is_ray = parallel_config.distributed_executor_backend == "ray"
    return is_ray or int(getattr(parallel_config, "nnodes", 1)) > 1


def block_bytes(kv_cache_config: Any) -> int:
    """Bytes that one block takes on one worker, padding included: the most that its row in a tier may take."""
    tensors = kv_cache_config.kv_cache_tensors
    num_blocks = int(kv_cache_config.num_blocks)
    # All tensors lie in one allocation of their common size (since 0.29, and before where layers were packed), or else each
    # has one of its own.
    shares_allocation = any(hasattr(tensor, "layers") or getattr(tensor, "block_stride", 0) for tensor in tensors)
    total = max(tensor.size for tensor in tensors) if shares_allocation else sum(tensor.size for tensor in tensors)
    return int(-(-total // num_blocks))


def group_sizes(kv_cache_config: Any, groups: Sequence[KVCacheGroup]) -> list[int]:
    """Bytes of a block that each group's layers fill, on one worker; all of it in versions and layouts that do not say."""
    whole = block_bytes(kv_cache_config)
    filled = [sum(size for size, _ in _layer_bytes(kv_cache_config, group)) for group in groups]
    return [min(size or whole, whole) for size in filled]


def _planned_sizes(kv_cache_config: Any, groups: Sequence[KVCacheGroup]) -> list[int]:
    """Bytes of each group's blocks that are kept: those that its layers fill.

    Beside much larger groups, they would be too few for a row. So a part of the padding after the last layer is kept, too.
    """
    sizes = group_sizes(kv_cache_config, groups)
    least = -(-max(sizes) // (MAX_ROWS * ALIGNMENT)) * ALIGNMENT
    padding = [min((behind for _, behind in _layer_bytes(kv_cache_config, group)), default=0) for group in groups]
    return [
        size if size * MAX_ROWS >= max(sizes) else min(least, size + behind)
        for size, behind in zip(sizes, padding, strict=True)
    ]


def _layer_bytes(kv_cache_config: Any, group: KVCacheGroup) -> list[tuple[int, int]]:
    """For each layer of a group, the bytes of a block that it fills, and those of the padding after it; none if unknown."""
    says_so = getattr(kv_cache_config, "kv_cache_layout", None) not in _HEADS_FIRST
    tensors = [tensor for tensor in kv_cache_config.kv_cache_tensors if says_so and hasattr(tensor, "layers")]
    specs = {name: spec for each in kv_cache_config.kv_cache_groups for name, spec in named_specs(each).items()}
    sizes = []
    for tensor in tensors:
        if not frozenset(tensor.layers).isdisjoint(group.layer_names):
            # A stride is 0 where it is between things of which there is one.
            page = min(filter(None, (tensor.layer_stride, tensor.block_stride)), default=0)
            filled = min(page, getattr(specs.get(tensor.layers[0]), "real_page_size_bytes", page))
            sizes += [(filled, page - filled)] * len(tensor.layers)
    return sizes


def smallest_block_tokens(groups: Sequence[KVCacheGroup]) -> int:
    """The largest number of tokens that divides the block size of every group."""
    return math.gcd(*(group.block_tokens for group in groups))


def dropped_tokens(vllm_config: Any, groups: Sequence[KVCacheGroup]) -> int:
    """Tokens at the end of a prefix found on the device that vLLM computes again all the same; 0 if there are none.

    A draft model that reads the target model's hidden states needs those of the last tokens, and its KV of a block's last
    token depends on the token after the block.
    """
    speculation = getattr(vllm_config, "speculative_config", None)
    if speculation is None:
        return 0
    drops = getattr(speculation, "use_eagle_block_drop", speculation.use_eagle)
    return math.lcm(*(group.block_tokens for group in groups)) if drops() else 0


def shares_loads(kv_cache_config: Any, groups: Sequence[KVCacheGroup]) -> bool:
    """Whether vLLM's prefix cache keeps all blocks that were loaded for a request.

    With a retention interval, whose default is 0, it keeps of windows and recurrent states only those at which the request's
    own prompt ends (``reachable_block_mask`` of ``SlidingWindowManager`` and ``MambaManager``).
    """
    is_sparse = getattr(kv_cache_config, "prefix_cache_retention_interval", None) is not None
    return not is_sparse or not any(group.kind in _KEPT_AT_ENDS for group in groups)


def marks_shared_prefixes(groups: Sequence[KVCacheGroup]) -> bool:
    """Whether vLLM accepts where to keep windows and states for other requests, and the model has any."""
    return compat.KEEPS_SHARED_PREFIXES and any(group.kind in _KEPT_AT_ENDS for group in groups)


def shares_load_ends(vllm_config: Any, groups: Sequence[KVCacheGroup]) -> bool:
    """Whether vLLM's prefix cache keeps the windows and states at the end of a load if the request is marked so.

    If vLLM drops the last block of a hit, others continue a block before that end, whose window and state were not loaded.
    """
    return compat.KEEPS_SHARED_PREFIXES and not dropped_tokens(vllm_config, groups)


def _parallel_obstacles(parallel_config: Any) -> list[str]:
    names = {
        "decode_context_parallel_size": "decode context parallelism",
        "prefill_context_parallel_size": "prefill context parallelism",
    }
    obstacles = [f"{what} is not supported" for name, what in names.items() if getattr(parallel_config, name, 1) > 1]
    if parallel_config.world_size > 1 and parallel_config.distributed_executor_backend == "external_launcher":
        obstacles.append("with external_launcher each scheduler gets the reports of one worker only; use mp or ray")
    if getattr(parallel_config, "enable_fault_tolerance", False):
        # The workers' reports of such a step are lost, and with them that transfers have ended and that its KV is wrong.
        obstacles.append(
            "with --enable-fault-tolerance vLLM continues after a failed step without notifying connectors"
        )
    return obstacles


def _latent_obstacles(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Why latent attention cannot be served on a CPU, as sentences; empty if it can, or if the model has none.

    On most CPUs, vLLM computes prompts of latent attention with one kernel and what follows them with another, whose results
    differ. There it reuses no prefixes, which shows in its prefix cache being turned off.
    """
    is_cpu = getattr(getattr(vllm_config, "device_config", None), "device_type", None) == "cpu"
    if not is_cpu or vllm_config.cache_config.enable_prefix_caching:
        return []
    layers = [layer for group in kv_cache_config.kv_cache_groups for layer in layer_specs(group)]
    if not any(is_latent(layer) for layer in layers):
        return []
    return ["vLLM itself reuses no prefix of latent attention on this CPU: what it computes behind one differs"]
