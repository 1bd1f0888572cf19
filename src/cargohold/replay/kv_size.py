"""How many bytes of KV a token takes, by a model's configuration; also for models that the embedded engine cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from cargohold.engine.model.source import load_config, locate_model
from cargohold.errors import ConfigError, UnsupportedModelError, one_line
from cargohold.units import is_positive_int

_DTYPE_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_WINDOWED: Final = ("sliding_attention", "chunked_attention")
_FULL: Final = ("full_attention", "attention")
_STATELESS: Final = ("mlp", "moe")
_STATES: Final = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSize:
    """The KV that a model keeps of a token.

    Attributes:
        full_layers: layers that look back at everything.
        windowed_layers: layers that look back at a window. Every token's KV is offloaded while it is inside the window, so for
            the tier they weigh as much.
        state_layers: layers that keep a state of fixed size instead; not counted in ``bytes_per_token``.
        shared_layers: layers that use another layer's KV, and keep none.
        spare_layers: layers for which the blocks of the last group of a kind have unused room; see ``KVGeometry``.
        bytes_per_token: bytes of KV in all layers on all workers together, with the unused room of spare layers.
        is_latent: whether keys and values are kept as one compressed vector (MLA).
    """

    full_layers: int
    windowed_layers: int
    state_layers: int
    shared_layers: int
    spare_layers: int
    bytes_per_token: int
    is_latent: bool

    def describe(self) -> str:
        """A description in words."""
        kinds = [
            (self.full_layers, "full attention"),
            (self.windowed_layers, "sliding or chunked attention"),
            (self.state_layers, "a state of fixed size, not counted"),
            (self.shared_layers, "another layer's KV"),
        ]
        layers = ", ".join(f"{count} with {kind}" for count, kind in kinds if count)
        if self.spare_layers:
            layers += f", and room for {self.spare_layers} more, as blocks of all kinds are equally large"
        latent = "compressed (MLA), " if self.is_latent else ""
        return f"{self.bytes_per_token:,} bytes per token: {latent}layers: {layers}"


def describe_kv(model: str, dtype_bytes: int | None = None) -> KVSize:
    """The KV of a model, by its configuration alone.

    Args:
        model: a directory, a GGUF file, a hub id or ``smollm2``.
        dtype_bytes: bytes per number, if KV is kept in another type than the model was saved in.

    Raises:
        ModelNotFoundError: there is no such model.
        UnsupportedModelError: the model's configuration does not tell.
    """
    config = load_config(model, locate_model(model), otherwise="give --bytes-per-token instead")
    return kv_size(model, config.get_text_config(), dtype_bytes)


def kv_size(model: str, config: Any, dtype_bytes: int | None = None) -> KVSize:
    """The KV of a model with this configuration, of which only the part about text is looked at.

    Raises:
        ConfigError: ``dtype_bytes`` is impossible.
        UnsupportedModelError: the configuration does not tell.
    """
    if dtype_bytes is None:
        dtype_bytes = _DTYPE_BYTES.get(str(getattr(config, "dtype", None)).removeprefix("torch."), 4)
    elif not is_positive_int(dtype_bytes):
        raise ConfigError("kv_dtype_bytes", dtype_bytes, "it must be an integer from 1")
    num_layers = getattr(config, "num_hidden_layers", None)
    if not num_layers:
        raise UnsupportedModelError(model, "its configuration does not say how many layers it has")
    kinds = _layer_kinds(config, num_layers)
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    keeping = kinds[: num_layers - shared]
    unknown = sorted({kind for kind in keeping if kind not in (*_FULL, *_WINDOWED, *_STATELESS, *_STATES)})
    if unknown:
        reason = (
            f"what its layers of kind {', '.join(unknown)} keep of a token is not known: give --bytes-per-token instead"
        )
        raise UnsupportedModelError(model, reason)
    counted = [layer for layer, kind in enumerate(keeping) if kind in (*_FULL, *_WINDOWED)]
    numbers = [_numbers_of_layer(model, config, layer) for layer in counted]
    num_full, num_windowed = (sum(kind in kinds for kind in keeping) for kinds in (_FULL, _WINDOWED))
    # Where layers differ in size, engines lay them out in ways of their own.
    num_spare = _num_spare(num_full, num_windowed) if len(set(numbers)) == 1 else 0
    size = KVSize(
        full_layers=num_full,
        windowed_layers=num_windowed,
        state_layers=sum(kind in _STATES for kind in keeping),
        shared_layers=shared,
        spare_layers=num_spare,
        bytes_per_token=dtype_bytes * (sum(numbers) + sum(numbers[:1]) * num_spare),
        is_latent=any(getattr(_of_layer(config, layer), "kv_lora_rank", None) for layer in counted),
    )
    if not size.bytes_per_token:
        raise UnsupportedModelError(model, "it has no attention layers, so it has no KV cache")
    return size


def _num_spare(num_full: int, num_windowed: int) -> int:
    """Layers for which groups have unused room, if each group has as many layers as the rarer of both kinds."""
    rarest = min(num_full, num_windowed)
    return -(num_full + num_windowed) % rarest if rarest else 0


def _layer_kinds(config: Any, num_layers: int) -> Sequence[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is not None:
        return list(kinds)
    uses_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if uses_window else "full_attention"] * num_layers


def _of_layer(config: Any, layer: int) -> Any:
    """The configuration of one layer. Where layers differ, the model's configuration has no values for what differs."""
    per_layer = getattr(config, "per_layer_config", None)
    return per_layer[layer] if per_layer else config


def _numbers_of_layer(model: str, config: Any, layer: int) -> int:
    """Numbers that one layer keeps of a token: a key and a value per KV head, or one compressed vector for all."""
    own = _of_layer(config, layer)
    try:
        if getattr(own, "kv_lora_rank", None):
            return int(own.kv_lora_rank + own.qk_rope_head_dim)
        num_heads = own.num_attention_heads
        num_kv_heads = getattr(own, "num_key_value_heads", None) or num_heads
        if getattr(own, "new_decoder_architecture", False):
            num_kv_heads = own.num_kv_heads  # as the larger Falcons call them, which have multi_query set too
        elif getattr(own, "multi_query", False):
            num_kv_heads = 1
        head_dim = getattr(own, "head_dim", None) or own.hidden_size // num_heads
    except (AttributeError, RuntimeError, ZeroDivisionError, TypeError) as error:
        raise UnsupportedModelError(
            model, f"its configuration does not tell the size of KV: {one_line(error)}"
        ) from error
    return int(num_kv_heads * (head_dim + (getattr(own, "v_head_dim", None) or head_dim)))
