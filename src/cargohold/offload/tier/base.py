"""The tier port: one worker's shard of a medium below host memory.

A tier stores bytes by key. Its calls block, may come from several threads at once, and may fail: ``TierQueue`` stands between
the tier and every caller that must not wait. A tier knows nothing of blocks, rows, requests or ranks. It hands out only chunks
that were written under its own namespace (``cargohold.offload.tier.namespace``), and verifies them first.

A key names contents, so what is stored under it never changes: storing a chunk twice is storing it once, and a lost chunk is a
miss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from cargohold.offload.manager.base import OffloadKey


class StoreOutcome(Enum):
    """How storing a chunk ended."""

    STORED = "stored"
    """The chunk is there now."""
    PRESENT = "present"
    """The chunk was there already."""
    REFUSED = "refused"
    """The chunk is not there: there is no room for it, or another thread is writing it. No fault of the medium."""
    FAILED = "failed"
    """The chunk is not there: the medium failed, but not for all chunks of the job. Only the queue says so; a tier raises."""


class LoadOutcome(Enum):
    """How loading a chunk ended."""

    LOADED = "loaded"
    """The destination holds the chunk, verified."""
    ABSENT = "absent"
    """The chunk is not there. The destination holds garbage."""
    CORRUPT = "corrupt"
    """The chunk failed its check, and was deleted if that is allowed. The destination holds garbage."""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is.

    Attributes:
        num_chunks: number of chunks that are there; in a shared store, only those that this worker stored.
        num_bytes: bytes that they take, headers and padding included.
        capacity_bytes: bytes that they may take; ``None`` if the medium sets the limit.
    """

    num_chunks: int
    num_bytes: int
    capacity_bytes: int | None


class Tier(ABC):
    """One worker's shard of a tier. Thread-safe; every call blocks until it is done.

    Every method but ``close`` raises ``TierError`` when the medium fails or cannot be reached, and nothing else. After an
    error the tier can still be used: the medium may come back.

    Attributes:
        name: the tier's name for users: ``disk``, ``shared``.
        chunk_bytes: bytes of the largest chunk.
        has_index: whether the tier keeps an index of its chunks, and answers probes without asking its medium.
    """

    name: str
    chunk_bytes: int
    has_index: bool = False

    @abstractmethod
    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return whether each chunk is there."""

    @abstractmethod
    def store(self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None) -> StoreOutcome:
        """Write a chunk, and let it be found once all of it is written.

        Args:
            key: the chunk's key.
            payload: the chunk's bytes: contiguous, ``chunk_bytes`` at most. They must not change during the call.
            parent: key of the chunk before it in its prefix, if there is one, so that eviction leaves no hole.
        """

    @abstractmethod
    def load(self, key: OffloadKey, into: memoryview) -> LoadOutcome:
        """Read a chunk and verify it.

        Args:
            key: the chunk's key.
            into: destination, exactly as long as what was stored: contiguous, writable. Holds garbage unless ``LOADED`` is
                returned.
        """

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Mark chunks as used by a request; ``keys`` are in prefix order. Absent chunks are ignored."""

    @abstractmethod
    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Remove chunks at once. Absent chunks are ignored."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """Return how full the tier is, from what is known here, without asking the medium."""

    @abstractmethod
    def close(self) -> None:
        """Release files, locks and connections; the chunks stay. The last call, in a thread of its own; never raises."""
