"""vLLM's KV-cache groups as ours: which are served, which are left out, and which a model is refused for.

A class of vLLM's is known by its own name: a subclass keeps other things in its blocks and is never taken for its parent. What
the class does not say, such as windows and whether a prefix can be found by its hash, is taken from its values.

A group may be left out only if vLLM itself computes it again after a hit of its own prefix cache. Its blocks are never stored,
loaded or looked up, and our groups are numbered without it::

    vLLM's groups      0: latent   1: ring    2: latent, window      3: indexer's keys
    ours               0           left out   1                      2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, Final, TypeVar

from cargohold.protocol import AttentionKind, KVCacheGroup

Table = TypeVar("Table")

_MODULE: Final = "vllm.v1.kv_cache_interface"
LATENT: Final = "MLAAttentionSpec"
_LATENT_WINDOW: Final = "SlidingWindowMLASpec"
_RING: Final = "CircularBufferSpec"
_STATE: Final = "MambaSpec"
_KINDS: Final[Mapping[str, AttentionKind]] = {
    "FullAttentionSpec": AttentionKind.FULL,
    "SinkFullAttentionSpec": AttentionKind.FULL,
    LATENT: AttentionKind.FULL,
    "SlidingWindowSpec": AttentionKind.SLIDING_WINDOW,
    _LATENT_WINDOW: AttentionKind.SLIDING_WINDOW,
    "ChunkedLocalAttentionSpec": AttentionKind.CHUNKED_LOCAL,
    _STATE: AttentionKind.RECURRENT,
    # One block per request, for as long as it lives, as of a state that is never kept.
    _RING: AttentionKind.RECURRENT,
}
_LEFT_OUT: Final = (_LATENT_WINDOW, _RING)
"""Classes whose groups vLLM computes again if they are not in its prefix cache: it replays a bounded window, and begins with an
empty ring where a whole compressed row ends."""
_REFUSED: Final[Mapping[str, str]] = {
    "RSWASpec": "generates with a window, so the KV of an answer differs from that of the same tokens in a prompt",
    "HiddenStateCacheSpec": "holds hidden states for other readers, not KV",
    "HiSparseHotSpec": "lives outside the block pool",
    "HiSparseResidentSpec": "lives outside the block pool",
    "EncoderOnlyAttentionSpec": "keeps nothing from one step to the next",
    "CrossAttentionSpec": "depends on what an encoder has read, which the hashes of tokens do not cover",
}
_WINDOWS: Final = {
    AttentionKind.SLIDING_WINDOW: "sliding_window",
    AttentionKind.CHUNKED_LOCAL: "attention_chunk_size",
}


@dataclass(frozen=True, slots=True)
class Groups:
    """The KV-cache groups of a model.

    Attributes:
        by_number: our group for each of vLLM's; ``None`` for those that are left out.
        in_pool: all of vLLM's groups, under its numbers: those that are left out take blocks of the pool, too.
        bear_full_hits: whether vLLM may compute the last token of a request again of which all tokens were loaded.
    """

    by_number: tuple[KVCacheGroup | None, ...]
    in_pool: tuple[KVCacheGroup, ...]
    bear_full_hits: bool

    @property
    def served(self) -> tuple[KVCacheGroup, ...]:
        """The groups that are not left out."""
        return tuple(group for group in self.by_number if group is not None)

    @property
    def numbers(self) -> tuple[int, ...]:
        """VLLM's number for each of ours."""
        return tuple(number for number, group in enumerate(self.by_number) if group is not None)

    @property
    def left_out_layers(self) -> frozenset[str]:
        """The layers whose blocks are never copied."""
        return frozenset(name for group in self.in_pool for name in group.layer_names).difference(
            *(group.layer_names for group in self.served)
        )

    def select(self, tables: Sequence[Table]) -> tuple[Table, ...]:
        """Return of one table per group of vLLM's those of ours."""
        return tuple(table for table, group in zip(tables, self.by_number, strict=True) if group is not None)


def groups_of(kv_cache_config: Any) -> Groups | list[str]:
    """Return the groups that vLLM made of a model's layers, or why they cannot be served, as sentences."""
    specs = kv_cache_config.kv_cache_groups
    found = [_group(number, spec) for number, spec in enumerate(specs)]
    obstacles = [f"group {number} {why}" for number, why in enumerate(found) if isinstance(why, str)]
    in_pool = tuple(group for group in found if not isinstance(group, str))
    if obstacles:
        return obstacles
    is_kept = [_is_kept(layer_specs(spec)) for spec in specs]
    if specs and not any(is_kept):
        return ["no group of the model can be found by a prefix"]
    hit_tokens = _hit_tokens(kv_cache_config, [group for group, keeps in zip(in_pool, is_kept, strict=True) if keeps])
    by_number: list[KVCacheGroup | None] = []
    for group, keeps in zip(in_pool, is_kept, strict=True):
        index = sum(one is not None for one in by_number)
        by_number.append(replace(group, index=index, hit_tokens=hit_tokens) if keeps else None)
    # A last token that is computed once more would be compressed with what is not in the ring any more.
    compresses = any(getattr(layer, "tokens_per_state", 1) > 1 for spec in specs for layer in layer_specs(spec))
    bears = all(is_kept) and not compresses and all(map(bears_full_hits, in_pool))
    return Groups(tuple(by_number), in_pool, bears)


def _hit_tokens(kv_cache_config: Any, served: Sequence[KVCacheGroup]) -> int:
    """Return at multiples of how many tokens vLLM goes on. Blocks of groups that are left out count for it, too."""
    aligned = int(getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or 1)
    return lcm(aligned, *[group.block_tokens for group in served])


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


def layer_specs(group: Any) -> list[Any]:
    """Return what vLLM says of each layer of a group; what it says of the group if this worker has none of its layers."""
    return list(named_specs(group).values()) or [group.kv_cache_spec]


def named_specs(group: Any) -> dict[str, Any]:
    """Return what vLLM says of each layer of a group, by its name."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return per_layer if isinstance(per_layer, dict) else dict.fromkeys(group.layer_names, group.kv_cache_spec)


def is_latent(layer: Any) -> bool:
    """Whether a layer has latent attention, which tensor-parallel workers do not split."""
    return type(layer).__name__ in (LATENT, _LATENT_WINDOW)


def _group(number: int, group: Any) -> KVCacheGroup | str:
    """Translate one of vLLM's groups; a sentence without its subject if it cannot be served."""
    layers = layer_specs(group)
    why = next(_refusals(group, layers), None)
    if why is not None:
        return why
    kind, block_tokens, window, _ = _describe(layers[0])
    names = tuple(group.layer_names)
    return KVCacheGroup(number, kind, block_tokens, names, window, number_type=_number_type(layers))


def _number_type(layers: Sequence[Any]) -> str:
    """Return the type of all numbers in the blocks of some layers; empty if there are several."""
    types = {of for layer in layers for of in getattr(layer, "dtypes", None) or [getattr(layer, "dtype", None)]}
    return str(types.pop()).removeprefix("torch.") if len(types) == 1 else ""


def _refusals(group: Any, layers: Sequence[Any]) -> Iterator[str]:
    """Yield why a group cannot be served, as sentences without their subject."""
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        yield "lives outside the block pool"
    if any(getattr(layer, "non_causal", False) for layer in layers):
        yield "has attention that looks ahead: its KV depends on what follows it"
    kinds = {type(layer).__name__: type(layer).__module__ for layer in layers}
    names = sorted(kinds)
    is_kept = _is_kept(layers)
    for name in names:
        if name in _REFUSED:
            yield f"has layers of kind {name}: it {_REFUSED[name]}"
        # A plugin's class may have the name of the one that it is made of.
        if name not in _KINDS or kinds[name] != _MODULE or not (is_kept or name in _LEFT_OUT):
            yield f"has layers of kind {name}, which is not supported"
    if len({_describe(layer) for layer in layers}) > 1:
        yield f"mixes layers of different kinds: {', '.join(names)}"
    if type(layers[0]).__name__ == _STATE and getattr(layers[0], "mamba_cache_mode", "none") == "none":
        yield "keeps one recurrent state per request and none at block boundaries; vLLM's --mamba-cache-mode says when"


def _is_kept(layers: Sequence[Any]) -> bool:
    """Whether a group of these layers can be found by a prefix."""
    return all(getattr(layer, "prefix_cacheable", True) for layer in layers)


def _describe(layer: Any) -> tuple[AttentionKind, int, int | None, bool]:
    """Return a layer's kind, the tokens of its blocks, its window, and whether a prefix of it can be found."""
    kind = _KINDS[type(layer).__name__]
    field = _WINDOWS.get(kind)
    window = None
    if field is not None:
        # With several layers that draft, vLLM keeps some tokens more than the window, and wants them in a load.
        window = getattr(layer, field) + getattr(layer, "extra_retained_tokens", 0)
    return kind, int(layer.block_size), window, bool(getattr(layer, "prefix_cacheable", True))
