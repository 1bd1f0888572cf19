"""The policy made for prefixes: evicts the leaf that is worth least, and admits only chunks that are worth no less."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, groupby
from math import inf
from operator import attrgetter
from typing import ClassVar, Final, NamedTuple
from zlib import crc32

from cargohold.cache.chunk_table import NO_SLOT, ChunkTable
from cargohold.cache.policies.base import Newcomers, RunsPolicy
from cargohold.cache.policies.reuse_model import (
    ADDED_BY_END,
    CLASS,
    CLASS_BITS,
    DETAILS,
    LAST,
    NEW,
    NUM_AGES,
    NUM_CLASSES,
    AbsentChunks,
    ReuseModel,
    age_bucket,
    is_last,
    kind_behind,
    kind_used_again,
    stretches,
)
from cargohold.cache.policies.runs import Order, Run, Runs
from cargohold.protocol import TurnEnd

_AGED_AFTER_PART: Final = 64
_AGED_AFTER: Final = range(1, 256)
_JOINED_WITHIN: Final = 256
_JOINED_WITHIN_PART: Final = 16
"""What a request adds joins the run of the chunks before it if so many uses, or uses of this part of the tier, lie between."""


class _Met(NamedTuple):
    """Chunks on offer.

    Attributes:
        keys: the chunks, of one prefix.
        tags: their tags.
        kinds: their kinds, if they come in.
    """

    keys: Sequence[bytes]
    tags: list[int]
    kinds: list[int]


class ReuseIndexPolicy(RunsPolicy):
    """Keeps the chunks that bring most reuse for the time that they take a slot.

    Each chunk's worth is its reuse index, learned from the traffic, by its class and age (see ``reuse_model``).
    Only leaves are evicted, so a prefix is worth at least as much as its best continuation. A chunk that is worth less than the
    victim that it needs is not stored, nor are those that follow it: one-shot prompts do not flush the tier, and are not
    written. The uses of evicted and refused chunks are remembered for a while. After ``admit_all`` the policy refuses no chunk,
    and only chooses victims.

    Until it has learned something, it behaves like LRU.

    Chunks of one class and about one age are worth the same: they are in one *cell*, the longest unused first. A heap has the
    cells in the order of their worth. As runs get older, they move on to the next cell.

    Args:
        table: the chunks.
        runs: see ``RunsPolicy``.
    """

    name: ClassVar[str] = "reuse-index"
    may_pool: ClassVar[bool] = True

    def __init__(self, table: ChunkTable, runs: Runs | None = None) -> None:
        super().__init__(table, runs)
        capacity = table.capacity
        self._now = 0
        self._admits_all = False
        self._tags = array("I", [0]) * capacity
        self._model = ReuseModel(NUM_CLASSES, DETAILS, capacity, len(ADDED_BY_END))
        self._absent = AbsentChunks(capacity)
        self._cells: dict[int, Cell] = {}
        self._queue: list[tuple[float, int]] = []
        self._use_index()
        self._aged_at, self._aged_after = 0, min(max(_AGED_AFTER.start, capacity // _AGED_AFTER_PART), _AGED_AFTER.stop)
        self._joined_within = max(_JOINED_WITHIN, capacity // _JOINED_WITHIN_PART)
        # By their first key, the chunks for which room was made last: they come in next.
        self._met: dict[bytes, _Met] = {}

    def admit_all(self) -> None:
        self._admits_all = True

    def touch(self, slots: Sequence[int], *, is_whole: bool) -> None:
        self._model.num_requests += 1
        if not slots:
            return
        parts, began = self._kinds_of_used(slots, is_whole=is_whole), self._now
        now = self._now = began + len(slots)
        for kind, part in parts:
            self.runs.move(part, self._cell(kind, 0), now, kind)
        tags, end, run_of = self._tags, self._model.sample_end, self.runs.run_of
        sampled = [slot for slot in slots if tags[slot] < end]
        if sampled:
            classes = [run.kind & CLASS for run in map(run_of.__getitem__, sampled) if run is not None]
            self._model.observe_each([tags[slot] for slot in sampled], classes, began, now)

    def end_turn(self, keys: Sequence[bytes], slot: int, end: TurnEnd) -> None:
        added = ADDED_BY_END[end]
        self._model.note_end(list(map(crc32, keys)), added // NUM_CLASSES)
        for run in self.runs.before(slot):
            if (run.kind & CLASS) >= NUM_CLASSES:
                break  # of another turn, which ended
            kind = run.kind + added
            self.runs.change(run, kind, self._cell(kind, age_bucket(self._now - run.time)))

    def renew(self, slot: int) -> None:
        self.runs.renew(slot, self._now, self._cell_of)

    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        if keys[0] not in self._met:
            self._met.clear()  # those for which room was made before did not all come in
        kinds = self._meet(keys, parent).kinds
        for kind, num_chunks in stretches(kinds[len(kinds) - num_slots :]):
            num_evicted, is_refused = self._evict(num_chunks, self._worth(kind))
            if num_evicted < num_chunks:
                return is_refused
        return False

    def make_room_ahead(self, newcomers: Sequence[Newcomers], num_slots: int) -> None:
        self._age_if_due()
        self._met.clear()
        kinds = self._meet_each(newcomers)
        self._evict(num_slots, min([self._worth(kind) for kind in set(kinds)]))

    def give_up(self, num_chunks: int, worth: float = inf) -> None:
        self._evict(num_chunks, worth)

    def worth_of(self, slots: Sequence[int]) -> Sequence[float]:
        if self._admits_all:
            return super().worth_of(slots)
        worths: list[float] = []
        for run, same in groupby(slots, key=self.runs.run_of.__getitem__):
            assert run is not None
            worths += [self._index[run.kind & CLASS][age_bucket(self._now - run.time)]] * len(list(same))
        return worths

    def lose(self, slots: Sequence[int]) -> None:
        by_run = groupby(slots, key=self.runs.run_of.__getitem__)
        self._remember([(run, list(same)) for run, same in by_run if run is not None])
        self.runs.drop(slots)

    def home(self, run: Run[int]) -> Order[int]:
        return self._cell_of(run)

    def note_evicted(self, victims: Sequence[tuple[Run[int], Sequence[int]]]) -> None:
        self._remember(victims)

    def add(self, keys: Sequence[bytes], parent: int, slots: Sequence[int]) -> None:
        _, tags, kinds = self._meet(keys, parent)
        del self._met[keys[0]]
        if parent != NO_SLOT:
            self._go_on(parent)
        at, began = 0, self._now
        now = self._now = began + len(tags)
        for kind, num_chunks in stretches(kinds[: len(slots)]):
            part = slots[at : at + num_chunks]
            stem = self._stem(parent, kind)
            if stem is None:
                self.runs.add(part, self._cell(kind, 0), now, kind)
            else:
                self.runs.extend(stem, part)
            at, parent = at + num_chunks, part[-1]
        known = self._tags
        for slot, tag in zip(slots, tags, strict=False):
            known[slot] = tag
        if len(slots) < len(tags):
            uses = [kind >> CLASS_BITS for kind in kinds[len(slots) :]]
            self._absent.remember_each(tags[len(slots) :], uses, [now] * len(uses))
        self._model.observe_each(tags, [kind & CLASS for kind in kinds], began, now)
        self._age_if_due()

    def drop(self, slots: Sequence[int]) -> None:
        self.runs.drop(slots)

    def clear(self) -> None:
        self._cells.clear()
        self._queue.clear()
        self.runs.clear()

    def check(self) -> None:
        self.runs.check()
        cells = {number for number, cell in self._cells.items() if cell.oldest is not None}
        queued = [number for _, number in self._queue]
        assert len(set(queued)) == len(queued) and cells <= set(queued), "a cell with chunks is not in the queue once"

    def _kinds_of_used(self, slots: Sequence[int], *, is_whole: bool) -> list[tuple[int, list[int]]]:
        """Return stretches of chunks that are used now, each with the kind that they have from now on. See ``touch``."""
        parts: list[tuple[int, list[int]]] = []
        at = 0
        for run, same in groupby(map(self.runs.run_of.__getitem__, slots)):
            assert run is not None
            kind = kind_used_again(run.kind >> CLASS_BITS, self._now - run.time)
            first, at = at, at + len(list(same))
            if not parts or parts[-1][0] != kind:
                parts.append((kind, []))
            parts[-1][1].extend(slots[first:at])
        if is_whole:
            kind, last = parts[-1][0], parts[-1][1].pop()
            parts.append((kind + LAST, [last]))
        return [(kind, part) for kind, part in parts if part]

    # --- newcomers ----------------------------------------------------------------------------------------------------

    def _meet(self, keys: Sequence[bytes], parent: int) -> _Met:
        """Find out what is known of chunks on offer, if it was not done when room was made for them."""
        met = self._met.get(keys[0])
        if met is None or met.keys is not keys:
            tags = list(map(crc32, keys))
            kinds = [self._kind_behind(parent)] * len(tags)
            for at, kind in self._absent.recall(tags, self._now):
                kinds[at] = kind
            kinds[-1] += LAST
            met = self._met[keys[0]] = _Met(keys, tags, kinds)
        return met

    def _meet_each(self, newcomers: Sequence[Newcomers]) -> list[int]:
        """Do ``_meet`` for several prefixes; return the kinds of all their chunks."""
        tags = list(map(crc32, chain.from_iterable([keys for keys, _ in newcomers])))
        kinds: list[int] = []
        for keys, parent in newcomers:
            kinds += [self._kind_behind(parent)] * len(keys)
        for at, kind in self._absent.recall(tags, self._now):
            kinds[at] = kind
        end = 0
        for keys, _ in newcomers:
            first, end = end, end + len(keys)
            kinds[end - 1] += LAST
            self._met[keys[0]] = _Met(keys, tags[first:end], kinds[first:end])
        return kinds

    def _worth(self, kind: int) -> float:
        """Return the worth of a chunk that comes in: none that is worth more may be evicted for it."""
        return float("inf") if self._admits_all else self._index[kind & CLASS][0]

    def _kind_behind(self, parent: int) -> int:
        """Return the kind of new chunks after the chunk in slot ``parent``."""
        run = None if parent == NO_SLOT else self.runs.run_of[parent]
        return NEW if run is None else kind_behind(run.kind)

    def _go_on(self, parent: int) -> None:
        """Change the class of the chunk in ``parent``: it is not its request's last any more, because the request goes on.

        It joins the run of the chunks before it if that was used about when it was: else an answer would take a run per chunk.
        """
        runs = self.runs
        run = runs.run_of[parent]
        if run is None or not is_last(run.kind):
            return
        kind = run.kind - LAST
        stem = self._stem(self.table.parents[parent], kind)
        if stem is not None and not runs.are_apart(run, stem):
            runs.join(run, stem)
        else:
            runs.change(run, kind, self._cell(kind, age_bucket(self._now - run.time)))

    def _stem(self, parent: int, kind: int) -> Run[int] | None:
        """Return the run that chunks of ``kind`` after ``parent`` join, if there is one: their request goes on."""
        run = None if parent == NO_SLOT else self.runs.run_of[parent]
        if run is None or run.kind != kind or run.entries[-1] != parent or run.order is None or run.order.is_aside:
            return None
        return run if self._now - run.time <= self._joined_within else None

    # --- victims ------------------------------------------------------------------------------------------------------

    def _evict(self, num_chunks: int, worth: float) -> tuple[int, bool]:
        """Evict the leaves that are worth least, if that is no more than ``worth``. Mutates everything.

        Returns how many were evicted, and whether there are others that are worth more.
        """
        queue = self._queue
        victims: list[tuple[Run[int], list[int]]] = []
        passed: list[tuple[float, int]] = []
        num_evicted, is_refused = 0, False
        while num_evicted < num_chunks and queue:
            entry = queue[0]
            cell = self._cells[entry[1]]
            if cell.oldest is None:
                heappop(queue)
                cell.is_queued = False
                continue
            if entry[0] > worth:
                is_refused = True
                break
            evicted = self.runs.evict(cell, num_chunks - num_evicted)
            victims += evicted
            for _, slots in evicted:
                num_evicted += len(slots)
            # If something lower was exposed, it is next; if not, what is left in the cell is in use.
            if num_evicted < num_chunks and queue[0] is entry and cell.oldest is not None:
                passed.append(heappop(queue))
        for entry in passed:
            heappush(queue, entry)
        if victims:
            self._remember(victims)
        return num_evicted, is_refused

    def _remember(self, victims: Sequence[tuple[Run[int], Sequence[int]]]) -> None:
        """Remember the uses of evicted chunks, given as slots by run."""
        tags: list[int] = []
        uses: list[int] = []
        times: list[int] = []
        for run, slots in victims:
            tags += map(self._tags.__getitem__, slots)
            uses += [run.kind >> CLASS_BITS] * len(slots)
            times += [run.time] * len(slots)
        self._absent.remember_each(tags, uses, times)

    def _cell(self, kind: int, bucket: int) -> Cell:
        """Return the cell of chunks of a kind in an age bucket, to put a run there."""
        number = (kind & CLASS) * NUM_AGES + bucket
        cell = self._cells.get(number)
        if cell is None:
            cell = self._cells[number] = Cell(bucket, self._cell_of)
        if not cell.is_queued:
            cell.is_queued = True
            heappush(self._queue, (self._index[kind & CLASS][bucket], number))
        return cell

    def _cell_of(self, run: Run[int]) -> Cell:
        return self._cell(run.kind, age_bucket(self._now - run.time))

    def _age_if_due(self) -> None:
        """Move runs on to the cells of their ages, and learn a bit, if that was not done lately. Mutates cells and model."""
        now = self._now
        if now - self._aged_at < self._aged_after:
            return
        self._aged_at = now
        if now >= self._model.next_fit and self._model.fit(now, self._classes_in_use):
            self._use_index()
        due = [
            cell
            for cell in self._cells.values()
            if (run := cell.end.newer) is not None and run is not cell.end and now - run.time >= 2 << cell.bucket
        ]
        # The older ones first, so that each cell stays in order.
        for cell in sorted(due, key=attrgetter("bucket"), reverse=True):
            while (run := cell.oldest) is not None and (bucket := age_bucket(now - run.time)) > cell.bucket:
                cell.pass_on(now - (1 << bucket), self._cell(run.kind, bucket))

    def _classes_in_use(self) -> set[int]:
        return {number // NUM_AGES for number in self._cells}

    def _use_index(self) -> None:
        """Use a new table of worth. Mutates the cells and their queue."""
        index = self._index = self._model.index
        self._cells = {number: cell for number, cell in self._cells.items() if cell.end.newer is not cell.end}
        self._queue = [(index[number // NUM_AGES][number % NUM_AGES], number) for number in self._cells]
        heapify(self._queue)
        for cell in self._cells.values():
            cell.is_queued = True


class Cell(Order[int]):
    """Runs of one class in one age bucket.

    Args:
        bucket: the age bucket.
        cell_of: finds the cell that a run belongs to by now.

    Attributes:
        is_queued: whether the cell is in the policy's queue.
    """

    __slots__ = ("_cell_of", "bucket", "is_queued")

    def __init__(self, bucket: int, cell_of: Callable[[Run[int]], Cell]) -> None:
        super().__init__()
        self.bucket = bucket
        self.is_queued = False
        self._cell_of = cell_of

    def put_back(self, run: Run[int]) -> None:
        """Add a run that was parked, and may have grown older meanwhile, where it belongs."""
        Order.put_back(self._cell_of(run), run)
