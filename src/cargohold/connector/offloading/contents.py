"""What KV events say of a chunk besides its key, and how a tier keeps that over a restart."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cargohold.cache.keys import ChunkKeys, split_key
from cargohold.protocol import Adapter, ExtraKey, RequestView
from cargohold.tiers.chunk_format import TOKEN_TYPE, Details, pack_tokens, unpack_tokens


@dataclass(frozen=True, slots=True)
class Contents:
    """What events say of a chunk besides its key.

    Attributes:
        parent_hash: hash of the block before the chunk; ``None`` at the start of a prompt.
        tokens: its token ids, in an array of 4 bytes each.
        inner_hashes: hashes of its blocks but the last, whose hash is in its key.
        extra_keys: per block, what its hash covers besides tokens.
        adapter: adapter with which the KV was computed; ``None`` if there was none.
        is_salted: whether it is of a request with a salt.
    """

    parent_hash: bytes | None
    tokens: array[int]
    inner_hashes: tuple[bytes, ...] = ()
    extra_keys: tuple[tuple[ExtraKey, ...], ...] = ()
    adapter: Adapter | None = None
    is_salted: bool = False

    def details(self) -> Details:
        """Return the form in which a tier keeps them."""
        extras = _Extras(
            hashes=(self.parent_hash or b"", *self.inner_hashes),
            extra_keys=self.extra_keys if any(self.extra_keys) else (),
            adapter=None if self.adapter is None else (self.adapter.name, self.adapter.number),
            salted=self.is_salted,
        )
        return Details(pack_tokens(self.tokens), _ENCODER.encode(extras))


class _Extras(msgspec.Struct, frozen=True, omit_defaults=True):
    """The extras of a chunk's details.

    Attributes:
        hashes: of the block before the chunk, empty at the start of a prompt, and of the chunk's blocks but the last.
        extra_keys: per block; empty if no block has any.
        adapter: its name and number, if there was one.
        salted: whether the chunk is of a request with a salt.
    """

    hashes: tuple[bytes, ...]
    extra_keys: tuple[tuple[Any, ...], ...] = ()
    adapter: tuple[str, int] | None = None
    salted: bool = False


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_Extras)


def contents_of(request: RequestView, keys: ChunkKeys, at: int) -> Contents:
    """Return the contents of chunk number ``at`` of a request, in the group that ``keys`` are of."""
    size, block_tokens = keys.chunk_tokens, keys.group.block_tokens
    start, end = at * size, (at + 1) * size
    return Contents(
        split_key(keys.keys[at - 1])[0] if at else None,
        array(TOKEN_TYPE, request.all_token_ids[start:end]),
        keys.inner_hashes(request.block_hashes, at),
        tuple(request.extra_keys(first, first + block_tokens) for first in range(start, end, block_tokens)),
        request.adapter,
        request.salt is not None,
    )


def contents_in(details: Details, block_tokens: int) -> Contents | None:
    """Return the contents of a chunk that a tier has kept; ``None`` if they do not fit its blocks.

    Args:
        details: as the tier has them.
        block_tokens: tokens of an engine block of the chunk's group.
    """
    try:
        extras = _DECODER.decode(details.extras)
        tokens = unpack_tokens(details.tokens)
        extra_keys = tuple(tuple(map(_extra_key, of_block)) for of_block in extras.extra_keys)
    except (msgspec.DecodeError, ValueError):
        return None
    num_blocks = len(extras.hashes)
    is_whole = num_blocks > 0 and len(tokens) == num_blocks * block_tokens
    if not is_whole or len(extra_keys) not in (0, num_blocks):
        return None
    parent, *inner = extras.hashes
    adapter = None if extras.adapter is None else Adapter(*extras.adapter)
    return Contents(parent or None, tokens, tuple(inner), extra_keys or ((),) * num_blocks, adapter, extras.salted)


def _extra_key(value: object) -> ExtraKey:
    """Return an extra key; MessagePack has lists where it had tuples. Raises ``ValueError`` if it is none."""
    match value:
        case str() | bytes():
            return value
        case [str() as name, int() as number]:
            return name, number
        case _:
            raise ValueError("no extra key")
