"""Which model's KV it is: whatever changes its bytes besides tokens, or the reason why that is unknown.

What only rounds in another way is left out (kernels of one attention backend, compilation, sizes of batches): two runs of the
same engine may differ by as much.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Final

import torch

from cargohold.integrations.vllm import compat
from cargohold.integrations.vllm.plugin import ran_first_at
from cargohold.integrations.vllm.regions import arrangement_of
from cargohold.protocol import KVCacheLayout, ServedModel
from cargohold.tiers.namespace import places_of_plugins, why_another_hub

# Options that change what the model's files say; the model's digest is made of these files.
_CHANGES_OF_MODEL: Final = ("hf_config_path", "hf_overrides", "quantization", "quantization_config")
_IMPLEMENTATION: Final = ("config_format", "model_impl")
_CACHE: Final = ("kv_cache_dtype_skip_layers",)
# Options that the hash of a picture or a sound does not cover: it covers its bytes, and what the request says of them.
_MEDIA: Final = (
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
_SCALES: Final = "mm_encoder_fp8_scale_path"
# Options that choose among the files next to each other: the digest covers all of them, whichever are read.
_FILES: Final = ("ignore_patterns", "load_format", "model_loader_extra_config")
_TEMPERATURE: Final = "attn_temperature_tuning"
_ENVIRONMENT: Final = (
    "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_VIDEO_LOADER_BACKEND",
    "VLLM_XPU_INC_WNA16_BACKEND",
)
"""vLLM's environment variables that quantize weights or activations, choose experts by lot, arrange the inside of a block in
another way, choose other frames of a film, or promise the same bits whatever is computed together."""
_ELSEWHERE: Final = ("audio_model_id", "text_model_id")
"""Fields of a model's configuration that name others, of which it takes weights and configuration: Ultravox has them."""
_PLUGINS: Final = ("vllm.general_plugins", "vllm.platform_plugins")
_NO_CHANGE: Final = ("auto", "evs", "['original/**/*']")
"""Values of these options that change nothing: their defaults."""

_LOCAL_FORMATS: Final = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)
"""Load formats that read weights from where the model is; other formats may bring them from elsewhere.

With ``dummy``, programs that train a model start an engine whose weights they send as soon as it runs; with ``npcache``, vLLM
goes on reading its copy of weights that have been replaced since.
"""


def served_model(vllm_config: Any, kv_cache_config: Any) -> ServedModel:
    """The identity of the served model. Its ``dtype`` names version, layout and attention backends, which arrange the KV."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    changes = {name: getattr(model, name, None) for name in _CHANGES_OF_MODEL}
    if _turns_by_length(model) or _tempers_by_length(model):
        changes["max_model_len"] = model.max_model_len
    changes["kv_cache_layout"] = getattr(kv_cache_config, "kv_cache_layout", None)
    changes["states"] = _states(kv_cache_config)
    changes["backends"] = _attention_backends(vllm_config)
    changes["processor"] = _processor(vllm_config)
    # GPUs of some generations have another type of this size.
    changes["fp8"] = compat.fp8_dtype()
    # It fills in what configurations leave out, and makes numbers of pictures and sounds; on its own backend, it is the model.
    changes["transformers"] = version("transformers")
    changes |= {name: compat.environment_option(name) for name in _ENVIRONMENT}
    changes |= dict(_further_changes(vllm_config))
    workers = [getattr(vllm_config.parallel_config, name, "") for name in ("worker_cls", "worker_extension_cls")]
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
        parts=tuple(_parts(model)),
        code_parts=tuple(places_of_plugins(_PLUGINS, compat.environment_option("VLLM_PLUGINS"), workers, own="vllm")),
        obstacle=next(_obstacles(vllm_config), ""),
        # A program that runs the engines itself may have saved their models meanwhile.
        read_after_s=ran_first_at() if compat.has_own_process() else None,
    )


def _further_changes(vllm_config: Any) -> Iterator[tuple[str, object]]:
    """Names and values of options that change the KV, but only if they are set."""
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
    further = getattr(vllm_config, "additional_config", None)
    if further:  # of plugins, and for kernels of recurrent states
        yield "additional_config", further.compute_hash() if hasattr(further, "compute_hash") else further
    if _tempers_by_length(model):
        generation = model.try_get_generation_config() | model.override_generation_config
        yield _TEMPERATURE, str(generation.get(_TEMPERATURE))


def _parts(model_config: Any) -> Iterator[str]:
    """What else of the model's files is read, from elsewhere: their contents count, not their names."""
    config, media = getattr(model_config, "hf_config", None), getattr(model_config, "multimodal_config", None)
    for place in (*(getattr(config, name, None) for name in _ELSEWHERE), getattr(media, _SCALES, None)):
        if place:
            yield str(place)


def _obstacles(vllm_config: Any) -> Iterator[str]:
    """Reasons, as sentences, why the KV may be another one after a restart without anyone noticing."""
    model, load_format = vllm_config.model_config, vllm_config.load_config.load_format
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        # A client that sends them before the first request has no reason to reset the prefix cache.
        yield "weight_transfer_config lets other weights than those in the files be sent at any time"
    media = getattr(model, "multimodal_config", None)
    if getattr(media, "mm_processor_cache_gb", None) == 0 and not vllm_config.cache_config.enable_prefix_caching:
        # And the numbers begin at 1 at every start.
        yield "with mm_processor_cache_gb=0 and without prefix caching vLLM numbers pictures and sounds, and hashes none"
    if str(getattr(load_format, "value", load_format)) not in _LOCAL_FORMATS:
        yield f"load_format={load_format} may load weights from outside {model.model}"
    if getattr(model, "model_weights", ""):
        yield f"model_weights={model.model_weights} loads weights from outside {model.model}"
    if compat.environment_option("VLLM_USE_MODELSCOPE"):
        yield from why_another_hub("VLLM_USE_MODELSCOPE", model.model)
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


def _states(kv_cache_config: Any) -> str:
    """The shapes and types of recurrent states.

    Options, also those of kernels, and the number of speculated tokens change them; padding hides it.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    layers = [layer for spec in specs for layer in getattr(spec, "kv_cache_specs", {"": spec}).values()]
    states = {f"{layer.shapes} {getattr(layer, 'dtypes', '')}" for layer in layers if hasattr(layer, "shapes")}
    return " ".join(sorted(states))


def _processor(vllm_config: Any) -> str:
    """What decides, besides options, how attention on a CPU arranges keys and values within a block; empty on other devices.

    vLLM chooses among several ways to pack them. All of them have the same name, shapes and strides.
    """
    if getattr(getattr(vllm_config, "device_config", None), "device_type", None) != "cpu":
        return ""
    has_amx = torch.cpu._is_amx_tile_supported()  # noqa: SLF001  # vLLM asks the same
    return f"{platform.machine()} {'with' if has_amx else 'without'} AMX"


def _attention_backends(vllm_config: Any) -> str:
    """The attention backends that write the KV; empty where no layers have been made, that is, not on a worker.

    By the names of their classes, too: vLLM gives some of them the same name.
    """
    compilation = getattr(vllm_config, "compilation_config", None)
    layers = getattr(compilation, "static_forward_context", None) or {}
    backends = {layer.get_attn_backend() for layer in layers.values() if hasattr(layer, "get_attn_backend")}
    return " ".join(sorted({f"{backend.get_name()} ({backend.__name__})" for backend in backends}))


def with_arrangement(layout: KVCacheLayout, kv_caches: Mapping[str, Any]) -> KVCacheLayout:
    """Return the layout of a worker whose model's ``dtype`` also names how its tensors arrange the inside of a block.

    An attention backend may do that in several ways: by options, and by what the device can do.
    """
    assert layout.model is not None  # vLLM always says which model it serves
    arranged = f"{layout.model.dtype}, arranged as {arrangement_of(kv_caches, layout.num_blocks)}"
    return replace(layout, model=replace(layout.model, dtype=arranged))
