"""What is written to lower tiers, and how chunks that host memory gives back are kept there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import compress, islice
from typing import Final

from cargohold.blocks import READY
from cargohold.cache.manager import ChunkPins, OffloadKey, OffloadManager, split_key
from cargohold.protocol import Clock, metrics
from cargohold.tiers.config import Admission, WriteMode
from cargohold.tiers.health import BreakerState
from cargohold.tiers.port import Access, JobKind
from cargohold.tiers.scheduler_side.fetches import BATCH_CHUNKS
from cargohold.tiers.scheduler_side.tasks import TaskTable, TierTask
from cargohold.tiers.scheduler_side.tier_state import ANSWERS_PER_SLOT, MAX_ANSWERS, TierState, parents_in

DAY_S: Final = 86_400.0
BURST_S: Final = 3600.0
"""Unused allowance is saved up for at most this many seconds, so a day may exceed its share by a twenty-fourth."""
START_S: Final = 60.0
"""A start is given what accrues in this many seconds.

What an earlier process wrote is not known. If it were an hour's allowance, an engine that is started again and again would
write many times the limit.
"""
MAX_TRIES: Final = 12
"""A chunk that a tier does not take for now is offered to it so many times, and after that when it is used."""
RETRY_S: Final = 0.1
"""Seconds after which it is offered again; each further time, twice as many."""
MAX_RETRY_S: Final = 10.0
MAX_LOOKS: Final = 4096
"""Maximum number of chunks looked at for one batch: while writes are suspended, all that wait may leave host memory."""
LOOK_AFTER_S: Final = 600.0
"""A tier that has said nothing of a chunk in use for so many seconds is asked for it; it is written again if it is gone."""
TOUCH_S: Final = 10.0
"""Tiers with an index are notified of the use of each chunk once in this many seconds."""
MAX_PROMISED_RETRY_S: Final = 0.5
"""Maximum number of these seconds; the latter for chunks for which another engine waits."""


class Writes:
    """The chunks that are written to one tier, and how it is kept up.

    Args:
        at: index of the tier.
        tier: what is known of it; mutated.
        host: the manager of host memory; chunks are pinned there while they are written.
        tasks: the table that jobs are added to.
        clock: monotonic time in seconds.
        local_hashes: how the keys of chunks begin that are never written; nothing if there are none.

    Attributes:
        tier: as given.
        backlog: chunks that wait to be written.
        promised: chunks that wait to be written before all others, because another engine was promised them.
        untaken: chunks that the tier did not take when they were offered to it last.
        num_writing: number of chunks that are being written.
        touching: chunks whose use the tier is being notified of.
        is_promised: whether another engine waits for a chunk.
    """

    def __init__(
        self, at: int, tier: TierState, host: OffloadManager, tasks: TaskTable, clock: Clock, local_hashes: bytes = b""
    ) -> None:
        self._at = at
        self._local = local_hashes
        self.tier = tier
        self._options = tier.options
        self._host = host
        self._tasks = tasks
        self.backlog = Backlog(host.capacity)
        self.promised = Backlog(host.capacity, MAX_PROMISED_RETRY_S)
        self.untaken = RetryQueue(host.capacity, clock)
        self._clock = clock
        # While a tier puts everything off, it is asked seldom; except chunks that other engines wait for.
        self._pause_s, self._paused_until, self._puts_off_since = 0.0, 0.0, float("inf")
        self._has_taken_any = False
        self.num_writing = 0
        self.touching: set[OffloadKey] = set()
        self.is_promised: Callable[[OffloadKey], bool] = lambda _: False
        self._max_writing = max(1, min(tier.options.max_inflight_chunks, host.capacity // 2))
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
        """Note that host memory has new chunks; add those that the tier is to get to the backlog."""
        if self._options.admission is Admission.REUSED:
            keys = [key for key in keys if self._was_seen(key)]
        self.untaken.forget(keys)
        self.backlog.add(self._wanted(keys), parents)

    def note_used(self, keys: Sequence[OffloadKey], ready: Sequence[OffloadKey]) -> None:
        """Note that a request uses ``keys``, in prefix order, of which host memory has ``ready``."""
        if self._options.write_mode is WriteMode.BACK:
            self.backlog.postpone(keys)
        if not ready:
            return  # a new prompt
        again = ready if self._options.admission is Admission.REUSED else self.untaken.take_used(ready)
        if again:
            self.backlog.add(self._wanted(again), parents_in(keys))
        if self.tier.is_readable:
            self._touch(ready, keys)

    def clear(self) -> None:
        """Forget what is to be written, for a reset or because the tier is off."""
        self.backlog.clear()
        self.promised.clear()
        self.untaken.clear()
        self._writing = set()
        self._seen.clear()

    def _wanted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks that would have to be written.

        A chunk that the tier had at its last answer, however old, is taken to be there still: ``_touch`` checks that.
        """
        if self.tier.is_off or self._options.is_read_only:
            return []
        if self._local:
            keys = [key for key in keys if not key.startswith(self._local)]
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
    def writes_through(self) -> bool:
        """Whether chunks are written as they come, now."""
        is_through = self._options.write_mode is WriteMode.THROUGH and not self._options.is_read_only
        return is_through and not self.tier.is_off

    @property
    def num_writable(self) -> int:
        """Number of chunks to hand out for writing now, promised ones first."""
        num_waiting = len(self.backlog) if self._clock() >= self._paused_until else 0
        if self._options.write_mode is WriteMode.BACK:
            # So many may wait: the rest of host memory can be evicted without loss.
            num_waiting = max(0, num_waiting - self._max_dirty)
        num_waiting += len(self.promised)
        limit = self._max_writing - self.num_writing
        if self._allowance is not None:
            limit = min(limit, self._allowance.available)
        return max(0, min(num_waiting, limit))

    @property
    def has_more(self) -> bool:
        """Whether chunks are to be written now, or soon."""
        return self.tier.is_writable and (self.num_writable > 0 or bool(self.untaken.times))

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be written, or to be offered again."""
        return not (self.backlog.parents or self.promised.parents or self.untaken.times)

    def take(self) -> Iterator[TierTask]:
        """Yield jobs, to be handed out at once, that write as many chunks of the backlog as may be in flight; pin them."""
        self.untaken.offer_due()
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
                self._allowance.spend(self._parts_of(keys))
            self._writing.update(keys)
            self.num_writing += len(keys)
            yield task

    def _parts_of(self, keys: Sequence[OffloadKey]) -> float:
        """Return how many of the largest chunks have as many bytes as these."""
        parts = self._options.chunk_parts
        return sum(parts[split_key(key)[1]] for key in keys) if parts else len(keys)

    def _writable(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks that the tier is to get and host memory has."""
        wanted = self._wanted(keys)
        states = self._host.lookup(wanted)
        if states.count(READY) == len(wanted):
            return wanted
        return [key for key, state in zip(wanted, states, strict=True) if state == READY]

    def _promised(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the promised chunks that host memory has, except those that are being written.

        One that is there already is written again, because what was known of it is old.
        """
        states = zip(keys, self._host.lookup(keys), strict=True)
        return [key for key, state in states if state == READY and key not in self._writing]

    def is_to_write(self, key: OffloadKey) -> bool:
        """Whether a promised chunk waits to be written, or is being written."""
        return key in self.promised or key in self._writing or self.untaken.is_coming(key)

    def will_take(self, keys: Sequence[OffloadKey], within_s: float) -> Iterator[OffloadKey]:
        """Yield the promised chunks among ``keys`` that will be written here ``within_s`` seconds, unless something fails.

        Those that are being written, and as many more, in this order, as the daily allowance lasts for; none if writes are
        suspended, or if the tier has put off everything so far, or for so long.
        """
        if self._obstacle(within_s):
            return iter(())
        waiting = [key for key in keys if key not in self._writing]
        num_left = len(waiting)
        if self._allowance is not None:
            num_others = len(self.promised) - sum(key in self.promised for key in waiting)
            num_left = min(num_left, max(0, self._allowance.available - num_others))
        taken = frozenset(waiting[:num_left])
        return (key for key in keys if key in self._writing or key in taken)

    def why_not(self, key: OffloadKey, within_s: float) -> str:
        """Return why a promised chunk is not written here, as the end of a sentence about the tier; empty if not known."""
        if obstacle := self._obstacle(within_s):
            return obstacle
        if self._allowance is not None and not self._allowance.available:
            return "has reached its daily limit"
        return self.untaken.why(key)

    def _obstacle(self, within_s: float) -> str:
        if self.tier.health.of(Access.WRITE) is BreakerState.OPEN:
            return f"takes no writes now: {self.tier.health.reason}"
        if self._clock() >= self._puts_off_since + (within_s if self._has_taken_any else 0.0):
            return "has postponed all writes " + ("for too long" if self._has_taken_any else "so far")
        return ""

    def _end_write(
        self,
        pins: ChunkPins,
        writing: set[OffloadKey],
        task: TierTask,
        succeeded: Sequence[bool],
        is_done: bool,
    ) -> None:
        pins.release()
        writing.difference_update(task.keys)
        self.num_writing -= len(task.keys)
        num_stored = sum(succeeded)
        self.tier.stats[metrics.STORED.of(self.tier.name)] += num_stored
        self.tier.stats[metrics.NOT_STORED.of(self.tier.name)] += len(succeeded) - num_stored
        if writing is not self._writing:
            return  # after a reset, names are others
        self.untaken.forget(compress(task.keys, succeeded))
        # Nothing is said of chunks that were not tried, or are not there only for now.
        refused = task.refused if num_stored < len(succeeded) else [False] * len(succeeded)
        is_told = [is_stored or is_refused for is_stored, is_refused in zip(succeeded, refused, strict=True)]
        self.tier.note_presence(list(compress(task.keys, is_told)), list(compress(succeeded, is_told)))
        for key, parent, is_stored, is_refused in zip(task.keys, task.parents, succeeded, refused, strict=True):
            if not is_stored:
                backlog = self.promised if self.is_promised(key) else self.backlog
                self.untaken.add(key, parent, backlog, is_refused=is_refused)
        if is_done or any(is_told):  # else the breaker decides
            self._pause(is_any_taken=any(is_told))

    def _pause(self, *, is_any_taken: bool) -> None:
        """Let a tier rest that puts off all that it is offered."""
        now = self._clock()
        if is_any_taken:
            self._has_taken_any = True
            self._pause_s, self._paused_until, self._puts_off_since = 0.0, 0.0, float("inf")
        elif now >= self._paused_until:
            self._pause_s = min(max(RETRY_S, 2 * self._pause_s), MAX_RETRY_S)
            self._paused_until = now + self._pause_s
            self._puts_off_since = min(self._puts_off_since, now)

    def is_busy_with(self, key: OffloadKey) -> bool:
        """Whether the tier is being notified of a chunk's use, or the chunk is being written or waits to be."""
        chunks = (self.touching, self.tier.probing, self._writing, self.backlog, self.promised)
        return any(key in some for some in chunks) or self.untaken.is_coming(key)

    # --- upkeep -------------------------------------------------------------------------------------------------------

    def _touch(self, ready: Sequence[OffloadKey], keys: Sequence[OffloadKey]) -> None:
        """Tell the tier of the use of chunks that host memory gives back, and ask whether it has them still.

        A tier sees nothing of their use otherwise, and would evict them. It is notified of all that it is thought to have: if
        only of some, the start of a prefix might count as used before its end, and be evicted first. For the same reason, of
        several jobs the end of a prefix goes first. Where each chunk has its price, a few are asked for with each use: nothing
        waits for the answers, and requests that wait for others should not queue after thousands of these.
        """
        lookup_cache, options = self.tier.lookup_cache, self._options
        idle = ready
        for busy in (self.touching, self.tier.probing, self._writing, self.backlog, self.untaken):
            if busy:  # seldom; a prompt has thousands of chunks
                idle = [key for key in idle if key not in busy]
        touched = lookup_cache.not_heard_of(idle, LOOK_AFTER_S) if options.write_mode is WriteMode.THROUGH else []
        if options.num_asked_at_once is not None:
            touched = [] if self.touching else touched[: options.num_asked_at_once]
        elif options.has_index:
            known = [key for key, is_there in zip(idle, self.tier.last_known(idle), strict=True) if is_there]
            if lookup_cache.not_heard_of(known, TOUCH_S):
                also = {*known, *touched}
                touched = [key for key in idle if key in also]
        if not touched:
            return
        self.touching.update(touched)
        parents = parents_in(keys)
        for part in reversed(self.tier.parts(touched)):
            task = TierTask(JobKind.TOUCH, self._at, part, self._end_touch, [parents[key] for key in part])
            self._tasks.want(task)

    def _end_touch(self, task: TierTask, succeeded: Sequence[bool], is_done: bool) -> None:
        """Note which chunks the tier has. Write again those that it has not had for long.

        To write them at once would wear a disk that is smaller than the set of chunks in use.
        """
        self.touching.difference_update(task.keys)
        if task.is_cancelled or not is_done:
            return
        tier, lookup_cache = self.tier, self.tier.lookup_cache
        there = [key for key, is_there in zip(task.keys, succeeded, strict=True) if is_there]
        lookup_cache.note(there, [True] * len(there))
        tier.announce(task.keys, succeeded)
        if self._options.write_mode is WriteMode.THROUGH:
            gone = lookup_cache.not_heard_of(task.keys, LOOK_AFTER_S)
            lookup_cache.note(gone, [False] * len(gone))
            self.note_new(gone, dict(zip(task.keys, task.parents, strict=True)))


# --- what waits to be written -----------------------------------------------------------------------------------------


class Backlog:
    """Chunks in host memory that are to be written to a tier, in the order of writing.

    Only keys are kept. A chunk that leaves host memory before its turn comes is passed over.

    Args:
        limit: maximum number of chunks; beyond it, those at the front are dropped.
        max_retry_s: maximum number of seconds after which a chunk that the tier has not taken comes again.

    Attributes:
        parents: the chunks, each with the chunk before it in its prefix, or ``None``.
    """

    def __init__(self, limit: int, max_retry_s: float = MAX_RETRY_S) -> None:
        self._limit = limit
        self.max_retry_s = max_retry_s
        self.parents: dict[OffloadKey, OffloadKey | None] = {}

    def __len__(self) -> int:
        return len(self.parents)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self.parents

    def add(self, keys: Sequence[OffloadKey], parents: Mapping[OffloadKey, OffloadKey | None]) -> None:
        """Append chunks that do not wait already; ``parents`` has the chunk before each in its prefix, or ``None``."""
        self.parents.update(zip(keys, map(parents.__getitem__, keys), strict=True))
        if len(self.parents) > self._limit:
            self._take_first(len(self.parents) - self._limit)

    def postpone(self, keys: Iterable[OffloadKey]) -> None:
        """Move waiting chunks of ``keys``, which were just used, to the end: the last of the prefix in front of the first."""
        for key in reversed(list(keys)):
            if key in self.parents:
                self.parents[key] = self.parents.pop(key)

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
        num_looks = min(len(self.parents), MAX_LOOKS)
        while num_looks and len(parents) < limit:
            num_next = min(num_looks, limit - len(parents))
            num_looks -= num_next
            looked_at = self._take_first(num_next)
            keys = ready(list(looked_at))
            parents.update(looked_at if len(keys) == num_next else {key: looked_at[key] for key in keys})
        return parents

    def clear(self) -> None:
        """Drop all waiting chunks."""
        self.parents.clear()

    def _take_first(self, count: int) -> dict[OffloadKey, OffloadKey | None]:
        # Many at once: a dict steps over what was removed in front of the first one each time that it looks for that.
        first = dict(islice(self.parents.items(), count))
        for key in first:
            del self.parents[key]
        return first


@dataclass(slots=True)
class _Untaken:
    """A chunk that a tier has not taken.

    Attributes:
        parent: the chunk before it.
        num_tries: how many times it was offered.
        again_at: time from which it may be offered again.
        backlog: where it goes to be offered again by itself; ``None`` if it waits for a use, or waits in a backlog.
    """

    parent: OffloadKey | None = None
    num_tries: int = 0
    again_at: float = 0.0
    backlog: Backlog | None = None
    is_refused: bool = False


class RetryQueue:
    """Chunks that a tier has not taken: it failed, put them off, or had no room for them.

    What failed or was put off is offered again by itself, a few times, each time later. After that, and if there was no room,
    it is offered again when it is used.

    Args:
        limit: maximum number of chunks; beyond it, those that were not taken first are forgotten.
        clock: monotonic time in seconds.

    Attributes:
        times: when chunks are offered again by themselves, the first one first. Some may have been forgotten since.
    """

    def __init__(self, limit: int, clock: Clock) -> None:
        self._limit = limit
        self._clock = clock
        self._chunks: dict[OffloadKey, _Untaken] = {}
        self.times: list[tuple[float, OffloadKey]] = []

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._chunks

    def is_coming(self, key: OffloadKey) -> bool:
        """Whether a chunk is offered again by itself."""
        chunk = self._chunks.get(key)
        return chunk is not None and chunk.backlog is not None

    def why(self, key: OffloadKey) -> str:
        """Return why the tier has not taken a chunk, as the end of a sentence about the tier; empty if that is not known."""
        chunk = self._chunks.get(key)
        if chunk is None:
            return ""
        return "has no room for it" if chunk.is_refused else "did not accept it in time"

    def add(self, key: OffloadKey, parent: OffloadKey | None, backlog: Backlog, *, is_refused: bool) -> None:
        """Note that a chunk, which came from ``backlog``, was not taken."""
        chunk = self._chunks.setdefault(key, _Untaken())
        again_at = self._clock() + min(RETRY_S * (2**chunk.num_tries - 1), backlog.max_retry_s)
        num_tries = min(chunk.num_tries + 1, MAX_TRIES)
        is_coming = num_tries < MAX_TRIES and not is_refused
        self._chunks[key] = _Untaken(parent, num_tries, again_at, backlog if is_coming else None, is_refused)
        if is_coming:
            heappush(self.times, (again_at, key))
        if len(self._chunks) > self._limit:
            del self._chunks[next(iter(self._chunks))]

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks: the tier has them by now, or they are new again."""
        if self._chunks:  # seldom
            for key in keys:
                self._chunks.pop(key, None)

    def offer_due(self) -> None:
        """Put the chunks whose time has come back into their backlogs."""
        now = self._clock()
        while self.times and self.times[0][0] <= now:
            again_at, key = heappop(self.times)
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.backlog is not None and chunk.again_at == again_at:
                chunk.backlog.add([key], {key: chunk.parent})
                chunk.backlog = None

    def take_used(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of ``keys``, which were just used, that may be offered again for that."""
        if not self._chunks:
            return []  # nearly always
        now = self._clock()
        return [
            key
            for key in keys
            if (chunk := self._chunks.get(key)) is not None and chunk.backlog is None and chunk.again_at <= now
        ]

    def clear(self) -> None:
        self._chunks.clear()
        self.times.clear()


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

    def spend(self, num_chunks: float) -> None:
        """Take ``num_chunks`` chunks, which are being written, off the allowance."""
        self._saved -= num_chunks
