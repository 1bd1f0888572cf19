"""KV events: changes of what a medium holds, as a stream that a follower (a router, for instance) can read.

An index that a follower builds from all events of a medium, in order, equals what the medium holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from cargohold.protocol.request import Adapter, ExtraKey

MEDIUM_DEVICE = "GPU"
"""The engine's own paged cache. This is its usual name in events, even if the engine runs on a CPU."""
MEDIUM_HOST = "CPU"
"""Host memory."""
MEDIUM_STORAGE = "STORAGE"
"""Disk and shared stores."""

Locality: TypeAlias = Literal["LOCAL", "REMOTE"]
"""Whether a medium belongs to the engine's machine, or is shared with engines on other machines."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks became available for reuse, consecutive in one prefix.

    Attributes:
        block_hashes: one per block, in prefix order.
        parent_block_hash: hash of the block before the first; ``None`` at the start of a prompt, or when not known.
        token_ids: the blocks' tokens, concatenated; empty when not known.
        block_tokens: tokens per block.
        group: index of the KV-cache group.
        medium: the medium that holds them, such as ``MEDIUM_HOST``.
        adapter: adapter with which the KV was computed; ``None`` if there was none, or when not known.
        extra_keys: per block, what its hash covers besides tokens (see ``RequestView.extra_keys``); empty when not known.
        locality: whether the medium is local or shared; ``None`` if the medium's name implies it.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_tokens: int
    group: int
    medium: str
    adapter: Adapter | None = None
    extra_keys: tuple[tuple[ExtraKey, ...], ...] = ()
    locality: Locality | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks are no longer available.

    Attributes:
        block_hashes: one per block, in the order of removal.
        group: index of the KV-cache group.
        medium: the medium that held them.
        locality: as in the ``BlockStored`` event.
    """

    block_hashes: tuple[bytes, ...]
    group: int
    medium: str
    locality: Locality | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """A medium holds no blocks any more.

    Attributes:
        medium: the medium.
    """

    medium: str


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
