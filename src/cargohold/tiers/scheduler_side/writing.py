"""What is written to lower tiers, and how chunks that host memory gives back are kept there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final

from cargohold.blocks import READY
from cargohold.cache.manager import LoadHandle, OffloadKey, OffloadManager
from cargohold.protocol import Clock
from cargohold.tiers.config import Admission, WriteMode
from cargohold.tiers.health import BreakerState
from cargohold.tiers.port import Access, JobKind
from cargohold.tiers.scheduler_side.fetches import BATCH_CHUNKS
from cargohold.tiers.scheduler_side.tasks import TaskTable, TierTask
from cargohold.tiers.scheduler_side.tier_state import ANSWERS_PER_SLOT, MAX_ANSWERS, TierState, parents_in

LOOK_AFTER_S: Final = 600.0
"""A tier that has said nothing of a chunk in use for so many seconds is asked for it; it is written again if it is gone."""
TOUCH_S: Final = 10.0
"""Tiers with an index are told of the use of each chunk once in this many seconds."""
DAY_S: Final = 86_400.0
BURST_S: Final = 3600.0
"""Unused allowance is saved up for at most this many seconds, so a day may exceed its share by a twenty-fourth."""
START_S: Final = 60.0
"""A start is given what accrues in this many seconds.

What an earlier process wrote is not known. If it were an hour's allowance, an engine that is started again and again would
write many times the limit.
"""
MAX_LOOKS: Final = 4096
"""Maximum number of chunks looked at for one batch: while writes are suspended, all that wait may leave host memory."""


class Backlog:
    """Chunks in host memory that are to be written to a tier, in the order of writing.

    Only keys are kept. A chunk that leaves host memory before its turn comes is passed over.

    Args:
        limit: maximum number of chunks; beyond it, those at the front are dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parents: dict[OffloadKey, OffloadKey | None] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._parents

    def add(self, keys: Sequence[OffloadKey], parents: Mapping[OffloadKey, OffloadKey | None]) -> None:
        """Append chunks that do not wait already; ``parents`` has the chunk before each in its prefix, or ``None``."""
        self._parents.update(zip(keys, map(parents.__getitem__, keys), strict=True))
        if len(self._parents) > self._limit:
            self._take_first(len(self._parents) - self._limit)

    def postpone(self, keys: Iterable[OffloadKey]) -> None:
        """Move waiting chunks of ``keys``, which were just used, to the end: the last of the prefix in front of the first."""
        for key in reversed(list(keys)):
            if key in self._parents:
                self._parents[key] = self._parents.pop(key)

    def take(
        self, limit: int, ready: Callable[[Sequence[OffloadKey]], Sequence[OffloadKey]]
    ) -> dict[OffloadKey, OffloadKey | None]:
        """Take out the chunks whose turn it is, at most ``limit``, of any prefixes.

        While many requests generate, each step completes a chunk of some of them: a job for each would cost more than the
        chunk itself.

        Args:
            limit: maximum number of chunks, at least 1.
            ready: returns those of the given chunks that are to be written and still in host memory, in their order.

        Returns:
            The chunks in the order of writing, each with the chunk before it in its prefix; none if nothing waits, or none of
            the first ``MAX_LOOKS`` chunks is ready. Chunks that are not ready are taken out, too.
        """
        parents: dict[OffloadKey, OffloadKey | None] = {}
        num_looks = min(len(self._parents), MAX_LOOKS)
        while num_looks and len(parents) < limit:
            num_next = min(num_looks, limit - len(parents))
            num_looks -= num_next
            looked_at = self._take_first(num_next)
            keys = ready(list(looked_at))
            parents.update(looked_at if len(keys) == num_next else {key: looked_at[key] for key in keys})
        return parents

    def clear(self) -> None:
        """Drop all waiting chunks."""
        self._parents.clear()

    def _take_first(self, count: int) -> dict[OffloadKey, OffloadKey | None]:
        # Many at once: a dict steps over what was removed in front of the first one each time that it looks for that.
        first = dict(islice(self._parents.items(), count))
        for key in first:
            del self._parents[key]
        return first


class Allowance:
    """An allowance of chunks that accrues evenly over the day, and can be saved up for an hour.

    At least one chunk can be saved up, and is given at the start, however small the allowance is.

    Args:
        per_day: chunks per day.
        clock: monotonic time in seconds.
    """

    def __init__(self, per_day: int, clock: Clock) -> None:
        self._per_s = per_day / DAY_S
        self._limit = max(1.0, self._per_s * BURST_S)
        self._clock = clock
        self._saved = max(1.0, self._per_s * START_S)
        self._counted_at = clock()

    @property
    def available(self) -> int:
        """Number of chunks that may be written now."""
        now = self._clock()
        self._saved = min(self._limit, self._saved + (now - self._counted_at) * self._per_s)
        self._counted_at = now
        return int(self._saved)

    def spend(self, num_chunks: int) -> None:
        """Take ``num_chunks`` chunks, which are being written, off the allowance."""
        self._saved -= num_chunks


class Writes:
    """The chunks that are written to one tier, and how it is kept up.

    Args:
        at: index of the tier.
        tier: what is known of it; mutated.
        host: the manager of host memory; chunks are pinned there while they are written.
        tasks: the table that jobs are added to.
        clock: monotonic time in seconds.

    Attributes:
        tier: as given.
        backlog: chunks that wait to be written.
        promised: chunks that wait to be written before all others, because another engine was promised them.
        num_writing: number of chunks that are being written.
        touching: chunks that the tier is being asked for and told of.
    """

    def __init__(self, at: int, tier: TierState, host: OffloadManager, tasks: TaskTable, clock: Clock) -> None:
        self._at = at
        self.tier = tier
        self._options = tier.options
        self._host = host
        self._tasks = tasks
        self.backlog = Backlog(host.capacity)
        self.promised = Backlog(host.capacity)
        self.num_writing = 0
        self.touching: set[OffloadKey] = set()
        self._max_writing = max(1, min(tier.options.max_inflight_chunks, host.capacity // 4))
        daily = tier.options.max_daily_chunks
        self._allowance = None if daily is None else Allowance(daily, clock)
        self._max_dirty = host.capacity * 3 // 4
        # Chunks that are being written under their current names. A reset makes a new set: jobs that began before empty theirs.
        self._writing: set[OffloadKey] = set()
        # Chunks used once, for ``Admission.REUSED``; oldest first.
        self._seen: OrderedDict[OffloadKey, None] = OrderedDict()
        self._max_seen = min(MAX_ANSWERS, ANSWERS_PER_SLOT * host.capacity)

    # --- what is to be written ----------------------------------------------------------------------------------------

    def note_new(self, keys: Sequence[OffloadKey], parents: Mapping[OffloadKey, OffloadKey | None]) -> None:
        """Learn that host memory has new chunks; add those that the tier is to get to the backlog."""
        if self._options.admission is Admission.REUSED:
            keys = [key for key in keys if self._was_seen(key)]
        self.backlog.add(self._wanted(keys), parents)

    def note_used(self, keys: Sequence[OffloadKey], ready: Sequence[OffloadKey]) -> None:
        """Learn that a request uses ``keys``, in prefix order, of which host memory has ``ready``."""
        if self._options.write_mode is WriteMode.BACK:
            self.backlog.postpone(keys)
        if not ready:
            return  # a new prompt
        if self._options.admission is Admission.REUSED:
            self.backlog.add(self._wanted(ready), parents_in(keys))
        if self.tier.is_readable:
            self._touch(ready, keys)

    def clear(self) -> None:
        """Forget what is to be written, for a reset or because the tier is off."""
        self.backlog.clear()
        self.promised.clear()
        self._writing = set()
        self._seen.clear()

    def _wanted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks that would have to be written.

        A chunk that the tier had at its last answer, however old, is taken to be there still: ``_touch`` checks that.
        """
        if self.tier.is_off or self._options.is_read_only:
            return []
        writing = self._writing
        if self.tier.had_none_of(keys) and writing.isdisjoint(keys):  # nearly always
            return list(keys)
        answers = zip(keys, self.tier.last_known(keys), strict=True)
        return [key for key, is_there in answers if is_there is not True and key not in writing]

    def _was_seen(self, key: OffloadKey) -> bool:
        """Whether a chunk was seen before; remember it."""
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)
        return False

    # --- writing ------------------------------------------------------------------------------------------------------

    @property
    def num_writable(self) -> int:
        """Number of chunks to hand out for writing now, promised ones first."""
        num_waiting = len(self.backlog)
        if self._options.write_mode is WriteMode.BACK:
            # So many may wait: the rest of host memory can be evicted without loss.
            num_waiting = max(0, num_waiting - self._max_dirty)
        num_waiting += len(self.promised)
        limit = self._max_writing - self.num_writing
        if self._allowance is not None:
            limit = min(limit, self._allowance.available)
        return max(0, min(num_waiting, limit))

    def take(self) -> Iterator[TierTask]:
        """Yield jobs, to be handed out at once, that write as many chunks of the backlog as may be in flight; pin them."""
        while (room := self.num_writable) and self.tier.is_writable:
            backlog, writable = (self.promised, self._promised) if self.promised else (self.backlog, self._writable)
            parents = backlog.take(min(room, BATCH_CHUNKS), writable)
            if not parents:
                break
            keys = tuple(parents)
            pins = self._host.prepare_load(keys)
            on_end = partial(self._end_write, pins, self._writing)
            task = TierTask(JobKind.STORE, self._at, keys, on_end, tuple(parents.values()), pins.slots)
            if self._allowance is not None:
                self._allowance.spend(len(keys))
            self._writing.update(keys)
            self.num_writing += len(keys)
            yield task

    def _writable(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks that the tier is to get and host memory has."""
        wanted = self._wanted(keys)
        states = self._host.lookup(wanted)
        if states.count(READY) == len(wanted):
            return wanted
        return [key for key, state in zip(wanted, states, strict=True) if state == READY]

    def _promised(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the promised chunks that host memory has, but for those that are being written.

        One that is there already is written again, because what was known of it is old.
        """
        states = zip(keys, self._host.lookup(keys), strict=True)
        return [key for key, state in states if state == READY and not self.is_to_write(key)]

    def is_to_write(self, key: OffloadKey) -> bool:
        """Whether a promised chunk waits to be written, or is being written."""
        return key in self.promised or key in self._writing

    def will_take(self, keys: Sequence[OffloadKey]) -> Iterator[OffloadKey]:
        """Yield the promised chunks among ``keys`` that will be written here, unless something fails.

        Those that are being written, and as many more, in this order, as the daily allowance lasts for; none of these if
        writes are suspended.
        """
        waiting = [key for key in keys if key not in self._writing]
        num_left = len(waiting) if self.tier.health.of(Access.WRITE) is not BreakerState.OPEN else 0
        if self._allowance is not None:
            num_others = len(self.promised) - sum(key in self.promised for key in waiting)
            num_left = min(num_left, max(0, self._allowance.available - num_others))
        taken = frozenset(waiting[:num_left])
        return (key for key in keys if key in self._writing or key in taken)

    def _end_write(
        self,
        pins: LoadHandle,
        writing: set[OffloadKey],
        task: TierTask,
        succeeded: Sequence[bool],
        is_done: bool,
    ) -> None:
        pins.release()
        writing.difference_update(task.keys)
        self.num_writing -= len(task.keys)
        num_stored = sum(succeeded)
        self.tier.stats["stored_chunks"] += num_stored
        self.tier.stats["not_stored_chunks"] += len(succeeded) - num_stored
        if is_done and not task.is_cancelled:  # after a reset, names are others
            self.tier.note_presence(task.keys, succeeded)

    def is_busy_with(self, key: OffloadKey) -> bool:
        """Whether the tier is being asked for a chunk or told of it, or the chunk is being written or waits to be."""
        return any(key in chunks for chunks in (self.touching, self.tier.probing, self._writing, self.backlog))

    # --- upkeep -------------------------------------------------------------------------------------------------------

    def _touch(self, ready: Sequence[OffloadKey], keys: Sequence[OffloadKey]) -> None:
        """Tell the tier of the use of chunks that host memory gives back, and ask whether it has them still.

        A tier sees nothing of their use otherwise, and would evict them. It is told of all that it is thought to have: if
        only of some, the start of a prefix might count as used before its end, and be evicted first. For the same reason, of
        several jobs the end of a prefix goes first. Where each chunk has its price, a few are asked for with each use: nobody
        waits for the answers, and requests that wait for others should not stand behind thousands of these.
        """
        presence, options = self.tier.presence, self._options
        idle = ready
        for busy in (self.touching, self.tier.probing, self._writing, self.backlog):
            if busy:  # seldom; a prompt has thousands of chunks
                idle = [key for key in idle if key not in busy]
        told = presence.not_heard_of(idle, LOOK_AFTER_S) if options.write_mode is WriteMode.THROUGH else []
        if options.num_asked_at_once is not None:
            told = [] if self.touching else told[: options.num_asked_at_once]
        elif options.has_index:
            known = [key for key, is_there in zip(idle, self.tier.last_known(idle), strict=True) if is_there]
            if presence.not_heard_of(known, TOUCH_S):
                also = {*known, *told}
                told = [key for key in idle if key in also]
        if not told:
            return
        self.touching.update(told)
        parents = parents_in(keys)
        for part in reversed(self.tier.parts(told)):
            task = TierTask(JobKind.TOUCH, self._at, part, self._end_touch, [parents[key] for key in part])
            self._tasks.want(task)

    def _end_touch(self, task: TierTask, succeeded: Sequence[bool], is_done: bool) -> None:
        """Note which chunks the tier has. Write again those that it has not had for long.

        To write them at once would wear a disk that is smaller than the set of chunks in use.
        """
        self.touching.difference_update(task.keys)
        if task.is_cancelled or not is_done:
            return
        tier, presence = self.tier, self.tier.presence
        there = [key for key, is_there in zip(task.keys, succeeded, strict=True) if is_there]
        presence.note(there, [True] * len(there))
        tier.announce(task.keys, succeeded)
        if self._options.write_mode is WriteMode.THROUGH:
            gone = presence.not_heard_of(task.keys, LOOK_AFTER_S)
            presence.note(gone, [False] * len(gone))
            self.note_new(gone, dict(zip(task.keys, task.parents, strict=True)))
