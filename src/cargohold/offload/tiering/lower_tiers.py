"""The tiers below host memory: what to ask them, what to bring up, what to write down.

A pure state machine: it does no I/O and moves no bytes. What is to be done it hands out as commands for the workers, who
answer with one byte per chunk; a chunk counts only when every worker has it::

    unknown --probe--> known to be there --promote--> host: writing --all workers done--> host: ready
               |                 |                       |
               +-> absent        +- no slot free         +- failed, late, cancelled --> forfeited: a miss

    host: ready --backlog--> pinned and written --> known to be there, too

Loads to the device are from host memory alone. Nobody waits for a tier beyond a deadline, whatever happens to it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

from cargohold.blocks import ABSENT, NOT_YET, READY
from cargohold.offload.manager.base import OffloadKey, OffloadManager
from cargohold.offload.tier.jobs import JobKind
from cargohold.offload.tiering.commands import TierCommand, TieringConfig, TierOptions
from cargohold.offload.tiering.dispatch import Dispatch, random_epoch
from cargohold.offload.tiering.lower_tier import UNKNOWN, LowerTier, mark
from cargohold.offload.tiering.promotion import Chain, Promotion
from cargohold.offload.tiering.promotions import Promotions
from cargohold.offload.tiering.stepped_clock import SteppedClock
from cargohold.offload.tiering.task import TierTask
from cargohold.offload.tiering.tasks import TaskTable
from cargohold.offload.tiering.upkeep import Upkeep
from cargohold.protocol import Clock, TransferOutcome

SETTLE_S = 5.0
"""How long an idle engine steps on to have written down what was stored last. What is left then waits for the next steps."""
PROGRESS_S = 3.0
"""It does not step on when no job has ended for this time, nor again until one has."""

_ABSENT = bytes([ABSENT])
_HARMLESS = frozenset({JobKind.PROBE, JobKind.TOUCH})
"""What moves no chunk, and needs not be waited for."""


class LowerTiers:
    """What is known of the tiers below host memory, and what is on its way from and to them.

    Args:
        host: host memory's manager.
        tiers: how each is to be used, the fastest first.
        clock: monotonic time in seconds.
        config: workers and deadlines.
        new_epoch: names what is stored after a reset.

    Attributes:
        tiers: what is known of each.
        config: as given.
        clock: time in which the engine steps, which it has to be told of: deadlines are in this time.
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
        self.tiers = [LowerTier(options, host.capacity, clock, config) for options in tiers]
        self.config = config
        self.clock = SteppedClock(clock)
        self._host = host
        self._tasks = TaskTable(self.clock)
        self._dispatch = Dispatch(host, self.tiers, self._tasks, config, new_epoch)
        self._promotions = Promotions(host, self._tasks, self.clock, config.restore_timeout_s)
        self._upkeep = Upkeep(self.tiers, self._tasks)
        self._alarms: list[float] = []
        self._num_changes = 0
        # Until when to step on, and when a job has ended or the first of several was handed out.
        self._settles_at = self._progressed_at = self.clock()

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def num_changes(self) -> int:
        """Grows when an answer of ``lookup`` may have changed, and when an alarm goes off."""
        now = self.clock()
        while self._alarms and self._alarms[0] <= now:
            heapq.heappop(self._alarms)
            self._num_changes += 1
        return self._num_changes + self._promotions.num_released

    @property
    def num_never_there(self) -> int:
        """Chunks that host memory counts as removed, although they had never arrived."""
        return self._promotions.num_never_there

    @property
    def is_idle(self) -> bool:
        """Whether no chunk is on its way or held for somebody. Questions may be open."""
        return not self._promotions and all(task.kind in _HARMLESS for task in self._tasks)

    @property
    def is_bringing_up(self) -> bool:
        """Whether chunks are on their way up, or held for somebody."""
        return bool(self._promotions) or self._is_loading

    @property
    def is_settling(self) -> bool:
        """Whether steps are worth while even if there is nothing to compute.

        Chunks stored lately are to be written, and until loads have ended that nobody wants any more there is no reset.
        """
        now = self.clock()
        if self._tasks and now >= self._progressed_at + PROGRESS_S:
            return False
        if self._is_loading:
            return True
        if now >= self._settles_at:
            return False
        return bool(self._tasks) or any(tier.num_writable and tier.is_usable for tier in self.tiers)

    @property
    def _is_loading(self) -> bool:
        return any(task.kind is JobKind.LOAD for task in self._tasks)

    def lookup(self, keys: Sequence[OffloadKey], *, up_to_absent: bool = False) -> bytes:
        """One byte per key: ``READY`` if a usable tier has the chunk, ``ABSENT``, ``NOT_YET`` or ``UNKNOWN``.

        Host memory is not asked.

        Args:
            keys: the chunks.
            up_to_absent: whether to end before the first that is absent.
        """
        answers = [tier.lookup(keys) for tier in self.tiers if tier.is_usable]
        states = reduce(_over, answers) if answers else _ABSENT * len(keys)
        states = mark(states, keys, self._promotions.arriving, NOT_YET)
        return states.partition(_ABSENT)[0] if up_to_absent else states

    def tiers_of(self, keys: Sequence[OffloadKey]) -> list[int]:
        """The fastest usable tier that has each chunk; -1 where none is known to: what was known a moment ago grows old."""
        tiers = [-1] * len(keys)
        for at, tier in enumerate(self.tiers):
            if tier.is_usable:
                answers = tier.presence.get(keys)
                tiers = [
                    at if known < 0 and is_there else known for known, is_there in zip(tiers, answers, strict=True)
                ]
        return tiers

    def wake_at(self, time: float) -> None:
        """``num_changes`` is to grow at that time of ``clock``: somebody will not wait any longer."""
        heapq.heappush(self._alarms, time)

    def estimate_s(self, num_chunks: Mapping[int, int]) -> float | None:
        """How long it takes to bring up so many chunks per tier; ``None`` if that is not known."""
        times = [self.tiers[at].pace.predict(count) for at, count in num_chunks.items()]
        return None if None in times else sum(time for time in times if time is not None)

    # --- for requests -------------------------------------------------------------------------------------------------

    def probe(self, keys: Sequence[OffloadKey]) -> list[TierTask]:
        """Ask for chunks of which nothing is known: each in the first usable tier that has not said that it is absent.

        Returns:
            The questions; each ``has_ended`` when there is an answer.
        """
        rest = [key for key, state in zip(keys, self.lookup(keys), strict=True) if state == UNKNOWN]
        probes: list[TierTask] = []
        for at, tier in enumerate(self.tiers):
            if tier.is_usable:
                answers = tier.presence.get(rest)
                asked = [key for key, is_there in zip(rest, answers, strict=True) if is_there is None]
                rest = [key for key, is_there in zip(rest, answers, strict=True) if is_there is not None]
                tier.probing.update(asked)
                probes += [TierTask(JobKind.PROBE, at, part) for part in tier.parts(asked)]
        for probe in probes:
            self._tasks.want(probe)
        return probes

    def promote(self, chains: Sequence[Chain], kept: Sequence[OffloadKey]) -> Promotion | None:
        """Bring chunks into host memory, as far as slots can be had, and hold ``kept``, which are there already.

        Returns:
            What to wait for, and to release in the end; ``None`` if there is no slot at the moment, and then nothing is held.
        """
        return self._promotions.begin(chains, kept)

    def note_stored(self, keys: Sequence[OffloadKey], parents: Mapping[OffloadKey, OffloadKey | None]) -> None:
        """Host memory has new chunks."""
        self._note_new(self.tiers, keys, parents)

    def note_used(self, keys: Sequence[OffloadKey]) -> None:
        """A request uses these chunks, in prefix order."""
        states = self._host.lookup(keys)
        for tier in self.tiers:
            tier.note_used(keys, states)
        if any(tier.backlog for tier in self.tiers):
            self._expect_writes()
        self._upkeep.note_used([key for key, state in zip(keys, states, strict=True) if state == READY], keys)

    def reset(self) -> None:
        """Forget everything; only while nothing is being brought up. Chunks have other names in the tiers from now on.

        Writes are cancelled. What they have written already has its old name, and is what that name says.
        """
        assert not self.is_bringing_up, "chunks on their way would be remembered under the wrong name"
        self._tasks.cancel(lambda _: True)
        for tier in self.tiers:
            tier.clear()
        self._dispatch.rename()
        self._num_changes += 1

    # --- for workers --------------------------------------------------------------------------------------------------

    def take_commands(self, new_id: Callable[[], int]) -> tuple[TierCommand, ...]:
        """What the workers are to do now; call it once in every step."""
        self._give_up_late()
        if not self._tasks:
            self._progressed_at = self.clock()
        return (*self._dispatch.requested(new_id, self._turn_away), *self._dispatch.writes(new_id))

    def take_cancelled(self) -> tuple[int, ...]:
        """Jobs that nobody needs any more; they end like all others, only sooner."""
        return self._tasks.take_cancelled()

    def note_answers(self, job_id: int, succeeded: bytes, num_workers: int) -> None:
        """What so many of the workers say of a job's chunks: 1 where all of them were successful, else 0."""
        task = self._tasks.get(job_id)
        if task is not None:
            task.note_answers(succeeded, num_workers)

    def turn_off(self, at: int) -> None:
        """A worker will not use a tier any more: a chunk counts only when all have it, so nobody will."""
        self.tiers[at].turn_off()
        self._num_changes += 1

    def end(self, job_id: int, outcome: TransferOutcome) -> bool:
        """All workers have reported a job; ``False`` if it is none of these."""
        task = self._tasks.end(job_id)
        if task is None:
            return False
        self._progressed_at = self.clock()
        self._judge(task, outcome)
        self._conclude(task, outcome)
        return True

    def take_stats(self) -> Counter[str]:
        """Counters since the last call."""
        total: Counter[str] = Counter()
        for tier in self.tiers:
            stats, tier.stats = tier.stats, Counter()
            total.update({f"{tier.name}_{name}": amount for name, amount in stats.items()})
        return total

    def check(self) -> None:
        """Verify every invariant. Raises ``AssertionError``."""
        tasks = list(self._tasks)
        for at, tier in enumerate(self.tiers):
            own = [task for task in tasks if task.tier == at]
            assert tier.probing == {k for t in own if t.kind is JobKind.PROBE for k in t.keys}, "asked by nobody"
            assert tier.touching == {k for t in own if t.kind is JobKind.TOUCH for k in t.keys}, "touched by nobody"
            assert tier.num_writing == sum(len(t.keys) for t in own if t.kind is JobKind.STORE), "written by nobody"
            assert len(tier.backlog) <= self._host.capacity, "the backlog is longer than it may be"
        self._promotions.check()
        num_read = sum(len(task.keys) for task in tasks if task.pins is not None)
        assert num_read + self._promotions.num_held <= self._host.num_pins, "a chunk is held without a pin"

    # --- inside -------------------------------------------------------------------------------------------------------

    def _note_new(
        self,
        tiers: Sequence[LowerTier],
        keys: Sequence[OffloadKey],
        parents: Mapping[OffloadKey, OffloadKey | None],
    ) -> None:
        for tier in tiers:
            tier.note_stored(keys, parents)
        self._expect_writes()

    def _expect_writes(self) -> None:
        self._settles_at = self.clock() + SETTLE_S

    def _conclude(self, task: TierTask, outcome: TransferOutcome) -> None:
        """Draw the consequences of a job's end."""
        task.has_ended = True
        self._num_changes += task.kind is not JobKind.TOUCH  # which makes no look-up end otherwise
        tier, succeeded = self.tiers[task.tier], task.succeeded(self.config.num_workers)
        match task.kind:
            case JobKind.PROBE:
                self._end_probe(task, tier, succeeded, outcome)
            case JobKind.TOUCH:
                tier.touching.difference_update(task.keys)
                if outcome is TransferOutcome.DONE and not task.is_cancelled:
                    tier.note_touched(task.keys, succeeded)
            case JobKind.LOAD:
                self._promotions.end_load(task, succeeded)
                self._note_loaded(task, succeeded)
                if outcome is TransferOutcome.DONE:
                    tier.note_presence(task.keys, succeeded)
                elif not task.is_cancelled:
                    tier.presence.forget(task.keys)
            case JobKind.STORE:
                assert task.pins is not None
                task.pins.release()
                tier.end_writing(task, succeeded)
                if outcome is TransferOutcome.DONE and not task.is_cancelled:  # their names may be others by now
                    tier.note_presence(task.keys, succeeded)
            case JobKind.REMOVE:
                raise AssertionError("nobody removes")

    def _end_probe(self, task: TierTask, tier: LowerTier, succeeded: Sequence[bool], outcome: TransferOutcome) -> None:
        tier.probing.difference_update(task.keys)
        if task.is_cancelled:
            return
        tier.note_presence(task.keys, succeeded)  # who does not answer does not have it
        if outcome is TransferOutcome.DONE and task.rewrites:
            gone = [key for key, is_there in zip(task.keys, succeeded, strict=True) if not is_there]
            self._note_new([tier], gone, task.rewrites)

    def _note_loaded(self, task: TierTask, succeeded: Sequence[bool]) -> None:
        tier, promotion = self.tiers[task.tier], task.promotion
        tier.stats["loaded_chunks"] += sum(succeeded)
        tier.stats["not_loaded_chunks"] += len(succeeded) - sum(succeeded)
        arrived = [key for key, is_there in zip(task.keys, succeeded, strict=True) if is_there]
        # What came from further away is worth keeping nearer.
        self._note_new(self.tiers[: task.tier], arrived, dict(zip(task.keys, task.parents, strict=True)))
        if promotion is not None and promotion.was_undisturbed and not task.is_late:
            tier.pace.note(promotion.num_wanted, self.clock() - promotion.started_at)

    def _turn_away(self, task: TierTask) -> None:
        task.is_cancelled = True
        self._conclude(task, TransferOutcome.ABANDONED)

    def _judge(self, task: TierTask, outcome: TransferOutcome) -> None:
        """What a job's end says of the tier's health."""
        tier = self.tiers[task.tier]
        if task.is_late or task.kind is JobKind.TOUCH:
            return  # it was blamed for that; a touch blames nobody
        is_trial = tier.is_tried_by(task.kind)
        if outcome is TransferOutcome.DONE:
            if is_trial:
                tier.breaker.note_success()
        elif task.is_cancelled:
            if is_trial:
                tier.breaker.note_cancelled()
        else:
            how = "failed" if outcome is TransferOutcome.FAILED else "was not carried out"
            tier.blame(f"a {task.kind.value} of {len(task.keys)} chunks {how}")

    def _give_up_late(self) -> None:
        for task in self._tasks.newly_late():
            self.tiers[task.tier].blame(f"a {task.kind.value} of {len(task.keys)} chunks did not end in time")
            self._num_changes += 1
        self._promotions.release_expired()


def _over(upper: bytes, lower: bytes) -> bytes:
    """What one tier says of chunks, and where that is ``ABSENT``, what the next one does."""
    return bytes(below if state == ABSENT else state for state, below in zip(upper, lower, strict=True))
