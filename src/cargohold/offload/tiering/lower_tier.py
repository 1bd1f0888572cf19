"""One tier below host memory, as the scheduler side sees it."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from cargohold.blocks import ABSENT, NOT_YET, READY
from cargohold.offload.manager.base import ChunksRemoved, ChunksStored, ManagerEvent, OffloadKey
from cargohold.offload.tier.breaker import BreakerConfig, BreakerState, CircuitBreaker
from cargohold.offload.tier.config import Admission, WriteMode
from cargohold.offload.tier.jobs import JobKind, reaches_medium
from cargohold.offload.tiering.allowance import Allowance
from cargohold.offload.tiering.backlog import Backlog
from cargohold.offload.tiering.commands import TieringConfig, TierOptions
from cargohold.offload.tiering.pace import Pace
from cargohold.offload.tiering.presence import Presence
from cargohold.offload.tiering.task import TierTask
from cargohold.protocol import Clock

logger = logging.getLogger(__name__)

UNKNOWN = 3
"""Nobody has asked the tier yet: ``LowerTiers.probe`` does. A state beside ``ABSENT``, ``READY`` and ``NOT_YET``."""
_STATES = {True: READY, False: ABSENT, None: UNKNOWN}
ANSWERS_PER_SLOT = 4
"""Answers remembered, and chunks known to have been seen once, per slot of host memory; but no more than is good for it."""
MAX_ANSWERS = 2**18
MAX_ANNOUNCED = 2**18
"""Chunks of a tier that are announced at the same time, where anyone listens; those heard of longest ago are taken back."""
MAX_ANSWER_AGE_S = 10.0
REMEASURE_S = 30.0
"""A tier that was too slow is tried again after this time."""


class LowerTier:
    """What is known of a tier, whether it works, how fast it is, and what waits to be written to it.

    Args:
        options: how it is to be used.
        host_capacity: slots of host memory.
        clock: monotonic time in seconds.
        config: what it has in common with other tiers.

    Attributes:
        stats: counters since they were last taken.
        probing: chunks it was asked for and has not answered.
        touching: chunks of whose use it is being told.
        num_writing: chunks that are being written to it.
        is_off: nothing is asked of it any more.
    """

    def __init__(self, options: TierOptions, host_capacity: int, clock: Clock, config: TieringConfig) -> None:
        self.options = options
        self.presence = Presence(min(MAX_ANSWERS, ANSWERS_PER_SLOT * host_capacity + 1024), MAX_ANSWER_AGE_S, clock)
        self.breaker = CircuitBreaker(clock, BreakerConfig())
        self.pace = Pace(clock, REMEASURE_S)
        self.backlog = Backlog(host_capacity)
        self.probing: set[OffloadKey] = set()
        self.touching: set[OffloadKey] = set()
        self.num_writing = 0
        self.is_off = False
        self.stats: Counter[str] = Counter()
        self._max_writing = max(1, min(options.max_inflight_chunks, host_capacity // 4))
        daily = options.max_daily_chunks
        self._allowance = None if daily is None else Allowance(daily, clock)
        self._max_dirty = host_capacity * 3 // 4
        # Which job writes each chunk, under the name that it has now.
        self._writing: dict[OffloadKey, TierTask] = {}
        # Chunks used once, for admission; oldest first.
        self._seen: OrderedDict[OffloadKey, None] = OrderedDict()
        self._max_seen = min(MAX_ANSWERS, ANSWERS_PER_SLOT * host_capacity)
        # Chunks whose presence was announced, where anyone listens; those heard of last are last.
        self._announced: OrderedDict[OffloadKey, None] | None = OrderedDict() if config.record_events else None
        self._events: list[ManagerEvent] = []

    @property
    def name(self) -> str:
        """What users call it."""
        return self.options.name

    @property
    def is_usable(self) -> bool:
        """Whether it takes jobs: not while it is left alone because it kept failing, or one job is finding out."""
        return not self.is_off and self.breaker.would_admit()

    def parts(self, keys: Sequence[OffloadKey]) -> list[Sequence[OffloadKey]]:
        """The keys, as many at a time as the tier's workers take."""
        size = self.options.max_asked_chunks
        return [keys[first : first + size] for first in range(0, len(keys), size)]

    def is_tried_by(self, kind: JobKind) -> bool:
        """Whether a job shows that the medium lives."""
        return reaches_medium(kind, has_index=self.options.has_index)

    def lookup(self, keys: Sequence[OffloadKey]) -> bytes:
        """One byte per key: ``READY``, ``ABSENT``, ``NOT_YET`` if the tier is being asked, or ``UNKNOWN``."""
        states = bytes(map(_STATES.__getitem__, self.presence.get(keys)))
        return mark(states, keys, self.probing, NOT_YET)

    def wanted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Chunks that would have to be written. Where one was, it is taken to be still: others look after that."""
        if self.is_off:
            return []
        known = zip(keys, self.presence.last(keys), strict=True)
        return [key for key, is_there in known if is_there is not True and key not in self._writing]

    def is_asked_for(self, key: OffloadKey) -> bool:
        """Whether a chunk is about to be written, or the tier to say whether it has it."""
        return key in self.probing or key in self._writing or key in self.backlog

    def note_stored(self, keys: Sequence[OffloadKey], parents: Mapping[OffloadKey, OffloadKey | None]) -> None:
        """Host memory has new chunks."""
        if self.options.admission is Admission.REUSED:
            keys = [key for key in keys if self._was_seen(key)]
        self.backlog.add(self.wanted(keys), parents)

    def note_used(self, keys: Sequence[OffloadKey], states: bytes) -> None:
        """A request uses these chunks, in prefix order; ``states`` says which of them host memory has."""
        if self.options.write_mode is WriteMode.BACK:
            self.backlog.postpone(keys)
        if self.options.admission is Admission.REUSED:
            ready = [key for key, state in zip(keys, states, strict=True) if state == READY]
            self.backlog.add(self.wanted(ready), dict(zip(keys, (None, *keys), strict=False)))

    @property
    def num_writable(self) -> int:
        """Chunks that are to be handed out for writing now."""
        num_waiting = len(self.backlog)
        if self.options.write_mode is WriteMode.BACK:
            # The rest of host memory can be evicted without loss.
            num_waiting -= self._max_dirty
        limit = self._max_writing - self.num_writing
        if self._allowance is not None:
            limit = min(limit, self._allowance.available)
        return max(0, min(num_waiting, limit))

    def note_presence(self, keys: Sequence[OffloadKey], are_there: Sequence[bool]) -> None:
        """The tier has said whether it has these chunks."""
        self.presence.note(keys, are_there)
        self._announce_presence(keys, are_there)

    def note_touched(self, keys: Sequence[OffloadKey], are_there: Sequence[bool]) -> None:
        """It was told of the use of these chunks, and has said which it has.

        Those that are gone stay what they were, to be looked for and written again in their time: at once would wear a disk
        that is smaller than what is in use.
        """
        there = [key for key, is_there in zip(keys, are_there, strict=True) if is_there]
        self.presence.note(there, [True] * len(there))
        self._announce_presence(keys, are_there)

    def take_events(self) -> list[ManagerEvent]:
        """What became known of the tier's contents since the last call, in order."""
        events, self._events = self._events, []
        return events

    def begin_writing(self, task: TierTask) -> None:
        """A job's chunks are being written."""
        if self._allowance is not None:
            self._allowance.spend(len(task.keys))
        self._writing.update(dict.fromkeys(task.keys, task))
        self.num_writing += len(task.keys)

    def end_writing(self, task: TierTask, succeeded: Sequence[bool]) -> None:
        """They are not being written any more; which of them were."""
        for key in task.keys:
            if self._writing.get(key) is task:
                del self._writing[key]
        self.num_writing -= len(task.keys)
        self.stats["stored_chunks"] += sum(succeeded)
        self.stats["not_stored_chunks"] += len(succeeded) - sum(succeeded)

    def turn_off(self) -> None:
        """A worker will not use it any more."""
        if not self.is_off:
            self.is_off = True
            self.stats["off"] += 1
            logger.error(
                "tier %s is off: a worker can no longer use it, and logged why; restart the engine to use it again",
                self.name,
            )
            self.clear()

    def blame(self, reason: str) -> None:
        """A job failed, or did not end in time."""
        self.stats["failures"] += 1
        if self.is_off:
            return
        was_trial = self.breaker.state is BreakerState.HALF_OPEN
        if self.breaker.note_failure():
            # Workers say of every trial why it failed.
            level = logging.INFO if was_trial else logging.WARNING
            logger.log(level, "tier %s is not asked for a while: %s", self.name, reason)
            # Nobody can load it now. What is still there when the tier is back is announced again when it is found.
            self._withdraw()

    def clear(self) -> None:
        """What the tier holds must not be found any more, and nothing waits to be written: host memory was emptied, say."""
        self.presence.clear()
        self.backlog.clear()
        # What is being written gets a name that nobody uses any more: new chunks must not be taken for it.
        self._writing.clear()
        self._seen.clear()
        self._withdraw()

    def _withdraw(self) -> None:
        """Nothing of what was announced can be found any more."""
        if self._announced:
            self._events.append(ChunksRemoved(tuple(self._announced)))
            self._announced.clear()

    def _announce_presence(self, keys: Sequence[OffloadKey], are_there: Sequence[bool]) -> None:
        announced = self._announced
        if announced is None or self.is_off:
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
        # It evicts by itself, and need not say so.
        forgotten = [announced.popitem(last=False)[0] for _ in range(len(announced) - MAX_ANNOUNCED)]
        if stored:
            self._events.append(ChunksStored(tuple(stored)))
        if removed or forgotten:
            self._events.append(ChunksRemoved((*removed, *forgotten)))

    def _was_seen(self, key: OffloadKey) -> bool:
        """Whether a chunk comes for the second time; it is remembered."""
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)
        return False


def mark(states: bytes, keys: Sequence[OffloadKey], marked: AbstractSet[OffloadKey], state: int) -> bytes:
    """The states of chunks, but another one where they are among those marked."""
    if marked.isdisjoint(keys):
        return states
    return bytes(state if key in marked else before for key, before in zip(keys, states, strict=True))
