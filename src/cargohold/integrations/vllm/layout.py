"""vLLM's KV-cache configuration as our layout, or the reasons why it cannot be served.

vLLM's blocks come from one pool whatever their group, so a block id stands for the same bytes in every group; what they mean
depends on the group that owns the block at the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cargohold.integrations.vllm import compat
from cargohold.integrations.vllm.served import served_model
from cargohold.protocol import AttentionKind, KVCacheGroup, KVCacheLayout

# By the class's own name: subclasses keep other things in their blocks, so an unknown subclass must not be served.
_LATENT = "MLAAttentionSpec"
_KINDS: Mapping[str, AttentionKind] = {
    "FullAttentionSpec": AttentionKind.FULL,
    _LATENT: AttentionKind.FULL,
    "SlidingWindowSpec": AttentionKind.SLIDING_WINDOW,
    "ChunkedLocalAttentionSpec": AttentionKind.CHUNKED_LOCAL,
    "MambaSpec": AttentionKind.RECURRENT,
}
_WINDOW_FIELDS = {
    AttentionKind.SLIDING_WINDOW: "sliding_window",
    AttentionKind.CHUNKED_LOCAL: "attention_chunk_size",
}


@dataclass(frozen=True, slots=True)
class Translation:
    """The result of translating a KV-cache configuration.

    Attributes:
        groups: the groups; empty if there are ``obstacles``.
        obstacles: reasons why the configuration cannot be served, as sentences.
    """

    groups: tuple[KVCacheGroup, ...]
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
    groups: list[KVCacheGroup] = []
    for index, spec in enumerate(kv_cache_config.kv_cache_groups):
        group = _group(index, spec)
        if isinstance(group, str):
            obstacles.append(f"group {index} {group}")
        else:
            groups.append(group)
    if not kv_cache_config.kv_cache_groups:
        obstacles.append("the model keeps no KV")
    caches_prefixes = bool(vllm_config.cache_config.enable_prefix_caching)
    if not caches_prefixes and any(group.kind is AttentionKind.RECURRENT for group in groups):
        obstacles.append(
            "recurrent state is kept at block boundaries only with prefix caching: --enable-prefix-caching"
        )
    if not reports_requests and any(group.kind is not AttentionKind.FULL or group.index > 0 for group in groups):
        # vLLM would go on from the first block that failed. With a window, the tokens before it, which its queries see, may not
        # have been loaded either.
        obstacles.append(
            "with windows, recurrent state or several KV-cache groups this vLLM cannot be told that a load failed; "
            "0.30 and later can"
        )
    return Translation(() if obstacles else tuple(groups), tuple(obstacles))


def may_load(vllm_config: Any) -> bool:
    """Whether vLLM protects loads in its role.

    Where steps overlap, a step in flight may still write blocks of a request that has ended. For consumers vLLM frees them
    only then (``defer_block_free``); for a producer it would give them to a load at once.
    """
    do_steps_overlap = getattr(vllm_config, "max_concurrent_batches", 2) > 1
    return bool(vllm_config.kv_transfer_config.is_kv_consumer or not do_steps_overlap)


def make_layout(
    groups: Sequence[KVCacheGroup], vllm_config: Any, kv_cache_config: Any, hash_block_tokens: int
) -> KVCacheLayout:
    """The layout that scheduler and workers agree on; raises ``ValueError`` if it contradicts itself."""
    return KVCacheLayout(
        groups=tuple(groups),
        num_blocks=int(kv_cache_config.num_blocks),
        block_bytes=block_bytes(kv_cache_config),
        hash_block_tokens=hash_block_tokens,
        world_size=int(vllm_config.parallel_config.world_size),
        model=served_model(vllm_config, kv_cache_config),
    )


def block_bytes(kv_cache_config: Any) -> int:
    """Bytes that one block takes on one worker, padding included: the most that its row in a tier may take."""
    tensors = kv_cache_config.kv_cache_tensors
    num_blocks = int(kv_cache_config.num_blocks)
    # All tensors lie in one allocation of their common size (since 0.29, and before where layers were packed), or else each
    # has one of its own.
    shares_allocation = any(hasattr(tensor, "layers") or getattr(tensor, "block_stride", 0) for tensor in tensors)
    total = max(tensor.size for tensor in tensors) if shares_allocation else sum(tensor.size for tensor in tensors)
    return int(-(-total // num_blocks))


def smallest_block_tokens(groups: Sequence[KVCacheGroup]) -> int:
    """The largest number of tokens that divides the block size of every group."""
    return math.gcd(*(group.block_tokens for group in groups))


def dropped_tokens(vllm_config: Any, groups: Sequence[KVCacheGroup]) -> int:
    """Tokens at the end of a prefix found on the device that vLLM computes again all the same; 0 if there are none.

    A draft model that reads the target model's hidden states needs those of the last tokens, and its KV of a block's last
    token depends on the token behind the block.
    """
    speculation = getattr(vllm_config, "speculative_config", None)
    if speculation is None:
        return 0
    drops = getattr(speculation, "use_eagle_block_drop", speculation.use_eagle)
    return math.lcm(*(group.block_tokens for group in groups)) if drops() else 0


def bears_full_hits(group: KVCacheGroup) -> bool:
    """Whether a request whose tokens were all loaded may compute its last token again, as vLLM then does.

    For a load of ``n`` tokens, vLLM allocates the blocks that a query at position ``n`` sees. But the query that it computes
    next is at ``n - 1``, and may see one block more::

        window of 5, blocks of 4      |........|........|        n = 8
                                           <------->             what position 7 sees: token 3, of the first block
                                               <------->         what position 8 sees: the first block is not needed

    A recurrent state would take in the last token twice.
    """
    match group.kind:
        case AttentionKind.FULL:
            return True
        case AttentionKind.SLIDING_WINDOW:
            # A full hit ends with a block; so the windows differ by a block if the later one begins with a block.
            return group.window_tokens is not None and (group.window_tokens - 1) % group.block_tokens != 0
        case AttentionKind.CHUNKED_LOCAL | AttentionKind.RECURRENT:
            return False


def shares_loads(kv_cache_config: Any, groups: Sequence[KVCacheGroup]) -> bool:
    """Whether vLLM's prefix cache keeps all blocks that were loaded for a request.

    With a retention interval, whose default is 0, it keeps of windows and recurrent states only those at which the request's
    own prompt ends (``reachable_block_mask`` of ``SlidingWindowManager`` and ``MambaManager``).
    """
    is_sparse = getattr(kv_cache_config, "prefix_cache_retention_interval", None) is not None
    return not is_sparse or not any(
        group.kind in {AttentionKind.SLIDING_WINDOW, AttentionKind.RECURRENT} for group in groups
    )


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
    obstacles = [f"{what} is not served" for name, what in names.items() if getattr(parallel_config, name, 1) > 1]
    if parallel_config.world_size > 1 and parallel_config.distributed_executor_backend == "external_launcher":
        obstacles.append("with external_launcher each scheduler gets the reports of one worker only; use mp or ray")
    if getattr(parallel_config, "enable_fault_tolerance", False):
        # The workers' reports of such a step are lost, and with them that transfers have ended and that its KV is wrong.
        obstacles.append("with --enable-fault-tolerance vLLM goes on after a step that failed, and does not tell of it")
    return obstacles


def _latent_obstacles(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Why latent attention cannot be served on a CPU, as sentences; empty if it can, or if the model has none.

    On most CPUs, vLLM computes prompts of latent attention with one kernel and what follows them with another, whose results
    differ. There it reuses no prefixes, which shows in its prefix cache being turned off.
    """
    is_cpu = getattr(getattr(vllm_config, "device_config", None), "device_type", None) == "cpu"
    if not is_cpu or vllm_config.cache_config.enable_prefix_caching:
        return []
    layers = [layer for group in kv_cache_config.kv_cache_groups for layer in _layer_specs(group.kv_cache_spec)]
    if not any(type(layer).__name__ == _LATENT for layer in layers):
        return []
    return ["vLLM itself reuses no prefix of latent attention on this CPU: what it computes behind one differs"]


def _group(index: int, spec: Any) -> KVCacheGroup | str:
    """Translate one of vLLM's groups; a sentence without its subject if it cannot be served."""
    if getattr(spec, "host_resident", False) or not getattr(spec, "enable_kv_transfer", True):
        return "lives outside the block pool"
    layers = _layer_specs(spec.kv_cache_spec)
    descriptions = {_describe(layer) for layer in layers}
    if len(descriptions) > 1:
        return f"mixes layers of different kinds: {', '.join(sorted(kind for kind, *_ in descriptions))}"
    if any(getattr(layer, "non_causal", False) for layer in layers):
        return "has attention that looks ahead: its KV depends on what follows it"
    name, block_tokens, window = descriptions.pop()
    kind = _KINDS.get(name)
    if kind is None:
        return f"has layers of kind {name}, which is not served"
    if kind is AttentionKind.RECURRENT and getattr(layers[0], "mamba_cache_mode", "none") == "none":
        return "keeps one recurrent state per request and none at block boundaries; vLLM's --mamba-cache-mode says when"
    if kind is AttentionKind.FULL:
        window = None  # with its hybrid cache manager off, vLLM keeps blocks behind a window
    return KVCacheGroup(index, kind, block_tokens, tuple(spec.layer_names), window)


def _layer_specs(spec: Any) -> list[Any]:
    per_layer = getattr(spec, "kv_cache_specs", None)
    return list(per_layer.values()) if isinstance(per_layer, dict) else [spec]


def _describe(spec: Any) -> tuple[str, int, int | None]:
    name = type(spec).__name__
    field = _WINDOW_FIELDS.get(_KINDS.get(name, AttentionKind.FULL))
    if field is None:
        return name, int(spec.block_size), None
    # With several layers that draft, vLLM keeps some tokens more than the window, and wants them in a load.
    return name, int(spec.block_size), getattr(spec, field) + getattr(spec, "extra_retained_tokens", 0)
