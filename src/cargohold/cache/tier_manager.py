"""The manager of one tier: a table of chunks, and a policy that decides which of them stay."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, groupby
from math import inf
from operator import and_
from typing import Final

from cargohold.blocks import ABSENT, READY
from cargohold.cache import chunk_table
from cargohold.cache.chunk_table import NO_SLOT, ON_DEVICE, ChunkTable
from cargohold.cache.manager import (
    ChunkPins,
    ChunksRemoved,
    ChunksStored,
    ManagerEvent,
    OffloadKey,
    OffloadManager,
    SlotReservation,
    StoreOffer,
)
from cargohold.cache.policies import Newcomers, ReplacementPolicy, RunsPolicy, find_policy
from cargohold.cache.retention import NORMAL
from cargohold.cache.rows import GroupedRowTable, PooledTable
from cargohold.cache.shares import Limits, Shares
from cargohold.errors import ConfigError, LifecycleError, MissingChunkError
from cargohold.protocol import TurnEnd

_ABSENT, _READY = bytes([ABSENT]), bytes([READY])
MAX_GROUPS: Final = 256
"""A key has a byte for its group."""

_SPARE_PART: Final = 1024
_MAX_SPARE: Final = 64
"""When room is made in a large tier for a few chunks, a few slots more are made free, at most this part of it: answers grow by
one chunk at a time, and one eviction of many chunks costs a fraction of as many evictions."""


class _Placement:
    """The plan of a store.

    Attributes:
        num_waiting: number of slots that were being written or read before, and will become free.
        keys: chunks that found a slot.
        slots: their slots.
        deferred: chunks that may find a slot when others become free.
        missed: chunks that found no slot, and whether they are deferred.
        is_full: whether nothing more can be evicted, because all other chunks are in use; not noted where quotas decide.
    """

    __slots__ = ("deferred", "is_full", "keys", "missed", "num_waiting", "slots")

    def __init__(self, num_waiting: int) -> None:
        self.num_waiting = num_waiting
        self.keys: list[OffloadKey] = []
        self.slots: list[int] = []
        self.deferred: list[OffloadKey] = []
        self.missed: dict[OffloadKey | None, bool] = {}
        self.is_full = False


class TierManager(OffloadManager):
    """Manages the chunks of one tier.

    Args:
        capacity: number of slots of the tier.
        policy: makes the policy that decides what is evicted, for a table.
        record_events: whether to record events for ``take_events``.
        quotas: limits of tenants that have some, by tenant; ``policy`` must then be the class of a ``RunsPolicy``.
        chunk_rows: rows that a chunk takes, by group, where groups differ; then ``slots`` of handles are tuples of rows.
    """

    generation = 0
    num_pins = 0

    def __init__(
        self,
        capacity: int,
        policy: Callable[[ChunkTable], ReplacementPolicy],
        *,
        record_events: bool = False,
        quotas: Mapping[str, Limits] | None = None,
        chunk_rows: Sequence[int] = (),
    ) -> None:
        if capacity < 1:
            raise ConfigError("capacity", capacity, "at least one slot")
        self.capacity = capacity
        self._chunk_rows = chunk_rows
        self._make_policy = policy
        self._num_spare = min(capacity // _SPARE_PART, _MAX_SPARE)
        self._quotas = dict(quotas or {})
        self._admits_all = False
        # The table where the device pool is part of the cache, and of which of its chunks slots may be taken.
        self._pooled: PooledTable | None = None
        self._may_take: Callable[[Sequence[OffloadKey]], Sequence[bool]] = lambda keys: [False] * len(keys)
        rows = GroupedRowTable(capacity * max(chunk_rows), chunk_rows) if chunk_rows else None
        self._use_table(rows or ChunkTable(capacity), rows)
        self._events: list[ManagerEvent] | None = [] if record_events else None
        self._writing: set[SlotReservation] = set()
        self._reading: set[ChunkPins] = set()
        self._num_removed = Counter[str]()

    def _use_table(self, table: ChunkTable, rows: GroupedRowTable | None) -> None:
        """Begin with an empty table."""
        self.table, self._rows = table, rows
        self.policy: ReplacementPolicy = self._make_policy(table)
        # Hints and quotas; ``None`` until there are any.
        self.shares: Shares | None = None
        if self._quotas:
            if not isinstance(self.policy, RunsPolicy) or not isinstance(self._make_policy, type):
                raise ConfigError(
                    "quotas", sorted(self._quotas), f"the policy {self.policy.name} keeps its own order: it takes none"
                )
            self.policy = self.shares = Shares(self.policy, self._quotas, self._make_policy)
        if self._admits_all:
            self.policy.admit_all()

    def admit_all(self) -> None:
        self._admits_all = True
        self.policy.admit_all()

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def num_ready(self) -> int:
        return self.table.num_ready

    @property
    def num_writing(self) -> int:
        return self.table.num_writing

    @property
    def num_removed(self) -> Mapping[str, int]:
        return self._num_removed

    @property
    def num_leaving(self) -> int:
        return self.table.num_leaving

    @property
    def num_free(self) -> int:
        return self.table.num_free if self._pooled is None else self._pooled.num_places

    @property
    def num_obtainable(self) -> int:
        pins = self.table.pins
        return max(0, self.capacity - len(pins) + pins.count(0))

    @property
    def fill(self) -> tuple[int, int]:
        rows = self._rows
        return (self.num_ready, self.capacity) if rows is None else (rows.num_ready_rows, rows.num_rows)

    @property
    def takes_hints(self) -> bool:
        return self.shares is not None or isinstance(self.policy, RunsPolicy)

    @property
    def quotas(self) -> Mapping[str, Limits]:
        return self._quotas

    def usage(self) -> Mapping[str, int]:
        return self.shares.usage() if self.table.used and self.shares is not None else {}

    def lookup_run(self, keys: Sequence[OffloadKey]) -> bytes:
        return _READY * len(self.table.find_run(list(keys)))

    def lookup(self, keys: Sequence[OffloadKey]) -> bytes:
        run = _READY * len(self.table.find_run(list(keys)))
        if len(run) == len(keys):
            return run
        rest = self.table.find_each(keys[len(run) :])
        if rest.count(None) == len(rest):
            return run + _ABSENT * len(rest)
        states = self.table.states
        is_ready = (slot is not None and states[slot] == chunk_table.READY for slot in rest)
        return run + bytes([READY if ready else ABSENT for ready in is_ready])

    def check(self) -> None:
        self.table.check()
        self.policy.check()
        assert not self.table.evicted, "evicted chunks were not announced"
        assert sum(len(handle.keys) for handle in self._writing) == self.num_writing, "written by nobody"
        assert sum(len(handle.keys) for handle in self._reading) == self.num_pins, "pinned by nobody"
        assert sum(self.table.pins) == self.num_pins + self.num_writing, "in use by nobody"

    # --- use ----------------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[OffloadKey]) -> int:
        keys = list(keys)
        slots = self.table.find_run(keys)
        num_ready, is_whole = len(slots), len(slots) == len(keys)
        if not is_whole:
            rest = self.table.find_each(keys[num_ready:])
            is_whole = rest[-1] is not None
            slots += [slot for slot in rest if slot is not None]
        self.policy.touch(slots, is_whole=is_whole)
        if self._pooled is not None:
            self._pooled.note_copies([slot for slot in slots if self._pooled.is_copy[slot]])
        return num_ready

    def renew(self, ends: Iterable[OffloadKey]) -> None:
        for key in ends:
            slot = self.table.find(key)
            if slot != NO_SLOT and self.table.states[slot] == chunk_table.READY:
                self.policy.renew(slot)

    def end_turn(self, keys: Sequence[OffloadKey], end: TurnEnd) -> None:
        if keys and end is not TurnEnd.UNKNOWN:
            found = (slot for key in reversed(keys) if (slot := self.table.find(key)) != NO_SLOT)
            self.policy.end_turn(keys, next(found, NO_SLOT), end)

    def drop(self, keys: Sequence[OffloadKey], tenant: str | None = None) -> int:
        table = self.table
        slots = [slot for slot in table.find_each(keys) if slot is not None and table.states[slot] == chunk_table.READY]
        if self.shares is not None:
            slots = self.shares.owned_by(slots, self.shares.share_of(tenant))
        victims: list[int] = []
        num_children = {slot: table.children[slot] for slot in slots}
        for slot in reversed(slots):
            if not num_children[slot] and not table.pins[slot]:
                victims.append(slot)
                if table.parents[slot] in num_children:
                    num_children[table.parents[slot]] -= 1
        self._remove(victims[::-1])
        return len(victims)

    def rank(self, keys: Sequence[OffloadKey], level: int, tenant: str | None = None) -> int:
        if self.shares is None:
            if not isinstance(self.policy, RunsPolicy):
                return 0
            self.policy = self.shares = Shares(self.policy)
        # A listed chunk that was set aside stays that while it is saved, so it is brought back also then.
        states, ranked = self.table.states, (chunk_table.READY, ON_DEVICE, *[chunk_table.WRITING] * (level == NORMAL))
        slots = [slot for slot in self.table.find_each(keys) if slot is not None and states[slot] in ranked]
        if level != NORMAL:
            slots = self.shares.owned_by(slots, self.shares.share_of(tenant))
        self.shares.rank(slots, level)
        return len(slots)

    def others(self, keys: Sequence[OffloadKey], tenant: str | None) -> list[OffloadKey]:
        shares, owners = self.shares, self.table.owners
        if shares is None or owners is None:
            return []
        own = shares.share_of(tenant)
        slots = self.table.find_each(keys)
        return [key for key, slot in zip(keys, slots, strict=True) if slot is not None and owners[slot] != own]

    def prepare_load(self, keys: Sequence[OffloadKey]) -> ChunkPins:
        keys = list(keys)
        slots = self.table.find_run(keys)
        if len(slots) < len(keys):
            raise MissingChunkError(keys[len(slots)])
        handle = ChunkPins(keys, slots, self._end_load)
        if self._rows is not None:
            handle.slots = [self._rows.rows_at[slot] for slot in slots]
        self.table.pin(slots)
        self._reading.add(handle)
        self.num_pins += len(keys)
        return handle

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> SlotReservation:
        listed = self._unlist(offers) if self.num_listed else ()
        are_apart = _are_apart(offers)
        is_limited = self.shares is not None and self.shares.has_hard_limits
        handle = self._fill_free(offers) if are_apart and not is_limited else None
        if handle is None:
            handle = self._make_room_and_place(offers, are_apart=are_apart)
        if listed:
            self.note_copies(listed)  # the device has them already, wherever they come from
        if self._rows is not None:
            handle.slots = [self._rows.rows_at[slot] for slot in handle.places]
        self._writing.add(handle)
        return handle

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        keys = list(dict.fromkeys(keys))
        slots = self.table.find_each(keys)
        for key, slot in zip(keys, slots, strict=True):
            if slot is not None and self.table.states[slot] == chunk_table.WRITING:
                raise LifecycleError(f"chunk {key.hex()}", "being written", "remove", ("prepare_stores",))
        self._remove([slot for slot in slots if slot is not None])

    def reset(self) -> bool:
        if self.num_writing:
            return False
        self.policy.clear()
        ready = self.table.slots_in(chunk_table.READY)
        keys = self.table.keys_at(ready)
        self.table.clear()
        self._note_removed(keys, "reset")
        return True

    def take_events(self) -> list[ManagerEvent]:
        events = self._events or []
        if events:
            self._events = []
        return events

    # --- the device pool as a part of the cache -----------------------------------------------------------------------

    def pool_with_device(self, num_chunks: int, may_take: Callable[[Sequence[OffloadKey]], Sequence[bool]]) -> bool:
        if self._pooled is not None:
            self._forget_device(may_take)
            return self._pooled.num_more >= num_chunks
        if not getattr(self._make_policy, "may_pool", False) or self.num_free < self.capacity:
            return False
        per_chunk = self._chunk_rows or (1,) * MAX_GROUPS
        self._pooled = PooledTable(self.capacity * max(per_chunk), per_chunk, num_chunks)
        self._may_take = may_take
        self._use_table(self._pooled, self._pooled)
        return True

    def _forget_device(self, may_take: Callable[[Sequence[OffloadKey]], Sequence[bool]]) -> None:
        """Forget what another device pool holds, whose engine has ended."""
        assert self._pooled is not None
        self._may_take = may_take
        self.note_lost(self._pooled.keys_at(self._pooled.slots_in(ON_DEVICE, chunk_table.READY)))

    @property
    def num_listed(self) -> int:
        return 0 if self._pooled is None else self._pooled.num_listed

    def listed(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        found, states = self.table.find_each(keys), self.table.states
        return [key for key, slot in zip(keys, found, strict=True) if slot is not None and states[slot] == ON_DEVICE]

    def num_known(self, keys: Sequence[OffloadKey]) -> int:
        slots = self.table.find_each(keys)
        return slots.index(None) if None in slots else len(slots)

    def list_on_device(self, offers: Sequence[StoreOffer]) -> bool:
        table, are_there = self._pooled, False
        if table is None:
            return False
        for offer in offers:
            found, before, at = table.find_each(offer.keys), table.find(offer.parent), 0
            for is_absent, same in groupby(found, key=lambda slot: slot is None):
                end = at + len(list(same))
                part, at = offer.keys[at:end], end
                if is_absent and len(part) <= table.num_unused:
                    slots = table.take(len(part))
                    owner = 0 if self.shares is None else self.shares.turn_to(offer.tenant, offer.level)
                    table.list_absent(part, slots, before, owner)
                    self.policy.add(part, before, slots)
                are_there |= not is_absent
                before = table.find(part[-1])
        return are_there

    def note_copies(self, keys: Sequence[OffloadKey]) -> None:
        if self._pooled is not None:
            found = dict.fromkeys(self._pooled.find_each(keys))  # two requests of a step may offer the same chunk
            self._pooled.note_copies([slot for slot in found if slot is not None])

    def prepare_saves(self, keys: Sequence[OffloadKey], *, at_any_cost: bool = False) -> SlotReservation:
        table = self._pooled
        assert table is not None, "nothing is listed"
        found = (slot for slot in table.find_each(keys) if slot is not None and table.states[slot] == ON_DEVICE)
        slots = list(found)[::-1]  # those that are lost last first, and with them the beginnings of prefixes
        kept: list[int] = []
        worths = [inf] * len(slots) if at_any_cost else self._worths_to_save(slots)
        order = sorted(range(len(slots)), key=worths.__getitem__, reverse=True)
        owners = [0] * len(slots) if self.table.owners is None else [self.table.owners[slot] for slot in slots]
        for (worth, owner), same in groupby(order, key=lambda at: (worths[at], owners[at])):
            alike = [slots[at] for at in same]
            alike = alike[: self._make_room_to_save(alike, worth, owner)]
            table.save(alike)
            kept += alike
        self._announce_evicted()
        self.policy.note_saved(kept)
        handle = SlotReservation(table.keys_at(kept), kept, self._end_store)
        handle.slots = [table.rows_at[slot] for slot in kept]
        self._writing.add(handle)
        return handle

    def _worths_to_save(self, slots: Sequence[int]) -> list[float]:
        """Return what listed chunks are worth: no less than those after them."""
        table = self._pooled
        assert table is not None
        worths = dict(zip(slots, self.policy.worth_of(slots), strict=True))
        if self.shares is not None:
            for slot, level in zip(slots, map(self.shares.level_of, slots), strict=True):
                if level != NORMAL:
                    worths[slot] = inf if level > NORMAL else -inf
        behind = Counter(map(table.parents.__getitem__, slots))
        for slot in reversed(slots):  # ends of prefixes first
            if table.children[slot] > 1 + behind[slot]:
                worths[slot] = inf  # something after it has a slot, or stays on the device
            if (parent := table.parents[slot]) in worths:
                worths[parent] = max(worths[parent], worths[slot])
        return [worths[slot] for slot in slots]

    def _make_room_to_save(self, slots: Sequence[int], worth: float, owner: int) -> int:
        """Make room for chunks of a share, by taking copies, and then what is worth no more; return for how many there is.

        Mutates everything.
        """
        table = self._pooled
        assert table is not None
        num_allowed = len(slots) if self.shares is None else self.shares.num_left(owner, len(slots))
        ends = list(accumulate(table.sizes_of(slots)))
        is_asked_again = worth > 0  # for what is not, nothing must go
        if is_asked_again:
            self._take_copies(-(-ends[-1] // table.most))
        while is_asked_again:
            # Victims may be small: if these are not enough, there are more.
            num_before, num_slots = len(table.evicted), -(-max(0, ends[-1] - table.num_free_rows) // table.most)
            if self.shares is not None:
                num_allowed = self.shares.make_room_to_save(len(slots), num_slots, worth, owner)
            elif num_slots:
                assert isinstance(self.policy, RunsPolicy), "such policies alone list chunks"
                self.policy.give_up(num_slots, worth)
            is_asked_again = num_slots > 0 and len(table.evicted) >= num_before + num_slots
        return min(num_allowed, bisect_right(ends, table.num_free_rows))

    def _unlist(self, offers: Sequence[StoreOffer]) -> Sequence[OffloadKey]:
        """Forget those chunks on offer that are listed, and return them: they are offered a slot as if they were new."""
        if listed := self.listed(list(dict.fromkeys(chain.from_iterable([offer.keys for offer in offers])))):
            slots = [self.table.find(key) for key in listed]
            self.policy.drop(slots)
            self.table.remove(slots)
        return listed

    def parents(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, OffloadKey | None]:
        table = self.table
        before = [NO_SLOT if slot is None else table.parents[slot] for slot in table.find_each(keys)]
        return {key: None if slot == NO_SLOT else table.keys[slot] for key, slot in zip(keys, before, strict=True)}

    def continuations(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        table, children = self.table, defaultdict[int, list[int]](list)
        for slot in table.slots_in(chunk_table.WRITING, chunk_table.READY, ON_DEVICE):
            children[table.parents[slot]].append(slot)
        found = dict.fromkeys(slot for slot in table.find_each(keys) if slot is not None)
        first, left = len(found), list(found)
        while left:
            more = [slot for slot in children[left.pop()] if slot not in found]
            found.update(dict.fromkeys(more))
            left += more
        return table.keys_at(list(found)[first:])

    def note_lost(self, keys: Sequence[OffloadKey]) -> None:
        table = self._pooled
        if table is None:
            return
        slots = [slot for slot in table.find_each(keys) if slot is not None]
        for slot in slots:
            table.is_copy[slot] = 0
        gone = [slot for slot in slots if table.states[slot] == ON_DEVICE]
        if gone:
            self.policy.lose(gone)
            table.remove(gone)

    def _take_copies(self, num_free: int) -> None:
        """Take the slots of copies, until so many chunks fit. Mutates the table."""
        table = self._pooled
        if table is not None:
            taken = table.take_copies(num_free * table.most, self.may_be_taken)
            if taken:
                self._note_removed(table.keys_at(taken))

    def may_be_taken(self, slots: Sequence[int]) -> Sequence[bool]:
        """Return which chunks' slots may be taken, because the device holds them, too."""
        pins, shares = self.table.pins, self.shares
        may = self._may_take(self.table.keys_at(slots))
        is_free = [not pins[slot] and (shares is None or shares.level_of(slot) <= NORMAL) for slot in slots]
        return list(map(and_, is_free, may))

    # --- stores -------------------------------------------------------------------------------------------------------

    def _fill_free(self, offers: Sequence[StoreOffer]) -> SlotReservation | None:
        """Place offers that share no chunk, if free slots are enough for all of their chunks, and none of them is there.

        So it is with most of what running requests generate. Mutates table and policy, or nothing if it is not so.
        """
        keys = list(chain.from_iterable([offer.keys for offer in offers]))
        if len(keys) > self.table.num_free or not self.table.are_absent(keys):
            return None
        parents = [self.table.find(offer.parent) for offer in offers]
        return SlotReservation(keys, self._fill(offers, parents), self._end_store)

    def _fill(self, offers: Sequence[StoreOffer], parents: Sequence[int]) -> list[int]:
        """Place offers that share no chunk and are absent, for all of which there are free slots; return their slots."""
        table, shares, policy = self.table, self.shares, self.policy
        slots: list[int] = []
        for offer, before in zip(offers, parents, strict=True):
            if offer.keys:
                owner = 0 if shares is None else shares.turn_to(offer.tenant, offer.level)
                taken = table.take(len(offer.keys))
                table.place(offer.keys, taken, before, owner)
                policy.add(offer.keys, before, taken)
                slots += taken
        return slots

    def _make_room_and_place(self, offers: Sequence[StoreOffer], *, are_apart: bool) -> SlotReservation:
        """Find slots for as many chunks on offer as are worth one, and evict others for them. Mutates everything."""
        table = self.table
        placement = _Placement(table.num_writing + self.num_pins)
        found = [table.find_each(offer.keys) for offer in offers]
        parents = [table.find(offer.parent) for offer in offers]
        # Neither what is there of the offers nor what they continue may be evicted for them.
        around = [slot for slot in parents if slot != NO_SLOT]
        for slots in found:
            if slots.count(None) < len(slots):
                around += [slot for slot in slots if slot is not None]
        table.pin(around)
        if are_apart and self._make_room_ahead(offers, parents, found):
            placement.slots = self._fill(offers, parents)
            placement.keys = list(chain.from_iterable([offer.keys for offer in offers]))
        elif are_apart:
            for offer, before, slots in zip(offers, parents, found, strict=True):
                self._place_offer(placement, offer, before, slots)
        else:
            self._place_in_order(placement, offers)
        table.unpin(around)
        self._announce_evicted()
        return SlotReservation(placement.keys, placement.slots, self._end_store, placement.deferred)

    def _make_room_ahead(
        self, offers: Sequence[StoreOffer], parents: Sequence[int], found: Sequence[Sequence[int | None]]
    ) -> bool:
        """Let the policy evict once for all offers that are absent as a whole, as nearly all are. Mutates policy and table.

        For a few chunks it evicts some more, to spare. Returns whether all offers are absent, and there is room for all now.
        """
        newcomers = [
            Newcomers(offer.keys, before)
            for offer, before, slots in zip(offers, parents, found, strict=True)
            if slots and slots.count(None) == len(slots)
        ]
        num_chunks = sum([len(keys) for keys, _ in newcomers])
        self._take_copies(num_chunks)
        num_slots = num_chunks - self.table.num_free
        num_spare = self._num_spare if num_chunks <= max(1, self._num_spare // 4) else 0
        if num_slots > 0 and self.shares is None and (num_spare or len(offers) > 1):
            self.policy.make_room_ahead(newcomers, num_slots + num_spare)
        is_room = num_chunks <= self.table.num_free and self.shares is None
        return is_room and num_chunks == sum([len(offer.keys) for offer in offers])

    def _place_in_order(self, placement: _Placement, offers: Sequence[StoreOffer]) -> None:
        """Find slots for offers that share chunks, or continue each other: then after each other. Mutates everything."""
        find, find_each = self.table.find, self.table.find_each
        left = [StoreOffer(list(dict.fromkeys(of.keys)), of.parent, of.tenant, of.level) for of in offers]
        while left:
            pending = {
                key for offer in left for key in offer.keys if find(key) == NO_SLOT and key not in placement.missed
            }
            # Keys that are not digests of prefixes may claim to be after each other in a circle: then one must begin.
            begun = [offer for offer in left if offer.parent not in pending] or left[:1]
            for offer in begun:
                self._place_offer(placement, offer, find(offer.parent), find_each(offer.keys))
            left = [offer for offer in left if offer not in begun]

    def _place_offer(self, placement: _Placement, offer: StoreOffer, before: int, found: Sequence[int | None]) -> None:
        """Find slots for the absent chunks of an offer, up to the first that finds none. Mutates everything.

        Args:
            placement: the plan.
            offer: the offer; no chunk is in it twice.
            before: the slot of its parent, or ``NO_SLOT``.
            found: by chunk, the slot of those that are there, and ``None``.
        """
        keys, missed, num_others = offer.keys, placement.missed, len(placement.keys)
        if self.shares is not None:
            self.shares.turn_to(offer.tenant, offer.level)
        # No more are deferred than will find a slot: a request that is longer than the tier is not offered for ever.
        num_waiting = placement.num_waiting - len(placement.deferred)
        at = 0
        waits = missed.get(offer.parent)
        while at < len(keys) and waits is None:
            slot = found[at]
            if slot is not None:
                before, at = slot, at + 1
                continue
            end = _end_of_absent(keys, found, at, missed)
            part = keys if end - at == len(keys) else keys[at:end]
            num_placed, is_refused = self._place(placement, part, before)
            at += num_placed
            if num_placed:
                before = placement.slots[-1]
            if at < end:
                waits, num_waiting = not is_refused, placement.num_waiting + num_others
            elif at < len(keys):
                waits = missed.get(keys[at])
        if at < len(keys):
            rest = [key for key, slot in zip(keys[at:], found[at:], strict=True) if slot is None and key not in missed]
            deferred = rest[: max(0, num_waiting)] if waits else []
            placement.deferred += deferred
            missed.update(dict.fromkeys(rest, False))
            missed.update(dict.fromkeys(deferred, True))

    def _place(self, placement: _Placement, keys: Sequence[OffloadKey], before: int) -> tuple[int, bool]:
        """Place the leading ones of absent chunks, consecutive in one prefix, after the chunk in slot ``before``.

        Evicts others if need be. Mutates everything. Returns how many were placed, and whether the policy refuses the rest.
        """
        table, policy, num_placed = self.table, self.policy, len(keys)
        is_refused = is_limited = False
        owner = 0
        if self.shares is not None:
            owner, num_placed = self.shares.tenant, self.shares.num_allowed(keys, before)
            is_limited = num_placed < len(keys)
        num_free = table.num_free
        if num_placed > num_free:
            if not placement.is_full:
                is_refused = self._make_room(keys, before, num_placed)
            placement.is_full = not is_refused and table.num_free < num_placed and not table.used
            num_placed = min(num_placed, table.num_free)
        is_refused |= is_limited
        # Of chunks that may be offered again the policy learns then.
        added = keys if is_refused or num_placed == len(keys) else keys[:num_placed]
        placed = keys if num_placed == len(keys) else keys[:num_placed]
        slots = table.take(num_placed) if placed else []
        if placed:
            table.place(placed, slots, before, owner)
            placement.keys += placed
            placement.slots += slots
        if added:
            policy.add(added, before, slots)
        return num_placed, is_refused

    def _make_room(self, keys: Sequence[OffloadKey], before: int, num_chunks: int) -> bool:
        """Let the policy evict until there is room for so many, or it gives no more; return whether it refuses that."""
        table, is_refused = self.table, False
        self._take_copies(num_chunks)
        num_missing = num_chunks - table.num_free
        while num_missing > 0:
            num_before = len(table.evicted)
            is_refused = self.policy.make_room(keys, before, num_missing)
            gave_all = len(table.evicted) - num_before == num_missing  # but they may have been small ones
            num_missing = num_chunks - table.num_free if gave_all else 0
        return is_refused

    def _end_store(self, handle: SlotReservation, is_stored: bool) -> None:
        self._writing.remove(handle)
        if not is_stored:
            self.policy.drop(handle.places)
            self.table.remove(handle.places)
        elif handle.keys:
            self.table.publish(handle.places)
            self.generation += 1
            if self._events is not None:
                self._events.append(ChunksStored(tuple(handle.keys)))

    # --- loads and removals -------------------------------------------------------------------------------------------

    def _end_load(self, handle: ChunkPins, bad_keys: Sequence[OffloadKey]) -> None:
        self._reading.remove(handle)
        self.num_pins -= len(handle.keys)
        # Another reader may have found the same chunks bad, and removed them; then they may even have been stored again.
        slot_of = dict(zip(handle.keys, handle.places, strict=True)) if bad_keys else {}
        self._remove([slot_of[key] for key in bad_keys if self.table.find(key) == slot_of[key]], "damaged")
        self.table.unpin(handle.places)

    def _remove(self, slots: Sequence[int], reason: str = "evicted") -> None:
        """Remove ready chunks. Mutates policy, table, generation and events."""
        if slots:
            keys = self.table.keys_at(slots)
            self.policy.drop(slots)
            self.table.remove(slots)
            self._note_removed(keys, reason)

    def _announce_evicted(self) -> None:
        if self.table.evicted:
            self._note_removed(self.table.evicted)
            self.table.evicted = []

    def _note_removed(self, keys: Sequence[OffloadKey], reason: str = "evicted") -> None:
        self.generation += 1
        self._num_removed[reason] += len(keys)
        if self._events is not None and keys:
            self._events.append(ChunksRemoved(tuple(keys)))


def _end_of_absent(
    keys: Sequence[OffloadKey], found: Sequence[int | None], at: int, missed: Mapping[OffloadKey | None, bool]
) -> int:
    """Return where a stretch of absent chunks that begins at ``at`` ends: before one that is there, or was missed."""
    if not missed and found.count(None) == len(found):
        return len(keys)  # nearly always
    return next((end for end in range(at, len(keys)) if found[end] is not None or keys[end] in missed), len(keys))


def _are_apart(offers: Sequence[StoreOffer]) -> bool:
    """Whether no chunk is on offer twice, and no offer continues another: nearly always so."""
    if len(offers) == 1 and len(offers[0].keys) == 1:
        return True
    names = set(chain.from_iterable([offer.keys for offer in offers]))
    is_each_once = len(names) == sum([len(offer.keys) for offer in offers])
    return is_each_once and names.isdisjoint([offer.parent for offer in offers])


# --- makes managers ---------------------------------------------------------------------------------------------------


def make_manager(
    policy: str,
    capacity: int,
    *,
    record_events: bool = False,
    quotas: Mapping[str, Limits] | None = None,
    chunk_rows: Sequence[int] = (),
) -> TierManager:
    """Make the manager of a tier.

    Args:
        policy: name of the eviction policy; see ``cargohold.cache.policies.find_policy``.
        capacity: number of slots.
        record_events: whether to record events for ``take_events``.
        quotas: limits of tenants that have some, by tenant.
        chunk_rows: rows that a chunk takes, by group, where groups differ.

    Raises:
        ConfigError: there is no such policy, or no slot, or the policy takes no quotas.
    """
    return TierManager(capacity, find_policy(policy), record_events=record_events, quotas=quotas, chunk_rows=chunk_rows)
