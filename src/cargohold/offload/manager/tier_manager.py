"""The manager of one tier: keeps an index of chunks, a table of slots and an eviction policy consistent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain as chained
from itertools import islice

import numpy as np

from cargohold.blocks import ABSENT, READY
from cargohold.errors import ConfigError, LifecycleError, MissingChunkError
from cargohold.offload.manager import slot_table
from cargohold.offload.manager.base import (
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
from cargohold.offload.manager.placement import OfferedChain, Placement, are_apart
from cargohold.offload.manager.slot_table import SlotTable
from cargohold.offload.policy.base import NO_SLOT, Offer, ReplacementPolicy, Room, Slots, joined

_ABSENT, _READY = bytes([ABSENT]), bytes([READY])
_LOOKUP_OF_STATE = bytes(READY if state == slot_table.READY else ABSENT for state in range(256))


class TierManager(OffloadManager):
    """Manages the chunks of one tier.

    Args:
        capacity: number of slots of the tier.
        policy: decides what is evicted; made for the same capacity, and used by no other manager.
        record_events: whether to record events for ``take_events``.
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
        # Of most prompts that are not there as a whole, nothing is there: then nothing is prepared for touching or loading.
        run = self.lookup_run(keys) if keys and self._index.slot_of(keys[0]) != NO_SLOT else b""
        return run if len(run) == len(keys) else run + self._lookup_each(keys[len(run) :])

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

    def touch(self, keys: Sequence[OffloadKey]) -> int:  # noqa: D102
        run = self._index.run(tuple(keys))
        slots, is_whole = run.slots, run.length == len(keys)
        if not is_whole:
            rest = self._index.slots_of(keys[run.length :])
            if rest.count(None) < len(rest):
                is_whole = rest[-1] is not None
                slots = joined([slots, np.array([slot for slot in rest if slot is not None], dtype=np.intp)])
        self.policy.touch(slots, is_whole=is_whole)
        return run.length

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

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> StoreHandle:  # noqa: D102
        chains = [OfferedChain(_each_once(keys), parent) for keys, parent in offers]
        self._look_up(chains)
        placement = Placement(self._around(chains), self.num_writing + self.num_pins)
        if are_apart(chains):
            for chain in chains:
                chain.run = chain.keys
            self._place(placement, chains)
        else:
            self._place_in_rounds(placement, chains)
        handle = SlotReservation(placement.keys, joined(placement.slots), placement.deferred, self._end_store)
        self._writing[handle] = placement.strands
        return handle

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

    def _look_up(self, chains: Sequence[OfferedChain]) -> None:
        """Find out which chunks of chains are in the tier. Mutates the chains."""
        if len(chains) == 1:
            chains[0].present = self._index.slots_of(chains[0].keys)
            return
        present = iter(self._index.slots_of([key for chain in chains for key in chain.keys]))
        for chain in chains:
            chain.present = list(islice(present, len(chain.keys)))

    def _around(self, chains: Sequence[OfferedChain]) -> list[int]:
        """Return the slots of chains' chunks that are in the tier, and of the chunks right before the chains.

        The policy by itself does not evict chunks before those.
        """
        around = [slot for chain in chains if (slot := self._index.slot_of(chain.parent)) != NO_SLOT]
        for chain in chains:
            if chain.present.count(None) < len(chain.present):
                around += [slot for slot in chain.present if slot is not None]
        return around

    def _ancestors(self, chains: Sequence[OfferedChain]) -> list[int]:
        """Return the slots of all chunks before chains in their prefixes."""
        ancestors: list[int] = []
        for chain in chains:
            first = next((slot for slot in chain.present if slot is not None), NO_SLOT)
            for end in (first, self._index.slot_of(chain.parent)):
                ancestors += self._index.ancestors(end).tolist()
        return ancestors

    def _place_in_rounds(self, placement: Placement, chains: Sequence[OfferedChain]) -> None:
        """Find slots for chains some of whose chunks are there, or that depend on each other. Mutates everything.

        A chain that depends on another waits for it: each round places the next run of each chain.
        """
        is_first, is_stuck = True, False
        while chains:
            # Keys that are not digests of prefixes may claim to be behind each other in a circle: then one must begin.
            pending = set[OffloadKey]() if is_stuck else {key for chain in chains for key in chain.absent()}
            claimed: set[OffloadKey] = set()
            begun = []
            for chain in chains:
                chain.skip_present()
                if (
                    chain.keys
                    and not placement.gives_up(chain, claimed)
                    and chain.begin_run(claimed, placement.missed, pending)
                ):
                    begun.append(chain)
            if is_first and not self.policy.evicts_ends_alone:
                # The policy spares the chunks before those in one call. Here it is called for some chains now, and for
                # others in later rounds, so what is before all of them is marked as busy.
                is_asked_again = any(chain.has_more(claimed) for chain in chains)
                placement.around += self._ancestors(
                    chains if is_asked_again else [chain for chain in chains if not chain.run]
                )
            if begun:
                self._place(placement, begun)
            left = [chain for chain in chains if chain.end_run()]
            is_first, is_stuck = False, len(left) == len(chains) and not begun
            chains = left
            self._look_up(chains)

    def _place(self, placement: Placement, chains: Sequence[OfferedChain]) -> None:
        """Find slots for the runs of chains, chain after chain. Mutates everything."""
        offers = [self._offer(chain.run, chain.parent) for chain in chains]
        self._make_room(placement, chains, offers)
        slots = self._table.reserve(sum([chain.num_fitting for chain in chains]))
        runs, parts, end, is_whole = [], [], 0, True
        for chain in chains:
            run, start, end = chain.run, end, end + chain.num_fitting
            if chain.num_fitting < len(run):
                run, is_whole = run[: chain.num_fitting], False
            chain.num_placed += len(run)
            placement.keys += run
            runs.append(run)
            parts.append(slots[start:end])
        placement.slots.append(slots)
        placement.strands += self._index.insert(runs, slots, [chain.parent for chain in chains])
        if is_whole:
            self.policy.add(offers, parts)
        else:
            self._tell_of_short(placement, chains, offers, parts)

    def _tell_of_short(
        self, placement: Placement, chains: Sequence[OfferedChain], offers: Sequence[Offer], parts: Sequence[Slots]
    ) -> None:
        """Tell the policy which chunks got slots, where not all did. Of deferred chunks it learns when they are offered again.

        Mutates ``placement`` and the policy.
        """
        deferred = [self._deferred(placement, chain) for chain in chains]
        placement.deferred += chained.from_iterable(deferred)
        for chain in chains:
            placement.missed.update(chain.run[chain.num_fitting :])
        if not any(deferred):
            self.policy.add(offers, parts)  # the objects that make_room got: the policy need not look at them again
            return
        told = [
            (offer._replace(keys=chain.run[: chain.num_fitting]) if waiting else offer, part)
            for chain, offer, part, waiting in zip(chains, offers, parts, deferred, strict=True)
            if chain.num_fitting or not waiting
        ]
        if told:
            self.policy.add([offer for offer, _ in told], [part for _, part in told])

    def _deferred(self, placement: Placement, chain: OfferedChain) -> tuple[OffloadKey, ...]:
        """Return the chunks of a run to offer again, because they have no slot only while other slots are in use.

        At most as many as there are slots in use that may become free; further chunks would never find one.
        """
        if chain.is_refused or chain.num_fitting == len(chain.run):
            return ()
        num_waiting = placement.num_waiting + len(placement.keys) - chain.num_placed
        return chain.run[chain.num_fitting : chain.num_fitting + num_waiting]

    def _offer(self, keys: tuple[OffloadKey, ...], parent: OffloadKey | None) -> Offer:
        slot = self._index.slot_of(parent)
        return Offer(keys, slot, partial(self._index.ancestors, slot))

    def _make_room(self, placement: Placement, chains: Sequence[OfferedChain], offers: Sequence[Offer]) -> None:
        """Set how many chunks of each run fit, evicting chunks that the policy gives up if need be. Mutates everything."""
        num_free = self._table.num_free
        missing, is_short = [], False
        for chain in chains:
            chain.num_fitting = min(len(chain.run), num_free)
            num_free -= chain.num_fitting
            missing.append(len(chain.run) - chain.num_fitting)
            is_short |= chain.num_fitting < len(chain.run)
        if is_short:
            rooms = self._ask_for_room(placement, offers, missing)
            for chain, room in zip(chains, rooms, strict=True):
                chain.num_fitting += len(room.victims)
                chain.is_refused = room.refused
            self._retire(joined([room.victims for room in rooms]))

    def _ask_for_room(self, placement: Placement, offers: Sequence[Offer], missing: Sequence[int]) -> list[Room]:
        if not placement.around:
            return self.policy.make_room(offers, missing, self._table.busy)
        around = np.array(placement.around, dtype=np.intp)
        self._table.hold(around)
        rooms = self.policy.make_room(offers, missing, self._table.busy)
        self._table.let_go(around)
        return rooms

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
            # Another reader may have found the same chunks bad, and removed them.
            bad = bad[np.frombuffer(self._table.states(bad), dtype=np.uint8) == slot_table.READY]
            self.policy.drop(bad)
            self._retire(bad)
        self._table.let_go(handle.slot_array)

    def _removable(self, key: OffloadKey) -> int:
        """Return the slot of a ready chunk, or ``NO_SLOT``. Raises ``LifecycleError`` if the chunk is being written."""
        slot = self._index.slot_of(key)
        if slot != NO_SLOT and self._table.states(np.array([slot]))[0] == slot_table.WRITING:
            raise LifecycleError(f"chunk {key.hex()}", "being written", "remove", ("prepare_stores",))
        return slot

    def _retire(self, slots: Slots) -> None:
        """Remove chunks that the policy has forgotten. Mutates index, table, generation and events."""
        if len(slots):
            self._table.retire(slots)
            self._note_removed(self._index.remove(slots))

    def _note_removed(self, keys: list[OffloadKey]) -> None:
        self._generation += 1
        self._num_removed += len(keys)
        if self._events is not None and keys:
            self._events.append(ChunksRemoved(tuple(keys)))

    def _lookup_each(self, keys: Sequence[OffloadKey]) -> bytes:
        """Answer ``lookup`` for chunks most of which are absent."""
        found = self._index.find(keys)
        if not found:
            return _ABSENT * len(keys)
        answers = bytearray(_ABSENT * len(keys))
        states = self._table.states(np.array(list(found.values()), dtype=np.intp))
        for at, answer in zip(found, states.translate(_LOOKUP_OF_STATE), strict=True):
            answers[at] = answer
        return bytes(answers)


def _each_once(keys: Sequence[OffloadKey]) -> tuple[OffloadKey, ...]:
    # Nearly always, all are different, and a set is made in two thirds of the time of a dict.
    return tuple(keys) if len(set(keys)) == len(keys) else tuple(dict.fromkeys(keys))
