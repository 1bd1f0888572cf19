"""Describes a model by its configuration, before its weights are loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cargohold.engine.model.kv_layout import KVGeometry, kv_geometry
from cargohold.engine.model.source import load_config, locate_model
from cargohold.errors import ConfigError, UnsupportedModelError, one_line

logger = logging.getLogger(__name__)

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
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError("dtype", dtype, f"it must be auto or one of {', '.join(DTYPES)}")
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


def _refuse_unless_causal(model: str, config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415  # slow

    if config.is_encoder_decoder:
        raise UnsupportedModelError(model, "encoder-decoder models are not served; choose a decoder-only model")
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
