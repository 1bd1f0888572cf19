"""The manager of one tier: an index of chunks, a table of slots, and a policy, kept in step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import numpy as np

from cargohold.blocks import ABSENT, READY
from cargohold.errors import ConfigError, LifecycleError, MissingChunkError
from cargohold.offload.manager import slot_table
from cargohold.offload.manager.base import (
    CannotStore,
    ChunksRemoved,
    ChunksStored,
    LoadHandle,
    ManagerEvent,
    OffloadKey,
    OffloadManager,
    StoreHandle,
    StoreOffer,
)
from cargohold.offload.manager.chain_index import ChainIndex, Strand
from cargohold.offload.manager.handles import ChunkPins, SlotReservation
from cargohold.offload.manager.slot_table import SlotTable
from cargohold.offload.policy.base import NO_SLOT, REFUSED, Offer, ReplacementPolicy, Slots, joined

_ABSENT, _READY = bytes([ABSENT]), bytes([READY])
_LOOKUP_OF_STATE = bytes(READY if state == slot_table.READY else ABSENT for state in range(256))


@dataclass(slots=True)
class _Placement:
    """A store being planned: what of the offered chunks found a slot so far.

    Attributes:
        deferred: chunks that may find a slot when others let go of theirs.
    """

    keys: list[OffloadKey] = field(default_factory=list)
    slots: list[Slots] = field(default_factory=list)
    strands: list[Strand] = field(default_factory=list)
    deferred: list[OffloadKey] = field(default_factory=list)

    def add(self, keys: Sequence[OffloadKey], slots: Slots, strands: list[Strand]) -> None:
        """These chunks found these slots."""
        self.keys += keys
        self.slots.append(slots)
        self.strands += strands


class TierManager(OffloadManager):
    """One tier's chunks.

    Args:
        capacity: slots of the tier.
        policy: what stays; made for the same capacity, and used by nobody else.
        record_events: whether ``take_events`` is wanted.
    """

    def __init__(self, capacity: int, policy: ReplacementPolicy, *, record_events: bool = False) -> None:
        if capacity < 1:
            raise ConfigError("capacity", capacity, "at least one slot")
        self.capacity = capacity
        self.policy = policy
        self._index = ChainIndex(capacity)
        self._table = SlotTable(capacity)
        self._generation = 0
        self._events: list[ManagerEvent] | None = [] if record_events else None
        self._writing: dict[SlotReservation, list[Strand]] = {}
        self._reading: set[ChunkPins] = set()
        self._num_pins = 0
        self._num_removed = 0

    def admit_all(self) -> None:  # noqa: D102
        self.policy.admit_all()

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:  # noqa: D102
        return self._generation

    @property
    def num_ready(self) -> int:  # noqa: D102
        return self._table.num_ready

    @property
    def num_writing(self) -> int:  # noqa: D102
        return self._table.num_writing

    @property
    def num_removed(self) -> int:  # noqa: D102
        return self._num_removed

    @property
    def num_leaving(self) -> int:  # noqa: D102
        return self._table.num_leaving

    @property
    def num_pins(self) -> int:  # noqa: D102
        return self._num_pins

    def lookup_run(self, keys: Sequence[OffloadKey]) -> bytes:  # noqa: D102
        return _READY * self._index.run(tuple(keys)).length

    def lookup(self, keys: Sequence[OffloadKey]) -> bytes:  # noqa: D102
        run = self.lookup_run(keys)
        return run + self._states(keys[len(run) :]).translate(_LOOKUP_OF_STATE)

    def check(self) -> None:  # noqa: D102
        self._table.check()
        self._index.check()
        used = self._table.slots_in(slot_table.WRITING, slot_table.READY)
        self.policy.check(used)
        assert len(self._index) == len(used), "a slot is used for a chunk that cannot be found"
        for strand in self._index.strands():
            state = slot_table.READY if strand.is_ready else slot_table.WRITING
            assert set(self._table.states(strand.slots)) == {state}, "a strand and its slots are in different states"
        assert sum(len(handle.keys) for handle in self._writing) == self.num_writing, "written by nobody"
        assert sum(len(handle.keys) for handle in self._reading) == self._num_pins, "pinned by nobody"
        assert int(self._table.busy.sum()) == self._num_pins + self.num_writing, "held by nobody"

    # --- use ----------------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[OffloadKey]) -> None:  # noqa: D102
        run = self._index.run(tuple(keys))
        slots, is_whole = run.slots, run.length == len(keys)
        if not is_whole:
            rest = self._index.slots_of(keys[run.length :])
            if rest.count(None) < len(rest):
                is_whole = rest[-1] is not None
                slots = joined([slots, np.array([slot for slot in rest if slot is not None], dtype=np.intp)])
        self.policy.touch(slots, is_whole=is_whole)

    def prepare_load(self, keys: Sequence[OffloadKey]) -> LoadHandle:  # noqa: D102
        keys = tuple(keys)
        run = self._index.run(keys)
        if run.length < len(keys):
            raise MissingChunkError(keys[run.length])
        handle = ChunkPins(keys, run.slots, self._end_load)
        self._table.hold(handle.slot_array)
        self._reading.add(handle)
        self._num_pins += len(keys)
        return handle

    def prepare_store(self, keys: Sequence[OffloadKey], parent: OffloadKey | None = None) -> StoreHandle | CannotStore:  # noqa: D102
        placement = _Placement()
        self._place_chain(placement, keys, parent)
        if placement.deferred and not placement.keys:
            return CannotStore.BUSY
        return self._reserved(placement)

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> StoreHandle:  # noqa: D102
        placement = _Placement()
        parents: dict[OffloadKey, OffloadKey | None] = {}
        for keys, parent in offers:
            if len(keys) == 1 < len(offers):  # as requests generate
                parents[keys[0]] = parent
            else:
                self._place_chain(placement, keys, parent)
        if parents:
            self._place_each(placement, parents)
        return self._reserved(placement)

    def remove(self, keys: Iterable[OffloadKey]) -> None:  # noqa: D102
        slots = np.array([slot for key in dict.fromkeys(keys) if (slot := self._removable(key)) != NO_SLOT], np.intp)
        self.policy.drop(slots)
        self._retire(slots)

    def reset(self) -> bool:  # noqa: D102
        if self.num_writing:
            return False
        slots = self._table.slots_in(slot_table.READY)
        keys = self._index.keys_at(slots)
        self._index.clear()
        self._table.retire(slots)
        self.policy.clear()
        self._note_removed(keys)
        return True

    def take_events(self) -> list[ManagerEvent]:  # noqa: D102
        events = self._events or []
        if events:
            self._events = []
        return events

    # --- stores -------------------------------------------------------------------------------------------------------

    def _reserved(self, placement: _Placement) -> SlotReservation:
        if placement.deferred:  # of one prefix: in another it may have found a slot
            placed = frozenset(placement.keys)
            placement.deferred = [key for key in placement.deferred if key not in placed]
        handle = SlotReservation(placement.keys, joined(placement.slots), placement.deferred, self._end_store)
        self._writing[handle] = placement.strands
        return handle

    def _place_chain(self, placement: _Placement, keys: Sequence[OffloadKey], parent: OffloadKey | None) -> None:
        """Find slots for those of ``keys`` that are absent. Mutates everything."""
        num_waiting = self.num_writing + self.num_pins
        keys = tuple(dict.fromkeys(keys))
        present = self._index.slots_of(keys)
        if present.count(None) == len(present):
            self._place(placement, keys, parent, num_waiting)
            return
        protected = np.array([slot for slot in present if slot is not None], dtype=np.intp)
        self._table.hold(protected)
        at = 0
        for is_absent, group in groupby(present, lambda slot: slot is None):
            count = len(list(group))
            in_front = keys[at - 1] if at else parent
            if is_absent and not self._place(placement, keys[at : at + count], in_front, num_waiting):
                break  # what lies behind a hole is worth nothing
            at += count
        self._table.let_go(protected)

    def _place(
        self, placement: _Placement, keys: tuple[OffloadKey, ...], parent: OffloadKey | None, num_waiting: int
    ) -> bool:
        """Find slots for absent chunks, one behind the other; whether all got one. Mutates everything.

        Args:
            placement: what was placed so far; added to.
            keys: the chunks.
            parent: the chunk before them.
            num_waiting: slots that others use at the moment, and may free.
        """
        offer = self._offer(keys, parent)
        is_refused = self._make_room(offer)
        num_placed = min(len(keys), self._table.num_free)
        if num_placed < len(keys) and not is_refused:
            # Others may let go of that many slots. Chunks beyond them would never find one: they are refused.
            deferred = keys[num_placed : num_placed + num_waiting]
            placement.deferred += deferred
            if deferred:
                offer = Offer(keys[:num_placed], offer.parent, offer.ancestors)
        if offer.keys:
            slots = self._table.reserve(num_placed)
            self.policy.add(offer, slots)
            placement.add(keys[:num_placed], slots, self._index.insert(keys[:num_placed], slots, parent))
        return num_placed == len(keys)

    def _place_each(self, placement: _Placement, parents: dict[OffloadKey, OffloadKey | None]) -> None:
        """Find slots for those of ``parents`` that are absent, single chunks of several prefixes. Mutates everything.

        Args:
            placement: what was placed so far; added to.
            parents: by chunk, the one before it.
        """
        there: list[Offer] = []
        offers: list[Offer] = []
        for (key, parent), slot in zip(parents.items(), self._index.slots_of(tuple(parents)), strict=True):
            if slot is None:
                offers.append(self._offer((key,), parent))
            else:
                there.append(self._offer((key,), key))  # it stays, as what is before the others does
        placed, others = offers[: self._table.num_free], offers[self._table.num_free :]
        refused: list[Offer] = []
        if others:
            answers = list(zip(others, self._make_room_for_each([*there, *offers], len(others)), strict=True))
            placed += [offer for offer, answer in answers if answer >= 0]
            # As in _place: no more of them wait than slots that others may let go of; here the others on offer, too.
            num_waiting = self.num_writing + self.num_pins + len(placed)
            waiting = [offer for offer, answer in answers if answer == NO_SLOT]
            placement.deferred += [offer.keys[0] for offer in waiting[:num_waiting]]
            refused = [offer for offer, answer in answers if answer == REFUSED] + waiting[num_waiting:]
        slots = self._table.reserve(len(placed))
        self.policy.add_each([*placed, *refused], slots)
        keys = [offer.keys[0] for offer in placed]
        placement.add(keys, slots, self._index.insert_each(keys, slots, [parents[key] for key in keys]))

    def _offer(self, keys: tuple[OffloadKey, ...], parent: OffloadKey | None) -> Offer:
        slot = self._index.slot_of(parent)
        return Offer(keys, slot, partial(self._index.ancestors, slot))

    def _make_room_for_each(self, offers: Sequence[Offer], num_slots: int) -> list[int]:
        """Evict what the policy gives up for each of the last ``num_slots`` offers; its answers. Mutates everything."""
        parents = np.array([offer.parent for offer in offers if offer.parent != NO_SLOT], dtype=np.intp)
        self._table.hold(parents)
        answers = self.policy.make_room_for_each(offers, num_slots, self._table.busy)
        self._table.let_go(parents)
        self._retire(np.array([answer for answer in answers if answer >= 0], dtype=np.intp))
        return answers

    def _make_room(self, offer: Offer) -> bool:
        """Evict what the policy gives up for ``offer``; whether it refused more. Mutates everything."""
        num_missing = len(offer.keys) - self._table.num_free
        if num_missing <= 0:
            return False
        busy = self._table.busy
        if offer.parent != NO_SLOT:
            busy[offer.parent] += 1
        room = self.policy.make_room(offer, num_missing, busy)
        if offer.parent != NO_SLOT:
            busy[offer.parent] -= 1
        self._retire(room.victims)
        return room.refused

    def _end_store(self, handle: SlotReservation, is_stored: bool) -> None:
        strands = self._writing.pop(handle)
        if not handle.keys:
            return
        if not is_stored:
            self._index.remove(handle.slot_array)
            self.policy.drop(handle.slot_array)
            self._table.forfeit(handle.slot_array)
            return
        for strand in strands:
            self._index.publish(strand)
        self._table.publish(handle.slot_array)
        self._generation += 1
        if self._events is not None:
            self._events.append(ChunksStored(tuple(handle.keys)))

    # --- loads and removals -------------------------------------------------------------------------------------------

    def _end_load(self, handle: ChunkPins, bad_slots: Sequence[int]) -> None:
        self._reading.remove(handle)
        self._num_pins -= len(handle.keys)
        if bad_slots:
            bad = np.array(bad_slots, dtype=np.intp)
            # Another reader may have found the same.
            bad = bad[np.frombuffer(self._table.states(bad), dtype=np.uint8) == slot_table.READY]
            self.policy.drop(bad)
            self._retire(bad)
        self._table.let_go(handle.slot_array)

    def _removable(self, key: OffloadKey) -> int:
        """Slot of a ready chunk, or ``NO_SLOT`` if there is none. Raises ``LifecycleError`` if it is being written."""
        slot = self._index.slot_of(key)
        if slot != NO_SLOT and self._table.states(np.array([slot]))[0] == slot_table.WRITING:
            raise LifecycleError(f"chunk {key.hex()}", "being written", "remove", ("prepare_store",))
        return slot

    def _retire(self, slots: Slots) -> None:
        """Chunks the policy has forgotten are gone. Mutates index, table, generation and events."""
        if len(slots):
            self._table.retire(slots)
            self._note_removed(self._index.remove(slots))

    def _note_removed(self, keys: list[OffloadKey]) -> None:
        self._generation += 1
        self._num_removed += len(keys)
        if self._events is not None and keys:
            self._events.append(ChunksRemoved(tuple(keys)))

    def _states(self, keys: Sequence[OffloadKey]) -> bytes:
        slots = self._index.slots_of(keys)
        if slots.count(None) == len(slots):
            return bytes(len(slots))
        return self._table.states(np.array([NO_SLOT if slot is None else slot for slot in slots], dtype=np.intp))
