"""A model of a tier in dicts and sets, with which every answer of a manager is compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cargohold.blocks import ABSENT, READY
from cargohold.cache import ChunkPins, OffloadManager, SlotReservation, StoreOffer
from tests.cache.common import EVERY_KEY


class NaiveTier:
    """Follows the operations of a manager, and checks its answers.

    It does not predict evictions, which are the policy's choice: it looks at what was evicted, and checks that it may be.

    Args:
        manager: the manager under test.
    """

    def __init__(self, manager: OffloadManager) -> None:
        self.manager = manager
        self.ready: dict[bytes, int] = {}  # slot by key
        self.stores: list[SlotReservation] = []
        self.loads: list[ChunkPins] = []
        self.leaving: set[int] = set()  # slots of removed chunks that are still being read
        # Key of a chunk to key of the chunk in front of it, if that was there at the store and has been there since.
        self.behind: dict[bytes, bytes] = {}

    @property
    def writing(self) -> dict[bytes, int]:
        return {key: slot for store in self.stores for key, slot in zip(store.keys, store.slots, strict=True)}

    @property
    def read_slots(self) -> list[int]:
        return [slot for load in self.loads for slot in load.slots]

    @property
    def num_free(self) -> int:
        return self.manager.capacity - len(self.ready) - len(self.writing) - len(self.leaving)

    # --- operations: each does the same to both -------------------------------------------------------------------

    def store(self, keys: Sequence[bytes], parent: bytes | None) -> SlotReservation:
        """Offer chunks of one prefix."""
        writing, num_waiting = self.writing, len(self.writing) + len(self.read_slots)
        absent = [key for key in dict.fromkeys(keys) if key not in self.ready and key not in writing]
        store = self.store_each([StoreOffer(keys, parent)])
        num_placed, deferred = len(store.keys), list(store.deferred)
        assert list(store.keys) == absent[:num_placed], "slots go to the leading chunks"
        assert deferred == absent[num_placed : num_placed + len(deferred)], "what is deferred comes next"
        assert len(deferred) <= num_waiting, "nobody will let go of so many slots"
        return store

    def store_each(self, offers: Sequence[StoreOffer]) -> SlotReservation:
        """Offer chunks of several prefixes at once."""
        before, num_free, writing = dict(self.ready), self.num_free, self.writing
        offered = {
            key: parent
            for offer in offers
            for parent, key in zip([offer.parent, *offer.keys], offer.keys, strict=False)
        }
        absent = {key for key in offered if key not in before and key not in writing}
        pinned = set(self.read_slots)
        num_waiting = len(writing) + len(pinned)
        stays = set[bytes | None](offered)
        for offer in offers:
            stays |= self._in_front(offer.parent)
        store = self.manager.prepare_stores(offers)
        evicted = self._note_evictions()
        self._forget(evicted)
        assert not stays & evicted.keys(), "evicted for its own child, or from an offer"
        assert not pinned & set(evicted.values()), "evicted while being read"
        assert len(store.keys) == len(set(store.keys)) == len(set(store.slots)), "given twice"
        assert set(store.slots) <= set(range(self.manager.capacity))
        assert absent.issuperset(store.keys), "stored twice"
        assert len(store.deferred) == len(set(store.deferred)), "deferred twice"
        assert absent - set(store.keys) >= set(store.deferred)
        assert len(evicted) == max(0, len(store.keys) - num_free), "more evicted than needed"
        assert not store.deferred or num_waiting + len(store.keys), "deferred although nobody is using anything"
        num_offers = Counter(key for offer in offers for key in offer.keys)
        for offer in offers:
            # A chunk of several offers may be a leading one in another offer.
            placed = [key in store.keys for key in offer.keys if key in absent and num_offers[key] == 1]
            assert placed == sorted(placed, reverse=True), "slots go to the leading chunks"
        behind_holes = [key for key in store.keys if offered[key] in absent and offered[key] not in store.keys]
        assert not behind_holes, "a chunk is placed behind one of the same call that is not"
        taken = {*self.ready.values(), *writing.values(), *self.leaving}
        assert not taken & set(store.slots), "a slot was given twice"
        for key in store.keys:
            self._note_order([key], offered[key], set(store.keys))
        self.stores.append(store)
        return store

    def commit(self, store: SlotReservation) -> None:
        self.stores.remove(store)
        store.commit()
        self.ready.update(zip(store.keys, store.slots, strict=True))

    def forfeit(self, store: SlotReservation) -> None:
        self.stores.remove(store)
        store.forfeit()
        self._forget(store.keys)

    def load(self, keys: Sequence[bytes]) -> ChunkPins:
        load = self.manager.prepare_load(keys)
        assert list(load.keys) == list(keys)
        assert list(load.slots) == [self.ready[key] for key in keys]
        self.loads.append(load)
        return load

    def release(self, load: ChunkPins, bad_keys: Sequence[bytes] = ()) -> None:
        self.loads.remove(load)
        slot_of = dict(zip(load.keys, load.slots, strict=True))
        load.release(bad_keys)
        for key in bad_keys:
            if self.ready.get(key) == slot_of[key]:
                self.leaving.add(self.ready.pop(key))
                self._forget([key])
        self.leaving &= set(self.read_slots)

    def remove(self, keys: Sequence[bytes]) -> None:
        self.manager.remove(keys)
        for key in keys:
            if key in self.ready:
                self.leaving.add(self.ready.pop(key))
                self._forget([key])
        self.leaving &= set(self.read_slots)

    def reset(self) -> None:
        could = not self.writing
        assert self.manager.reset() == could
        if could:
            self.leaving |= set(self.ready.values()) & set(self.read_slots)
            self.ready.clear()
            self.behind.clear()

    # --- what must hold at all times ------------------------------------------------------------------------------

    def check(self) -> None:
        manager = self.manager
        manager.check()
        assert manager.num_ready == len(self.ready)
        assert manager.num_writing == len(self.writing)
        assert manager.num_pins == len(self.read_slots)
        assert manager.num_leaving == len(self.leaving)
        assert manager.num_free == self.num_free >= 0
        assert manager.lookup(EVERY_KEY) == bytes(READY if key in self.ready else ABSENT for key in EVERY_KEY)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _note_order(self, keys: Sequence[bytes], parent: bytes | None, placed: set[bytes]) -> None:
        there = {*self.ready, *self.writing, *placed}
        for in_front, key in zip([parent, *keys], keys, strict=False):
            if key in placed and in_front is not None and in_front in there:
                self.behind[key] = in_front

    def _in_front(self, parent: bytes | None) -> set[bytes]:
        """The chunks that are known to be in front of an offer."""
        found: set[bytes] = set()
        while parent is not None and parent in {*self.ready, *self.writing}:
            found.add(parent)
            parent = self.behind.get(parent)
        return found

    def _forget(self, keys: Iterable[bytes]) -> None:
        gone = set(keys)
        self.behind = {key: front for key, front in self.behind.items() if gone.isdisjoint((key, front))}

    def _note_evictions(self) -> dict[bytes, int]:
        found = self.manager.lookup(list(self.ready))
        evicted = {
            key: slot for (key, slot), state in zip(list(self.ready.items()), found, strict=True) if state != READY
        }
        for key in evicted:
            del self.ready[key]
        return evicted
