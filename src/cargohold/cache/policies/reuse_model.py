"""A model of how soon chunks are used again, learned from a sample of them, whether they are in the tier or not.

Every chunk has a *class*, which sums up what is known about it when it is used. For each class the model estimates how likely a
chunk is to be used again at each age, and from that its *reuse index* at age ``a``: the highest rate of reuse per time in the
tier that keeping it can bring::

    index(a) = max over h of  P(used again by age a + h | not by a) / (E[time until then, at most h | not by a] + request)

It is the Gittins index of keeping a chunk (J. Gittins, "Bandit Processes and Dynamic Allocation Indices", J. R. Statist. Soc.
B 41, 1979), where a slot that was given is taken for a request at least. If classes were all there is to know, evicting the
chunk with the lowest index would be optimal. Age matters in both directions: a chunk whose reuse is overdue is worth less, and
one whose reuse is due soon is worth more than just after its last use.

Time is counted in uses of chunks, and a request is a mean one's. Ages are counted from the end of the call that used a chunk:
what the next request uses again has age 0, however long its prompt is.

What is known of a chunk is its *kind*, one number::

    kind  = uses * 512 + class
    class = how the turn ended * 80 + level * 20 + (10 if it was the last of its request) + detail

A level is 1, 2 to 3, 4 to 7, or 8 and more uses. The detail of a new chunk is how often the prefix that it continues was used;
that of others, the time between the last two uses, by powers of four.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cargohold.protocol import TurnEnd

Reals = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.intp]

DETAILS: Final = 10
LAST: Final = DETAILS
"""What is added to a kind if the chunk was the last of its request."""
PER_LEVEL: Final = 2 * DETAILS
_NUM_LEVELS: Final = 4
NUM_CLASSES: Final = _NUM_LEVELS * PER_LEVEL
"""Number of classes before the turn has ended, and for each way to end."""
ADDED_BY_END: Final = {end: number * NUM_CLASSES for number, end in enumerate(TurnEnd)}
"""What is added to a kind when the turn that used the chunk last has ended so."""

CLASS_BITS: Final = 9
CLASS: Final = (1 << CLASS_BITS) - 1
"""The bits of a kind that are its class."""
NEW: Final = 1 << CLASS_BITS
"""The kind of a chunk that was used once, after nothing that is in the tier."""
_CONTINUES_OFTEN: Final = 3

_MIN_ENTRIES: Final = 1 << 14
_ENTRIES_PER_SLOT: Final = 1
_USES_MASK: Final = 0xF
_MARK_MASK: Final = 0xFFF0
_TIME_MASK: Final = 0xFFFF
_TIMES_BITS: Final = 11
"""A tier with twice as many entries counts times in units twice as long; with so many bits, in single uses."""
_MANY_TAGS: Final = 32
"""Number of chunks from which on arrays are quicker than a loop."""

NUM_AGES: Final = 40
"""Number of age buckets; their limits are powers of two."""

_NUM_RECORDS: Final = 16_384
_ROWS_AT_ONCE: Final = 16
"""So many classes have their index computed in one call."""
_MIN_SPAN: Final = 1 << 18
_SPAN_PER_SLOT: Final = 16
_FIRST_FIT: Final = 256
_FIT_EVERY_PART: Final = 1 / 8
_FIT_AT_LEAST_EVERY: Final = 1 << 15
_FAMILY_WEIGHT: Final = 20.0
_CLASS_WEIGHT: Final = 100.0
"""If fewer chunks of a class than this were at risk, the estimate for its family counts more than that of the class itself.

``_FAMILY_WEIGHT`` is the same for a family and all chunks.
"""

_MANY: Final = 16
"""So many chunks and more are recorded in a third of the time as arrays."""

NUM_TAGS: Final = 1 << 32
_OPEN: Final = -1
_NUM_GROUPS: Final = 3
"""Ages of which how the turn ended tells different things: up to about an eighth of the tier's slots, up to all, and more."""
_TURN_WEIGHT: Final = 1.0
"""If the chunks of fewer turns than this were at risk, the class alone counts more than how the turn ended."""

_WIDTHS = np.diff(2.0 ** np.arange(1, NUM_AGES + 1), prepend=0.0)


def age_bucket(age: int) -> int:
    """Return the bucket of an age, which is a column of the index."""
    return min(max(age.bit_length() - 1, 0), NUM_AGES - 1)


def kind_behind(kind: int) -> int:
    """Return the kind of a new chunk after one of ``kind``."""
    uses = kind >> CLASS_BITS
    if uses == 1:  # the same request goes on, whose chunks come in parts
        return NEW + (kind & CLASS) % DETAILS
    return NEW + min((uses.bit_length() + 1) // 2, _CONTINUES_OFTEN)


def kind_used_again(uses_before: int, age: int) -> int:
    """Return the kind of a chunk used now and ``age`` ago, that is not the last of its request."""
    uses = uses_before + 1
    level = min(uses.bit_length(), _NUM_LEVELS) - 1
    detail = min((max(age, 1).bit_length() + 1) // 2, DETAILS - 1)
    return (uses << CLASS_BITS) + level * PER_LEVEL + detail


def is_last(kind: int) -> bool:
    """Whether chunks of this kind were the last of their requests."""
    return (kind & CLASS) % PER_LEVEL >= LAST


def stretches(kinds: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Return the kind of each stretch of chunks of one kind, and how many there are."""
    if len(kinds) == 1:
        return ((kinds[0], 1),)  # of what is generated, nearly always
    return [(kind, len(list(same))) for kind, same in groupby(kinds)]


class ReuseModel:
    """Records the intervals between uses of sampled chunks, and computes the index from them.

    Whether a chunk is in the sample depends only on its tag, so it is followed through eviction and return. New records replace
    the oldest ones. While those do not reach far enough back in time, the sample gets thinner.

    Args:
        num_classes: number of classes, which are ``0 .. num_classes - 1``.
        family_size: number of consecutive classes that form a family: they are alike, and share what they learn.
        capacity: number of slots of the tier, which determines how far back records should reach.
        num_ends: in how many ways a turn may end; 0 stands for not known.

    Attributes:
        sample_end: chunks with a smaller tag are in the sample.
        index: the reuse index. Replaced by ``fit``.
        next_fit: when ``fit`` has something to do.
        num_requests: number of requests until now.
    """

    def __init__(self, num_classes: int, family_size: int, capacity: int, num_ends: int = 1) -> None:
        self.sample_end = NUM_TAGS
        # Before anything is known: the older, the less worth.
        self.index: dict[int, list[float]] = dict.fromkeys(
            range(num_ends * num_classes), (2.0 ** -np.arange(NUM_AGES)).tolist()
        )
        self._num_classes = num_classes
        self._family_size = family_size
        self._span = max(_MIN_SPAN, _SPAN_PER_SLOT * capacity)
        self.next_fit = _FIRST_FIT
        self._fitting: Iterator[ReuseIndex | None] | None = None
        self._num_records = self._thinned_at = 0
        self._tags = np.zeros(_NUM_RECORDS, dtype=np.uint32)
        self._classes = np.zeros(_NUM_RECORDS, dtype=np.uint8)
        self._starts = np.zeros(_NUM_RECORDS, dtype=np.int64)
        self._ends = np.zeros(_NUM_RECORDS, dtype=np.int64)
        self._turn_ends = np.zeros(_NUM_RECORDS, dtype=np.uint8)
        self._num_ends = num_ends
        self.num_requests = self._num_turns = self._num_noted = 0
        middle = max(0, capacity.bit_length() - 4), capacity.bit_length() - 1
        self._groups = np.searchsorted(middle, np.arange(NUM_AGES), side="right")
        # The same memory: single elements are written three times faster this way.
        self._views = self._tags.data, self._classes.data, self._starts.data, self._ends.data, self._turn_ends.data
        # By tag: the record of the chunk's last use.
        self._open: dict[int, int] = {}

    def observe_each(self, tags: Sequence[int], classes: Sequence[int], began: int, now: int) -> None:
        """Record that those of these chunks that are in the sample are used, which ends the records of their uses before.

        Mutates the records.

        Args:
            tags: the chunks.
            classes: what their classes are from now on.
            began: the time before this use was counted.
            now: the time after it.
        """
        if max(tags) >= self.sample_end:
            sample_end = self.sample_end
            sampled = [(tag, chunk_class) for tag, chunk_class in zip(tags, classes, strict=True) if tag < sample_end]
            if not sampled:
                return
            tags, classes = zip(*sampled, strict=True)
        first, end = self._num_records, self._num_records + len(tags)
        if len(tags) < _MANY or end > _NUM_RECORDS:  # later, few chunks are in the sample
            self._observe_one_by_one(tags, classes, began, now)
            return
        befores = [before for before in map(self._open.get, tags) if before is not None]
        self._ends[befores] = began
        self._open.update(zip(tags, range(first, end), strict=True))
        self._tags[first:end], self._classes[first:end] = tags, classes
        self._starts[first:end], self._ends[first:end] = now, _OPEN
        self._turn_ends[first:end] = 0
        self._num_records = end

    def note_end(self, tags: Sequence[int], turn_end: int) -> None:
        """Note how the turn ended that used these chunks last. Mutates the records."""
        records = list(map(self._open.__getitem__, self._open.keys() & tags))
        if records:  # of a prompt of few chunks, often none are in the sample
            self._turn_ends[records] = turn_end
            self._num_turns += 1
            self._num_noted += len(records)

    def _observe_one_by_one(self, few: Sequence[int], of_classes: Sequence[int], began: int, now: int) -> None:
        tags, classes, starts, ends, turn_ends = self._views
        records, num_records = self._open, self._num_records
        for tag, chunk_class in zip(few, of_classes, strict=True):
            at = num_records % _NUM_RECORDS
            if num_records >= _NUM_RECORDS:
                self._forget(at, now)
            if tag < self.sample_end:
                before = records.get(tag)
                if before is not None:
                    ends[before] = began
                records[tag] = at
                tags[at], classes[at], starts[at], ends[at], turn_ends[at] = tag, chunk_class, now, _OPEN, 0
                self._num_records = num_records = num_records + 1

    def _forget(self, at: int, now: int) -> None:
        """Let a record be replaced. The sample is halved if that is too young, and all records are of the sample as it is.

        Mutates everything.
        """
        tags, _, starts, _, _ = self._views
        if self._open.get(tag := tags[at]) == at:
            del self._open[tag]
        if now - starts[at] < self._span and self._num_records - self._thinned_at >= _NUM_RECORDS:
            self.sample_end //= 2
            self._thinned_at = self._num_records

    def fit(self, now: int, in_use: Callable[[], set[int]]) -> bool:
        """Replace the index by one learned from the records, if it is time to; return whether it was.

        That takes several calls, so that no step waits for long: each walks the records once, or computes a few rows. The last
        one only replaces.

        Args:
            now: the time.
            in_use: returns the classes whose rows are needed at once.
        """
        if now < self.next_fit:
            return False
        if self._fitting is None:
            self._fitting = self._fit(now, in_use)
        index = next(self._fitting)
        if index is None:
            return False
        self.index, self._fitting = index, None
        return True

    def _fit(self, now: int, in_use: Callable[[], set[int]]) -> Iterator[ReuseIndex | None]:
        """Yield ``None`` where the next call may go on, and in the end the index."""
        # Copies: at the next call, there may be other records.
        used = np.flatnonzero(self._tags[: self._num_records] < self.sample_end)
        classes, turn_ends = self._classes[used].astype(np.intp), self._turn_ends[used].astype(np.intp)
        is_open, ages = self._ages(used, now)
        yield None
        hazards = self._hazards(is_open, ages, classes)
        yield None
        factors = self._factors(is_open, ages, hazards, classes, turn_ends)
        num_known = int(ages.max(initial=0)) + 2  # beyond, nothing is known, and an index is 0
        index = ReuseIndex(hazards[:, :num_known], factors[:, :num_known], now / max(1, self.num_requests))
        yield None
        while missing := list(in_use() - index.keys()):
            index.compute(missing[:_ROWS_AT_ONCE])
            yield None
        self.next_fit = now + int(min(max(_FIRST_FIT, now * _FIT_EVERY_PART), _FIT_AT_LEAST_EVERY))
        yield index

    def _factors(self, is_open: Flags, ages: Numbers, hazards: Reals, classes: Numbers, turn_ends: Numbers) -> Reals:
        """Return how many times as likely a reuse is as the class alone tells, by the end of the turn and age."""
        risks = hazards * _WIDTHS
        # By group, how many reuses a class lets expect up to an age: of the last bucket a half.
        parts = [np.where(self._groups == group, risks, 0.0) for group in range(_NUM_GROUPS)]
        expected = np.array([part.cumsum(axis=1) - part / 2 for part in parts]).reshape(_NUM_GROUPS, -1)
        num_groups = self._num_ends * _NUM_GROUPS
        reused = np.bincount(turn_ends * _NUM_GROUPS + self._groups[ages], ~is_open, num_groups)
        cells = (turn_ends * self._num_classes + classes) * NUM_AGES + ages
        counts = np.bincount(cells, minlength=self._num_ends * expected.shape[1]).reshape(self._num_ends, -1)
        hoped = counts @ expected.T
        # Chunks of one turn share one fate: what counts is the number of turns.
        weight = _TURN_WEIGHT * max(1, self._num_noted) / max(1, self._num_turns)
        factors: Reals = (reused.reshape(-1, _NUM_GROUPS) + weight) / (hoped + weight)
        factors[0] = 1  # not known
        return factors[:, self._groups]

    def _ages(self, used: Numbers, now: int) -> tuple[Flags, Numbers]:
        """Return, per record used, whether its chunk was not used again, and the bucket of the age that it has reached."""
        is_open = self._ends[used] == _OPEN
        intervals = np.where(is_open, now, self._ends[used]) - self._starts[used]
        # ``age_bucket`` of each: frexp gives the number of bits of an integer.
        return is_open, np.clip(np.frexp(intervals)[1] - 1, 0, NUM_AGES - 1).astype(np.intp)

    def _hazards(self, is_open: Flags, ages: Numbers, classes: Numbers) -> Reals:
        """Return reuses per chunk and time, by class and age. Where little is known, that of the family or of all chunks."""
        num_classes = self._num_classes
        cells = classes * NUM_AGES + ages
        size = num_classes * NUM_AGES
        ended = np.bincount(cells, minlength=size).reshape(num_classes, NUM_AGES)
        reused = np.bincount(cells, ~is_open, size).reshape(num_classes, NUM_AGES)
        # Chunks that get older than a bucket were at risk for all of it, those whose interval ends in it for half of it.
        older = ended[:, ::-1].cumsum(axis=1)[:, ::-1] - ended
        at_risk = older + 0.5 * ended
        in_general = _blend(reused.sum(axis=0), at_risk.sum(axis=0), np.zeros(NUM_AGES), 1e-9)
        families = num_classes // self._family_size, self._family_size, NUM_AGES
        family = _blend(
            reused.reshape(families).sum(axis=1), at_risk.reshape(families).sum(axis=1), in_general, _FAMILY_WEIGHT
        )
        return _blend(reused, at_risk, family.repeat(self._family_size, axis=0), _CLASS_WEIGHT)


def _blend(reused: npt.NDArray[Any], at_risk: Reals, prior: Reals, weight: float) -> Reals:
    """Return hazards from counts, as if ``weight`` more chunks had been at risk and behaved like ``prior``."""
    blended: Reals = (reused / _WIDTHS + weight * prior) / (at_risk + weight)
    return blended


class ReuseIndex(dict[int, list[float]]):
    """The reuse index by class, as a list by age bucket: computed when it is asked for, because most classes have no chunks.

    Args:
        hazards: reuses per chunk and time, by class and age bucket. Beyond its last bucket, nothing is known, and worth is 0.
        factors: what they are multiplied by, by how turns end and age bucket.
        request: the time that a request takes, on average.
    """

    def __init__(self, hazards: Reals, factors: Reals, request: float) -> None:
        super().__init__()
        self._hazards, self._factors, self._request = hazards, factors, request

    def __missing__(self, number: int) -> list[float]:
        self.compute([number])
        return self[number]

    def compute(self, classes: Sequence[int]) -> None:
        """Compute the rows of some classes, those of each end of turns after each other. Mutates the index."""
        turn_ends, alone = np.divmod(classes, len(self._hazards))
        rows = np.zeros((len(classes), NUM_AGES))
        rows[:, : self._hazards.shape[1]] = _reuse_index(self._hazards[alone] * self._factors[turn_ends], self._request)
        self.update(zip(classes, rows.tolist(), strict=True))


def _reuse_index(hazards: Reals, request: float) -> Reals:
    """Return the index at the start of each age bucket, for hazards that are constant within buckets. See the module."""
    widths = _WIDTHS[: hazards.shape[1]]
    risks = hazards * widths
    start = np.zeros((len(hazards), 1))
    survival = np.exp(-np.concatenate((start, risks.cumsum(axis=1)), axis=1))
    # Time spent in each bucket, on average over all chunks: the integral of survival, exact also where hazards vanish.
    spent = survival[:, :-1] * widths * np.where(risks > 1e-9, -np.expm1(-risks) / np.maximum(risks, 1e-9), 1.0)
    time = np.concatenate((start, spent.cumsum(axis=1)), axis=1)
    # The survival up to here cancels out, so the index is the steepest line from here to any point ahead.
    gain = survival[:, :-1, None] - survival[:, None, 1:]
    cost = time[:, None, 1:] - time[:, :-1, None] + request * survival[:, :-1, None]
    index: Reals = (gain / np.where(cost > 0, cost, np.inf)).max(axis=2)
    return index


class AbsentChunks:
    """How often chunks that are not in the tier were used, and when last, by tag.

    A tag is a short digest of a key, the same in every run. Keys may share one: good for statistics, not for identity. There is
    one place for several tags, so a new entry overwrites an old one: the table forgets at random, costs four bytes per entry,
    and needs no upkeep. A wrong tag means a wrong guess about one chunk, nothing more.

    Args:
        capacity: number of slots of the tier.
    """

    def __init__(self, capacity: int) -> None:
        num_bits = min((max(_MIN_ENTRIES, capacity * _ENTRIES_PER_SLOT) - 1).bit_length(), 32)
        self._mask = (1 << num_bits) - 1
        self._unit = num_bits - _TIMES_BITS
        # The upper half of the tag, with the number of uses in place of its lowest bits; and the time.
        self._known, self._times = array("H", [0]) * (1 << num_bits), array("H", [0]) * (1 << num_bits)
        # The same memory: many entries cost a third of the time this way.
        self._views = np.frombuffer(self._known, np.uint16), np.frombuffer(self._times, np.uint16)

    def recall(self, tags: Sequence[int], now: int) -> list[tuple[int, int]]:
        """Return the indices of the chunks of which something is known, and their kinds if they are used now."""
        known, mask, unit = self._known, self._mask, self._unit
        indices: Sequence[int] = range(len(tags))
        if len(tags) >= _MANY_TAGS:
            wanted = np.array(tags, np.uint32)
            indices = np.flatnonzero((self._views[0][wanted & mask] ^ (wanted >> 16)) <= _USES_MASK).tolist()
        kinds: list[tuple[int, int]] = []
        for at in indices:
            tag = tags[at]
            entry = known[tag & mask]
            uses = entry & _USES_MASK if entry ^ tag >> 16 <= _USES_MASK else 0
            if uses:
                # Times are modulo 2**16: longer ages don't matter.
                age = ((now >> unit) - self._times[tag & mask] & _TIME_MASK) << unit
                kinds.append((at, kind_used_again(uses, age)))
        return kinds

    def remember_each(self, tags: Sequence[int], uses: Sequence[int], times: Sequence[int]) -> None:
        """Remember the uses of chunks that leave the tier, or were not stored; ``times`` are those of the last ones."""
        if len(tags) >= _MANY_TAGS:
            last = np.array(tags, np.uint32)
            known, known_times = self._views
            known[last & self._mask] = last >> 16 & _MARK_MASK | np.minimum(uses, _USES_MASK)
            known_times[last & self._mask] = np.array(times, np.int64) >> self._unit & _TIME_MASK
            return
        for tag, num_uses, time in zip(tags, uses, times, strict=True):
            self._known[tag & self._mask] = tag >> 16 & _MARK_MASK | min(num_uses, _USES_MASK)
            self._times[tag & self._mask] = time >> self._unit & _TIME_MASK
