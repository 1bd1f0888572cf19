"""vLLM's KV cache and model as our layout, or the reasons why they cannot be served.

vLLM's blocks come from one pool whatever their group, so a block id stands for the same bytes in every group; what they mean
depends on the group that owns the block at the time.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Final

import torch

from cargohold.cache.rows import ALIGNMENT, MAX_ROWS
from cargohold.integrations.vllm import compat, plugin
from cargohold.integrations.vllm.groups import Groups, groups_of, is_latent, layer_specs, named_specs
from cargohold.option_values import format_count
from cargohold.process import can_share_memory
from cargohold.protocol import AttentionKind, KVCacheGroup, KVCacheLayout, ServedModel

# Options that change what the model's files say; the model's digest is made of these files.
_CHANGES_OF_MODEL: Final = ("hf_config_path", "hf_overrides", "quantization", "quantization_config")
_IMPLEMENTATION: Final = ("config_format", "model_impl")
_CACHE: Final = ("kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype")
# Options that the hash of a picture or a sound does not cover: it covers its bytes, and what the request says of them.
_MEDIA: Final = (
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
# Options that choose among the files beside each other: the digest covers all of them, whichever are read.
_FILES: Final = ("ignore_patterns", "load_format", "model_loader_extra_config")
_TEMPERATURE: Final = "attn_temperature_tuning"
_SHUFFLE: Final = "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"
"""vLLM's environment variable that has a backend for ROCm arrange the inside of a block in another way."""
_NO_CHANGE: Final = ("auto", "evs", "float32", "['original/**/*']")
"""Values of these options that change nothing: their defaults, and a type of states that differs from others in size."""

_LOCAL_FORMATS: Final = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)
"""Load formats that read weights from where the model is; other formats may bring them from elsewhere.

With ``dummy``, programs that train a model start an engine whose weights they send as soon as it runs.
"""


def served_model(vllm_config: Any, kv_cache_config: Any) -> ServedModel:
    """The identity of the served model. Its ``dtype`` names version, layout and attention backends, which arrange the KV."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    changes = {name: getattr(model, name, None) for name in _CHANGES_OF_MODEL}
    if _turns_by_length(model) or _tempers_by_length(model):
        changes["max_model_len"] = model.max_model_len
    changes["kv_cache_layout"] = getattr(kv_cache_config, "kv_cache_layout", None)
    changes["states"] = _state_shapes(kv_cache_config)
    changes["backends"] = _attention_backends(vllm_config)
    changes["processor"] = _processor(vllm_config)
    changes[_SHUFFLE] = compat.environment_option(_SHUFFLE)
    changes |= dict(_further_changes(vllm_config))
    changed = "".join(f", {name} {value}" for name, value in changes.items() if value)
    return ServedModel(
        name=str(model.served_model_name),
        path=str(model.model),
        dtype=f"{model.dtype}, cached as {cache.cache_dtype}, by vLLM {compat.VLLM_VERSION}, "
        f"hashed with {cache.prefix_caching_hash_algo}{changed}",
        revision=_revision(model),
        runs_code=bool(getattr(model, "trust_remote_code", False)),
        code_revision=_text(getattr(model, "code_revision", None)),
        config_path=_text(getattr(model, "hf_config_path", None)),
        download_dir=_text(getattr(vllm_config.load_config, "download_dir", None)),
        obstacle=next(_obstacles(vllm_config), ""),
        # A program that runs the engines itself may have saved their models meanwhile.
        read_after_s=plugin.ran_first_at() if compat.has_own_process() else None,
    )


def _further_changes(vllm_config: Any) -> Iterator[tuple[str, object]]:
    """Names and values of options that change the KV, but only if somebody has set them."""
    model = vllm_config.model_config
    media = getattr(model, "multimodal_config", None)
    cache, files = vllm_config.cache_config, vllm_config.load_config
    for config, names in ((model, _IMPLEMENTATION), (cache, _CACHE), (files, _FILES), (media, _MEDIA)):
        for name in names:
            value = getattr(config, name, None)
            if value and str(getattr(value, "value", value)) not in _NO_CHANGE:
                yield name, value
    speculation = getattr(vllm_config, "speculative_config", None)
    if speculation is not None and (speculation.use_eagle() or speculation.uses_draft_model()):
        # The draft model's KV lies in the same blocks, and decides how fast answers come.
        said = [getattr(speculation, name, None) for name in ("method", "model", "revision", "quantization")]
        yield "drafts by", " ".join(map(str, said))
    adapters = getattr(vllm_config, "lora_config", None)
    if adapters is not None:
        yield "adapters", adapters.compute_hash()  # of options that change how they are computed
    if _tempers_by_length(model):
        generation = model.try_get_generation_config() | model.override_generation_config
        yield _TEMPERATURE, str(generation.get(_TEMPERATURE))
    uses_transformers = getattr(model, "using_transformers_backend", None)
    if uses_transformers is not None and uses_transformers():
        yield "transformers", version("transformers")


def _obstacles(vllm_config: Any) -> Iterator[str]:
    """Reasons, as sentences, why the KV may be another one after a restart without anybody noticing."""
    model, load_format = vllm_config.model_config, vllm_config.load_config.load_format
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        # Whoever sends them before the first request sees no reason to reset the prefix cache.
        yield "weight_transfer_config lets other weights than those in the files be sent at any time"
    media = getattr(model, "multimodal_config", None)
    if getattr(media, "mm_processor_cache_gb", None) == 0 and not vllm_config.cache_config.enable_prefix_caching:
        # And the numbers begin at 1 at every start.
        yield "with mm_processor_cache_gb=0 and without prefix caching vLLM numbers pictures and sounds, and hashes none"
    if str(getattr(load_format, "value", load_format)) not in _LOCAL_FORMATS:
        yield f"load_format={load_format} may bring weights from elsewhere than {model.model}"
    overrides = getattr(model, "hf_overrides", None)
    if callable(overrides):
        yield "hf_overrides is a function"
    if getattr(model, "trust_remote_code", False) and "auto_map" in str(overrides):
        yield "hf_overrides names code"
    if getattr(model, "model_class_overrides", None):
        yield "model_class_overrides names code"


def _revision(model_config: Any) -> str | None:
    """The revision of the model's files: the commit that vLLM has resolved it to (0.32), since branches move.

    With ``hf_config_path``, it is what the user named, because it also stands for a revision of that other repository.
    """
    named = model_config.revision
    return _text(named if getattr(model_config, "hf_config_path", None) else getattr(named, "resolved", named))


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _turns_by_length(model_config: Any) -> bool:
    """Whether a model's rotary embedding turns all keys by angles that depend on the longest sequence allowed."""
    text = getattr(model_config, "hf_text_config", None)
    return any("longrope" in str(getattr(text, name, None)) for name in ("rope_parameters", "rope_scaling"))


def _tempers_by_length(model_config: Any) -> bool:
    """Whether a model scales its queries by the generation config, or else by the longest sequence allowed: Llama 4 does."""
    return hasattr(getattr(model_config, "hf_text_config", None), _TEMPERATURE)


def _state_shapes(kv_cache_config: Any) -> str:
    """The shapes of recurrent states. Kernels' options and the number of speculated tokens change them; padding hides it."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    layers = [layer for spec in specs for layer in getattr(spec, "kv_cache_specs", {"": spec}).values()]
    return " ".join(sorted({str(layer.shapes) for layer in layers if hasattr(layer, "shapes")}))


def _processor(vllm_config: Any) -> str:
    """What decides, besides options, how attention on a CPU arranges keys and values within a block; empty on other devices.

    vLLM chooses among several ways to pack them. All of them have the same name, shapes and strides.
    """
    if getattr(getattr(vllm_config, "device_config", None), "device_type", None) != "cpu":
        return ""
    has_amx = torch.cpu._is_amx_tile_supported()  # noqa: SLF001  # vLLM asks the same
    return f"{platform.machine()} {'with' if has_amx else 'without'} AMX"


def _attention_backends(vllm_config: Any) -> str:
    """Names of the attention backends that write the KV; empty where no layers have been made, that is, not on a worker."""
    compilation = getattr(vllm_config, "compilation_config", None)
    layers = getattr(compilation, "static_forward_context", None) or {}
    names = {layer.get_attn_backend().get_name() for layer in layers.values() if hasattr(layer, "get_attn_backend")}
    return " ".join(sorted(names))


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
            "with windows, recurrent state or several KV-cache groups this vLLM cannot be told that a load failed; "
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
    )


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

    Beside much larger groups, they would be too few for a row. So a part of the padding behind the last layer is kept, too.
    """
    sizes = group_sizes(kv_cache_config, groups)
    least = -(-max(sizes) // (MAX_ROWS * ALIGNMENT)) * ALIGNMENT
    padding = [min((behind for _, behind in _layer_bytes(kv_cache_config, group)), default=0) for group in groups]
    return [
        size if size * MAX_ROWS >= max(sizes) else min(least, size + behind)
        for size, behind in zip(sizes, padding, strict=True)
    ]


def _layer_bytes(kv_cache_config: Any, group: KVCacheGroup) -> list[tuple[int, int]]:
    """For each layer of a group, the bytes of a block that it fills, and those of the padding behind it; none if unknown."""
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
    token depends on the token behind the block.
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
    """Whether vLLM can be told where to keep windows and states for other requests, and the model has any."""
    return compat.KEEPS_SHARED_PREFIXES and any(group.kind in _KEPT_AT_ENDS for group in groups)


def finds_shared_prefixes(groups: Sequence[KVCacheGroup]) -> bool:
    """Whether windows and states are kept where prompts begin to differ, because the blocks of full attention tell where."""
    return marks_shared_prefixes(groups) and any(group.kind is AttentionKind.FULL for group in groups)


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
    layers = [layer for group in kv_cache_config.kv_cache_groups for layer in layer_specs(group)]
    if not any(is_latent(layer) for layer in layers):
        return []
    return ["vLLM itself reuses no prefix of latent attention on this CPU: what it computes behind one differs"]
