"""A manager in eighty lines: dicts and lists, plain and slow; what was used longest ago goes, ends of prefixes first."""

from collections.abc import Iterable, Sequence
from itertools import islice

from cargohold.blocks import ABSENT, READY
from cargohold.cache import ChunksRemoved, ChunksStored, ManagerEvent, OffloadManager, StoreOffer
from cargohold.cache.manager import ChunkPins, SlotReservation
from cargohold.errors import LifecycleError, MissingChunkError


class LeastRecent(OffloadManager):
    """Options name it as ``MODULE:FACTORY``; the class itself is the factory."""

    def __init__(self, capacity: int, *, record_events: bool) -> None:
        self.capacity = capacity
        self._records = record_events
        self._free = list(range(capacity))
        self._slot: dict[bytes, int] = {}  # of ready chunks, the least recently used first
        self._parent: dict[bytes, bytes | None] = {}
        self._writing: set[bytes] = set()
        self._pins: dict[int, int] = {}  # by slot
        self._leaving: set[int] = set()
        self._events: list[ManagerEvent] = []
        self._generation = 0
        self._num_pins = 0

    # --- look-ups -----------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes]) -> bytes:
        return bytes(READY if key in self._slot else ABSENT for key in keys)

    def lookup_run(self, keys: Sequence[bytes]) -> bytes:
        end = next((at for at, key in enumerate(keys) if key not in self._slot), len(keys))
        return bytes([READY] * end)

    def touch(self, keys: Sequence[bytes]) -> int:
        for key in reversed(keys):  # so that the ends of prefixes go first
            if key in self._slot:
                self._slot[key] = self._slot.pop(key)
        return len(self.lookup_run(keys))

    # --- loads and stores ---------------------------------------------------------------------------------------------

    def prepare_load(self, keys: Sequence[bytes]) -> ChunkPins:
        for key in keys:
            if key not in self._slot:
                raise MissingChunkError(key)
        slots = [self._slot[key] for key in keys]
        for slot in slots:
            self._pins[slot] = self._pins.get(slot, 0) + 1
        self._num_pins += len(slots)
        return ChunkPins(keys, slots, self._end_load)

    def _end_load(self, handle: ChunkPins, bad_keys: Iterable[bytes]) -> None:
        self.remove(key for key in bad_keys if self._slot.get(key) in handle.slots)
        self._num_pins -= len(handle.slots)
        for slot in handle.slots:
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                if slot in self._leaving:
                    self._leaving.remove(slot)
                    self._free.append(slot)

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> SlotReservation:
        spared = {key for offer in offers for key in (*offer.keys, *self._before(offer.parent))}
        num_in_use = len(self._writing) + len(self._pins)  # slots that will become free, or may be evicted then
        stored: dict[bytes, int] = {}
        deferred: dict[bytes, None] = {}
        for offer in offers:
            parent = offer.parent
            for at, key in enumerate(offer.keys):
                if key not in self._slot and key not in self._writing:
                    if not self._make_room(spared):
                        absent = [one for one in offer.keys[at:] if one not in self._slot and one not in self._writing]
                        deferred.update(dict.fromkeys(absent[:num_in_use]))
                        break  # what is behind a hole is worth nothing
                    stored[key] = self._free.pop()
                    self._writing.add(key)
                    self._parent[key] = parent
                parent = key
        return SlotReservation(list(stored), list(stored.values()), self._end_store, list(deferred))

    def _make_room(self, spared: set[bytes]) -> bool:
        """Whether one more chunk finds a slot: the least recently used chunk that may go makes room for it."""
        if not self._free:
            victims = (key for key, slot in self._slot.items() if key not in spared and slot not in self._pins)
            self.remove(list(islice(victims, 1)))
        return bool(self._free)

    def _before(self, key: bytes | None) -> list[bytes]:
        path: list[bytes] = []
        while key is not None and key in self._parent and key not in path:
            path.append(key)
            key = self._parent[key]
        return path

    def _end_store(self, handle: SlotReservation, is_written: bool) -> None:
        self._writing.difference_update(handle.keys)
        if is_written:
            self._generation += 1
            self._slot.update(zip(handle.keys, handle.slots, strict=True))
            self._note(ChunksStored(tuple(handle.keys)))
        else:
            self._free += handle.slots

    # --- the end of chunks --------------------------------------------------------------------------------------------

    def remove(self, keys: Iterable[bytes]) -> None:
        keys = list(keys)
        for key in keys:
            if key in self._writing:
                raise LifecycleError(f"chunk {key.hex()}", "being written", "remove", ())
        gone = [key for key in dict.fromkeys(keys) if key in self._slot]
        for key in gone:
            slot = self._slot.pop(key)
            if slot in self._pins:
                self._leaving.add(slot)
            else:
                self._free.append(slot)
        if gone:
            self._generation += 1
            self._note(ChunksRemoved(tuple(gone)))

    def reset(self) -> bool:
        if self._writing:
            return False
        self.remove(list(self._slot))
        return True

    def _note(self, event: ManagerEvent) -> None:
        if self._records:
            self._events.append(event)

    def take_events(self) -> list[ManagerEvent]:
        events, self._events = self._events, []
        return events

    # --- numbers ------------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def num_ready(self) -> int:
        return len(self._slot)

    @property
    def num_writing(self) -> int:
        return len(self._writing)

    @property
    def num_leaving(self) -> int:
        return len(self._leaving)

    @property
    def num_pins(self) -> int:
        return self._num_pins

    def check(self) -> None:
        used = [*self._slot.values(), *self._leaving, *self._free]
        assert len(set(used)) == len(used) == self.capacity - len(self._writing), "slots are lost, or in two places"
