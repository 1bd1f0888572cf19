"""KV events: what a medium holds, as a stream that a router can follow.

An index built from the events of a medium, in order, equals what the medium holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from cargohold.protocol.request import Adapter, ExtraKey

MEDIUM_DEVICE = "GPU"
"""The engine's own paged cache; the field's name for it, on a CPU too."""
MEDIUM_HOST = "CPU"
"""Host memory."""
MEDIUM_STORAGE = "STORAGE"
"""Disk and shared stores."""

Locality: TypeAlias = Literal["LOCAL", "REMOTE"]
"""Whether a medium is the engine's own, or one that engines on other machines have, too."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks became available for reuse, consecutive in one prefix.

    Attributes:
        block_hashes: one per block, in prefix order.
        parent_block_hash: hash of the block before the first, ``None`` at the start of a prompt or when not known.
        token_ids: the blocks' tokens, concatenated; empty when not known.
        block_tokens: tokens per block.
        group: index of the KV-cache group.
        medium: where they are.
        adapter: what the KV was computed with besides the model's own weights; ``None`` when not known, too.
        extra_keys: per block what else its hash covers, see ``RequestView.extra_keys``; empty when not known.
        locality: whose medium it is; ``None`` where its name says it.
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
        medium: where they were.
        locality: whose medium it is, as when they were stored.
    """

    block_hashes: tuple[bytes, ...]
    group: int
    medium: str
    locality: Locality | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The medium holds nothing any more.

    Attributes:
        medium: which one.
    """

    medium: str


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
