"""Derives KV-cache groups and the size of a block from a model's configuration. No torch: runs before anything is loaded.

All groups share one pool of blocks of one size, so they must have equally many layers. A model whose layers are of several
kinds is cut into groups as small as its rarest kind::

    22 sliding-window layers, 4 full   ->   4 full | 4 sliding | 4 | 4 | 4 | 4 | 2 (and room for 2 more)

With one group per kind instead, every block of the four full layers would take the room of 22.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cargohold.errors import UnsupportedModelError
from cargohold.protocol import AttentionKind, KVCacheGroup

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
        """Bytes of one block on one of ``num_shards`` workers."""
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
            raise UnsupportedModelError(model, f"layers of type {layer_type} are not served; served are {served}")
        yield kind, (window if kind is AttentionKind.SLIDING_WINDOW else None)


def _refuse_unknown_architectures(model: str, config: Any) -> None:
    unsupported = {
        "kv_lora_rank": "multi-head latent attention is not served",
        "attn_logit_softcapping": "soft-capped attention scores are not served",
        "use_bidirectional_attention": "attention that looks ahead is not served",
        "num_kv_shared_layers": "layers that share another layer's KV are not served",
    }
    for field, reason in unsupported.items():
        if _field(model, config, field):
            raise UnsupportedModelError(model, reason)
    # The scores of layers without rotary embedding. Such models take positions from transformers' own cache, which is not used
    # here. The scale changes only after some thousand positions, so a probe of a few tokens does not see it.
    if _field(model, config, "attn_temperature_tuning") and not all(_field(model, config, "no_rope_layers") or [False]):
        raise UnsupportedModelError(model, "attention scores that are scaled by position are not served")


def _field(model: str, config: Any, name: str) -> Any:
    """A field of the configuration, ``None`` if it has none of that name."""
    try:
        return getattr(config, name, None)
    except RuntimeError as error:  # how transformers says that it differs between layers
        raise UnsupportedModelError(model, f"layers that differ in {name} are not served") from error
