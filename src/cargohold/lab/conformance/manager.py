"""The conformance suite for managers of a tier: under random traffic, every slot holds what its chunk says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from random import Random
from typing import ClassVar

import pytest

from cargohold.blocks import ABSENT, READY
from cargohold.cache import ChunkPins, ChunksRemoved, ChunksStored, OffloadManager, SlotReservation, StoreOffer
from cargohold.errors import LifecycleError, MissingChunkError
from cargohold.protocol import TurnEnd

_CAPACITY = 24
_NUM_PREFIXES = 6
_LENGTH = 14


def _prefixes() -> list[list[bytes]]:
    """Prefixes of which half share their first chunks with another one."""
    chains = []
    for number in range(_NUM_PREFIXES):
        names = [f"{number // 2 if at < 5 else number}/{at}" for at in range(_LENGTH)]
        chains.append([sha256(name.encode()).digest() + bytes(4) for name in names])
    return chains


class _ManagerTraffic:
    """Drives a manager, and knows what each slot holds: what was written there last."""

    def __init__(self, manager: OffloadManager, dice: Random) -> None:
        self.manager = manager
        self.dice = dice
        self.prefixes = _prefixes()
        self.contents: dict[int, bytes] = {}
        self.stores: list[SlotReservation] = []
        self.loads: list[ChunkPins] = []
        self.announced: set[bytes] = set()

    def step(self) -> None:
        """Do something, and verify what must hold at any time."""
        self.dice.choice((self.store, self.store, self.load, self.end_store, self.end_load, self.touch, self.remove))()
        self.verify()

    def store(self) -> None:
        """Offer the continuations of some prefixes, and reserve slots."""
        offers = []
        for keys in self.dice.sample(self.prefixes, self.dice.randint(1, 2)):
            num_ready = self.manager.lookup_run(keys).count(READY)
            end = self.dice.randint(num_ready, len(keys))
            offers.append(StoreOffer(keys[num_ready:end], keys[num_ready - 1] if num_ready else None))
        offered = {key for offer in offers for key in offer.keys}
        handle = self.manager.prepare_stores(offers)
        assert set(handle.keys) | set(handle.deferred) <= offered, "it stores what was not offered"
        assert not set(handle.keys) & set(handle.deferred), "a chunk is stored and deferred"
        in_use = {slot for other in self.stores for slot in other.slots}
        in_use |= {slot for other in self.loads for slot in other.slots}
        assert len(set(handle.slots)) == len(handle.slots) == len(handle.keys), "chunks share a slot"
        assert not in_use & set(handle.slots), "a slot is given away that is being read or written"
        assert not handle.deferred or in_use or handle.keys, (
            "it says later, though nothing is in use that could become free"
        )
        self.contents.update(dict.fromkeys(handle.slots, b""))
        self.stores.append(handle)

    def end_store(self) -> None:
        """Write what a reservation is for, or give it up."""
        if self.stores:
            handle = self.stores.pop(self.dice.randrange(len(self.stores)))
            if self.dice.random() < 0.2:
                handle.forfeit()
            else:
                self.contents.update(zip(handle.slots, handle.keys, strict=True))
                handle.commit()
            with pytest.raises(LifecycleError):
                handle.commit()

    def load(self) -> None:
        """Pin the ready beginning of a prefix, whose slots must hold its chunks."""
        keys = self.dice.choice(self.prefixes)
        ready = keys[: self.manager.lookup_run(keys).count(READY)]
        if ready:
            handle = self.manager.prepare_load(ready)
            self._verify_load(handle)
            self.loads.append(handle)

    def _verify_load(self, handle: ChunkPins) -> None:
        held = [self.contents[slot] for slot in handle.slots]
        assert held == list(handle.keys), "a slot holds another chunk than the one that it is said to hold"

    def end_load(self) -> None:
        """Unpin, now and then with a chunk that could not be read: it must not be found any more."""
        if self.loads:
            handle = self.loads.pop(self.dice.randrange(len(self.loads)))
            self._verify_load(handle)
            bad = [handle.keys[-1]] if self.dice.random() < 0.2 else []
            handle.release(bad)
            assert READY not in self.manager.lookup(bad), "a chunk that could not be read is found again"

    def touch(self) -> None:
        """Use a prefix."""
        keys = self.dice.choice(self.prefixes)
        assert self.manager.touch(keys) == self.manager.lookup_run(keys).count(READY)
        before = self.manager.lookup(keys)
        self.manager.end_turn(keys, self.dice.choice(list(TurnEnd)))
        assert self.manager.lookup(keys) == before, "the end of a turn changes what is found"

    def remove(self) -> None:
        """Remove a chunk that nobody writes."""
        keys = self.dice.choice(self.prefixes)
        writing = {key for handle in self.stores for key in handle.keys}
        gone = [key for key in self.dice.sample(keys, 2) if key not in writing]
        self.manager.remove(gone)
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
        every = sorted({key for keys in self.prefixes for key in keys})
        found = [key for key, state in zip(every, manager.lookup(every), strict=True) if state == READY]
        assert len(found) == manager.num_ready, "more or fewer chunks are found than it counts"
        for event in manager.take_events():
            if isinstance(event, ChunksStored):
                self.announced.update(event.keys)
            elif isinstance(event, ChunksRemoved):
                self.announced.difference_update(event.keys)
        assert self.announced == set(found), "an index that follows the events has other chunks"

    def settle(self) -> None:
        """End all that is in flight."""
        while self.stores:
            self.end_store()
        while self.loads:
            self.end_load()


class ManagerConformance(ABC):
    """Tests a manager of host memory, with a model of what each slot holds.

    Attributes:
        num_seeds: runs of random traffic.
    """

    num_seeds: ClassVar[int] = 10

    @abstractmethod
    def manager(self, capacity: int, *, record_events: bool) -> OffloadManager:
        """A new manager of so many slots."""

    def _traffic(self, seed: int) -> _ManagerTraffic:
        return _ManagerTraffic(self.manager(_CAPACITY, record_events=True), Random(seed))  # noqa: S311  # traffic

    def test_every_slot_holds_its_chunk_under_any_traffic(self) -> None:
        """Slots in use are given to nobody else; the books are right, and so are the events, after every move."""
        for seed in range(self.num_seeds):
            traffic = self._traffic(seed)
            for _ in range(200):
                traffic.step()
            traffic.settle()
            traffic.verify()

    def test_what_is_stored_is_found_only_once_it_is_written(self) -> None:
        """A chunk is absent while it is written, and when it was given up."""
        manager, keys = self.manager(_CAPACITY, record_events=False), _prefixes()[0]
        handle = manager.prepare_store(keys)
        assert manager.lookup(keys) == bytes([ABSENT] * len(keys))
        handle.forfeit()
        assert manager.lookup(keys) == bytes([ABSENT] * len(keys)) and manager.num_free == _CAPACITY
        again = manager.prepare_store(keys)
        again.commit()
        assert manager.lookup(again.keys) == bytes([READY] * len(again.keys))

    def test_equal_generations_mean_equal_answers(self) -> None:
        """Whoever remembers an answer with the generation may go on with it while that stays the same."""
        traffic = self._traffic(1)
        remembered: dict[int, bytes] = {}
        every: Sequence[bytes] = sorted({key for keys in traffic.prefixes for key in keys})
        for _ in range(200):
            traffic.step()
            answer = traffic.manager.lookup(every)
            assert remembered.setdefault(traffic.manager.generation, answer) == answer

    def test_a_load_of_what_is_not_there_pins_nothing(self) -> None:
        """It raises ``MissingChunkError``."""
        manager, keys = self.manager(_CAPACITY, record_events=False), _prefixes()[0]
        manager.prepare_store(keys[:3]).commit()
        with pytest.raises(MissingChunkError):
            manager.prepare_load(keys[:4])
        assert manager.num_pins == 0

    def test_a_reset_waits_for_writers_and_not_for_readers(self) -> None:
        """It refuses while a chunk is written; what is read keeps its slot, and is not found."""
        manager, keys = self.manager(_CAPACITY, record_events=False), _prefixes()[0]
        manager.prepare_store(keys[:3]).commit()
        reading, writing = manager.prepare_load(keys[:3]), manager.prepare_store(keys[3:5], keys[2])
        assert not manager.reset() and manager.num_ready == 3
        writing.commit()
        assert manager.reset() and manager.num_ready == 0
        assert READY not in manager.lookup(keys)
        other = manager.prepare_store(_prefixes()[2])
        assert not set(other.slots) & set(reading.slots), "what is being read was given away"
        other.commit()
        with suppress(LifecycleError):
            reading.release()
        assert manager.num_leaving == 0
        manager.check()
