"""A tier in plain memory, and one that holds nothing: baselines for measurements, and stand-ins for a medium in tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cargohold.offload.manager.base import OffloadKey
from cargohold.offload.tier.base import LoadOutcome, StoreOutcome, Tier, TierUsage
from cargohold.offload.tier.staging import copy_bytes


class MemoryTier(Tier):
    """A tier that keeps chunks in a dictionary, and refuses more than ``max_chunks``.

    Args:
        chunk_bytes: bytes of the largest chunk.
        max_chunks: maximum number of chunks.
        name: the tier's name for users.
    """

    def __init__(self, chunk_bytes: int, max_chunks: int = 2**30, name: str = "memory") -> None:
        self.name = name
        self.chunk_bytes = chunk_bytes
        self._max_chunks = max_chunks
        self._lock = threading.Lock()
        self._chunks: dict[OffloadKey, bytes] = {}

    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return whether each chunk is there."""
        with self._lock:
            return [key in self._chunks for key in keys]

    def store(self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None) -> StoreOutcome:
        """Keep a copy of the chunk."""
        del parent
        with self._lock:
            if key in self._chunks:
                return StoreOutcome.PRESENT
            if len(self._chunks) >= self._max_chunks:
                return StoreOutcome.REFUSED
            self._chunks[key] = payload.tobytes()
        return StoreOutcome.STORED

    def load(self, key: OffloadKey, into: memoryview) -> LoadOutcome:
        """Copy a chunk to ``into``; a chunk of another length counts as absent."""
        with self._lock:
            chunk = self._chunks.get(key)
        if chunk is None or len(chunk) != len(into):
            return LoadOutcome.ABSENT
        copy_bytes(into, memoryview(chunk))
        return LoadOutcome.LOADED

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Do nothing: this tier never evicts."""

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Remove chunks."""
        with self._lock:
            for key in keys:
                self._chunks.pop(key, None)

    def usage(self) -> TierUsage:
        """Return how full the tier is."""
        with self._lock:
            num_bytes = sum(map(len, self._chunks.values()))
            return TierUsage(len(self._chunks), num_bytes, self._max_chunks * self.chunk_bytes)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class NullTier(Tier):
    """A tier that finds nothing and refuses every chunk.

    Args:
        chunk_bytes: bytes of the largest chunk.
        name: the tier's name for users.
    """

    def __init__(self, chunk_bytes: int, name: str = "null") -> None:
        self.name = name
        self.chunk_bytes = chunk_bytes

    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return ``False`` for every chunk."""
        return [False] * len(keys)

    def store(self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None) -> StoreOutcome:
        """Refuse the chunk."""
        del key, payload, parent
        return StoreOutcome.REFUSED

    def load(self, key: OffloadKey, into: memoryview) -> LoadOutcome:
        """Find the chunk absent."""
        del key, into
        return LoadOutcome.ABSENT

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Do nothing: no chunk is there."""

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Do nothing: no chunk is there."""

    def usage(self) -> TierUsage:
        """Return that the tier is empty."""
        return TierUsage(0, 0, 0)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
