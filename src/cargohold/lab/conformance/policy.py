"""The conformance suite for replacement policies: tests of what every policy must do, to be inherited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from itertools import pairwise
from random import Random
from typing import ClassVar

import pytest

from cargohold.blocks import READY
from cargohold.cache import ChunkPins, OffloadKey, OffloadManager, SlotReservation, StoreOffer, TierManager
from cargohold.cache.chunk_table import NO_SLOT, ChunkTable
from cargohold.cache.manager import offload_key
from cargohold.cache.policies import Newcomers, ReplacementPolicy
from cargohold.protocol import TurnEnd
from cargohold.protocol.hooks import answered, passed_on

NUM_OPERATIONS = 250


class PolicyConformance(ABC):
    """Tests a policy inside a tier's manager, with every invariant checked after every operation.

    Attributes:
        num_seeds: random streams of operations per test.
    """

    num_seeds: ClassVar[int] = 12

    @abstractmethod
    def policy(self, table: ChunkTable) -> ReplacementPolicy:
        """A new policy for a table of chunks."""

    def strict(self, table: ChunkTable) -> ReplacementPolicy:
        """A new policy whose every answer is checked."""
        return StrictPolicy(self.policy(table))

    def _traffic(
        self,
        capacity: int,
        seed: int,
        policy: Callable[[ChunkTable], ReplacementPolicy] | None = None,
        *,
        all_goes_well: bool = False,
    ) -> ManagerTraffic:
        manager = TierManager(capacity, policy or self.strict, record_events=True)
        return ManagerTraffic(manager, seed, all_goes_well=all_goes_well)

    # --- any traffic --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("capacity", [1, 2, 5, 30])
    def test_any_traffic_keeps_every_rule(self, capacity: int) -> None:
        """Victims hold chunks, are not busy, named once, and no more than asked for; the policy knows the slots in use."""
        for seed in range(self.num_seeds):
            traffic = self._traffic(capacity, seed)
            for _ in range(NUM_OPERATIONS):
                traffic.move()
                traffic.manager.check()
            traffic.settle()
            traffic.manager.check()

    def test_the_same_traffic_has_the_same_victims(self) -> None:
        """Two policies that see the same operations evict the same chunks: decisions depend on nothing but history."""
        for seed in range(self.num_seeds):
            left, right = (self._traffic(12, seed, self.policy) for _ in range(2))
            for _ in range(NUM_OPERATIONS):
                left.move()
                right.move()
                assert left.manager.take_events() == right.manager.take_events(), "the same traffic has other victims"

    def test_no_prefix_has_holes(self) -> None:
        """No chunk stays while the one before it in its prefix is gone: chunks after such a hole could never be used."""
        for seed in range(self.num_seeds):
            traffic = self._traffic(15, seed, self.policy, all_goes_well=True)
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
        manager = TierManager(len(tree.keys), self.policy)
        for path in tree.paths:
            _store(manager, path)
        assert manager.lookup(tree.keys) == bytes([READY]) * len(tree.keys)

    def test_idle_chunks_make_room_or_are_worth_more(self) -> None:
        """While no chunk is busy, every chunk on offer gets a slot or is refused for good; none is deferred."""
        for seed in range(self.num_seeds):
            traffic = self._traffic(6, seed)
            for _ in range(NUM_OPERATIONS // 4):
                traffic.settle()
                handle = traffic.manager.prepare_store(traffic.tree.any_path(traffic.random))
                assert not handle.deferred, "nothing is in use, and yet chunks are deferred"
                handle.commit()

    @pytest.mark.parametrize("capacity", [4, 8, 16])
    def test_offers_that_come_together_spare_each_others_prefixes(self, capacity: int) -> None:
        """Of several offers that come together, none gets a slot whose chunk is in front of another offer in its prefix."""
        for seed in range(self.num_seeds):
            traffic = self._traffic(capacity, seed, all_goes_well=True)
            for _ in range(NUM_OPERATIONS // 2):
                traffic.store_several()
                traffic.manager.check()

    @pytest.mark.parametrize("is_written", [False, True])
    def test_what_is_busy_has_offers_come_again(self, *, is_written: bool) -> None:
        """While all chunks are being written or read, chunks on offer are deferred; once that has ended, they are stored.

        Without ``admit_all``, which the test calls, a policy might refuse them for good because others are worth more.
        """
        held = [key(f"held {depth}") for depth in range(6)]
        late = [StoreOffer([key(f"late {number} {depth}") for depth in range(2)]) for number in range(2)]
        manager = TierManager(len(held), self.strict)
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
        traffic = self._traffic(10, 1, self.policy)
        for _ in range(3):
            for _ in range(60):
                traffic.move()
            traffic.settle()
            assert traffic.manager.reset()
            traffic.manager.check()
            assert traffic.manager.num_ready == 0

    def test_it_has_a_name(self) -> None:
        """The policy has a name, by which users choose it."""
        assert self.policy(ChunkTable(4)).name


@answered(ReplacementPolicy, passed_on)
class StrictPolicy(ReplacementPolicy):
    """Wraps a policy, and asserts that it keeps the rules of the policy port.

    Args:
        inner: the policy.
    """

    name: ClassVar[str] = "strict"

    def __init__(self, inner: ReplacementPolicy) -> None:
        super().__init__(inner.table)
        self.inner = inner

    def touch(self, slots: Sequence[int], *, is_whole: bool) -> None:
        before = list(slots)
        self.inner.touch(slots, is_whole=is_whole)
        assert list(slots) == before, "touch changed its argument"

    def end_turn(self, keys: Sequence[bytes], slot: int, end: TurnEnd) -> None:
        before = list(keys)
        self.inner.end_turn(keys, slot, end)
        assert list(keys) == before, "end_turn changed its argument"

    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        table, num_free = self.table, self.table.num_free
        with self._evicts_rightly([parent], num_slots):
            refused: object = self.inner.make_room(keys, parent, num_slots)  # whatever an untyped policy answers
        assert isinstance(refused, bool), f"the answer is whether the rest is refused, not {refused!r}"
        if table.num_free - num_free < num_slots and not refused:
            # Some idle chunks may have to stay as well: those in front of a busy one in its prefix.
            assert any(table.pins) or not table.num_ready, "nothing is in use, and yet the answer is to ask again"
        return refused

    def make_room_ahead(self, newcomers: Sequence[Newcomers], num_slots: int) -> None:
        with self._evicts_rightly([parent for _, parent in newcomers], num_slots):
            self.inner.make_room_ahead(newcomers, num_slots)

    def check(self) -> None:
        try:
            self.inner.check()
        except AssertionError as error:
            used = f"slots {[slot for slot, key in enumerate(self.table.keys) if key is not None]} are in use"
            raise AssertionError(f"the policy's own check fails: {used}; {error}".rstrip("; ")) from error

    @contextmanager
    def _evicts_rightly(self, parents: Sequence[int], num_slots: int) -> Iterator[None]:
        """Assert that what is evicted meanwhile is no more than is wanted, and not in front of newcomers after ``parents``."""
        table = self.table
        pins, num_free, num_evicted = table.pins[:], table.num_free, len(table.evicted)
        in_front = {key for parent in parents if parent != NO_SLOT for key in table.keys_at(table.ancestors(parent))}
        yield
        table.check()
        assert table.pins == pins, "the policy changed pins"
        assert table.num_free - num_free == len(table.evicted) - num_evicted <= num_slots, (
            f"{table.num_free - num_free} slots were freed for {num_slots}, {len(table.evicted) - num_evicted} by eviction"
        )
        assert in_front.isdisjoint(table.evicted), "a chunk is evicted for what comes behind it"


class ManagerTraffic:
    """A random stream of operations on a tier's manager.

    Args:
        manager: the manager.
        seed: seed of the random numbers.
        all_goes_well: whether stores never fail and chunks are never found corrupt: both leave holes in prefixes that are not
            the policy's doing.
    """

    def __init__(self, manager: OffloadManager, seed: int, *, all_goes_well: bool = False) -> None:
        self.random = Random(seed)  # noqa: S311  # repeatable, on purpose
        self.tree = Tree(Random(seed))  # noqa: S311  # repeatable, on purpose
        self.manager = manager
        self._all_goes_well = all_goes_well
        self.stores: list[SlotReservation] = []
        self.loads: list[ChunkPins] = []

    def move(self) -> None:
        """Carry out one random operation."""
        match self.random.randrange(7):
            case 0 | 1:
                self.store()
            case 2:
                self.touch()
            case 3:
                self.load()
            case 4 if self.stores:
                self.end_store(self.stores.pop(self.random.randrange(len(self.stores))))
            case 5 if self.loads:
                self.end_load(self.loads.pop(self.random.randrange(len(self.loads))))
            case 6:
                self.store_several()
            case _:
                pass

    def settle(self) -> None:
        """End all stores and loads in flight."""
        while self.stores:
            self.end_store(self.stores.pop())
        while self.loads:
            self.end_load(self.loads.pop())

    def store(self) -> None:
        """Store for one request, which may have lost the beginning of its prefix."""
        path = self.tree.any_path(self.random)
        first = 0 if self._all_goes_well else self.random.choice((0, 0, self.random.randrange(len(path))))
        self._reserve([StoreOffer(path[first:], path[first - 1] if first else None)])

    def store_several(self) -> None:
        """Store for several requests at once, as one step does: each continues its prefix, often by a single chunk."""
        offers = []
        for _ in range(self.random.randint(2, 4)):
            path = self.tree.any_path(self.random)
            at = len(self.manager.lookup_run(path))
            end = at + self.random.choice((1, 1, len(path)))
            if at < len(path):
                offers.append(StoreOffer(path[at:end], path[at - 1] if at else None))
        self._reserve(offers)

    def _reserve(self, offers: Sequence[StoreOffer]) -> SlotReservation:
        handle = self.manager.prepare_stores(offers)
        self.stores.append(handle)
        if self._all_goes_well:
            self.end_store(self.stores.pop())
        return handle

    def touch(self) -> None:
        """Use a prefix, and end the turn that did."""
        path = self.tree.any_path(self.random)
        before = self.manager.lookup(path)
        assert self.manager.touch(path) == len(self.manager.lookup_run(path))
        self.manager.end_turn(path, self.random.choice(list(TurnEnd)))
        assert self.manager.lookup(path) == before, "the end of a turn changes what is found"

    def load(self) -> ChunkPins | None:
        """Pin the ready beginning of a prefix, if there is any."""
        path = self.tree.any_path(self.random)
        there = self.manager.lookup_run(path)
        if there:
            self.loads.append(self.manager.prepare_load(path[: len(there)]))
        return self.loads[-1] if there else None

    def end_store(self, handle: SlotReservation) -> bool:
        """Make the chunks of a reservation visible, or give it up. Returns whether they are written."""
        is_written = self._all_goes_well or self.random.random() < 0.8
        (handle.commit if is_written else handle.forfeit)()
        return is_written

    def end_load(self, handle: ChunkPins) -> Sequence[OffloadKey]:
        """Unpin, now and then with a chunk that could not be read. Returns those."""
        is_bad = not self._all_goes_well and self.random.random() < 0.1
        bad = [handle.keys[-1]] if is_bad else []
        handle.release(bad)
        return bad


def _store(manager: TierManager, path: list[OffloadKey]) -> None:
    manager.prepare_store(path).commit()


# --- chunks for tests, also of tiers ----------------------------------------------------------------------------------

NUM_PATHS = 12
MAX_DEPTH = 7


class Tree:
    """A random tree of prefixes that share beginnings.

    Args:
        random: the random numbers it is drawn from.

    Attributes:
        paths: prefixes, each as the keys of its chunks in prefix order; every leaf of the tree ends one of them.
        keys: keys of all chunks, each once.
        parents: for each chunk that has one, the chunk before it in its prefix.
    """

    def __init__(self, random: Random) -> None:
        self.paths: list[list[OffloadKey]] = []
        for number in range(NUM_PATHS):
            stem = random.choice(self.paths)[: random.randint(0, MAX_DEPTH - 2)] if self.paths else []
            length = random.randint(1, MAX_DEPTH - len(stem))
            self.paths.append([*stem, *(key(f"{number} {depth}") for depth in range(length))])
        self.keys = list(dict.fromkeys(chunk for path in self.paths for chunk in path))
        self.parents = {chunk: before for path in self.paths for before, chunk in pairwise(path)}

    def any_path(self, random: Random) -> list[OffloadKey]:
        """The beginning of a path, often all of it."""
        path = random.choice(self.paths)
        return path[: random.choice((len(path), random.randint(1, len(path))))]


def key(name: str) -> OffloadKey:
    """The offload key of the chunk with this name, made of a digest and a group as real ones are."""
    return offload_key(sha256(name.encode()).digest(), 0)


def contents(name: str, num_bytes: int) -> bytes:
    """The bytes of the chunk with this name: random, and the same for the same name."""
    return Random(name).randbytes(num_bytes)  # noqa: S311  # repeatable, on purpose
