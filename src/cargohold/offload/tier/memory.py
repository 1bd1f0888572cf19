"""A tier in plain memory, and one that holds nothing: yardsticks, and stand-ins where a medium would be in the way."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cargohold.offload.manager.base import OffloadKey
from cargohold.offload.tier.base import LoadOutcome, StoreOutcome, Tier, TierUsage
from cargohold.offload.tier.staging import copy_bytes


class MemoryTier(Tier):
    """Keeps chunks in a dictionary, until there are too many: then it refuses.

    Args:
        chunk_bytes: of the largest chunk.
        max_chunks: how many it takes.
        name: what users call it.
    """

    def __init__(self, chunk_bytes: int, max_chunks: int = 2**30, name: str = "memory") -> None:
        self.name = name
        self.chunk_bytes = chunk_bytes
        self._max_chunks = max_chunks
        self._lock = threading.Lock()
        self._chunks: dict[OffloadKey, bytes] = {}

    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Whether each chunk is there."""
        with self._lock:
            return [key in self._chunks for key in keys]

    def store(self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None) -> StoreOutcome:
        """Keep a copy."""
        del parent
        with self._lock:
            if key in self._chunks:
                return StoreOutcome.PRESENT
            if len(self._chunks) >= self._max_chunks:
                return StoreOutcome.REFUSED
            self._chunks[key] = payload.tobytes()
        return StoreOutcome.STORED

    def load(self, key: OffloadKey, into: memoryview) -> LoadOutcome:
        """Copy a chunk; one of another length is no such chunk."""
        with self._lock:
            chunk = self._chunks.get(key)
        if chunk is None or len(chunk) != len(into):
            return LoadOutcome.ABSENT
        copy_bytes(into, memoryview(chunk))
        return LoadOutcome.LOADED

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Nothing is ever evicted here."""

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget chunks."""
        with self._lock:
            for key in keys:
                self._chunks.pop(key, None)

    def usage(self) -> TierUsage:
        """How full it is."""
        with self._lock:
            num_bytes = sum(map(len, self._chunks.values()))
            return TierUsage(len(self._chunks), num_bytes, self._max_chunks * self.chunk_bytes)

    def close(self) -> None:
        """Nothing is to be released."""


class NullTier(Tier):
    """Finds nothing and refuses everything.

    Args:
        chunk_bytes: of the largest chunk.
        name: what users call it.
    """

    def __init__(self, chunk_bytes: int, name: str = "null") -> None:
        self.name = name
        self.chunk_bytes = chunk_bytes

    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Nothing is there."""
        return [False] * len(keys)

    def store(self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None) -> StoreOutcome:
        """Refused."""
        del key, payload, parent
        return StoreOutcome.REFUSED

    def load(self, key: OffloadKey, into: memoryview) -> LoadOutcome:
        """Nothing is there."""
        del key, into
        return LoadOutcome.ABSENT

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Nothing is there."""

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Nothing is there."""

    def usage(self) -> TierUsage:
        """Empty."""
        return TierUsage(0, 0, 0)

    def close(self) -> None:
        """Nothing is to be released."""
