"""The tier port: one worker's shard of a medium below host memory.

A tier is a store of bytes by key. It blocks, it may be called from several threads at once, and it may fail: ``TierQueue``
stands between it and everybody who must not wait. It knows nothing of blocks, rows, requests or ranks; what it holds was
written under the same namespace (``cargohold.offload.tier.namespace``), and is verified before it is handed out.

A key names contents, so what is stored under it never changes: storing twice is storing once, and losing a chunk is a miss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from cargohold.offload.manager.base import OffloadKey


class StoreOutcome(Enum):
    """What became of a chunk that was to be stored."""

    STORED = "stored"
    """It is there now."""
    PRESENT = "present"
    """It was there already."""
    REFUSED = "refused"
    """It is not there: no room that may be taken for it, or another thread is writing it. No fault of the medium."""
    FAILED = "failed"
    """It is not there: the medium failed, and others of the same job fared better. Said by the queue; a tier raises."""


class LoadOutcome(Enum):
    """What became of a chunk that was to be loaded."""

    LOADED = "loaded"
    """The destination holds the chunk, verified."""
    ABSENT = "absent"
    """It is not there. The destination holds garbage."""
    CORRUPT = "corrupt"
    """It failed its check and is not there any more. The destination holds garbage."""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is.

    Attributes:
        num_chunks: chunks that are there; of a store that others share, only those that this worker stored.
        num_bytes: bytes that they take, headers and padding included.
        capacity_bytes: bytes that may be taken, or ``None`` where the medium sets the limit.
    """

    num_chunks: int
    num_bytes: int
    capacity_bytes: int | None


class Tier(ABC):
    """One worker's shard of a tier. Thread-safe; every call blocks until it is done.

    Every method but ``close`` raises ``TierError`` when the medium fails or cannot be reached, and nothing else. After an
    error the tier can still be used: the medium may come back.

    Attributes:
        name: what users call it: ``disk``, ``shared``.
        chunk_bytes: bytes of the largest chunk.
        has_index: whether it knows by itself what it holds. Then an answer to a probe says nothing of the medium.
    """

    name: str
    chunk_bytes: int
    has_index: bool = False

    @abstractmethod
    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Whether each chunk is there."""

    @abstractmethod
    def store(self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None) -> StoreOutcome:
        """Write a chunk, and make it visible when all of it is there.

        Args:
            key: its name.
            payload: its bytes: contiguous, ``chunk_bytes`` at most. They must not change during the call.
            parent: the chunk before it in its prefix, if there is one: eviction then never leaves a hole.
        """

    @abstractmethod
    def load(self, key: OffloadKey, into: memoryview) -> LoadOutcome:
        """Read a chunk and verify it.

        Args:
            key: its name.
            into: exactly as many bytes as were stored: contiguous, writable. It holds garbage unless the answer is ``LOADED``.
        """

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """A request uses these chunks, in prefix order. Those that are not there do not matter."""

    @abstractmethod
    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget chunks, at once. Those that are not there do not matter."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """How full it is. Asks nobody: the answer is known here."""

    @abstractmethod
    def close(self) -> None:
        """Release files, locks and connections; the chunks stay. The last call; never raises."""
