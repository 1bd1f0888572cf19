"""The conformance suite for managers of a tier: under random traffic, every slot holds what its chunk says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

import pytest

from cargohold.blocks import ABSENT, READY
from cargohold.cache import (
    ChunkPins,
    ChunksRemoved,
    ChunksStored,
    OffloadKey,
    OffloadManager,
    SlotReservation,
    StoreOffer,
)
from cargohold.errors import LifecycleError, MissingChunkError
from cargohold.lab.conformance.policy import ManagerTraffic, key

_CAPACITY = 24
_KEYS = [key(f"{at}") for at in range(14)]
"""Chunks of one prefix, and after them those of another."""


class _CheckedTraffic(ManagerTraffic):
    """Knows what each slot holds: what was written there last; and what an index that follows the events has."""

    def __init__(self, manager: OffloadManager, seed: int) -> None:
        super().__init__(manager, seed)
        self._contents: dict[int, bytes] = {}
        self._announced: set[bytes] = set()
        self._removed: set[bytes] = set()

    def step(self) -> None:
        """Do something, and verify what must hold at any time."""
        (self.remove if self.random.random() < 0.15 else self.move)()
        self.verify()

    def store(self) -> None:
        """Store for several: offers of a prefix whose beginning is lost are for policies."""
        self.store_several()

    def _reserve(self, offers: Sequence[StoreOffer]) -> SlotReservation:
        in_use = {slot for other in (*self.stores, *self.loads) for slot in other.slots}
        offered = {key for offer in offers for key in offer.keys}
        handle = super()._reserve(offers)
        assert set(handle.keys) | set(handle.deferred) <= offered, "it stores what was not offered"
        assert not set(handle.keys) & set(handle.deferred), "a chunk is stored and deferred"
        assert len(set(handle.slots)) == len(handle.slots) == len(handle.keys), "chunks share a slot"
        assert not in_use & set(handle.slots), "a slot is given away that is being read or written"
        assert not handle.deferred or in_use or handle.keys, (
            "it says later, though nothing is in use that could become free"
        )
        self._contents.update(dict.fromkeys(handle.slots, b""))
        return handle

    def end_store(self, handle: SlotReservation) -> bool:
        is_written = super().end_store(handle)
        if is_written:
            self._contents.update(zip(handle.slots, handle.keys, strict=True))
        with pytest.raises(LifecycleError):
            handle.commit()
        return is_written

    def load(self) -> ChunkPins | None:
        handle = super().load()
        if handle is not None:
            self._verify_load(handle)
        return handle

    def end_load(self, handle: ChunkPins) -> Sequence[OffloadKey]:
        self._verify_load(handle)
        bad = super().end_load(handle)
        # What was removed while it was read may have been stored again, elsewhere.
        found = self.manager.lookup([key for key in bad if key not in self._removed])
        assert READY not in found, "a chunk that could not be read is found again"
        return bad

    def _verify_load(self, handle: ChunkPins) -> None:
        held = [self._contents[slot] for slot in handle.slots]
        assert held == list(handle.keys), "a slot holds another chunk than the one that it is said to hold"

    def remove(self) -> None:
        """Remove chunks that are not being written."""
        writing = {key for handle in self.stores for key in handle.keys}
        gone = [key for key in self.tree.any_path(self.random)[-2:] if key not in writing]
        self.manager.remove(gone)
        self._removed.update(gone)
        assert READY not in self.manager.lookup(gone)

    def verify(self) -> None:
        """Verify the books, and that what is pinned is still there."""
        manager = self.manager
        manager.check()
        parts = (manager.num_ready, manager.num_writing, manager.num_leaving, manager.num_free)
        assert min(parts) >= 0 and sum(parts) == manager.capacity, "slots are lost, or counted twice"
        assert manager.num_writing == sum(len(handle.keys) for handle in self.stores)
        for handle in self.loads:
            self._verify_load(handle)
        every = self.tree.keys
        found = [key for key, state in zip(every, manager.lookup(every), strict=True) if state == READY]
        assert len(found) == manager.num_ready, "more or fewer chunks are found than it counts"
        for event in manager.take_events():
            if isinstance(event, ChunksStored):
                self._announced.update(event.keys)
            elif isinstance(event, ChunksRemoved):
                self._announced.difference_update(event.keys)
        assert self._announced == set(found), "an index that follows the events has other chunks"


class ManagerConformance(ABC):
    """Tests a manager of host memory, with a model of what each slot holds.

    Attributes:
        num_seeds: runs of random traffic.
    """

    num_seeds: ClassVar[int] = 10

    @abstractmethod
    def manager(self, capacity: int, *, record_events: bool) -> OffloadManager:
        """A new manager of so many slots."""

    def _traffic(self, seed: int) -> _CheckedTraffic:
        return _CheckedTraffic(self.manager(_CAPACITY, record_events=True), seed)

    def test_every_slot_holds_its_chunk_under_any_traffic(self) -> None:
        """Slots in use are given to no other chunk; the books are right, and so are the events, after every move."""
        for seed in range(self.num_seeds):
            traffic = self._traffic(seed)
            for _ in range(200):
                traffic.step()
            traffic.settle()
            traffic.verify()

    def test_what_is_stored_is_found_only_once_it_is_written(self) -> None:
        """A chunk is absent while it is written, and when it was given up."""
        manager, keys = self.manager(_CAPACITY, record_events=False), _KEYS[:9]
        handle = manager.prepare_store(keys)
        assert manager.lookup(keys) == bytes([ABSENT] * len(keys))
        handle.forfeit()
        assert manager.lookup(keys) == bytes([ABSENT] * len(keys)) and manager.num_free == _CAPACITY
        again = manager.prepare_store(keys)
        again.commit()
        assert manager.lookup(again.keys) == bytes([READY] * len(again.keys))

    def test_equal_generations_mean_equal_answers(self) -> None:
        """An answer that is remembered with its generation stays valid while that stays the same."""
        traffic = self._traffic(1)
        remembered: dict[int, bytes] = {}
        every = traffic.tree.keys
        for _ in range(200):
            traffic.step()
            answer = traffic.manager.lookup(every)
            assert remembered.setdefault(traffic.manager.generation, answer) == answer

    def test_a_load_of_what_is_not_there_pins_nothing(self) -> None:
        """It raises ``MissingChunkError``."""
        manager, keys = self.manager(_CAPACITY, record_events=False), _KEYS[:9]
        manager.prepare_store(keys[:3]).commit()
        with pytest.raises(MissingChunkError):
            manager.prepare_load(keys[:4])
        assert manager.num_pins == 0

    def test_a_reset_waits_for_writers_and_not_for_readers(self) -> None:
        """It refuses while a chunk is written; what is read keeps its slot, and is not found."""
        manager, keys = self.manager(_CAPACITY, record_events=False), _KEYS[:9]
        manager.prepare_store(keys[:3]).commit()
        reading, writing = manager.prepare_load(keys[:3]), manager.prepare_store(keys[3:5], keys[2])
        assert not manager.reset() and manager.num_ready == 3
        writing.commit()
        assert manager.reset() and manager.num_ready == 0
        assert READY not in manager.lookup(keys)
        other = manager.prepare_store(_KEYS[9:])
        assert not set(other.slots) & set(reading.slots), "what is being read was given away"
        other.commit()
        with suppress(LifecycleError):
            reading.release()
        assert manager.num_leaving == 0
        manager.check()
