"""The tiers below host memory: which chunks to ask them for, to fetch and to write down.

A pure state machine: it does no I/O and moves no bytes. It hands out commands for the workers, which answer with one byte per
chunk. A chunk counts as there only if every worker has its shard::

    unknown --probe--> known to be there --fetch----> host: writing --all workers done--> host: ready
               |                 |                       |
               +-> absent        +- no slot free         +- failed, late, cancelled --> forfeited: a miss

    host: ready --backlog--> pinned and written --> known to be there, too

The device is loaded from host memory only. No request waits for a tier beyond a deadline, whatever happens to the tier.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import compress, islice
from types import MappingProxyType

from cargohold.blocks import ABSENT, NOT_YET, READY
from cargohold.cache.manager import OffloadKey, OffloadManager
from cargohold.deadlines import PROGRESS, PROMISE, SETTLE
from cargohold.protocol import Clock, Outage, Tally, TransferOutcome, metrics
from cargohold.tiers.health import HEALTHY, TierHealth
from cargohold.tiers.messages import TierCommand
from cargohold.tiers.port import LISTED_AT_ONCE, JobKind, Listing
from cargohold.tiers.scheduler_side.fetches import Fetches
from cargohold.tiers.scheduler_side.listing import InventoryScan
from cargohold.tiers.scheduler_side.promises import Promises
from cargohold.tiers.scheduler_side.tasks import SteppedClock, TaskTable, TierTask, random_epoch
from cargohold.tiers.scheduler_side.tier_state import UNKNOWN, TieringConfig, TierOptions, TierState, mark
from cargohold.tiers.scheduler_side.writing import Writes

RANKED_AT_ONCE = 256
"""Number of chunks whose new retentions are sent to tiers in one step."""

_NOT_WAITED_FOR = frozenset({JobKind.STORE, *LISTED_AT_ONCE})
_ABSENT = bytes([ABSENT])
_NOTHING_FOUND: Mapping[int, int] = MappingProxyType({})
_NOTHING_LISTED: Mapping[int, Listing] = MappingProxyType({})
_NOT_MEASURED: Mapping[int, float] = MappingProxyType({})


class LowerTiers:
    """The state of the tiers below host memory, and of the chunks on their way from and to them.

    Args:
        host: the manager of host memory.
        tiers: how each tier is to be used, the fastest first.
        clock: monotonic time in seconds.
        config: number of workers, deadlines, and whether events are recorded.
        new_epoch: makes a new name at each reset; it becomes part of the chunks' names in the tiers.

    Attributes:
        host: as given.
        tiers: what is known of each tier.
        writes: what is written to each tier.
        promises: the chunks that other engines were promised.
        tasks: the jobs of all tiers.
        fetches: chunks on their way into host memory.
        namespace: what the chunks' bytes depend on in the first shared tier, as the first worker says; empty until it has.
        config: as given.
        on_arrived: called with chunks that have come up into host memory.
        max_look_up: maximum number of chunks in one look-up. All of its answers must be remembered until the last has come. If
            they were not, the first chunks would be asked for again, and push out the answers for the last, without end.
        clock: time in which the engine steps; the owner calls its ``begin_step`` and ``end_step``. Deadlines are in this time.
    """

    def __init__(
        self,
        host: OffloadManager,
        tiers: Sequence[TierOptions],
        clock: Clock,
        config: TieringConfig,
        *,
        new_epoch: Callable[[], bytes] = random_epoch,
    ) -> None:
        self.config = config
        self.clock = SteppedClock(clock)
        self.host = host
        self.namespace: Mapping[str, str] = {}
        self.tasks = TaskTable(self.clock, new_epoch)
        self.tiers = [
            TierState(options, host.capacity, clock, config, partial(self.tasks.is_in_flight, at))
            for at, options in enumerate(tiers)
        ]
        self.max_look_up = min((tier.lookup_cache.limit for tier in self.tiers), default=0) // 2
        self.writes = [
            Writes(at, tier, host, self.tasks, clock, config.local_hashes) for at, tier in enumerate(self.tiers)
        ]
        self.fetches = Fetches(host, self.tiers, self.tasks, self.clock, config.restore_timeout_s, self._note_arrived)
        self._to_rank: dict[OffloadKey, None] = {}
        self.on_arrived: Callable[[Iterable[OffloadKey]], None] = lambda _: None
        self._scans = [InventoryScan(at, tier, self.tasks, self.clock) for at, tier in enumerate(self.tiers)]
        self.promises = Promises(host, self.writes, self.clock, PROMISE.seconds(config.restore_timeout_s))
        # When an idle engine stops stepping on, and when a job last ended or the first of several was handed out.
        self._settles_at = self._progressed_at = self.clock()

    def rank(self, keys: Iterable[OffloadKey]) -> None:
        """Note that hints ask something else for chunks now: tiers that have them are notified, a few with each step."""
        if any(tier.ranks for tier in self.tiers):
            self._to_rank.update(dict.fromkeys(keys))
            self._expect_writes()

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def is_readable(self) -> bool:
        """Whether requests may look for chunks in any of the tiers."""
        return any(tier.is_readable for tier in self.tiers)

    def may_fetch(self, num_chunks: int) -> bool:
        """Whether so many more chunks may be fetched: what is fetched, held or loaded leaves half of host memory to stores.

        The device's new chunks would find no slot otherwise, and be lost. One request may always fetch its chunks.
        """
        if not (self.fetches.num_held or self.fetches.arriving):
            return True
        num_written = sum([writes.num_writing for writes in self.writes])
        num_used = self.host.capacity - self.host.num_obtainable - num_written
        return num_used + num_chunks <= self.host.capacity * 3 // 4

    @property
    def is_idle(self) -> bool:
        """Whether no chunk is on its way or held for a request. Probes and touches, which move none, may be in flight."""
        return not (self.fetches.live or self.promises.made) and all(
            task.kind in (JobKind.PROBE, JobKind.TOUCH) for task in self.tasks
        )

    @property
    def is_fetching(self) -> bool:
        """Whether chunks are being fetched, or held for a request."""
        return bool(self.fetches.live or self.fetches.arriving)

    @property
    def is_settling(self) -> bool:
        """Whether the engine should keep stepping even if there is nothing to compute.

        Chunks that were stored lately or are promised are still to be written down, or loads are in flight, without whose end
        a reset is not possible.
        """
        now = self.clock()
        if self.tasks and now >= self._progressed_at + PROGRESS.seconds():
            return False
        if self.fetches.arriving or self.promises.made or any(scan.is_at_work for scan in self._scans):
            return True
        if now >= self._settles_at:
            return False
        return bool(self.tasks or self._to_rank) or any(writes.has_more for writes in self.writes)

    def is_asked_for(self, key: OffloadKey) -> bool:
        """Whether a chunk is on its way from or to a tier, or a tier is being asked whether it has it."""
        return key in self.fetches.arriving or any(writes.is_busy_with(key) for writes in self.writes)

    def lookup(self, keys: Sequence[OffloadKey], *, skipped: Container[int] = ()) -> bytes:
        """Return one byte per chunk: ``READY`` if a usable tier has it, ``ABSENT``, ``NOT_YET`` or ``UNKNOWN``.

        Host memory is not looked at, except that chunks on their way into it are ``NOT_YET``.

        Args:
            keys: the chunks.
            skipped: indices of tiers that are not to be asked: what they have not said yet, they do not have.
        """
        answers = [
            tier.lookup(keys, is_skipped=at in skipped) for at, tier in enumerate(self.tiers) if tier.is_readable
        ]
        states = reduce(_over, answers) if answers else _ABSENT * len(keys)
        return mark(states, keys, self.fetches.arriving, NOT_YET)

    def tiers_of(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Return, per chunk, the index of the fastest usable tier known to have it, or -1.

        -1 is possible even for a chunk that was just looked up as ready, because answers grow old.
        """
        tiers = [-1] * len(keys)
        for at, tier in enumerate(self.tiers):
            if tier.is_readable:
                answers = tier.known(keys)
                tiers = [
                    at if known < 0 and is_there else known for known, is_there in zip(tiers, answers, strict=True)
                ]
        return tiers

    def estimate_s(self, num_chunks: Mapping[int, int]) -> float:
        """Return the estimated seconds to fetch the given number of chunks per tier, as far as that is known.

        Tiers work side by side. One of which nothing is known counts as fast, so that it is tried, and measured.
        """
        times = [self.tiers[at].pace.predict(count) for at, count in num_chunks.items()]
        return max((time for time in times if time is not None), default=0.0)

    # --- for requests -------------------------------------------------------------------------------------------------

    def probe(
        self,
        keys: Sequence[OffloadKey],
        *,
        skipped: Container[int] = (),
        num_found: Mapping[int, int] = _NOTHING_FOUND,
        within_s: float = float("inf"),
    ) -> list[TierTask]:
        """Ask for chunks whose state is ``UNKNOWN``: each in the first usable tier that has not said that it is absent.

        Some may have to be asked for again, with what is still unknown once the probes are answered.

        Args:
            keys: the chunks, in prefix order.
            skipped: see ``lookup``.
            num_found: by tier, the number of chunks that the same look-up has found there before.
            within_s: seconds in which answers are wanted. Tiers are asked for no more than they are expected to answer for.

        Returns:
            The probes; ``has_ended`` becomes true on each when it is answered.
        """
        states = self.lookup(keys, skipped=skipped)
        rest = [key for key, state in zip(keys, states, strict=True) if state == UNKNOWN]
        probes: list[TierTask] = []
        for at, tier in enumerate(self.tiers):
            if tier.is_readable and at not in skipped:
                answers = tier.known(rest)
                asked = [key for key, is_there in zip(rest, answers, strict=True) if is_there is None]
                rest = [key for key, is_there in zip(rest, answers, strict=True) if is_there is not None]
                before = num_found.get(at, 0)
                count = tier.num_to_ask(len(asked), before, within_s)
                tier.probing.update(asked[:count])
                probes += [
                    TierTask(JobKind.PROBE, at, part, self._end_probe, num_before=before, num_after=len(asked) - count)
                    for part in tier.parts(asked[:count])
                ]
        for probe in probes:
            self.tasks.want(probe)
        return probes

    def forget_absent(self, keys: Sequence[OffloadKey]) -> None:
        """Forget which of these chunks shared tiers did not have: another engine may have written them since."""
        for tier in self.tiers:
            if tier.options.locality != "LOCAL":
                answers = zip(keys, tier.lookup_cache.last(keys), strict=True)
                tier.lookup_cache.forget([key for key, is_there in answers if is_there is False])

    def note_new_in_host(self, keys: Sequence[OffloadKey], parents: Mapping[OffloadKey, OffloadKey | None]) -> None:
        """Note that host memory has new chunks: they are to be written down."""
        for writes in self.writes:
            writes.note_new(keys, parents)
        self._expect_writes()
        self.promises.note_ready(keys)

    def note_used(self, keys: Sequence[OffloadKey]) -> None:
        """Note that a request uses these chunks, in prefix order."""
        ready = [key for key, state in zip(keys, self.host.lookup(keys), strict=True) if state == READY]
        for writes in self.writes:
            writes.note_used(keys, ready)
            if writes.backlog:
                self._expect_writes()

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Remove chunks from all tiers that may be written: they are not what their keys say."""
        for at, tier in enumerate(self.tiers):
            if not (tier.options.is_read_only or tier.is_off):
                tier.note_lost(keys)
                for part in tier.parts(keys):
                    self.tasks.want(TierTask(JobKind.REMOVE, at, part, _nothing_follows))

    def reset(self) -> None:
        """Forget all chunks, and give chunks other names in the tiers from now on. Only while nothing is being fetched.

        Writes in flight are cancelled. Chunks that they have written already keep their old names, and are not found again.
        """
        assert not self.is_fetching, "chunks on their way would be remembered under the wrong name"
        self.tasks.cancel(lambda _: True)
        for tier, writes in zip(self.tiers, self.writes, strict=True):
            tier.clear(is_empty=True)
            writes.clear()
        self._to_rank.clear()
        self.promises.note_reset()
        self.tasks.rename()

    def use_namespace(self, namespace: int, weights: str = "") -> None:
        """Learn in which namespace requests have their chunks now. In all but 0, no other engine knows their names.

        With a lasting name of their ``weights``, an engine knows them that is given the same name.
        """
        if namespace:
            self.tasks.use_namespace(namespace, weights)
        if namespace and weights and not self.tasks.is_renamed:
            for tier in self.tiers:
                tier.ask_always()  # what earlier engines have left there has names that do not reveal which chunks they are
        self.promises.are_names_private = self.tasks.is_renamed or namespace > 0

    # --- for workers --------------------------------------------------------------------------------------------------

    def take_commands(self, new_id: Callable[[], int]) -> tuple[TierCommand, ...]:
        """Return the commands for the workers in this step. Call it once in every step."""
        self._begin_step()
        if not self.tasks:
            self._progressed_at = self.clock()
        commands: list[TierCommand] = []
        full: set[int] = set()
        for task in self.tasks.take_wanted():
            tier = self.tiers[task.tier]
            # The workers of a full tier would refuse the job, which looks like a failure of the medium.
            if not task.is_cancelled and (task.tier in full or self._is_too_much(task)):
                full.add(task.tier)
                self.tasks.want(task)
            elif not task.is_cancelled and tier.takes(task.kind):
                # No request waits for a list or a write: on a slow medium, too, it is to end.
                is_waited_for = task.kind not in _NOT_WAITED_FOR
                timeout_s = self.config.restore_timeout_s if is_waited_for else self.config.store_timeout_s
                commands.append(self.tasks.begin(new_id(), task, timeout_s))
            else:
                task.is_cancelled = True
                self._conclude(task, is_done=False)
        for writes in self.writes:
            if not writes.is_idle:
                commands += [self.tasks.begin(new_id(), task, self.config.store_timeout_s) for task in writes.take()]
        return tuple(commands)

    def begin_writes(self) -> None:
        """Pin chunks that are to be written next, before others make room: only host memory has them until then."""
        for tier, writes in zip(self.tiers, self.writes, strict=True):
            if tier.health is HEALTHY and not writes.is_idle:  # while writes are tried, there is one job at a time
                for task in writes.take():
                    self.tasks.want(task)

    def note_report(
        self,
        answers: Mapping[int, tuple[bytes, int]],
        health: Mapping[tuple[int, int], TierHealth],
        namespace: Mapping[str, str] | None = None,
        listings: Mapping[int, Listing] = _NOTHING_LISTED,
        seconds: Mapping[int, float] = _NOT_MEASURED,
    ) -> None:
        """Take in what some or all workers say of their jobs' chunks, and of their tiers. ``end`` ends a job.

        Args:
            answers: by job, the verdicts of all workers that are merged here, one byte per chunk, and their number.
            health: by the worker's rank and the tier's index, the tier's health where it has changed.
            namespace: what the chunks' bytes depend on, if a worker says it now.
            listings: by job, what the first worker has listed.
            seconds: by job, how long the tier itself took.
        """
        self.namespace = namespace or self.namespace
        for job_id, (succeeded, num_workers) in answers.items():
            if (task := self.tasks.get(job_id)) is not None:
                task.note_answers(succeeded, num_workers)
                task.listing = listings.get(job_id, task.listing)
                task.took_s = max(task.took_s, seconds.get(job_id, 0.0))
        for (rank, at), of_tier in health.items():
            self.tiers[at].note_health(rank, of_tier)
            if self.tiers[at].is_off:
                self.writes[at].clear()

    def note_emptied(self, tiers: Iterable[int]) -> None:
        """Note that tiers have lost all that they had. To be called before a report's answers are noted, and jobs end."""
        for at in tiers:
            self.tiers[at].clear(is_empty=self.tasks.is_renamed)
            self._scans[at].begin_again()
            self.tasks.note_lost(at, None)

    def note_lost(self, at: int, names: Sequence[OffloadKey]) -> None:
        """Note that a worker has lost chunks of a tier. To be called after the jobs have ended."""
        keys = self.tasks.keys_of(names)
        self.tiers[at].note_lost(keys)
        self.tasks.note_lost(at, frozenset(keys))

    def end(self, job_id: int, outcome: TransferOutcome) -> bool:
        """End a job that all workers have reported. Returns ``False`` if it is not a job of lower tiers."""
        task = self.tasks.end(job_id)
        if task is None:
            return False
        self._progressed_at = self.clock()
        self._conclude(task, is_done=outcome is TransferOutcome.DONE)
        return True

    def retire(self) -> None:
        """Use the tiers no more, and release all that is held except what jobs in flight read and write; ``end`` does that."""
        for tier, writes in zip(self.tiers, self.writes, strict=True):
            tier.retire()
            writes.clear()
        self._to_rank.clear()
        self.fetches.release_all()
        self.promises.give_up_all()
        for task in self.tasks.take_wanted():
            task.is_cancelled = True
            self._conclude(task, is_done=False)

    def outages(self) -> list[Outage]:
        """Return which tiers are out of use, as a whole or in part."""
        return [outage for tier in self.tiers if (outage := tier.outage()) is not None]

    def take_stats(self) -> Tally:
        """Return counters since the last call."""
        total = Tally()
        for tier in self.tiers:
            stats, tier.stats = tier.stats, Tally()
            total.add(stats)
        if self.promises.num_broken:
            total[metrics.FAILURES.of("promise")], self.promises.num_broken = self.promises.num_broken, 0
        return total

    def check(self) -> None:
        """Verify every invariant. Raises ``AssertionError``."""
        tasks = list(self.tasks)
        for at, tier in enumerate(self.tiers):
            own = [task for task in tasks if task.tier == at]
            assert tier.probing == {k for t in own if t.kind is JobKind.PROBE for k in t.keys}, "asked by nobody"
            writes = self.writes[at]
            assert writes.touching == {k for t in own if t.kind is JobKind.TOUCH for k in t.keys}, "touched by nobody"
            assert writes.num_writing == sum(len(t.keys) for t in own if t.kind is JobKind.STORE), "written by nobody"
            assert len(writes.backlog) <= self.host.capacity, "the backlog is longer than it may be"
        self.fetches.check()
        num_read = sum(len(task.keys) for task in tasks if task.kind is JobKind.STORE)
        self.promises.check()
        num_held = self.fetches.num_held + self.promises.num_pins
        assert num_read + num_held <= self.host.num_pins, "a chunk is held without a pin"

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Do what is due: mostly nothing."""
        if self.fetches.live:
            self.fetches.release_expired()
        if self.promises.made:
            self.promises.give_up_late()
        for scan in self._scans:
            if scan.is_due or scan.next or scan.tier.health is not HEALTHY:
                scan.step()
        if self._to_rank:
            self._rank_some()

    def _rank_some(self) -> None:
        ranked = list(islice(self._to_rank, RANKED_AT_ONCE))
        for key in ranked:
            del self._to_rank[key]
        for at, tier in enumerate(self.tiers):
            if tier.ranks:
                self.tasks.want(TierTask(JobKind.RANK, at, ranked, _nothing_follows))

    def _expect_writes(self) -> None:
        self._settles_at = self.clock() + SETTLE.seconds()

    def _is_too_much(self, task: TierTask) -> bool:
        num_asked = 0 if task.kind is JobKind.STORE else self.tasks.num_asked(task.tier)
        return num_asked > 0 and num_asked + len(task.keys) > self.tiers[task.tier].options.max_asked_chunks

    def _conclude(self, task: TierTask, *, is_done: bool) -> None:
        task.has_ended = True
        if is_done:
            self.tiers[task.tier].note_took(task.kind, self.clock() - task.begun_at)
        succeeded = task.succeeded(self.config.num_workers)
        task.on_end(task, succeeded, is_done)
        if task.lost:
            self.tiers[task.tier].note_lost(tuple(task.lost))
        if task.kind is JobKind.STORE:
            self.promises.note_written(task.keys)
            there = (key for key in compress(task.keys, succeeded) if key not in task.lost)
            self.tasks.note_written(task.tier, there)

    def _end_probe(self, task: TierTask, succeeded: Sequence[bool], is_done: bool) -> None:
        """Remember the answers of a tier. One that does not answer counts as not having the chunks."""
        tier = self.tiers[task.tier]
        tier.probing.difference_update(task.keys)
        if not task.is_cancelled:
            task.num_found = sum(succeeded)
            tier.note_presence(task.keys, succeeded)
            if is_done:
                tier.note_look_up(task, task.took_s or self.clock() - task.begun_at)

    def _note_arrived(self, tier: int, parents: Mapping[OffloadKey, OffloadKey | None]) -> None:
        """Note that chunks came from a tier: they are worth writing to the faster ones."""
        self.on_arrived(parents.keys())
        self.promises.note_ready(parents)
        for writes in self.writes[:tier]:
            writes.note_new(list(parents), parents)
        self._expect_writes()


def _nothing_follows(task: TierTask, succeeded: Sequence[bool], is_done: bool) -> None:
    """Do nothing at the end of a task: a tier that does not know of a hint goes on as before."""


def _over(upper: bytes, lower: bytes) -> bytes:
    """Merge the states of two tiers: per chunk that of ``upper``, or that of ``lower`` where the former is ``ABSENT``."""
    return bytes([below if state == ABSENT else state for state, below in zip(upper, lower, strict=True)])
