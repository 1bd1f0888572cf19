"""Orders of eviction: chunks that were used together are one *run*, and runs are evicted from the oldest, each from its end.

::

    oldest                                                  newest
    [a b c d] <-> [k l] <-> [s t u v w] <-> ... <-> [x y]          runs, linked; each in prefix order
           ^ next victim

A use costs one link and one entry per chunk, however large the tier. A chunk that is used again is an entry of a newer run; its
old entry is void, and skipped when its turn comes. A run whose entries are mostly void is copied without them.

A run whose last chunk has children in other runs cannot give one up: it is *parked*, out of the order, until the last child is
gone. So eviction never walks over chunks again and again that it may not take.

Chunks can be set *aside*: from then on they are in another owner's order, whatever their policy does with them, and keep
their times and kinds. So a policy never meets them among its victims, but goes on to learn of their use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import ClassVar, Final, Generic, TypeVar

from cargohold.cache.chunk_table import NO_SLOT, ON_DEVICE, READY, WRITING, ChunkTable

Entry = TypeVar("Entry", int, bytes)

_MAX_STEPS: Final = 16
"""How far a run that was parked is moved towards its place by age; it nearly always belongs to the oldest."""


class Run(Generic[Entry]):
    """Chunks used together, in prefix order: none is before another one that is in front of it.

    Attributes:
        entries: their slots (ghosts: their keys); void if the chunk is in another run by now.
        num_live: number of entries that are not void.
        time: when they were used.
        kind: what its chunks have in common, for policies that tell kinds apart.
        order: the order that it is in, or will return to.
        older: the next older run of the order; ``None`` while parked, and at the end of its life.
        newer: the next newer one.
    """

    __slots__ = ("entries", "kind", "newer", "num_live", "older", "order", "time")

    def __init__(self, entries: list[Entry], time: int, kind: int) -> None:
        self.entries: list[Entry] = entries
        self.num_live = len(entries)
        self.time = time
        self.kind = kind
        self.order: Order[Entry] | None = None
        self.older: Run[Entry] | None = None
        self.newer: Run[Entry] | None = None


class Order(Generic[Entry]):
    """Runs in the order of their times, the oldest first.

    Attributes:
        is_aside: whether it is no policy's, but holds chunks that were set aside.
    """

    __slots__ = ("end",)
    is_aside: ClassVar[bool] = False

    def __init__(self) -> None:
        # Between the newest and the oldest.
        end: Run[Entry] = Run([], 0, 0)
        self.end: Run[Entry] = end
        end.older = end.newer = end

    def __iter__(self) -> Iterator[Run[Entry]]:
        """Iterate over the runs, the oldest first."""
        run = self.end.newer
        while run is not None and run is not self.end:
            yield run
            run = run.newer

    @property
    def oldest(self) -> Run[Entry] | None:
        run = self.end.newer
        return None if run is self.end else run

    def append(self, run: Run[Entry]) -> None:
        """Add the newest run."""
        end, older = self.end, self.end.older
        assert older is not None
        run.order, run.older, run.newer = self, older, end
        older.newer = end.older = run

    def put_back(self, run: Run[Entry]) -> None:
        """Add a run that is probably one of the oldest."""
        place = self.end.newer
        assert place is not None
        for _ in range(_MAX_STEPS):
            if place is self.end or place.time >= run.time or place.newer is None:
                break
            place = place.newer
        self.link(run, place)

    def take_out(self, run: Run[Entry]) -> None:
        """Remove a run."""
        older, newer = run.older, run.newer
        assert older is not None and newer is not None
        older.newer, newer.older = newer, older
        run.older = run.newer = None

    def pass_on(self, time: int, other: Order[Entry]) -> None:
        """Move the runs of ``time`` and before to the young end of another order, all of whose runs are older.

        The oldest must be one of them.
        """
        first = last = self.end.newer
        run, before = first, other.end.older
        while run is not None and run is not self.end and run.time <= time:
            run.order, last, run = other, run, run.newer
        assert first is not None and last is not None and run is not None and before is not None
        self.end.newer, run.older = run, self.end
        before.newer, first.older = first, before
        last.newer, other.end.older = other.end, last

    def link(self, run: Run[Entry], newer: Run[Entry]) -> None:
        """Add a run as the next older one of another."""
        older = newer.older
        assert older is not None
        run.order, run.older, run.newer = self, older, newer
        older.newer = newer.older = run


class Aside(Order[int]):
    """Runs of chunks that were set aside."""

    __slots__ = ()
    is_aside = True


class Runs:
    """All runs of a table's chunks, in one or several orders.

    Args:
        table: the chunks.

    Attributes:
        run_of: by slot, the run of its chunk, or ``None``.
        aside: by slot, the order of each chunk that was set aside.
    """

    def __init__(self, table: ChunkTable) -> None:
        self._table = table
        self.run_of: list[Run[int] | None] = [None] * table.capacity
        self.aside: dict[int, Aside] = {}
        # The orders into which runs were put back since that was asked last.
        self._returned_to: list[Order[int]] = []

    def add(self, slots: Sequence[int], order: Order[int], time: int, kind: int = 0) -> None:
        """Make chunks, which are in no run, the newest run of an order. Those that were set aside stay aside."""
        if self.aside and not self.aside.keys().isdisjoint(slots):
            aside = self.aside
            for its_order, same in groupby(slots, key=lambda slot: aside.get(slot, order)):
                self._add(list(same), its_order, time, kind)
        else:
            self._add(list(slots), order, time, kind)

    def _add(self, slots: list[int], order: Order[int], time: int, kind: int) -> None:
        order.append(self._run_with(slots, time, kind))

    def _run_with(self, slots: list[int], time: int, kind: int) -> Run[int]:
        """Return a new run of chunks, which are in it from now on; it is in no order."""
        run = Run(slots, time, kind)
        run_of = self.run_of
        for slot in slots:
            run_of[slot] = run
        return run

    def extend(self, run: Run[int], slots: Sequence[int]) -> None:
        """Append chunks, which are in no run, to a run in which their parent is.

        If that is not the last one, they are a branch. As part of the run, a branch in use would keep what is in front of it
        from being evicted, so it becomes a run of its own, next to it, which is given up first.
        """
        if self._table.parents[slots[0]] != run.entries[-1]:
            self._branch(run, slots)
            return
        run.entries += slots
        run.num_live += len(slots)
        run_of = self.run_of
        for slot in slots:
            run_of[slot] = run
        if run.older is None:
            self._put_back(run)

    def _branch(self, run: Run[int], slots: Sequence[int]) -> None:
        branch = self._run_with(list(slots), run.time, run.kind)
        assert run.order is not None
        if run.older is None:
            run.order.put_back(branch)
        else:
            run.order.link(branch, run)

    def move(self, slots: Sequence[int], order: Order[int], time: int, kind: int = 0) -> None:
        """Make chunks that are in runs the newest run of an order."""
        lost = [(run, sum(1 for _ in same)) for run, same in groupby(map(self.run_of.__getitem__, slots))]
        self.add(slots, order, time, kind)
        for run, num_chunks in lost:
            assert run is not None
            lose(run, num_chunks, self._is_in)
            self._put_back(run)

    def renew(self, slot: int, time: int, home: Callable[[Run[int]], Order[int]]) -> None:
        """Let the prefix that ends in ``slot`` be used again at ``time``; what is after it stays as old as it is.

        Its runs are linked again unchanged, so a chunk of an answer costs no more after a long prompt. Only a run in whose
        middle the prefix ends is divided first, once.

        Args:
            slot: the end of the prefix.
            time: no earlier than that of any run.
            home: returns the order to which a run that was not set aside belongs.
        """
        parents, owners = self._table.parents, self._table.owners
        owner = None if owners is None else owners[slot]
        # Keys that are no digests may claim to be before each other: then a run is met that has the time already.
        while slot != NO_SLOT and (run := self.run_of[slot]) is not None and run.time != time:
            if owners is not None and owners[slot] != owner:
                break  # whose times are others
            run = self._take_front(run, slot)
            run.time = time
            assert run.order is not None
            (run.order if run.order.is_aside else home(run)).append(run)  # so the end of the prefix is given up first
            slot = parents[run.entries[0]]

    def before(self, slot: int) -> Iterator[Run[int]]:
        """Yield the runs of the prefix that ends in ``slot``, the last one first, up to one that goes on elsewhere."""
        parents, owners = self._table.parents, self._table.owners
        owner = None if owners is None or slot == NO_SLOT else owners[slot]
        while slot != NO_SLOT and (run := self.run_of[slot]) is not None:
            if run.num_live < len(run.entries):
                run.entries = self._live(run)
            if run.entries[-1] != slot or (owners is not None and owners[slot] != owner):
                return
            yield run
            slot = parents[run.entries[0]]

    def _take_front(self, run: Run[int], slot: int) -> Run[int]:
        """Return a run of the chunks of ``run`` up to that in ``slot``, out of its order. The others stay where they are."""
        if run.num_live < len(run.entries):
            run.entries = self._live(run)
        entries, order = run.entries, run.order
        end = len(entries) if entries[-1] == slot else entries.index(slot) + 1
        if 2 * end <= len(entries):  # the shorter part becomes a new run, because each of its chunks is assigned to it
            front = self._run_with(entries[:end], run.time, run.kind)
            front.order, run.entries, run.num_live = order, entries[end:], run.num_live - end
            return front
        if end < len(entries):
            rest = self._run_with(entries[end:], run.time, run.kind)
            rest.order, run.entries, run.num_live = order, entries[:end], end
            if run.older is not None and order is not None:
                order.link(rest, run)
        if run.older is not None and order is not None:
            order.take_out(run)
        return run

    def drop(self, slots: Sequence[int]) -> None:
        """Forget chunks that leave the table by no choice of the policy. They are still in the table."""
        run_of, parents = self.run_of, self._table.parents
        for run, same in groupby(reversed(slots), key=run_of.__getitem__):
            assert run is not None
            part = list(same)
            for slot in part:
                run_of[slot] = None
                self.aside.pop(slot, None)
            lose(run, len(part), self._is_in)
            self._put_back(run)
            for parent in {parents[slot] for slot in part} - {NO_SLOT}:
                if (before := run_of[parent]) is not None:
                    self._put_back(before)

    def put_back(self, slot: int) -> None:
        """Put the run of a chunk back into its order if it is parked, because the chunk may be evicted now."""
        run = self.run_of[slot]
        assert run is not None
        self._put_back(run)

    def clear(self) -> None:
        """Forget all chunks. Orders must be made again."""
        self.run_of = [None] * len(self.run_of)
        self.aside.clear()

    def set_aside(self, slots: Sequence[int], order: Aside) -> None:
        """Put chunks into ``order``, where they stay until they are brought back. Their times and kinds stay."""
        self.aside.update(dict.fromkeys(slots, order))
        for run, same in groupby(slots, key=self.run_of.__getitem__):
            assert run is not None
            if run.order is not order:
                self.move(list(same), order, run.time, run.kind)

    def bring_back(self, slots: Iterable[int], home: Callable[[Run[int]], Order[int]]) -> None:
        """Put chunks that were set aside back into the orders of their policy, by their times.

        Args:
            slots: the chunks.
            home: returns the order to which a run belongs.
        """
        back = [slot for slot in slots if self.aside.pop(slot, None) is not None]
        for run, same in groupby(back, key=self.run_of.__getitem__):
            assert run is not None
            chunks = list(same)
            returned = self._run_with(chunks, run.time, run.kind)
            lose(run, len(chunks), self._is_in)
            self._put_back(run)
            returned.order = home(returned)
            self._put_back(returned)

    def are_apart(self, run: Run[int], stem: Run[int]) -> bool:
        """Whether two runs may not become one: one was set aside, or they have different owners."""
        owners = self._table.owners
        return any(one.order is not None and one.order.is_aside for one in (run, stem)) or (
            owners is not None and owners[run.entries[-1]] != owners[stem.entries[-1]]
        )

    def join(self, run: Run[int], stem: Run[int]) -> None:
        """Append the chunks of a run to another one, in which their parent is the last."""
        slots = [slot for slot in run.entries if self.run_of[slot] is run]
        lose(run, len(slots), self._is_in)
        self.extend(stem, slots)

    def change(self, run: Run[int], kind: int, order: Order[int]) -> None:
        """Make a run one of another kind, in another order, unless it was set aside."""
        run.kind = kind
        older, newer = run.older, run.newer
        if older is not None and newer is not None and run.order is not None and not run.order.is_aside:
            older.newer, newer.older = newer, older
            order.append(run)

    def evict(self, order: Order[int], num_chunks: int) -> list[tuple[Run[int], list[int]]]:
        """Evict at most ``num_chunks`` from the oldest runs of an order. Mutates the table.

        Returns the runs, and the slots given up by each.
        """
        victims = []
        before, pins = order.end, self._table.pins
        while num_chunks and (run := before.newer) is not None and run is not order.end:
            if pins[run.entries[-1]] and run.num_live == len(run.entries):
                before = run  # in use, so it is passed over, as are many of those stored just now
                continue
            self._returned_to.clear()
            slots = self._evict_from(run, num_chunks)
            if slots:
                victims.append((run, slots))
                num_chunks -= len(slots)
            if order in self._returned_to:
                before = order.end  # a run that was parked may be the oldest now
            elif before.newer is run:
                before = run
        return victims

    def check(self) -> None:
        """Verify that every chunk is in one run, and every run in its order or parked. Raises ``AssertionError``."""
        used = self._table.slots_in(WRITING, READY, ON_DEVICE)
        assert [slot for slot, run in enumerate(self.run_of) if run is not None] == used, "not the slots in use"
        runs = {id(run): run for run in self.run_of if run is not None}
        orders = {id(run.order): run.order for run in runs.values() if run.order is not None}
        linked = {id(run) for order in orders.values() for run in order}
        for run in runs.values():
            live = [slot for slot in dict.fromkeys(run.entries) if self._is_in(slot, run)]
            assert len(live) == run.num_live, "a run does not count its chunks right"
            if run.older is None:
                last = next(slot for slot in reversed(run.entries) if self._is_in(slot, run))
                assert self._table.children[last], "a run is parked whose last chunk could be evicted"
            else:
                assert id(run) in linked, "a run is not in its order"
        assert linked <= runs.keys(), "a run without chunks is in an order"

    def _evict_from(self, run: Run[int], num_chunks: int) -> list[int]:
        """Evict chunks from the end of a run, as long as nothing needs them; return their slots. Mutates the table.

        Parks the run if its last chunk has children; takes it out of its order if it is used up.
        """
        run_of, entries = self.run_of, run.entries
        if run.num_live < len(entries):
            entries = run.entries = self._live(run)
        victims, exposed = self._table.evict_end(entries, num_chunks)
        for slot in victims:
            run_of[slot] = None
        if self.aside:
            for slot in victims:
                self.aside.pop(slot, None)
        run.num_live -= len(victims)
        if run.order is not None and (not entries or self._table.children[entries[-1]]):
            run.order.take_out(run)
        for slot in exposed:
            other = run_of[slot]
            if other is not None:
                self._put_back(other)
        return victims

    def _live(self, run: Run[int]) -> list[int]:
        """Return the entries of a run that are not void. Of several entries for one slot the last one counts."""
        run_of = self.run_of
        return list(dict.fromkeys(slot for slot in reversed(run.entries) if run_of[slot] is run))[::-1]

    def _is_in(self, slot: int, run: Run[int]) -> bool:
        return self.run_of[slot] is run

    def _put_back(self, run: Run[int]) -> None:
        """Put a run back into its order if it is parked: its last chunk may be another one, or have lost its children."""
        if run.older is None and run.num_live and run.order is not None:
            run.order.put_back(run)
            self._returned_to.append(run.order)


def lose(run: Run[Entry], num_chunks: int, is_in: Callable[[Entry, Run[Entry]], bool]) -> None:
    """Note that chunks left a run: they are in another one by now, or gone. Mutates the run and its order."""
    run.num_live -= num_chunks
    if not run.num_live:
        run.entries = []
        if run.older is not None and run.order is not None:
            run.order.take_out(run)
    elif 2 * run.num_live < len(run.entries):
        # Of several entries for one slot the last one counts.
        last_first = dict.fromkeys(entry for entry in reversed(run.entries) if is_in(entry, run))
        run.entries = list(last_first)[::-1]
