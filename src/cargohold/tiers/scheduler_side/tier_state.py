"""The scheduler side of one tier below host memory."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import reduce

from cargohold.blocks import ABSENT, NOT_YET, READY
from cargohold.cache.manager import ChunksRemoved, ChunksStored, ManagerEvent, OffloadKey
from cargohold.protocol import Clock, Locality
from cargohold.tiers.config import Admission, WriteMode
from cargohold.tiers.health import HEALTHY, BreakerState, TierHealth
from cargohold.tiers.port import ACCESS_OF, Access, JobKind
from cargohold.tiers.scheduler_side.known import Allowance, Backlog, LookUpGain, Pace, Presence
from cargohold.tiers.scheduler_side.tasks import TierTask


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """How a tier is to be used.

    Attributes:
        name: the tier's name for users.
        admission: which chunks are written to it.
        write_mode: when they are written.
        max_chunks: maximum number of chunks that it can hold; ``None`` if that is not known.
        max_daily_chunks: maximum number of chunks written per day; ``None`` for no limit.
        has_index: whether the tier keeps an index of its chunks. Then it answers probes without asking its medium, and its
            policy must be told of the use of chunks that host memory gives back, or it would evict them.
        locality: whether it is local or shared; see ``TierConfig``.
        is_read_only: whether nothing is written to it.
        max_inflight_chunks: maximum number of chunks being written at the same time; each keeps its slot in host memory.
        max_asked_chunks: maximum number of chunks in probes, touches and loads in flight at the same time.
        num_asked_at_once: number of chunks for which it answers in one round trip; ``None`` for any number. See
            ``TierConfig.num_asked_at_once``.
    """

    name: str
    admission: Admission = Admission.ALL
    write_mode: WriteMode = WriteMode.THROUGH
    max_chunks: int | None = None
    max_daily_chunks: int | None = None
    has_index: bool = True
    locality: Locality | None = None
    is_read_only: bool = False
    max_inflight_chunks: int = 64
    max_asked_chunks: int = 65536
    num_asked_at_once: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TieringConfig:
    """Options that all lower tiers have in common.

    Attributes:
        num_workers: number of workers; each has a shard of every chunk.
        restore_timeout_s: maximum time that a request waits for lower tiers.
        store_timeout_s: maximum time for writing a batch of chunks.
        record_events: whether to record events for ``take_events``.
    """

    num_workers: int = 1
    restore_timeout_s: float = 5.0
    store_timeout_s: float = 30.0
    record_events: bool = False


# --- the scheduler side of one tier below host memory -----------------------------------------------------------------

logger = logging.getLogger(__name__)

UNKNOWN = 3
"""State of a chunk for which no tier was asked yet; ``LowerTiers.probe`` asks. Besides ``ABSENT``, ``READY``, ``NOT_YET``."""
_STATES = {True: READY, False: ABSENT, None: UNKNOWN}
_UNKNOWN_IS_ABSENT = bytes.maketrans(bytes([UNKNOWN]), bytes([ABSENT]))
ANSWERS_PER_SLOT = 4
"""Number of answers remembered, and of chunks remembered as used once, per slot of host memory."""
MIN_ANSWERS = 2**16
"""Number of answers remembered even if host memory is small: enough for the longest prompts, at some 200 bytes each."""
MAX_ANSWERS = 2**18
MAX_ANNOUNCED = 2**18
"""Maximum number of a tier's chunks announced at the same time, even if it can hold more."""
MAX_ANSWER_AGE_S = 10.0
"""Seconds for which an answer of the tier counts: it may evict chunks, and other engines may write to it."""
REMEASURE_S = 30.0
"""Seconds after which the pace of a tier is forgotten, so that a tier that was too slow is tried again."""
_READING = (Access.LOOK_UP, Access.LOAD)
_GROWTH = 4
"""A look-up that has found n chunks asks for this many times n next; see ``TierState.num_to_ask``."""


class TierState:
    """The scheduler side's state of one tier: its known contents, its health, its pace, and its backlog of writes.

    Args:
        options: how it is to be used.
        host_capacity: slots of host memory.
        clock: monotonic time in seconds.
        config: options that all tiers have in common.
        is_in_flight: tells whether a job is in flight that shows whether an access works.

    Attributes:
        options: as given.
        presence: the tier's remembered answers.
        health: its health, as the workers report it; the worst counts.
        pace: how long fetching chunks takes.
        look_up_pace: how long it takes to ask a tier without an index which chunks it has.
        look_up_gain: how many of the chunks that requests ask it for it has.
        backlog: chunks that wait to be written to it.
        promised: chunks that wait to be written to it before all others, because another engine was promised them.
        stats: counters since they were last taken.
        probing: chunks in probes that it has not answered.
        touching: chunks in touches that it has not answered.
        num_writing: number of chunks that are being written to it.
    """

    def __init__(
        self,
        options: TierOptions,
        host_capacity: int,
        clock: Clock,
        config: TieringConfig,
        is_in_flight: Callable[[Access], bool] = lambda _: False,
    ) -> None:
        self.options = options
        self.health = HEALTHY
        self._healths: dict[int, TierHealth] = {}
        self._is_in_flight = is_in_flight
        num_answers = min(MAX_ANSWERS, max(MIN_ANSWERS, ANSWERS_PER_SLOT * host_capacity))
        self.presence = Presence(num_answers, MAX_ANSWER_AGE_S, clock)
        self.pace = Pace(clock, REMEASURE_S)
        self.look_up_pace = Pace(clock, REMEASURE_S)
        self.look_up_gain = LookUpGain()
        self.backlog = Backlog(host_capacity)
        self.promised = Backlog(host_capacity)
        self.probing: set[OffloadKey] = set()
        self.touching: set[OffloadKey] = set()
        self.num_writing = 0
        self.stats: Counter[str] = Counter()
        self._max_writing = max(1, min(options.max_inflight_chunks, host_capacity // 4))
        daily = options.max_daily_chunks
        self._allowance = None if daily is None else Allowance(daily, clock)
        self._max_dirty = host_capacity * 3 // 4
        # The job that writes each chunk, for chunks under their current names.
        self._writing: dict[OffloadKey, TierTask] = {}
        # Chunks used once, for ``Admission.REUSED``; oldest first.
        self._seen: OrderedDict[OffloadKey, None] = OrderedDict()
        self._max_seen = min(MAX_ANSWERS, ANSWERS_PER_SLOT * host_capacity)
        # Chunks announced as present, if events are recorded; those heard of last are last.
        self._announced: OrderedDict[OffloadKey, None] | None = OrderedDict() if config.record_events else None
        self._max_announced = MAX_ANNOUNCED if options.max_chunks is None else min(MAX_ANNOUNCED, options.max_chunks)
        self._events: list[ManagerEvent] = []

    @property
    def name(self) -> str:
        """The tier's name for users."""
        return self.options.name

    @property
    def is_off(self) -> bool:
        """Whether it is off for good: it gets no jobs any more."""
        return self.health.is_off

    @property
    def trouble(self) -> str:
        """Why requests find nothing in the tier, in one line; empty if they do, or a trial is on."""
        if self.is_off:
            return f"tier {self.name} is off, because a worker can no longer use it"
        suspended = [access.value for access in _READING if self.health.of(access) is BreakerState.OPEN]
        return f"tier {self.name}: {' and '.join(suspended)} are suspended: {self.health.reason}" if suspended else ""

    @property
    def is_readable(self) -> bool:
        """Whether requests may look for chunks in the tier: not if that is suspended, or being tried by another request."""
        return all(map(self._admits, _READING))

    @property
    def is_writable(self) -> bool:
        """Whether the tier takes chunks: not if writes are suspended, or one is trying whether they work again."""
        return self._admits(Access.WRITE)

    def is_tried(self, access: Access) -> bool:
        """Whether the next job of this kind, or the one in flight, tries whether the tier works again."""
        return self.health.of(access) is BreakerState.HALF_OPEN

    def takes(self, kind: JobKind) -> bool:
        """Whether a job may be handed out now. Touches are no trials."""
        if kind is JobKind.TOUCH:
            return not self.is_off and self.health.look_up is BreakerState.CLOSED
        return self._admits(ACCESS_OF[kind])

    def note_health(self, worker: int, health: TierHealth) -> None:
        """Learn what a worker says of the tier's health."""
        was_off = self.is_off
        self._healths[worker] = health
        self.health = reduce(TierHealth.worse, self._healths.values(), HEALTHY)
        if self.is_off and not was_off:
            self.stats["off"] += 1
            logger.error(
                "tier %s is off: a worker can no longer use it, and logged why; restart the engine to use it again",
                self.name,
            )
            self.clear()
        elif not self._can_be_relied_on:
            # Nobody can load its chunks now. Those still there when the tier is back are announced again when found.
            self._withdraw()

    def _admits(self, access: Access) -> bool:
        """Whether a job may be handed out that shows whether this access works: one at a time while it is half-open."""
        state = self.health.of(access)
        is_in_turn = state is BreakerState.HALF_OPEN and not self._is_in_flight(access)
        return not self.is_off and (state is BreakerState.CLOSED or is_in_turn)

    @property
    def _can_be_relied_on(self) -> bool:
        """Whether look-ups and loads work, as far as is known."""
        return all(self.health.of(access) is BreakerState.CLOSED for access in _READING)

    def parts(self, keys: Sequence[OffloadKey]) -> list[Sequence[OffloadKey]]:
        """Split keys into parts of as many as the tier's workers take in one job."""
        size = self.options.max_asked_chunks
        return [keys[first : first + size] for first in range(0, len(keys), size)]

    def num_to_ask(self, num_chunks: int, num_found: int, within_s: float = float("inf")) -> int:
        """Return how many of ``num_chunks`` to ask for now in a look-up that has found ``num_found`` here before.

        Where each chunk that is asked for has its price, the first few are asked for first: most prompts are new, and what is
        behind an absent chunk is of no use. If they are there, four times as many follow; but no more than it is expected to
        answer for ``within_s`` seconds.
        """
        at_once = self.options.num_asked_at_once
        if at_once is None:
            return num_chunks
        count = min(num_chunks, max(at_once, _GROWTH * num_found))
        most = self.look_up_pace.amount_in(within_s)
        return count if most is None or count <= most else int(most)

    def look_up_s(self, num_chunks: int, num_found: int, part: float) -> float | None:
        """Return the seconds that the rest of a look-up, of ``num_chunks``, is expected to take; ``None`` if not known.

        Args:
            num_chunks: number of chunks that the tier has not been asked for yet.
            num_found: number of chunks that the same look-up has found here before.
            part: the part of ``num_chunks`` that is expected to be there, from 0 to 1.
        """
        first_s = self.look_up_pace.predict(self.num_to_ask(num_chunks, num_found))
        whole_s = self.look_up_pace.predict(num_chunks)
        if first_s is None or whole_s is None:
            return None
        return first_s + part * (whole_s - first_s)

    def note_look_up(self, task: TierTask, took_s: float) -> None:
        """Learn how long a probe took and, if its look-up ends with it, what part of what that wanted is there."""
        self.look_up_pace.note(len(task.keys), took_s)
        goes_on = task.num_after > 0 and task.num_found == len(task.keys)
        if not goes_on:
            num_wanted = task.num_before + len(task.keys) + task.num_after
            self.look_up_gain.note((task.num_before + task.num_found) / num_wanted)

    def lookup(self, keys: Sequence[OffloadKey], *, is_skipped: bool = False) -> bytes:
        """Return one byte per chunk: ``READY``, ``ABSENT``, ``NOT_YET`` if the tier is being asked, or ``UNKNOWN``.

        With ``is_skipped``, it has nothing but what it is known to have.
        """
        states = bytes(map(_STATES.__getitem__, self.presence.get(keys)))
        if is_skipped:
            return states.translate(_UNKNOWN_IS_ABSENT)
        return mark(states, keys, self.probing, NOT_YET)

    def wanted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks that would have to be written.

        A chunk that the tier had at its last answer, however old, is taken to be there still: ``Upkeep`` checks that.
        """
        if self.is_off or self.options.is_read_only:
            return []
        known = zip(keys, self.presence.last(keys), strict=True)
        return [key for key, is_there in known if is_there is not True and key not in self._writing]

    def is_to_write(self, key: OffloadKey) -> bool:
        """Whether a promised chunk waits to be written, or is being written."""
        return key in self.promised or key in self._writing

    def will_take(self, keys: Sequence[OffloadKey]) -> Iterator[OffloadKey]:
        """Yield the promised chunks among ``keys`` that will be written here, unless something fails.

        Those that are being written, and as many more, in this order, as the daily allowance lasts for; none of these if
        writes are suspended.
        """
        waiting = [key for key in keys if key not in self._writing]
        num_left = len(waiting) if self.health.of(Access.WRITE) is not BreakerState.OPEN else 0
        if self._allowance is not None:
            num_others = len(self.promised) - sum(key in self.promised for key in waiting)
            num_left = min(num_left, max(0, self._allowance.available - num_others))
        taken = frozenset(waiting[:num_left])
        return (key for key in keys if key in self._writing or key in taken)

    def is_asked_for(self, key: OffloadKey) -> bool:
        """Whether the tier is being asked for a chunk, or the chunk is being written or waits to be."""
        return key in self.probing or key in self._writing or key in self.backlog

    def note_new_in_host(self, keys: Sequence[OffloadKey], parents: Mapping[OffloadKey, OffloadKey | None]) -> None:
        """Learn that host memory has new chunks; add those that the tier is to get to the backlog."""
        if self.options.admission is Admission.REUSED:
            keys = [key for key in keys if self._was_seen(key)]
        self.backlog.add(self.wanted(keys), parents)

    def note_used(self, keys: Sequence[OffloadKey], states: bytes) -> None:
        """Learn that a request uses these chunks, in prefix order; ``states`` says which of them host memory has."""
        if self.options.write_mode is WriteMode.BACK:
            self.backlog.postpone(keys)
        if self.options.admission is Admission.REUSED:
            ready = [key for key, state in zip(keys, states, strict=True) if state == READY]
            self.backlog.add(self.wanted(ready), parents_in(keys))

    @property
    def num_writable(self) -> int:
        """Number of chunks to hand out for writing now, promised ones first."""
        num_waiting = len(self.backlog)
        if self.options.write_mode is WriteMode.BACK:
            # So many may wait: the rest of host memory can be evicted without loss.
            num_waiting = max(0, num_waiting - self._max_dirty)
        num_waiting += len(self.promised)
        limit = self._max_writing - self.num_writing
        if self._allowance is not None:
            limit = min(limit, self._allowance.available)
        return max(0, min(num_waiting, limit))

    def note_presence(self, keys: Sequence[OffloadKey], are_there: Sequence[bool]) -> None:
        """Remember, and announce, whether the tier has these chunks."""
        self.presence.note(keys, are_there)
        self._announce_presence(keys, are_there)

    def note_touched(self, keys: Sequence[OffloadKey], are_there: Sequence[bool]) -> None:
        """Remember which chunks of a touch the tier has; announce which it has and which it has not.

        The remembered answer for chunks that are gone is not changed, so that ``Upkeep`` probes for them and writes them again
        in its time: to write them at once would wear a disk that is smaller than the set of chunks in use.
        """
        there = [key for key, is_there in zip(keys, are_there, strict=True) if is_there]
        self.presence.note(there, [True] * len(there))
        self._announce_presence(keys, are_there)

    def take_events(self) -> list[ManagerEvent]:
        """Return the events since the last call, in order: chunks that the tier was found to have, or not to have any more."""
        events, self._events = self._events, []
        return events

    def begin_writing(self, task: TierTask) -> None:
        """Note that the chunks of a job are being written, and take them off the daily allowance."""
        if self._allowance is not None:
            self._allowance.spend(len(task.keys))
        self._writing.update(dict.fromkeys(task.keys, task))
        self.num_writing += len(task.keys)

    def end_writing(self, task: TierTask, succeeded: Sequence[bool]) -> None:
        """Note that a job's chunks are not being written any more; ``succeeded`` says which of them were written."""
        for key in task.keys:
            if self._writing.get(key) is task:
                del self._writing[key]
        self.num_writing -= len(task.keys)
        self.stats["stored_chunks"] += sum(succeeded)
        self.stats["not_stored_chunks"] += len(succeeded) - sum(succeeded)

    def clear(self) -> None:
        """Forget what the tier holds, and the backlog, for a reset or because the tier is off."""
        self.presence.clear()
        self.backlog.clear()
        self.promised.clear()
        # Chunks being written have names that nobody uses any more: they must not be taken for new chunks.
        self._writing.clear()
        self._seen.clear()
        self._withdraw()

    def _withdraw(self) -> None:
        """Announce all announced chunks as removed."""
        if self._announced:
            self._events.append(ChunksRemoved(tuple(self._announced)))
            self._announced.clear()

    def _announce_presence(self, keys: Sequence[OffloadKey], are_there: Sequence[bool]) -> None:
        announced = self._announced
        # While loads are suspended, chunks may still be written, but nobody could load them. They are announced when found.
        if announced is None or self.is_off or not self._can_be_relied_on:
            return
        stored, removed = [], []
        for key, is_there in zip(keys, are_there, strict=True):
            if is_there:
                if key not in announced:
                    stored.append(key)
                    announced[key] = None
                announced.move_to_end(key)
            elif key in announced:
                removed.append(key)
                del announced[key]
        # The tier evicts by itself and does not report it, so old announcements are withdrawn.
        forgotten = [announced.popitem(last=False)[0] for _ in range(len(announced) - self._max_announced)]
        if stored:
            self._events.append(ChunksStored(tuple(stored)))
        if removed or forgotten:
            self._events.append(ChunksRemoved((*removed, *forgotten)))

    def _was_seen(self, key: OffloadKey) -> bool:
        """Whether a chunk was seen before; remember it."""
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)
        return False


def parents_in(keys: Sequence[OffloadKey]) -> dict[OffloadKey, OffloadKey | None]:
    """Return the chunk before each chunk of a prefix; ``None`` for the first."""
    return dict(zip(keys, (None, *keys), strict=False))


def mark(states: bytes, keys: Sequence[OffloadKey], marked: AbstractSet[OffloadKey], state: int) -> bytes:
    """Return ``states`` with ``state`` in place of the states of chunks that are in ``marked``."""
    if marked.isdisjoint(keys):
        return states
    return bytes(state if key in marked else before for key, before in zip(keys, states, strict=True))
