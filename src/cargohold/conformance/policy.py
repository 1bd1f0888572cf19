"""The conformance suite for replacement policies: tests of what every policy must do, to be inherited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import ClassVar

import numpy as np
import pytest

from cargohold.blocks import READY
from cargohold.conformance.chunks import Tree
from cargohold.conformance.chunks import key as key_of
from cargohold.offload.manager import LoadHandle, OffloadKey, StoreHandle, StoreOffer, TierManager
from cargohold.offload.policy.base import NO_SLOT, BusyCounts, Offer, ReplacementPolicy, Room, Slots

NUM_OPERATIONS = 250


class PolicyConformance(ABC):
    """Tests a policy inside a tier's manager, with every invariant checked after every operation.

    Attributes:
        num_seeds: random streams of operations per test.
        keeps_prefixes_whole: whether the policy promises that it evicts no chunk while a later chunk of its prefix stays.
    """

    num_seeds: ClassVar[int] = 6
    keeps_prefixes_whole: ClassVar[bool] = True

    @abstractmethod
    def policy(self, capacity: int) -> ReplacementPolicy:
        """A new policy for a tier of ``capacity`` slots."""

    # --- any traffic --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("capacity", [1, 2, 5, 30])
    def test_any_traffic_keeps_every_rule(self, capacity: int) -> None:
        """Victims hold chunks, are not busy, named once, and no more than asked for; the policy knows the slots in use."""
        for seed in range(self.num_seeds):
            traffic = _Traffic(StrictPolicy(self.policy(capacity)), capacity, seed)
            for _ in range(NUM_OPERATIONS):
                traffic.move()
                traffic.manager.check()
            traffic.settle()
            traffic.manager.check()

    def test_the_same_traffic_has_the_same_victims(self) -> None:
        """Two policies that see the same operations evict the same chunks: decisions depend on nothing but history."""
        for seed in range(self.num_seeds):
            left, right = (_Traffic(self.policy(12), 12, seed) for _ in range(2))
            for _ in range(NUM_OPERATIONS):
                left.move()
                right.move()
                assert left.manager.take_events() == right.manager.take_events(), "the same traffic has other victims"

    def test_no_prefix_has_holes(self) -> None:
        """No chunk stays while the one before it in its prefix is gone: chunks behind such a hole could never be used."""
        if not self.keeps_prefixes_whole:
            pytest.skip("this policy makes no such promise")
        for seed in range(self.num_seeds):
            traffic = _Traffic(self.policy(15), 15, seed, all_goes_well=True)
            for _ in range(NUM_OPERATIONS):
                traffic.move()
                states = dict(zip(traffic.tree.keys, traffic.manager.lookup(traffic.tree.keys), strict=True))
                for key, parent in traffic.tree.parents.items():
                    assert states[key] != READY or states[parent] == READY, (
                        "a chunk is there, and the one before is not"
                    )

    # --- one thing at a time ------------------------------------------------------------------------------------------

    def test_what_fits_stays(self) -> None:
        """As long as the tier has free slots, the policy evicts nothing."""
        tree = Tree(Random(1))  # noqa: S311  # repeatable, on purpose
        manager = TierManager(len(tree.keys), self.policy(len(tree.keys)))
        for path in tree.paths:
            _store(manager, path)
        assert manager.lookup(tree.keys) == bytes([READY]) * len(tree.keys)

    def test_idle_chunks_make_room_or_are_worth_more(self) -> None:
        """While no chunk is busy, every chunk on offer gets a slot or is refused for good; none is deferred."""
        for seed in range(self.num_seeds):
            traffic = _Traffic(StrictPolicy(self.policy(6)), 6, seed)
            for _ in range(NUM_OPERATIONS // 4):
                traffic.settle()
                handle = traffic.manager.prepare_store(traffic.tree.any_path(traffic.random))
                assert not handle.deferred, "nothing is in use, and yet chunks are deferred"
                handle.commit()

    @pytest.mark.parametrize("capacity", [4, 8, 16])
    def test_offers_that_come_together_spare_each_others_prefixes(self, capacity: int) -> None:
        """Of several offers that come together, none gets a slot whose chunk is in front of another offer in its prefix."""
        for seed in range(self.num_seeds):
            traffic = _Traffic(StrictPolicy(self.policy(capacity)), capacity, seed, all_goes_well=True)
            for _ in range(NUM_OPERATIONS // 2):
                traffic.store_several()
                traffic.manager.check()

    @pytest.mark.parametrize("is_written", [False, True])
    def test_what_is_busy_has_offers_come_again(self, *, is_written: bool) -> None:
        """While all chunks are being written or read, chunks on offer are deferred; once that has ended, they are stored.

        Without ``admit_all``, which the test calls, a policy might refuse them for good because others are worth more.
        """
        held = [key_of(f"held {depth}") for depth in range(6)]
        late = [StoreOffer([key_of(f"late {number} {depth}") for depth in range(2)]) for number in range(2)]
        manager = TierManager(len(held), StrictPolicy(self.policy(len(held))))
        manager.admit_all()
        writing = manager.prepare_store(held)
        if is_written:
            writing.commit()
        reading = manager.prepare_load(held) if is_written else None
        refused = manager.prepare_stores(late)
        wanted = [chunk for offer in late for chunk in offer.keys]
        assert sorted(refused.deferred) == sorted(wanted), "everything is in use, and yet chunks are refused for good"
        refused.commit()
        if reading is None:
            writing.commit()
        else:
            reading.release()
        again = manager.prepare_stores(late)
        assert sorted(again.keys) == sorted(wanted), "nothing is in use any more, and yet chunks find no slot"
        again.commit()

    def test_clearing_forgets_all_slots(self) -> None:
        """After a reset, the policy knows of no slot in use, and the tier can be filled again."""
        traffic = _Traffic(self.policy(10), 10, seed=1)
        for _ in range(3):
            for _ in range(60):
                traffic.move()
            traffic.settle()
            assert traffic.manager.reset()
            traffic.manager.check()
            assert traffic.manager.num_ready == 0

    def test_it_has_a_name(self) -> None:
        """The policy has a name, by which users choose it."""
        assert self.policy(4).name


class StrictPolicy(ReplacementPolicy):
    """Wraps a policy, and asserts that it keeps the rules of the policy port.

    Args:
        inner: the policy.
    """

    name: ClassVar[str] = "strict"

    def __init__(self, inner: ReplacementPolicy) -> None:
        self._inner = inner
        self.evicts_ends_alone = inner.evicts_ends_alone  # type: ignore[misc]  # of whatever class is inside
        self._known: set[int] = set()
        # Slot of a chunk to slot of the chunk before it in its prefix, if that was in the tier at the store and still is.
        self._parents: dict[int, int] = {}

    def admit_all(self) -> None:
        """Pass on."""
        self._inner.admit_all()

    def touch(self, slots: Slots, *, is_whole: bool) -> None:
        """Pass on."""
        before = slots.copy()
        self._inner.touch(slots, is_whole=is_whole)
        assert (slots == before).all(), "touch changed its argument"

    def make_room(self, offers: Sequence[Offer], num_slots: Sequence[int], busy: BusyCounts) -> list[Room]:
        """Pass on, and check the victims."""
        before = busy.copy()
        rooms = self._inner.make_room(offers, num_slots, busy)
        assert (busy == before).all(), "make_room left busy counts changed"
        assert len(rooms) == len(offers), f"{len(rooms)} answers for {len(offers)} offers"
        for room, num_missing in zip(rooms, num_slots, strict=True):
            victims: object = room.victims  # whatever an untyped policy hands over
            is_array = isinstance(victims, np.ndarray) and np.issubdtype(victims.dtype, np.integer)
            assert is_array, f"victims are an array of whole numbers, not {victims!r}"
            assert len(room.victims) <= num_missing, f"{len(room.victims)} chunks given up for {num_missing} slots"
        asks_again = any(
            len(room.victims) < num_missing and not room.refused
            for room, num_missing in zip(rooms, num_slots, strict=True)
        )
        self._give_up([slot for room in rooms for slot in room.victims.tolist()], offers, before, asks_again=asks_again)
        return rooms

    def add(self, offers: Sequence[Offer], slots: Sequence[Slots]) -> None:
        """Pass on."""
        for offer, of_offer in zip(offers, slots, strict=True):
            self._learn(of_offer.tolist(), [offer.parent, *of_offer.tolist()])
        self._inner.add(offers, slots)

    def drop(self, slots: Slots) -> None:
        """Pass on."""
        self._forget(slots.tolist())
        self._inner.drop(slots)

    def clear(self) -> None:
        """Pass on."""
        self._forget(list(self._known))
        self._inner.clear()

    def check(self, slots: Slots) -> None:
        """Assert that ``slots`` are those added and not given up since, and pass on to the policy's own check."""
        assert self._known == set(np.asarray(slots).tolist()), "the policy and the tier disagree on what is in use"
        try:
            self._inner.check(slots)
        except AssertionError as error:
            used = f"slots {slots.tolist()} are in use, by what it was told"
            raise AssertionError(f"the policy's own check fails: {used}; {error}".rstrip("; ")) from error

    def _give_up(self, victims: Sequence[int], offers: Sequence[Offer], busy: BusyCounts, *, asks_again: bool) -> None:
        """Assert that victims are given up by the rules, and forget them.

        Args:
            victims: their slots.
            offers: the offers that they are given up for.
            busy: busy counts before the call; slots with a count above 0 must stay.
            asks_again: whether the policy answered that an offer which got too few slots may come again.
        """
        assert len(set(victims)) == len(victims), "a chunk is given up twice"
        assert self._known.issuperset(victims), "a slot is given up that holds nothing"
        assert not busy[list(victims)].any(), "a chunk is given up that is in use"
        if self.evicts_ends_alone:
            given_up = set(victims)
            behind = {slot for slot, parent in self._parents.items() if parent in given_up}
            assert behind <= given_up, "a chunk is given up that another was stored behind: see evicts_ends_alone"
        if asks_again:
            rest = sorted(self._known.difference(victims))
            # Some idle chunks may have to stay as well: those in front of a busy one in its prefix.
            assert not rest or busy[rest].any(), "nothing is in use, and yet the answer is to ask again"
        for offer in offers:
            assert self._in_front(offer).isdisjoint(victims), "a chunk is given up for what comes behind it"
        self._forget(victims)

    def _learn(self, slots: Sequence[int], parents: Sequence[int]) -> None:
        self._known |= set(slots)
        self._parents.update(zip(slots, parents, strict=False))

    def _forget(self, slots: Sequence[int]) -> None:
        gone = set(slots)
        self._known -= gone
        self._parents = {
            slot: parent for slot, parent in self._parents.items() if slot not in gone and parent not in gone
        }

    def _in_front(self, offer: Offer) -> set[int]:
        """Slots of the chunks in front of an offer in its prefix."""
        found: set[int] = set()
        slot = offer.parent
        while slot != NO_SLOT and slot not in found:
            found.add(slot)
            slot = self._parents.get(slot, NO_SLOT)
        return found


class _Traffic:
    """A random stream of operations on a tier's manager.

    Args:
        policy: the policy under test.
        capacity: slots of the tier.
        seed: seed of the random numbers.
        all_goes_well: whether stores never fail and chunks are never found corrupt: both leave holes in prefixes that are not
            the policy's doing.
    """

    def __init__(self, policy: ReplacementPolicy, capacity: int, seed: int, *, all_goes_well: bool = False) -> None:
        self.random = Random(seed)  # noqa: S311  # repeatable, on purpose
        self.tree = Tree(Random(seed))  # noqa: S311  # repeatable, on purpose
        self.manager = TierManager(capacity, policy, record_events=True)
        self._all_goes_well = all_goes_well
        self._stores: list[StoreHandle] = []
        self._loads: list[LoadHandle] = []

    def move(self) -> None:
        """Carry out one random operation."""
        match self.random.randrange(7):
            case 0 | 1:
                self._store()
            case 2:
                self.manager.touch(self.tree.any_path(self.random))
            case 3:
                self._load()
            case 4 if self._stores:
                self._end_store(self._stores.pop(self.random.randrange(len(self._stores))))
            case 5 if self._loads:
                self._end_load(self._loads.pop(self.random.randrange(len(self._loads))))
            case 6:
                self.store_several()
            case _:
                pass

    def settle(self) -> None:
        """End all stores and loads in flight."""
        while self._stores:
            self._end_store(self._stores.pop())
        while self._loads:
            self._end_load(self._loads.pop())

    def _store(self) -> None:
        path = self.tree.any_path(self.random)
        first = 0 if self._all_goes_well else self.random.choice((0, 0, self.random.randrange(len(path))))
        handle = self.manager.prepare_store(path[first:], path[first - 1] if first else None)
        self._stores.append(handle)
        if self._all_goes_well:
            self._end_store(self._stores.pop())

    def store_several(self) -> None:
        """Store for several requests at once, as one step does: each continues its prefix, often by a single chunk."""
        offers = []
        for _ in range(self.random.randint(2, 4)):
            path = self.tree.any_path(self.random)
            at = len(self.manager.lookup_run(path))
            end = at + self.random.choice((1, 1, len(path)))
            if at < len(path):
                offers.append(StoreOffer(path[at:end], path[at - 1] if at else None))
        self._stores.append(self.manager.prepare_stores(offers))
        if self._all_goes_well:
            self._end_store(self._stores.pop())

    def _load(self) -> None:
        path = self.tree.any_path(self.random)
        there = self.manager.lookup_run(path)
        if there:
            self._loads.append(self.manager.prepare_load(path[: len(there)]))

    def _end_store(self, handle: StoreHandle) -> None:
        if self._all_goes_well or self.random.random() < 0.8:
            handle.commit()
        else:
            handle.forfeit()

    def _end_load(self, handle: LoadHandle) -> None:
        is_bad = not self._all_goes_well and self.random.random() < 0.1
        handle.release([handle.keys[-1]] if is_bad else [])


def _store(manager: TierManager, path: list[OffloadKey]) -> None:
    manager.prepare_store(path).commit()
