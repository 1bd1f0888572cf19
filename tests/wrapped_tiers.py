"""Tiers for tests and measurements: plain memory, and wrappers that count or fail."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import TypeVar

from cargohold.cache.manager import OffloadKey
from cargohold.cache.retention import Retention
from cargohold.errors import TierError
from cargohold.tiers.chunk_format import NO_NOTE, Note
from cargohold.tiers.memory import copy_bytes
from cargohold.tiers.port import Listing, LoadOutcome, Losses, StoreOutcome, Tier, TierUsage

T = TypeVar("T")


class WrappedTier(Tier):
    """A tier that passes every call on to another: through ``call``, but for ``take_losses``, ``usage`` and ``close``.

    Args:
        inner: the tier inside.
    """

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.chunk_bytes = inner.chunk_bytes
        self.has_index = inner.has_index

    def call(self, operation: str, num_bytes: int, run: Callable[[], T]) -> T:
        """Make a call on the tier inside, and return its answer.

        Args:
            operation: name of the method.
            num_bytes: bytes of the payload; 0 if there is none.
            run: makes the call.
        """
        del operation, num_bytes
        return run()

    def begin(self) -> None:
        self.inner.begin()

    def staging(self) -> memoryview:
        return self.inner.staging()

    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return self.call("probe", 0, lambda: self.inner.probe(keys))

    def store(
        self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None, note: Note = NO_NOTE
    ) -> StoreOutcome:
        return self.call("store", len(payload), lambda: self.inner.store(key, payload, parent, note))

    def load(self, key: OffloadKey, into: memoryview) -> LoadOutcome:
        return self.call("load", len(into), lambda: self.inner.load(key, into))

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self.call("touch", 0, lambda: self.inner.touch(keys))

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        self.call("remove", 0, lambda: self.inner.remove(keys))

    def rank(self, keys: Sequence[OffloadKey], retentions: Sequence[Retention]) -> None:
        self.call("rank", 0, lambda: self.inner.rank(keys, retentions))

    def list_chunks(self, cursor: bytes, limit: int, *, with_details: bool) -> Listing:
        return self.call("list_chunks", 0, lambda: self.inner.list_chunks(cursor, limit, with_details=with_details))

    def take_losses(self) -> Losses:
        return self.inner.take_losses()

    def usage(self) -> TierUsage:
        return self.inner.usage()

    def close(self) -> None:
        self.inner.close()


class CountingTier(WrappedTier):
    """Counts calls, bytes and outcomes.

    Attributes:
        calls: number of calls, by name of the method.
        num_bytes: bytes of payloads, by name of the method, whatever the outcome.
        outcomes: number of stores and loads, by outcome.
    """

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.outcomes: Counter[Enum] = Counter()

    def call(self, operation: str, num_bytes: int, run: Callable[[], T]) -> T:
        """Make a call and count it, even if it fails."""
        with self._lock:
            self.calls[operation] += 1
            self.num_bytes[operation] += num_bytes
        result = run()
        if isinstance(result, Enum):
            with self._lock:
                self.outcomes[result] += 1
        return result


class FaultyTier(WrappedTier):
    """Asks a function before every call whether the call should fail.

    Args:
        inner: the tier inside.
        fault: called with the name of the method, also for ``close``, which can be made to block but not to fail. May block,
            raise, return the reason of a ``TierError``, or return ``None`` for a call that is to work.
    """

    def __init__(self, inner: Tier, fault: Callable[[str], str | None]) -> None:
        super().__init__(inner)
        self._fault = fault

    def call(self, operation: str, num_bytes: int, run: Callable[[], T]) -> T:
        """Make the call, unless it is to fail."""
        reason = self._fault(operation)
        if reason is not None:
            raise TierError(self.name, reason)
        return super().call(operation, num_bytes, run)

    def close(self) -> None:
        """Ask the function, which may block, and close the tier inside whatever the answer is: closing never fails."""
        with suppress(Exception):
            self._fault("close")
        super().close()


# --- a tier in plain memory -------------------------------------------------------------------------------------------


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
        with self._lock:
            return [key in self._chunks for key in keys]

    def store(
        self, key: OffloadKey, payload: memoryview, parent: OffloadKey | None = None, note: Note = NO_NOTE
    ) -> StoreOutcome:
        """Keep a copy of the chunk."""
        del parent, note
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
        with self._lock:
            for key in keys:
                self._chunks.pop(key, None)

    def usage(self) -> TierUsage:
        with self._lock:
            num_bytes = sum(map(len, self._chunks.values()))
            return TierUsage(len(self._chunks), num_bytes, self._max_chunks * self.chunk_bytes)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
