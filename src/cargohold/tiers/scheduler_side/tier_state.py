"""What the scheduler side knows of one tier below host memory: which chunks it has, how fast it is, how well it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import reduce
from itertools import compress
from typing import Final, TypeAlias

from cargohold.blocks import ABSENT, NOT_YET, READY
from cargohold.cache.manager import ChunksRemoved, ChunksStored, ManagerEvent, OffloadKey
from cargohold.pace import Pace
from cargohold.protocol import Clock, Locality, Outage, Tally, metrics
from cargohold.tiers.config import Admission, WriteMode
from cargohold.tiers.health import HEALTHY, BreakerState, TierHealth
from cargohold.tiers.port import ACCESS_OF, SHOW_NOTHING, Access, Found, JobKind
from cargohold.tiers.scheduler_side.tasks import TierTask

_TIMES: Final = {JobKind.PROBE: metrics.LOOK_UP, JobKind.LOAD: metrics.FETCH, JobKind.STORE: metrics.WRITE}
"""The kinds of job whose times are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """How a tier is to be used.

    Attributes:
        name: the tier's name for users.
        admission: which chunks are written to it.
        write_mode: when they are written.
        max_chunks: maximum number of chunks that it can hold; ``None`` if that is not known.
        max_daily_chunks: maximum number of the largest chunks written per day; ``None`` for no limit.
        chunk_parts: which part of the largest chunk one of each group is; empty if all are as large.
        has_index: whether the tier keeps an index of its chunks. Then it answers probes without asking its medium, and its
            policy must be notified of the use of chunks that host memory gives back, or it would evict them.
        locality: whether it is local or shared; see ``TierConfig``.
        is_listed: whether it can list its chunks; see ``TierConfig``.
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
    chunk_parts: Sequence[float] = ()
    has_index: bool = True
    locality: Locality | None = None
    is_listed: bool = False
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
        local_hashes: how the keys of chunks begin that stay in host memory; see ``SchedulerEnvironment``.
    """

    num_workers: int = 1
    restore_timeout_s: float = 5.0
    store_timeout_s: float = 30.0
    record_events: bool = False
    local_hashes: bytes = b""


@dataclass(frozen=True, slots=True)
class AllChunksRemoved:
    """An event: none of a tier's chunks can be found any more."""


@dataclass(frozen=True, slots=True)
class ChunksFound:
    """An event: the tier has chunks that no request has asked for yet."""

    found: tuple[Found, ...]


TierEvent: TypeAlias = ManagerEvent | AllChunksRemoved | ChunksFound


class LookupCache:
    """Answers of a tier, remembered for a while.

    A tier may evict chunks, and other engines may write to it, so an answer grows old. Acting on an old answer does no harm: a
    chunk that has gone is a miss when it is loaded, and a new chunk is found a little later.

    Answers are kept in two halves: when the younger one is full, the older one is forgotten as a whole. So thousands of answers
    are noted without touching each, and the last ``limit / 2`` are always remembered.

    Args:
        limit: maximum number of answers to remember; the oldest are forgotten first.
        max_age_s: time in seconds for which an answer counts.
        clock: monotonic time in seconds.

    Attributes:
        limit: as given.
    """

    def __init__(self, limit: int, max_age_s: float, clock: Clock) -> None:
        self.limit = limit
        self._max_age_s = max_age_s
        self._clock = clock
        self._young: dict[OffloadKey, tuple[bool, float]] = {}
        self._old: dict[OffloadKey, tuple[bool, float]] = {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def get(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """Return whether each chunk is there; ``None`` if there is no answer, or it is too old."""
        oldest = self._clock() - self._max_age_s
        return [None if answer is None or answer[1] < oldest else answer[0] for answer in self._last(keys)]

    def last(self, keys: Sequence[OffloadKey]) -> list[bool | None]:
        """Return the last answer for each chunk, however old; ``None`` if there is none."""
        return [None if answer is None else answer[0] for answer in self._last(keys)]

    def not_heard_of(self, keys: Sequence[OffloadKey], for_s: float) -> list[OffloadKey]:
        """Return the chunks about which there was no answer in the last ``for_s`` seconds."""
        oldest = self._clock() - for_s
        return [key for key, answer in zip(keys, self._last(keys), strict=True) if answer is None or answer[1] < oldest]

    def note(self, keys: Sequence[OffloadKey], are_there: Sequence[bool]) -> None:
        """Remember answers of the tier, or that chunks were just written to it."""
        now = self._clock()
        self._young.update(zip(keys, map(((False, now), (True, now)).__getitem__, are_there), strict=True))
        if 2 * len(self._young) >= self.limit:
            self._old, self._young = self._young, {}

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Forget the answers for these chunks."""
        for key in keys:
            self._young.pop(key, None)
            self._old.pop(key, None)

    def clear(self) -> None:
        """Forget all answers."""
        self._young.clear()
        self._old.clear()

    def _last(self, keys: Sequence[OffloadKey]) -> Iterator[tuple[bool, float] | None]:
        return map(self._young.get, keys, map(self._old.get, keys))


_KEEP_LONG = 0.95
"""Weight that the long-run share of chunks found keeps with each new look-up."""
_KEEP_LATEST = 0.5
"""Weight that the latest share of chunks found keeps with each new look-up."""


class LookUpGain:
    """Predicts which part of what a tier is asked for it has.

    Most prompts may be new: then a request that asks an object store waits for nothing, even if that is faster than computing.
    Both the average of many look-ups and that of the latest few count, whichever is more: a store in which one prompt in twenty
    is found may be worth asking, and one that others have just filled is soon asked again.
    """

    def __init__(self) -> None:
        self._long = self._latest = 1.0

    @property
    def expected(self) -> float:
        """The part of the chunks asked for, from 0 to 1, that is expected to be found; 1 before anything is known."""
        return max(self._long, self._latest)

    def note(self, part: float) -> None:
        """Add a look-up in which this part of the chunks asked for was found."""
        self._long += (1 - _KEEP_LONG) * (part - self._long)
        self._latest += (1 - _KEEP_LATEST) * (part - self._latest)


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
MAX_ANSWER_AGE_S = 10.0
"""Seconds for which an answer of the tier counts: it may evict chunks, and other engines may write to it."""
REMEASURE_S = 30.0
"""Seconds after which the pace of a tier is forgotten, so that a tier that was too slow is tried again."""
SLOW_WEIGHT = 0.25
"""The least that a slower measurement than expected counts; see ``Pace``. A busy machine must not look like a slow tier."""
MAX_ANNOUNCED = 2**18
"""Maximum number of a tier's chunks that KV events announce at the same time, even if it can hold more."""
MAX_KNOWN = 2**21
"""Maximum number of chunks of a tier of which all are known, at some 150 bytes each. One that holds more is asked."""
_READING = (Access.LOOK_UP, Access.LOAD)
_GROWTH = 4
"""A look-up that has found n chunks asks for this many times n next; see ``TierState.num_to_ask``."""


class TierState:
    """What is known of one tier: its contents, its health, its pace.

    Args:
        options: how it is to be used.
        host_capacity: slots of host memory.
        clock: monotonic time in seconds.
        config: options that all tiers have in common.
        is_in_flight: returns whether a job is in flight that shows whether an access works.

    Attributes:
        options: as given.
        name: the tier's name for users.
        lookup_cache: the tier's remembered answers.
        health: its health, as the workers report it; the worst counts.
        pace: how long fetching chunks takes.
        look_up_pace: how long it takes to ask a tier without an index which chunks it has.
        look_up_gain: how many of the chunks that requests ask it for it has.
        stats: counters since they were last taken.
        events: what was found of its chunks since the last ``take_events``; ``None`` without a listener.
        probing: chunks in probes that it has not answered.
        knows_all: whether all chunks that the tier has are known, so that it need not be asked. It tells what it loses; a chunk
            that it turns out not to have is a miss.
        list_failed: whether a part of the list of its chunks could not be read: what earlier engines have left there may be
            known only in part, and announced only in part.
    """

    def __init__(
        self,
        options: TierOptions,
        host_capacity: int,
        clock: Clock,
        config: TieringConfig,
        is_in_flight: Callable[[Access], bool] = lambda _: False,
    ) -> None:
        self.options, self.name = options, options.name
        self.health = HEALTHY
        self._healths: dict[int, TierHealth] = {}
        self._is_in_flight = is_in_flight
        self._clock = clock
        # Since when it is not healthy, and when what is suspended is tried again.
        self._ill_since: float | None = None
        self._retry_at: float | None = None
        num_answers = min(MAX_ANSWERS, max(MIN_ANSWERS, ANSWERS_PER_SLOT * host_capacity))
        self.lookup_cache = LookupCache(num_answers, MAX_ANSWER_AGE_S, clock)
        self.pace = Pace(clock, REMEASURE_S, SLOW_WEIGHT)
        self.look_up_pace = Pace(clock, REMEASURE_S, SLOW_WEIGHT)
        self.look_up_gain = LookUpGain()
        self.probing: set[OffloadKey] = set()
        self.knows_all = False
        self.list_failed = False
        self._held: set[OffloadKey] = set()
        self._asks_always = False
        self.stats = Tally()
        self.events: list[TierEvent] | None = [] if config.record_events else None

    @property
    def is_off(self) -> bool:
        """Whether it is off for good: it gets no jobs any more."""
        return self.health.is_off

    @property
    def trouble(self) -> str:
        """Why requests find nothing in the tier, in one line; empty if they do, or a trial is on."""
        if self.health is HEALTHY:
            return ""
        if self.is_off:
            return f"tier {self.name} is off, because a worker can no longer use it"
        suspended = [access.value for access in _READING if self.health.of(access) is BreakerState.OPEN]
        return f"tier {self.name}: {' and '.join(suspended)} are suspended: {self.health.reason}" if suspended else ""

    def outage(self) -> Outage | None:
        """Return which ways of access are out of use, those that are being tried again among them; ``None`` if all work."""
        if self._ill_since is None:
            return None
        if self.is_off:
            reason = "a worker can no longer use it, and logged why"
            return Outage(self.name, "everything", reason, self._ill_since)
        accesses = [access.value for access in Access if self.health.of(access) is not BreakerState.CLOSED]
        return Outage(self.name, " and ".join(accesses), self.health.reason, self._ill_since, self._retry_at)

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
        return self.health is not HEALTHY and self.health.of(access) is BreakerState.HALF_OPEN

    def takes(self, kind: JobKind) -> bool:
        """Whether a job may be handed out now. Those that show nothing are no trials."""
        if kind in SHOW_NOTHING:
            return not self.is_off and self.health.of(ACCESS_OF[kind]) is BreakerState.CLOSED
        return self._admits(ACCESS_OF[kind])

    def note_health(self, worker: int, health: TierHealth) -> None:
        """Learn what a worker says of the tier's health."""
        was_off = self.is_off
        self._healths[worker] = health
        worst = reduce(TierHealth.worse, self._healths.values())
        self.health = HEALTHY if worst == HEALTHY else worst
        self._note_outage(health)
        if self.is_off and not was_off:
            self.stats[metrics.OTHER.of(f"{self.name}_off")] += 1
            logger.error(
                "tier %s is off: a worker can no longer use it, and logged why; restart the engine to use it again",
                self.name,
            )
            self.clear()
        elif not self.can_be_relied_on:
            # Its chunks can't be loaded now. Those still there when the tier is back are announced again when found.
            self._note_events(AllChunksRemoved())

    def retire(self) -> None:
        """Be off for good, because the connector has turned lower tiers off."""
        self.health = replace(self.health, is_off=True)
        self._note_outage(self.health)
        self.clear()

    def _note_outage(self, news: TierHealth) -> None:
        now = self._clock()
        if self.health == HEALTHY:
            self._ill_since = self._retry_at = None
        else:
            self._ill_since = now if self._ill_since is None else self._ill_since
            self._retry_at = now + news.retry_s if news.retry_s else self._retry_at

    def _admits(self, access: Access) -> bool:
        """Whether a job may be handed out that shows whether this access works: one at a time while it is half-open."""
        if self.health is HEALTHY:
            return True
        state = self.health.of(access)
        is_in_turn = state is BreakerState.HALF_OPEN and not self._is_in_flight(access)
        return not self.is_off and (state is BreakerState.CLOSED or is_in_turn)

    @property
    def can_be_relied_on(self) -> bool:
        """Whether look-ups and loads work, as far as is known."""
        is_open = self.health is HEALTHY or all(self.health.of(access) is BreakerState.CLOSED for access in _READING)
        return is_open and not self.is_off

    @property
    def ranks(self) -> bool:
        """Whether it evicts by itself, and takes what hints ask."""
        return self.options.has_index and not self.options.is_read_only and not self.is_off

    @property
    def may_know_all(self) -> bool:
        """Whether all of its chunks can be known, once they are listed: it tells what it loses, and they are not too many."""
        return self.options.is_listed and not self._asks_always

    def parts(self, keys: Sequence[OffloadKey]) -> list[Sequence[OffloadKey]]:
        """Split keys into parts of as many as the tier's workers take in one job."""
        size = self.options.max_asked_chunks
        return [keys[first : first + size] for first in range(0, len(keys), size)]

    def num_to_ask(self, num_chunks: int, num_found: int, within_s: float = float("inf")) -> int:
        """Return how many of ``num_chunks`` to ask for now in a look-up that has found ``num_found`` here before.

        Where each chunk that is asked for has its price, the first few are asked for first: most prompts are new, and what is
        after an absent chunk is of no use. If they are there, four times as many follow; but no more than it is expected to
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
        """Note how long a probe took and, if its look-up ends with it, what part of what that wanted is there."""
        self.look_up_pace.note(len(task.keys), took_s)
        goes_on = task.num_after > 0 and task.num_found == len(task.keys)
        if not goes_on:
            num_wanted = task.num_before + len(task.keys) + task.num_after
            self.look_up_gain.note((task.num_before + task.num_found) / num_wanted)

    def lookup(self, keys: Sequence[OffloadKey], *, is_skipped: bool = False) -> bytes:
        """Return one byte per chunk: ``READY``, ``ABSENT``, ``NOT_YET`` if the tier is being asked, or ``UNKNOWN``.

        With ``is_skipped``, it has nothing but what it is known to have.
        """
        states = bytes(map(_STATES.__getitem__, self.known(keys)))
        if self.knows_all:
            return states
        if is_skipped:
            return states.translate(_UNKNOWN_IS_ABSENT)
        return mark(states, keys, self.probing, NOT_YET)

    def known(self, keys: Sequence[OffloadKey]) -> Sequence[bool | None]:
        """Return whether each chunk is there; ``None`` if the tier must be asked."""
        return list(map(self._held.__contains__, keys)) if self.knows_all else self.lookup_cache.get(keys)

    def last_known(self, keys: Sequence[OffloadKey]) -> Sequence[bool | None]:
        """Return whether each chunk was there when it was last reported, however old that is; ``None`` if it never was."""
        return list(map(self._held.__contains__, keys)) if self.knows_all else self.lookup_cache.last(keys)

    def had_none_of(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether the tier had none of these chunks when they were last reported: so it is with all that is new."""
        return self._held.isdisjoint(keys) if self.knows_all else True not in self.lookup_cache.last(keys)

    def hold(self, keys: Sequence[OffloadKey], are_there: Sequence[bool]) -> None:
        """Note which chunks the tier has, if all are to be known."""
        if not self.may_know_all:
            return
        self._held.difference_update(keys)
        self._held.update(compress(keys, are_there))
        if len(self._held) > MAX_KNOWN:
            self.ask_always()
            logger.info("tier %s holds more than %d chunks: from now on it is asked which", self.name, MAX_KNOWN)

    def ask_always(self) -> None:
        """Forget which chunks the tier has, and ask it from now on: they are too many, or their names do not tell all."""
        self._held, self.knows_all, self._asks_always = set(), False, True

    def note_presence(self, keys: Sequence[OffloadKey], are_there: Sequence[bool]) -> None:
        """Remember, and announce, whether the tier has these chunks."""
        if not (self.knows_all and all(are_there)):
            self.lookup_cache.note(keys, are_there)
        self.announce(keys, are_there)

    def take_events(self) -> list[TierEvent]:
        """Return the events since the last call, in order: chunks that the tier was found to have, or not to have.

        A chunk may be found, or found absent, several times in a row.
        """
        events = self.events or []
        if events:
            self.events = []
        return events

    def note_took(self, kind: JobKind, seconds: float) -> None:
        """Count how long a job took that was carried out, from when it was handed out until all workers had reported it."""
        if kind in _TIMES:
            _TIMES[kind].of(self.name).note(seconds, self.stats)

    def clear(self, *, is_empty: bool = False) -> None:
        """Forget what the tier holds, because it is off, or has lost everything or its list of losses.

        After a reset it ``is_empty``: what it has under the names before is not asked for.
        """
        self.lookup_cache.clear()
        self._held.clear()
        self.knows_all = is_empty and self.may_know_all
        self._note_events(AllChunksRemoved())

    def note_lost(self, keys: Sequence[OffloadKey]) -> None:
        """Note that chunks which the tier may have had are not there any more."""
        known = [key for key, was_there in zip(keys, self.last_known(keys), strict=True) if was_there]
        self.lookup_cache.note(known, [False] * len(known))
        self._held.difference_update(keys)
        self._note_events(ChunksRemoved(tuple(keys)))

    def announce(self, keys: Sequence[OffloadKey], are_there: Sequence[bool]) -> None:
        """Note, and record for events, which chunks the tier was found to have, and which not to have."""
        self.hold(keys, are_there)
        # While loads are suspended, chunks may still be written, but could not be loaded. They are announced when found.
        if self.events is None or not self.can_be_relied_on:
            return
        there = tuple(compress(keys, are_there))
        absent = tuple(key for key, is_there in zip(keys, are_there, strict=True) if not is_there)
        self._note_events(ChunksStored(there), ChunksRemoved(absent))

    def announce_found(self, found: tuple[Found, ...]) -> None:
        """Record that the tier has chunks that were not asked for."""
        if found and self.can_be_relied_on:
            self._note_events(ChunksFound(found))

    def _note_events(self, *events: TierEvent) -> None:
        if self.events is not None:
            self.events += events


def parents_in(keys: Sequence[OffloadKey]) -> dict[OffloadKey, OffloadKey | None]:
    """Return the chunk before each chunk of a prefix; ``None`` for the first."""
    return dict(zip(keys, (None, *keys), strict=False))


def mark(states: bytes, keys: Sequence[OffloadKey], marked: AbstractSet[OffloadKey], state: int) -> bytes:
    """Return ``states`` with ``state`` in place of the states of chunks that are in ``marked``."""
    if marked.isdisjoint(keys):
        return states
    return bytes(state if key in marked else before for key, before in zip(keys, states, strict=True))
