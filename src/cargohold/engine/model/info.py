"""A model before its weights are loaded: its description, its KV-cache groups, a block's size. No torch.

All groups share one pool of blocks of one size, so they must have equally many layers. A model whose layers are of several
kinds is cut into groups as small as its rarest kind::

    22 sliding-window layers, 4 full   ->   4 full | 4 sliding | 4 | 4 | 4 | 4 | 2 (and room for 2 more)

With one group per kind instead, every block of the four full layers would take the room of 22.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cargohold.engine.model.files import load_config, locate_model
from cargohold.errors import ConfigError, ModelError, UnsupportedModelError, one_line
from cargohold.protocol import AttentionKind, KVCacheGroup

logger = logging.getLogger(__name__)

LayerKind = tuple[AttentionKind, int | None]
_LAYER_TYPES: Mapping[str, AttentionKind] = {
    "full_attention": AttentionKind.FULL,
    "sliding_attention": AttentionKind.SLIDING_WINDOW,
}


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of a model's KV.

    Attributes:
        layer_kinds: per layer, how it looks back: kind and window in tokens.
        num_query_heads: query heads per layer.
        num_kv_heads: key/value heads per layer.
        head_dim: numbers per head.
    """

    layer_kinds: tuple[LayerKind, ...]
    num_query_heads: int
    num_kv_heads: int
    head_dim: int

    def groups(self, block_tokens: int) -> tuple[KVCacheGroup, ...]:
        """The KV-cache groups: full attention first, then by window; each of ``layers_per_group`` layers at most."""
        size = self.layers_per_group
        groups: list[KVCacheGroup] = []
        for (kind, window), layers in sorted(self._layers_by_kind().items(), key=lambda item: item[0][1] or 0):
            for start in range(0, len(layers), size):
                names = tuple(layer_name(layer) for layer in layers[start : start + size])
                groups.append(KVCacheGroup(len(groups), kind, block_tokens, names, window))
        return tuple(groups)

    @property
    def layers_per_group(self) -> int:
        """Layers whose KV fits in one block: as many as the rarest kind has."""
        return min(len(layers) for layers in self._layers_by_kind().values())

    def block_bytes(self, block_tokens: int, dtype_bytes: int, num_shards: int = 1) -> int:
        heads = self.heads_per_shard(num_shards)
        return self.layers_per_group * 2 * block_tokens * heads * self.head_dim * dtype_bytes

    def heads_per_shard(self, num_shards: int) -> int:
        """KV heads that each of ``num_shards`` workers keeps. A single head serves all query heads: every worker keeps it."""
        return 1 if self.num_kv_heads == 1 else self.num_kv_heads // num_shards

    def splits_over(self, num_shards: int) -> bool:
        """Whether each of ``num_shards`` workers can take an equal part of the heads."""
        kv_heads_split = self.num_kv_heads == 1 or self.num_kv_heads % num_shards == 0
        return kv_heads_split and self.num_query_heads % num_shards == 0

    def _layers_by_kind(self) -> dict[LayerKind, list[int]]:
        by_kind: dict[LayerKind, list[int]] = {}
        for layer, kind in enumerate(self.layer_kinds):
            by_kind.setdefault(kind, []).append(layer)
        return by_kind


def layer_name(layer: int) -> str:
    """Name of a layer in groups and hooks."""
    return f"layers.{layer}"


def kv_geometry(model: str, config: Any) -> KVGeometry:
    """Read the geometry from a Hugging Face configuration.

    Args:
        model: the model's name, for errors.
        config: the text part of the configuration.

    Raises:
        UnsupportedModelError: the model has something that paged KV cannot hold yet.
    """
    _refuse_unknown_architectures(model, config)
    num_heads = _field(model, config, "num_attention_heads")
    num_layers = _field(model, config, "num_hidden_layers")
    if not num_heads or not num_layers:
        raise UnsupportedModelError(model, f"{config.model_type} has no attention layers, so it has no KV cache")
    return KVGeometry(
        layer_kinds=tuple(_layer_kinds(model, config, num_layers)),
        num_query_heads=num_heads,
        num_kv_heads=_field(model, config, "num_key_value_heads") or num_heads,
        head_dim=_field(model, config, "head_dim") or config.hidden_size // num_heads,
    )


def _layer_kinds(model: str, config: Any, num_layers: int) -> Iterable[LayerKind]:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        uses_window = bool(window) and getattr(config, "use_sliding_window", True)
        layer_types = ["sliding_attention" if uses_window else "full_attention"] * num_layers
    for layer_type in layer_types:
        kind = _LAYER_TYPES.get(layer_type)
        if kind is None:
            served = ", ".join(_LAYER_TYPES)
            raise UnsupportedModelError(model, f"layers of type {layer_type} are not supported; supported are {served}")
        yield kind, (window if kind is AttentionKind.SLIDING_WINDOW else None)


def _refuse_unknown_architectures(model: str, config: Any) -> None:
    unsupported = {
        "kv_lora_rank": "multi-head latent attention is not supported",
        "attn_logit_softcapping": "soft-capped attention scores are not supported",
        "use_bidirectional_attention": "attention that looks ahead is not supported",
        "num_kv_shared_layers": "layers that share another layer's KV are not supported",
    }
    for field, reason in unsupported.items():
        if _field(model, config, field):
            raise UnsupportedModelError(model, reason)
    # The scores of layers without rotary embedding. Such models take positions from transformers' own cache, which is not used
    # here. The scale changes only after some thousand positions, so a probe of a few tokens does not see it.
    if _field(model, config, "attn_temperature_tuning") and not all(_field(model, config, "no_rope_layers") or [False]):
        raise UnsupportedModelError(model, "attention scores that are scaled by position are not supported")


def _field(model: str, config: Any, name: str) -> Any:
    """A field of the configuration, ``None`` if it has none of that name."""
    try:
        return getattr(config, name, None)
    except RuntimeError as error:  # how transformers says that it differs between layers
        raise UnsupportedModelError(model, f"layers that differ in {name} are not supported") from error


DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Types that weights and KV can have, and their bytes."""
_UNKNOWN_MAX_POSITIONS = 2048
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model, described.

    Attributes:
        name: as the user wrote it.
        path: directory or hub id to load from.
        dtype: one of ``DTYPES``.
        geometry: shape of its KV.
        max_positions: longest sequence that it can be served with.
        vocab_size: size of the vocabulary; a prompt's token ids are below it.
        eos_token_ids: tokens that end a sequence.
        read_after_s: a time, in seconds since 1970, before which none of its files had been read.
    """

    name: str
    path: str
    dtype: str
    geometry: KVGeometry
    max_positions: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    read_after_s: float

    @property
    def dtype_bytes(self) -> int:
        """Bytes per number."""
        return DTYPES[self.dtype]


def describe_model(model: str, dtype: str = "auto") -> ModelInfo:
    """Find a model and read its configuration.

    Args:
        model: a directory, a GGUF file, a hub id or ``smollm2``.
        dtype: one of ``DTYPES``, or ``auto`` for the type that the model was saved in.

    Raises:
        ModelNotFoundError: nothing is there.
        UnsupportedModelError: the engine cannot run it.
        ConfigError: the type is unknown.
        ModelError: a package of the extra ``engine`` is not installed.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError("dtype", dtype, f"it must be auto or one of {', '.join(DTYPES)}")
    _require_packages(model)
    path = locate_model(model)
    read_after_s = time.time()  # not earlier: where a GGUF file is converted, the files have just been written
    config = load_config(model, path, otherwise="choose a model that transformers knows itself")
    _refuse_unless_causal(model, config)
    text = _text_config(model, config)
    return ModelInfo(
        name=model,
        path=path,
        dtype=_saved_dtype(config) if dtype == "auto" else dtype,
        geometry=kv_geometry(model, text),
        max_positions=_max_positions(model, text),
        vocab_size=text.vocab_size,
        eos_token_ids=_eos_token_ids(model, path, text),
        read_after_s=read_after_s,
    )


def _require_packages(model: str) -> None:
    """Raise ``ModelError`` where the packages are missing that run a model: vLLM's users need none of them for us."""
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        raise ModelError(model, f"running it needs {' and '.join(missing)}; run: pip install 'cargohold[engine]'")


def _refuse_unless_causal(model: str, config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415  # slow

    if config.is_encoder_decoder:
        raise UnsupportedModelError(model, "encoder-decoder models are not supported; choose a decoder-only model")
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModelError(model, f"{config.model_type} is not a language model that generates text")


def _text_config(model: str, config: Any) -> Any:
    """The part of a configuration that is about text, for models that also see or hear."""
    try:
        return config.get_text_config()
    except ValueError as error:
        raise UnsupportedModelError(model, f"it is not one language model: {one_line(error)}") from error


def _saved_dtype(config: Any) -> str:
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def _max_positions(model: str, text_config: Any) -> int:
    """Longest sequence that the model can be served with.

    Some rotary embeddings turn by other angles once a sequence is longer than those the model was first trained with. All
    requests of a batch share the angles, and cached keys keep those they were made with, so such a model stays below that.
    """
    limit = getattr(text_config, "max_position_embeddings", None) or _UNKNOWN_MAX_POSITIONS
    for rope in _rope_parameters(text_config):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = rope.get("original_max_position_embeddings") or limit
            if original < limit:
                logger.warning(
                    "model %s is served up to %d of its %d tokens: its %s rotary embedding changes there",
                    model,
                    original,
                    limit,
                    rope["rope_type"],
                )
                limit = original
    return int(limit)


def _rope_parameters(text_config: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of the rotary embedding, of which there may be one set per type of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    yield parameters
    yield from (value for value in parameters.values() if isinstance(value, Mapping))


def _eos_token_ids(model: str, path: str, text_config: Any) -> frozenset[int]:
    from transformers import GenerationConfig  # noqa: PLC0415  # slow to import

    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        eos = None  # a model need not have one
    except Exception as error:  # whatever transformers raises for what is no mapping
        raise UnsupportedModelError(model, f"its generation_config.json is not valid: {one_line(error)}") from error
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    token_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token_id, int) for token_id in token_ids):
        raise UnsupportedModelError(model, f"its eos_token_id={eos!r} must be a token's number, or several in a list")
    return frozenset(token_ids)
