"""The index of a shard's slots, in memory: where each chunk is, when it was used last, and what hints ask for it.

The time at which each slot was last used is kept on the disk, too, so that a restart does not forget what is worth keeping. A
segment's table is written as a whole, now and then and at the end: a process that is killed loses the uses of some seconds.
Times that are read back are only hints: a time before the chunk was stored, or in the future, is ignored.

A lease or a raised priority ends with its time; the ends are in a heap, so a store looks at the first one only. Leases cover at
most a quarter of the slots, and raised priorities half: what is beyond that counts as normal. A lowered chunk is normal again
when it is used.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cargohold.cache.chunk_table import NO_SLOT, READY, ChunkTable
from cargohold.cache.manager import OffloadKey
from cargohold.cache.policies import ReplacementPolicy, RunsPolicy
from cargohold.cache.retention import NO_RETENTION, NO_TENANT, NORMAL, Budget, Budgets, Ends, Retention
from cargohold.cache.shares import Shares
from cargohold.tiers.chunk_format import HEADER_BYTES, MAGIC, ChunkCodec, Header, unpack_header
from cargohold.tiers.disk.files import USE_BYTES
from cargohold.tiers.disk.shard import Shard
from cargohold.tiers.disk.slots import ONE_EACH, Found, Links, SlotPlan, SlotTable, gather
from cargohold.tiers.port import StoreOutcome


class SlotIndex:
    """Slots of one shard. Not thread-safe: its owner holds a lock.

    A chunk that is there has a number, with which it is pinned and committed: its slot, or what ``slots_of`` is asked with if
    chunks take several.

    Args:
        capacity: maximum number of slots; at first there are none.
        policy: makes the policy that decides what is evicted, for a table.
        plan: how many slots chunks take; by default one each.
    """

    def __init__(
        self, capacity: int, policy: Callable[[ChunkTable], ReplacementPolicy], plan: SlotPlan = ONE_EACH
    ) -> None:
        self.capacity = capacity
        self._max_chunks = capacity // plan.most
        self._several = SlotTable(capacity, plan) if plan.most > 1 else None
        self._table = self._several or ChunkTable(capacity, num_slots=0)
        self._policy = policy(self._table)
        # Made when a hint asks for it first; a third-party policy keeps its own order.
        self._levels: Levels | None = None

    @property
    def num_slots(self) -> int:
        return self._table.num_slots if self._several is None else self._several.num_rows

    @property
    def num_ready(self) -> int:
        """Number of chunks that can be loaded."""
        return self._table.num_ready

    @property
    def num_ready_slots(self) -> int:
        """Number of slots of chunks that can be loaded."""
        return self._table.num_ready if self._several is None else self._several.num_ready_rows

    @property
    def has_free(self) -> bool:
        """Whether a chunk can be stored without evicting another."""
        return self._table.num_free > 0

    def slots_of(self, number: int) -> tuple[int, ...]:
        """Return the slots of a chunk that is pinned, in order."""
        return (number,) if self._several is None else self._several.rows_at[number]

    def add_slots(self, count: int) -> None:
        """Add ``count`` free slots. Low ones are used first."""
        if self._several is None:
            self._table.add_slots(count)
        else:
            self._several.add_rows(count)

    def contains(self, key: OffloadKey) -> bool:
        """Whether a chunk can be loaded."""
        slot = self._table.find(key)
        return slot != NO_SLOT and self._table.states[slot] == READY

    def chunks_in(self, numbers: Iterable[int]) -> list[tuple[tuple[int, ...], OffloadKey]]:
        """Return the chunks with these numbers that can be loaded: the slots of each, and its key."""
        keys, states, slots_of = self._table.keys, self._table.states, self.slots_of
        return [(slots_of(at), key) for at in numbers if states[at] == READY and (key := keys[at]) is not None]

    def prefixes(self) -> tuple[npt.NDArray[np.intc], npt.NDArray[np.bool_]]:
        """Return, by number, that of the chunk before, or ``NO_SLOT``, and whether the chunk can be loaded. Copies."""
        table = self._table
        parents = np.array(table.parents[: table.num_slots], dtype=np.intc)
        return parents, np.frombuffer(bytes(table.states[: table.num_slots]), dtype=np.uint8) == READY

    def is_known(self, key: OffloadKey) -> bool:
        """Whether a chunk can be loaded, or is being written."""
        return self._table.find(key) != NO_SLOT

    def reserve(self, key: OffloadKey, parent: OffloadKey | None, num_slots: int = 1) -> int | StoreOutcome:
        """Reserve slots to write a chunk to, by evicting other chunks if need be.

        Returns the chunk's number. If all other chunks are worth more, or busy, the outcome of the store: of those that are
        being written, one may go in a moment.
        """
        table, before, keys = self._table, self._table.find(parent), [key]
        assert not self.is_known(key)
        is_worth_less = False
        if not self._has_room(num_slots):
            around = [] if before == NO_SLOT else [before]
            table.pin(around)
            is_worth_less = self._make_room(keys, before, num_slots)
            table.unpin(around)
        if not self._has_room(num_slots):
            return StoreOutcome.LATER if table.num_writing and not is_worth_less else StoreOutcome.REFUSED
        numbers = table.take(1)
        table.place(keys, numbers, before)
        if self._several is not None:
            self._several.give_rows(numbers[0], num_slots)
        self._policy.add(keys, before, numbers)
        return numbers[0]

    def _has_room(self, num_slots: int) -> bool:
        return self._table.num_free > 0 if self._several is None else self._several.has_room(num_slots)

    def _make_room(self, keys: Sequence[OffloadKey], before: int, num_slots: int) -> bool:
        """Evict chunks, one by one, until there is room; return whether that fails because the others are worth more."""
        while True:
            num_ready = self._table.num_ready
            is_worth_less = self._policy.make_room(keys, before, 1)
            if self._has_room(num_slots) or self._table.num_ready == num_ready:
                return is_worth_less

    def take_evicted(self) -> list[OffloadKey]:
        """Return the chunks evicted since the last call. To be called after each ``reserve``."""
        evicted, self._table.evicted = self._table.evicted, []
        if self._levels is not None:
            self._levels.forget(evicted)
        return evicted

    def rank(self, key: OffloadKey, retention: Retention, now_s: float) -> bool:
        """Let what hints ask count for a chunk; return whether it is ready. Policies with an order of their own keep it."""
        if not self.contains(key):
            return False
        if self._levels is None and retention != NO_RETENTION and isinstance(self._policy, RunsPolicy):
            self._levels = Levels(self._table, self._policy, self._max_chunks)
            self._policy = self._levels.shares
        if self._levels is not None:
            self._levels.set(key, retention, now_s)
        return True

    def expire(self, now_s: float) -> None:
        """Let leases and raised priorities end whose time is over."""
        if self._levels is not None:
            self._levels.expire(now_s)

    def restore(self, keys: Sequence[OffloadKey], places: Sequence[tuple[int, ...]], parent: OffloadKey) -> None:
        """Add ready chunks, each the parent of the next, found in these places; call ``forget_free`` for them first."""
        before = self._table.find(parent) if parent else NO_SLOT
        numbers = self._numbers_for(places)
        self._table.place(keys, numbers, before)
        self._policy.add(keys, before, numbers)
        self._table.publish(numbers)

    def forget_free(self, used: Iterable[Sequence[int]]) -> None:
        """Take slots off the list of free slots, because chunks were found in them."""
        if self._several is None:
            self._table.take_these(chain.from_iterable(used))
        else:
            self._several.take_rows(chain.from_iterable(used))

    def _numbers_for(self, places: Sequence[tuple[int, ...]]) -> list[int]:
        if self._several is None:
            return [place[0] for place in places]
        numbers = self._several.take(len(places))
        for number, place in zip(numbers, places, strict=True):
            self._several.rows_at[number] = place
        return numbers

    def commit(self, slot: int) -> None:
        """Make a chunk that was written ready: it can be loaded from now on."""
        self._table.publish([slot])

    def forfeit(self, slot: int) -> None:
        """Give back the slot of a chunk that was not written."""
        self._withdraw([slot])

    def pin(self, key: OffloadKey) -> int | None:
        """Pin a chunk for reading; return its number; its slots keep their contents until ``unpin``. ``None`` if not ready."""
        if not self.contains(key):
            return None
        slot = self._table.find(key)
        self._table.pin([slot])
        return slot

    def unpin(self, slot: int) -> None:
        """Give back one pin on a slot."""
        self._table.unpin([slot])

    def discard(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Remove chunks that are ready; return their numbers. Their slots are free once they are no longer read."""
        slots = [self._table.find(key) for key in dict.fromkeys(keys) if self.contains(key)]
        self._withdraw(slots)
        return slots

    def is_current(self, key: OffloadKey, slot: int) -> bool:
        """Whether a pinned slot is still the one of its chunk: the chunk was not removed since."""
        return self._table.find(key) == slot

    def touch(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Tell the policy that a request uses these chunks, in prefix order; return the first slots of those that are ready."""
        slots = [self._table.find(key) for key in keys if self.contains(key)]
        if slots:
            self._policy.touch(slots, is_whole=False)
        if self._levels is not None:
            self._levels.note_used(keys)
        return slots if self._several is None else [self._several.rows_at[slot][0] for slot in slots]

    def check(self) -> None:
        """Verify that no slot is lost. Raises ``AssertionError``."""
        self._table.check()
        self._policy.check()

    def _withdraw(self, slots: Sequence[int]) -> None:
        if self._levels is not None:
            self._levels.forget(self._table.keys_at(slots))
        self._policy.drop(slots)
        self._table.remove(slots)


def parents_first(parents: npt.NDArray[np.intc], is_ready: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Return the slots that are ready, each after its parent, by their distance from the start of their prefix.

    Takes a logarithm of the longest prefix in steps over whole arrays: each doubles the distance that is looked back.
    """
    has_parent = parents != NO_SLOT
    depth, back = has_parent.astype(np.int64), np.where(has_parent, parents, np.arange(len(parents)))
    for _ in range(len(parents).bit_length()):  # keys that are no digests may claim to be before each other
        further = depth[back]
        if not further.any():
            break
        depth, back = depth + further, back[back]
    ready = is_ready.nonzero()[0]
    return ready[np.argsort(depth[ready], kind="stable")]


# --- the time at which each slot was last used ------------------------------------------------------------------------

Uses: TypeAlias = npt.NDArray[np.int64]
"""Per slot, the time at which it was last used, in nanoseconds since 1970; 0 if that is not known."""

SAVE_EVERY_NS: Final = 10 * 10**9
_ON_DISK: Final = np.dtype("<i8")


class LastUses:
    """The last uses of a shard's slots. Thread-safe.

    Args:
        shard: the shard; its tables are read.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._per_segment = shard.geometry.slots_per_segment
        self._uses = np.zeros(shard.capacity, dtype=np.int64)
        self._lock = threading.Lock()
        self._changed: set[int] = set()
        self._saved_ns = 0
        for at, segment in enumerate(shard.segments):
            try:
                found = segment.read_uses()
            except OSError:
                continue  # a bad place on the disk: the uses of this segment are not known
            count = len(found) // USE_BYTES
            self._of(at)[:count] = np.frombuffer(found, _ON_DISK, count)

    def snapshot(self) -> Uses:
        """Return a copy of the last uses of all slots up to the shard's capacity."""
        with self._lock:
            return self._uses.copy()

    def note(self, slots: Sequence[int], now_ns: int) -> bool:
        """Note that slots are used now; return whether it is time to call ``save``."""
        with self._lock:
            self._uses[slots] = now_ns
            self._changed.update(slot // self._per_segment for slot in slots)
            is_due = bool(self._changed) and not 0 <= now_ns - self._saved_ns < SAVE_EVERY_NS
            if is_due:
                self._saved_ns = now_ns
            return is_due

    def save(self) -> None:
        """Write the tables of segments with new uses. Raises ``OSError``; the next call writes them all again."""
        with self._lock:
            changed, self._changed = self._changed, set()
            tables = [(at, self._of(at).astype(_ON_DISK).tobytes()) for at in changed]
        try:
            for at, table in tables:
                self._shard.segments[at].write_uses(table)
        except OSError:
            with self._lock:
                self._changed |= changed
            raise

    def _of(self, segment: int) -> Uses:
        first = segment * self._per_segment
        return self._uses[first : first + self._per_segment]


# --- restores the index of chunks that earlier processes stored -------------------------------------------------------

_MOST_USES: Final = 1024


def restore_index(
    index: SlotIndex, tables: Iterable[bytes], links: Links, uses: Uses, codec: ChunkCodec, plan: SlotPlan
) -> list[int]:
    """Fill an index of free slots with the chunks whose headers are good.

    The index's policy learns of stores and last uses in the order in which they happened, as far as that is known. Chunks that
    were stored one after the other along a prefix are added together.

    Args:
        index: has as many slots as there are headers, all free; mutated.
        tables: headers of consecutive slots.
        links: their links.
        uses: time at which each slot was last used: of a chunk, its first one. Times before the chunk was stored or in the
            future are ignored.
        codec: knows which headers are of this namespace, and what time it is.
        plan: how chunks lie in slots.

    Returns:
        Slots whose header must be wiped: damaged, of another namespace, of a chunk that is stored twice or not as a whole, or
        with a key of unusual length.
    """
    good, bad = _sort_out(tables, codec, links, plan)
    index.forget_free(place for _, place in good)
    later = _used_later(good, uses, codec.now_ns())
    use = next(later, None)
    for run in _runs(good):
        while use is not None and use[0] < run[0][0].stored_ns:
            index.touch(use[1])
            use = next(later, None)
        index.restore([header.key for header, _ in run], [place for _, place in run], run[0][0].parent)
    for _, keys in () if use is None else chain([use], later):
        index.touch(keys)
    now_s = codec.now_ns() / 1e9
    for header, place in good:
        # A lowered chunk that was used later is normal again.
        asked = header.retention
        if asked is not NO_RETENTION and not (asked.level < NORMAL and uses[place[0]] > header.stored_ns):
            index.rank(header.key, asked, now_s)
    return bad


def _used_later(found: Sequence[Found], uses: Uses, now_ns: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yield times of use with the chunks that were last used then, after they were stored; the oldest time first.

    Chunks used at the same time are in the order in which they were stored. If there are more than ``_MOST_USES`` times,
    neighbouring ones are merged, with the chunks used last first: a touch costs the policy about as much for few chunks as
    for many.
    """
    used = [
        (when, header.key)
        for (header, _), when in zip(found, uses[[place[0] for _, place in found]].tolist(), strict=True)
        if header.stored_ns < when <= now_ns
    ]
    used.sort(key=itemgetter(0))
    groups = [(when, [key for _, key in together]) for when, together in groupby(used, key=itemgetter(0))]
    size = -(-len(groups) // _MOST_USES) or 1
    for first in range(0, len(groups), size):
        part = groups[first : first + size]
        yield part[-1][0], [key for _, keys in reversed(part) for key in keys]


def _sort_out(
    tables: Iterable[bytes], codec: ChunkCodec, links: Links, plan: SlotPlan
) -> tuple[list[Found], list[int]]:
    """Return the good headers with their places, the oldest first, and the slots with bad headers."""
    good, bad = _good_headers(tables, codec)
    found, left = gather(good, links, plan)
    bad += left
    newest: dict[bytes, Found] = {}
    for header, place in found:
        other = newest.get(header.key)
        if other is not None and other[0].stored_ns > header.stored_ns:
            bad.append(place[0])
            continue
        if other is not None:
            bad.append(other[1][0])
        newest[header.key] = (header, place)
    for key in _strange(newest):
        bad.append(newest.pop(key)[1][0])
    return sorted(newest.values(), key=lambda found: (found[0].stored_ns, found[1])), bad


def _good_headers(tables: Iterable[bytes], codec: ChunkCodec) -> tuple[list[tuple[Header, int]], list[int]]:
    """Return the headers of this namespace with their slots, and the slots with others."""
    good, bad = [], []
    for slot, data in _used_slots(tables):
        header = unpack_header(data)
        if header is None or not codec.is_ours(header):
            bad.append(slot)
        else:
            good.append((header, slot))
    return good, bad


def _strange(keys: Collection[bytes]) -> list[bytes]:
    """Return the keys whose length differs from that of most keys.

    All keys of an engine have one length, on which policies rely; others have other writers.
    """
    lengths = Counter(map(len, keys))
    if len(lengths) <= 1:
        return []
    ((usual, _),) = lengths.most_common(1)
    return [key for key in keys if len(key) != usual]


def _used_slots(tables: Iterable[bytes]) -> Iterator[tuple[int, memoryview]]:
    """Yield the slots whose header is not empty, with their headers."""
    first = 0
    for table in tables:
        begins = np.frombuffer(table, dtype=np.uint64)[:: HEADER_BYTES // len(MAGIC)]
        for at in begins.nonzero()[0].tolist():
            yield first + at, memoryview(table)[at * HEADER_BYTES :][:HEADER_BYTES]
        first += len(begins)


def _runs(found: Iterable[Found]) -> Iterator[list[Found]]:
    """Cut headers into runs in which each chunk is the parent of the next."""
    run: list[Found] = []
    for header, place in found:
        if run and header.parent != run[-1][0].key:
            yield run
            run = []
        run.append((header, place))
    if run:
        yield run


LEASED_PART: Final = 4
RAISED_PART: Final = 2


class Levels:
    """The levels of a shard's chunks that are not normal. Not thread-safe: its owner holds a lock.

    Args:
        table: the chunks.
        policy: decides among chunks of one level.
        capacity: number of chunks for which there is room in any case.

    Attributes:
        shares: the policy with levels.
    """

    def __init__(self, table: ChunkTable, policy: RunsPolicy, capacity: int) -> None:
        self.shares = Shares(policy)
        self._table = table
        self._retained: dict[OffloadKey, Retention] = {}
        self._ends = Ends[OffloadKey]()
        self._budgets = Budgets[bytes | None](
            {
                Budget.PINNED: capacity // LEASED_PART,
                Budget.RAISED: capacity // RAISED_PART,
                Budget.LOWERED: capacity,
            }
        )

    def __len__(self) -> int:
        return len(self._retained)

    def set(self, key: OffloadKey, retention: Retention, now_s: float) -> None:
        """Give a chunk that is ready the level that is asked for it, unless its time is over or its budget spent."""
        self.forget([key])
        level = retention.level_at(now_s)
        if level != NORMAL and self._budgets.room(*_payer(retention)):
            self._retained[key] = retention
            self._budgets.take(*_payer(retention), 1)
            if level > NORMAL:
                self._ends.set(key, retention.ends_s)
        self._rank([key])

    def expire(self, now_s: float) -> None:
        """Make chunks normal whose time is over. To be called before others are evicted."""
        self._bring_back(self._ends.take_ended(now_s))

    def note_used(self, keys: Sequence[OffloadKey]) -> None:
        """Make lowered chunks normal that are used."""
        self._bring_back([key for key in keys if self._level_of(key) < NORMAL])

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Forget what is asked for chunks, because they are gone or something else is asked."""
        for key in keys:
            retention = self._retained.pop(key, None)
            if retention is not None:
                self._ends.forget(key)
                self._budgets.take(*_payer(retention), -1)

    def _bring_back(self, keys: Sequence[OffloadKey]) -> None:
        if keys:
            self.forget(keys)
            self._rank(keys)

    def _level_of(self, key: OffloadKey) -> int:
        return self._retained.get(key, NO_RETENTION).level

    def _rank(self, keys: Sequence[OffloadKey]) -> None:
        """Give chunks the level that the first of them has."""
        slots = [slot for key in keys if (slot := self._table.find(key)) != NO_SLOT]
        self.shares.rank(slots, self._level_of(keys[0]))


def _payer(retention: Retention) -> tuple[bytes | None, Budget]:
    return None if retention.tenant == NO_TENANT else retention.tenant, Budget.of(retention.level)
