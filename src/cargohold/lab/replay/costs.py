"""What hits are worth: a simple model of time. It is stated here, so that readers can judge it.

* Computing ``n`` tokens of a prompt takes ``n / prefill_tokens_per_s``. Attention makes long prompts slower than that, so for
  them the saving is underestimated.
* Loading a chunk from a tier takes its bytes over the tier's bandwidth, and overlaps with nothing: an overestimate.
* Storing costs nothing: it happens in the background.

Sizes of tiers are as people write them: ``5%`` of the different blocks, ``1000`` blocks, ``64GiB``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final

from cargohold.engine.model.files import load_config, locate_model
from cargohold.errors import ConfigError, UnsupportedModelError, one_line
from cargohold.lab.replay.replaying import ReplayResult
from cargohold.lab.replay.tiers import DISK, HOST
from cargohold.lab.replay.workload import Workload
from cargohold.option_values import (
    NUMBER,
    SIZE_UNITS,
    format_bytes,
    format_count,
    is_positive_int,
    is_positive_number,
    parse_bytes,
)

DEFAULT_BYTES_PER_S: Final[Mapping[str, float]] = MappingProxyType({HOST: 20e9, DISK: 3e9})
"""About the bandwidth of a PCIe 4.0 link with 16 lanes, and of an NVMe drive."""
_MAX_BYTES_PER_TOKEN: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Bytes and times. Raises ``ConfigError`` for impossible values.

    Attributes:
        bytes_per_token: bytes of KV per token; ``None`` if not known.
        prefill_tokens_per_s: prompt tokens that the accelerator computes per second; ``None`` if not known.
        bytes_per_s: bandwidth of loads, by tier.
    """

    bytes_per_token: int | None = None
    prefill_tokens_per_s: float | None = None
    bytes_per_s: Mapping[str, float] = field(default_factory=lambda: DEFAULT_BYTES_PER_S)

    def __post_init__(self) -> None:
        per_token = self.bytes_per_token
        if per_token is not None and not (is_positive_int(per_token) and per_token <= _MAX_BYTES_PER_TOKEN):
            raise ConfigError("bytes_per_token", per_token, f"it must be an integer from 1 to {_MAX_BYTES_PER_TOKEN}")
        rate = self.prefill_tokens_per_s
        if rate is not None and not is_positive_number(rate):
            raise ConfigError("prefill_tokens_per_s", rate, "it must be a number above 0")
        for tier, bandwidth in self.bytes_per_s.items():
            if not is_positive_number(bandwidth):
                raise ConfigError(f"{tier}_bytes_per_s", bandwidth, "it must be a number above 0")

    def chunk_bytes(self, chunk_tokens: int | None) -> int | None:
        return None if self.bytes_per_token is None or chunk_tokens is None else self.bytes_per_token * chunk_tokens

    def saved_s(self, result: ReplayResult, chunk_tokens: int | None) -> float | None:
        """Seconds of prefill that hits saved, less the time of loads; negative if computing would have been faster.

        ``None`` if bytes per token, tokens per chunk or the prefill rate are not known.
        """
        chunk_bytes = self.chunk_bytes(chunk_tokens)
        if self.prefill_tokens_per_s is None or chunk_bytes is None or result.num_hit_tokens is None:
            return None
        loaded = {tier.name: tier.loaded for tier in result.tiers} or {HOST: result.num_prefix_hits}
        load_s = sum(chunks * chunk_bytes / self.bytes_per_s[tier] for tier, chunks in loaded.items())
        return result.num_hit_tokens / self.prefill_tokens_per_s - load_s

    def waiting_s(self, result: ReplayResult, workload: Workload) -> float | None:
        """Seconds that all prompts together take to be loaded and computed: what their sessions wait for.

        ``None`` where ``saved_s`` is.
        """
        saved_s = self.saved_s(result, workload.chunk_tokens)
        if saved_s is None or self.prefill_tokens_per_s is None:
            return None
        return workload.prompt_tokens_from(0) / self.prefill_tokens_per_s - saved_s

    def break_even_tokens_per_s(self, tier: str) -> float | None:
        """The prefill rate above which computing a token is faster than loading it from a tier."""
        return None if self.bytes_per_token is None else self.bytes_per_s[tier] / self.bytes_per_token


_EXPECTED = (
    "it must be a share of the different blocks such as 5%, a number of blocks such as 1000, or bytes such as 64GiB; "
    f"{SIZE_UNITS}"
)
_PERCENT = re.compile(rf"({NUMBER})\s*%")
_BLOCKS = re.compile(r"[0-9]{1,40}")


class _Unit(Enum):
    PERCENT = "per cent of the different blocks"
    BLOCKS = "blocks"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Size:
    """How large a tier is.

    Attributes:
        key: the option's name.
        text: the size as the user wrote it.
        amount: the number, in ``unit``.
        unit: unit of ``amount``.
    """

    key: str
    text: str
    amount: Fraction
    unit: _Unit

    @property
    def is_bytes(self) -> bool:
        """Whether the size is in bytes, so that the bytes per token must be known to convert it to chunks."""
        return self.unit is _Unit.BYTES

    def chunks_for(self, workload: Workload, chunk_bytes: int | None) -> int:
        """Slots of a tier of this size, at least one. Raises ``ConfigError`` if the trace and its model do not say."""
        if self.unit is _Unit.PERCENT:
            return max(1, round(self.amount * workload.num_unique / 100))
        if self.unit is _Unit.BLOCKS:
            size = int(self.amount) // workload.blocks_per_chunk
            least = format_count(workload.blocks_per_chunk, "block")
        elif chunk_bytes is None:
            raise ConfigError(self.key, self.text, "bytes need --bytes-per-token or --model, and --block-tokens")
        else:
            size = int(self.amount) // chunk_bytes
            least = format_count(chunk_bytes, "byte")
        if not size:
            raise ConfigError(self.key, self.text, f"it must hold at least one chunk, which is {least}")
        return size


def parse_size(key: str, text: str) -> Size:
    """Parse a size. Raises ``ConfigError`` naming ``key`` if the text is not a size, or is zero."""
    text = text.strip()
    percent = _PERCENT.fullmatch(text)
    if percent:
        size = Size(key, text, Fraction(percent[1]), _Unit.PERCENT)
    elif _BLOCKS.fullmatch(text):
        size = Size(key, text, Fraction(text), _Unit.BLOCKS)
    else:
        try:
            size = Size(key, text, Fraction(parse_bytes(key, text)), _Unit.BYTES)
        except ConfigError as error:
            raise ConfigError(key, text, _EXPECTED) from error
    if not size.amount:
        raise ConfigError(key, text, "a tier of size zero keeps nothing")
    return size


def parse_sizes(key: str, text: str) -> list[Size]:
    """Parse several sizes, separated by commas. Raises like ``parse_size``."""
    return [parse_size(key, part) for part in text.split(",")]


# --- how many bytes of KV a token takes -------------------------------------------------------------------------------

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
        has_encoder: whether an encoder reads the prompt, so that KV depends on more than tokens.
        number_type: type of its numbers; empty if another width was asked for.
    """

    full_layers: int
    windowed_layers: int
    state_layers: int
    shared_layers: int
    spare_layers: int
    bytes_per_token: int
    is_latent: bool
    has_encoder: bool
    number_type: str = ""

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
        UnsupportedModelError: the model's configuration does not say.
    """
    config = load_config(model, locate_model(model), otherwise="give --bytes-per-token instead")
    return kv_size(model, config.get_text_config(), dtype_bytes)


def kv_size(model: str, config: Any, dtype_bytes: int | None = None) -> KVSize:
    """The KV of a model with this configuration, of which only the part about text is looked at.

    Raises:
        ConfigError: ``dtype_bytes`` is impossible.
        UnsupportedModelError: the configuration does not say.
    """
    number_type = "" if dtype_bytes else str(getattr(config, "dtype", None)).removeprefix("torch.")
    if dtype_bytes is None:
        dtype_bytes = _DTYPE_BYTES.get(number_type, 4)
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
        has_encoder=bool(getattr(config, "is_encoder_decoder", False)),
        number_type=number_type,
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
            model, f"its configuration does not say the size of KV: {one_line(error)}"
        ) from error
    return int(num_kv_heads * (head_dim + (getattr(own, "v_head_dim", None) or head_dim)))


# --- does it pay? -----------------------------------------------------------------------------------------------------


TOKENS: Final = 1000
"""Tokens that people compare times of."""


@dataclass(frozen=True, slots=True)
class Paying:
    """A model on a machine, and a tier.

    Attributes:
        prefill_tokens_per_s: prompt tokens that are computed per second.
        bytes_per_token: bytes of KV per token.
        bytes_per_s: what the way from the tier to the device carries.
    """

    prefill_tokens_per_s: float
    bytes_per_token: int
    bytes_per_s: float

    @property
    def compute_s(self) -> float:
        return TOKENS / self.prefill_tokens_per_s

    @property
    def load_s(self) -> float:
        return TOKENS * self.bytes_per_token / self.bytes_per_s

    @property
    def saved_s(self) -> float:
        """Seconds that loading saves; negative if computing is faster."""
        return self.compute_s - self.load_s

    @property
    def break_even_tokens_per_s(self) -> float:
        """The prefill rate above which loading no longer pays."""
        return self.bytes_per_s / self.bytes_per_token

    def describe(self, tier: str) -> str:
        """What it means, in a sentence."""
        times = f"loading {TOKENS:,} tokens from {tier} takes {format_s(self.load_s)}"
        if self.saved_s <= 0:
            return f"{times}, longer than computing them: it does not pay"
        limit = f"it pays up to a prefill of {self.break_even_tokens_per_s:,.0f} tokens/s"
        return f"{times} and saves {format_s(self.saved_s)}; {limit}"


def tokens_per_gib(bytes_per_token: int) -> int:
    """Tokens whose KV a GiB holds."""
    return (1 << 30) // bytes_per_token


def describe_size(bytes_per_token: int) -> str:
    """The size of KV, for people."""
    return f"{format_bytes(bytes_per_token)} per token: a GiB holds {tokens_per_gib(bytes_per_token):,} tokens"


def format_s(seconds: float) -> str:
    """A time for people: ``2.3 s``, ``13 ms``, ``0.4 ms``."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
