"""What is known of a model before its weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cargohold.engine.model.kv_layout import KVGeometry, kv_geometry
from cargohold.engine.model.source import locate_model
from cargohold.errors import ConfigError, ModelNotFoundError, UnsupportedModelError

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Types that weights and KV can have, and their bytes."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model, described.

    Attributes:
        name: as the user wrote it.
        path: directory or hub id to load from.
        dtype: one of ``DTYPES``.
        geometry: shape of its KV.
        max_positions: longest sequence it was made for.
        num_attention_heads: query heads.
        vocab_size: size of the vocabulary; a prompt's token ids are below it.
        eos_token_ids: tokens that end a sequence.
    """

    name: str
    path: str
    dtype: str
    geometry: KVGeometry
    max_positions: int
    num_attention_heads: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    @property
    def dtype_bytes(self) -> int:
        """Bytes per number."""
        return DTYPES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token over all layers."""
        geometry = self.geometry
        return len(geometry.layer_kinds) * 2 * geometry.num_kv_heads * geometry.head_dim * self.dtype_bytes


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
    config = _load_config(model, path)
    text = config.get_text_config()
    geometry = kv_geometry(model, text)
    return ModelInfo(
        name=model,
        path=path,
        dtype=_saved_dtype(config) if dtype == "auto" else dtype,
        geometry=geometry,
        max_positions=getattr(text, "max_position_embeddings", None) or 2048,
        num_attention_heads=text.num_attention_heads,
        vocab_size=text.vocab_size,
        eos_token_ids=_eos_token_ids(path, text),
    )


def _load_config(model: str, path: str) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415  # slow to import

    try:
        return AutoConfig.from_pretrained(path)
    except OSError as error:
        if path == model:
            reason = "it is neither a directory nor a .gguf file, and the Hugging Face hub does not have it or is out of reach"
            raise ModelNotFoundError(model, reason) from error
        raise ModelNotFoundError(model, f"its config.json cannot be read: {_first_line(error)}") from error
    except (ValueError, KeyError) as error:
        raise UnsupportedModelError(model, f"transformers does not know it: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", maxsplit=1)[0]


def _saved_dtype(config: Any) -> str:
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def _eos_token_ids(path: str, text_config: Any) -> frozenset[int]:
    from transformers import GenerationConfig  # noqa: PLC0415  # slow to import

    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        eos = None  # a model need not have one
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
