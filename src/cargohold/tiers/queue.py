"""The asynchronous front of a tier: bounded, with deadlines, and without waits for its caller.

A tier blocks as long as its medium does: a network file system may hang for minutes. So that no request waits for it:

* Threads work on *staging* memory of their own. They read or write a job's buffers only for one short copy, and only while the
  job is live. So a thread that hangs does no harm: its job ends in time, and the job's buffers are free.
* Jobs end at their deadline, whatever the threads do. Probes, touches and loads go before stores and removals; look-ups
  take turns with the chunks of loads. A job that finds the queue full is refused at once.
* Circuit breakers suspend what keeps failing: look-ups, loads or writes. A job that is late though the medium has worked
  meanwhile was only one too many.
* A thread that died is replaced, a few times; then the tier is turned off and an error is logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cargohold.cache.manager import OffloadKey
from cargohold.deadlines import CLOSE, STOP
from cargohold.errors import TierError, one_line
from cargohold.protocol import Clock
from cargohold.tiers.chunk_format import NO_NOTE
from cargohold.tiers.health import BreakerConfig, BreakerState, MediumHealth, TierHealth
from cargohold.tiers.memory import Buffer, copy_bytes
from cargohold.tiers.port import (
    ACCESS_OF,
    EMPTY,
    LISTED_AT_ONCE,
    URGENT,
    Access,
    Answer,
    JobKind,
    JobLedger,
    JobStatus,
    LoadOutcome,
    Losses,
    StoreOutcome,
    Tier,
    TierJob,
    TierUsage,
)
from cargohold.tiers.worker import JobQueue

logger = logging.getLogger(__name__)


class IoThread(threading.Thread):
    """A thread that takes and carries out work until there is no more. Started at once.

    Attributes:
        job: the job that it works on. If the thread is found dead, its owner must end that job.

    Args:
        queue: where work comes from, and where answers go.
        tier: the tier to work on.
    """

    def __init__(self, queue: TierQueue, tier: Tier) -> None:
        # A daemon, so that it does not keep the process alive when its medium hangs.
        super().__init__(name=f"cargohold-{tier.name}", daemon=True)
        self.job: TierJob | None = None
        self._queue = queue
        self._tier = tier
        self._staging = tier.staging()
        self.start()

    def run(self) -> None:
        """Work until the queue has no more."""
        while (taken := self._queue.take()) is not None:
            self.job, at = taken
            try:
                answers = self._carry_out(self.job, at)
            except TierError as error:
                self._queue.fail(self.job, at, error.reason)
            except Exception as error:  # a tier's bug costs a miss; it is logged with its traceback
                kind = self.job.kind.value
                logger.exception("tier %s: a %s failed with an unexpected error", self._tier.name, kind)
                self._queue.fail(self.job, at, one_line(error))
            else:
                self._queue.answer(self.job, at, answers)
            self.job = None

    def _carry_out(self, job: TierJob, at: int) -> list[Answer]:
        match job.kind:
            case JobKind.RANK:
                self._tier.rank(job.keys, [note.retention for note in job.notes])
                return [True] * len(job.keys)
            case JobKind.LIST | JobKind.DESCRIBE:
                job.listing = self._tier.list_chunks(
                    job.keys[0], LISTED_AT_ONCE[job.kind], with_details=job.kind is JobKind.DESCRIBE
                )
                return [True]
            case JobKind.PROBE | JobKind.TOUCH | JobKind.CHECK:
                is_there = self._tier.probe(job.keys)
                if job.kind is not JobKind.CHECK:
                    self._tier.touch(job.keys)  # a request that asks for chunks uses them, wherever they then come from
                return list(is_there)
            case JobKind.REMOVE:
                self._tier.remove(job.keys)
                return [True] * len(job.keys)
            case JobKind.LOAD:
                return [self._load(job, at)]
            case JobKind.STORE:
                return [self._store(job, at)]

    def _load(self, job: TierJob, at: int) -> LoadOutcome:
        if at == 0:
            self._tier.touch(job.keys)
        staged = self._staging[: len(job.buffers[at])]
        outcome = self._tier.load(job.keys[at], staged)
        if outcome is LoadOutcome.LOADED and not self._copy(job, job.buffers[at], staged):
            return LoadOutcome.ABSENT  # the job has ended, so this answer is not seen
        return outcome

    def _store(self, job: TierJob, at: int) -> StoreOutcome:
        staged = self._staging[: len(job.buffers[at])]
        if not self._copy(job, staged, job.buffers[at]):
            return StoreOutcome.REFUSED
        parent = job.parents[at] if job.parents else None
        return self._tier.store(job.keys[at], staged, parent, job.notes[at] if job.notes else NO_NOTE)

    def _copy(self, job: TierJob, into: Buffer, source: Buffer) -> bool:
        """Copy if the job is still live; return whether it was."""
        if not self._queue.begin_copy(job):
            return False
        try:
            copy_bytes(into, source)
        finally:
            self._queue.end_copy(job)
        return True


# --- the asynchronous front of a tier ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Limits of a queue.

    Attributes:
        num_threads: number of threads, so of requests to the medium at the same time; each has staging memory for one chunk.
        max_urgent_chunks: maximum number of chunks in probes, touches and loads that are queued or under way.
        max_store_chunks: maximum number of chunks in stores and removals that are queued or under way.
        max_thread_deaths: number of dead threads that are replaced; the next death turns the tier off.
        finish_s: maximum time for stores and removals to end when the queue is shut down.
        breaker: when look-ups, loads or writes are suspended.
    """

    num_threads: int = 4
    max_urgent_chunks: int = 65536
    max_store_chunks: int = 1024
    max_thread_deaths: int = 8
    finish_s: float = 0.0
    breaker: BreakerConfig = field(default_factory=BreakerConfig)


class TierQueue(JobQueue):
    """Carries out jobs on one tier in threads of its own.

    One thread owns the queue: it submits, cancels and polls. Only ``drain`` and ``shutdown`` wait. Every job that was taken is
    returned by ``poll`` exactly once. Or else many threads use it by ``perform``, each of which waits for its job.

    Args:
        tier: the medium; closed by ``shutdown``.
        clock: monotonic time in seconds.
        config: limits.
    """

    def __init__(self, tier: Tier, clock: Clock, config: QueueConfig) -> None:
        self.tier = tier
        self.config = config
        self._clock = clock
        self._changed = threading.Condition()
        self._ledger = JobLedger(clock)
        self._health = MediumHealth(tier.name, clock, config.breaker, has_index=tier.has_index)
        self._num_thread_deaths = 0
        self._is_off = False
        self._threads: list[IoThread] = []
        self._closing: threading.Thread | None = None
        try:
            while len(self._threads) < self.config.num_threads:
                self._threads.append(IoThread(self, tier))
        except BaseException:
            self._stop(time.monotonic() + STOP.seconds())  # threads that were started must not keep the tier open
            raise

    # --- for the owner ------------------------------------------------------------------------------------------------

    def submit(self, job: TierJob) -> bool:
        """Queue a job. Returns ``False`` if it is not taken: the queue is full, its access is suspended, or the tier is off."""
        with self._changed:
            if self._is_off or self._is_full(job) or not self._health.admit(job.kind):
                return False
            self._ledger.add(job)
            if job.status:  # it has no chunks, so it is done already; the medium was not asked
                self._health.note_end(job)
            self._changed.notify_all()
        return True

    def poll(self) -> list[TierJob]:
        """Return the jobs that ended since the last call, in the order of their ends. Also ends jobs at their deadlines."""
        with self._changed:
            self._replace_dead_threads()
            for job in self._ledger.late():
                self._end(job, JobStatus.EXPIRED, "not done by its deadline")
            ended, self._ledger.ended = self._ledger.ended, []
        return ended

    def perform(self, job: TierJob) -> bool:
        """Submit a job and wait until it has ended, which is at its deadline at the latest; return whether it was taken.

        For callers that may wait, in any thread, and do not poll. The clock must be ``time.monotonic``.
        """
        with self._changed:
            if not self.submit(job):
                return False
            while self._ledger.find(job.job_id) is job:
                if job.status:
                    self._changed.wait()  # for the end of a copy from or to its buffers
                elif not self._changed.wait(max(0.0, job.deadline - self._clock())):
                    self._end(job, JobStatus.EXPIRED, "not done by its deadline")
                self._replace_dead_threads()
            self._ledger.ended.remove(job)
        return True

    def cancel(self, job_id: int) -> None:
        """Cancel a job that has not ended yet, because no caller waits for it any longer."""
        with self._changed:
            job = self._ledger.find(job_id)
            if job is not None:
                self._end(job, JobStatus.CANCELLED)

    def health(self) -> TierHealth:
        """Return which of look-ups, loads and writes are possible, and whether the tier is off for good."""
        with self._changed:
            health = self._health.report()
            return replace(health, is_off=True) if self._is_off else health

    def usage(self) -> TierUsage:
        """Return how full the tier is, as far as is known here; empty if it cannot say."""
        try:
            return self.tier.usage()
        except Exception as error:  # noqa: BLE001  # a third-party tier; it is counted, and nothing depends on it
            logger.info("tier %s does not report how full it is: %s", self.tier.name, one_line(error))
            return EMPTY

    def take_losses(self) -> Losses:
        """Return what the tier has lost since the last call, as far as it knows."""
        return self.tier.take_losses()

    def lacking(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of the chunks that the tier does not have. One that reports losses has an index, so this is quick."""
        return [key for key, is_there in zip(keys, self.tier.probe(keys), strict=True) if not is_there]

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job has ended or no thread lives, at most ``timeout_s`` seconds; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not len(self._ledger) or not self._has_living_thread(), timeout_s)

    def shutdown(self, timeout_s: float = STOP.seconds()) -> None:
        """Let stores and removals end, for ``finish_s`` at most, cancel all other jobs, and close the tier.

        Waits at most ``timeout_s`` in all, or ``finish_s`` if that is longer, and not any more once it is interrupted. If the
        medium hangs, the tier may be closed later, or never. ``poll`` still works afterwards.
        """
        # Real time: this method really waits, whatever ``clock`` says.
        end = time.monotonic() + max(timeout_s, self.config.finish_s)
        patience_ends = 0.0
        try:
            self._finish_writes(self.config.finish_s)
            patience_ends = end
        finally:
            self._stop(patience_ends)

    def _finish_writes(self, timeout_s: float) -> None:
        """Cancel probes, touches and loads, which are no longer needed, and wait for the other jobs.

        Chunks that only host memory has would be lost with it.
        """
        if timeout_s <= 0:
            return
        with self._changed:
            for job in self._ledger.all():
                if job.kind in URGENT:
                    self._ledger.end(job, JobStatus.CANCELLED)
        if not self.drain(timeout_s):
            logger.warning("tier %s: not everything was written within %g s", self.tier.name, timeout_s)

    def _stop(self, patience_ends: float) -> None:
        with self._changed:
            self._is_off = True
            for job in self._ledger.all():
                self._ledger.end(job, JobStatus.CANCELLED)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, patience_ends - time.monotonic()))
        if self._has_living_thread():
            # The thread may still use the tier's files: the number of a closed file may be given to another file.
            logger.warning(
                "tier %s: an I/O thread still hangs in its medium, so the tier is not closed", self.tier.name
            )
        else:
            self._close_tier(patience_ends)

    def _close_tier(self, patience_ends: float) -> None:
        """Close the tier in a thread of its own, because its medium may have begun to hang while there was nothing to do."""
        if self._closing is None:
            name = f"cargohold-{self.tier.name}-close"
            closing = threading.Thread(target=self.tier.close, name=name, daemon=True)
            try:
                closing.start()
            except RuntimeError:  # no thread can be started any more, for instance because the interpreter ends
                self.tier.close()
                return
            self._closing = closing
        self._closing.join(max(CLOSE.seconds(), patience_ends - time.monotonic()))
        if self._closing.is_alive():
            logger.warning("tier %s: its medium hangs, so the tier is not closed", self.tier.name)

    # --- for the threads ----------------------------------------------------------------------------------------------

    def take(self) -> tuple[TierJob, int] | None:
        """Wait for the next job to work on, and return it with the index of its chunk; ``None`` when the thread is to stop."""
        with self._changed:
            while True:
                if self._is_off:
                    return None
                taken = self._ledger.take()
                if taken is None:
                    self._changed.wait()
                elif self._clock() <= taken[0].deadline:
                    return taken
                else:
                    self._end(taken[0], JobStatus.EXPIRED, "not begun by its deadline")

    def begin_copy(self, job: TierJob) -> bool:
        """Whether the job's buffers may be used; if so, ``end_copy`` must follow soon."""
        with self._changed:
            return self._ledger.begin_copy(job)

    def end_copy(self, job: TierJob) -> None:
        """Note that the job's buffers are not used any more."""
        with self._changed:
            if self._ledger.end_copy(job):
                self._changed.notify_all()

    def answer(self, job: TierJob, at: int, answers: list[Answer]) -> None:
        """Note the answers for a job's chunks from index ``at`` on."""
        with self._changed:
            self._note_answers(job, at, answers)

    def fail(self, job: TierJob, at: int, reason: str) -> None:
        """Note that a job failed at a chunk. A store goes on with its other chunks, which may belong to other requests."""
        with self._changed:
            if self._may_go_on(job):
                job.reason = reason
                self._note_answers(job, at, [StoreOutcome.FAILED])
            else:
                self._end(job, JobStatus.FAILED, reason)

    # --- under the lock -----------------------------------------------------------------------------------------------

    def _note_answers(self, job: TierJob, at: int, answers: list[Answer]) -> None:
        if not job.status:
            self._health.note_answers(job, answers)
        if self._ledger.answer(job, at, answers):
            self._judge(job)

    def _may_go_on(self, job: TierJob) -> bool:
        """Whether to go on with a job though a chunk failed.

        Only with a store while the breaker is closed, and not if all chunks failed, or so many that the medium seems to fail.
        """
        num_failed = job.answers.count(StoreOutcome.FAILED) + 1
        return (
            job.kind is JobKind.STORE
            and self._health.state_of(job.kind) is BreakerState.CLOSED
            and num_failed < min(len(job.answers), self.config.breaker.failures_to_open)
        )

    def _is_full(self, job: TierJob) -> bool:
        is_urgent = job.kind in URGENT
        limit = self.config.max_urgent_chunks if is_urgent else self.config.max_store_chunks
        return self._ledger.num_chunks[is_urgent] + len(job.keys) > limit

    def _end(self, job: TierJob, status: JobStatus, reason: str = "") -> None:
        if self._ledger.end(job, status, reason):
            self._judge(job)

    def _judge(self, job: TierJob) -> None:
        """Judge the medium by a job that has ended. If that suspends an access, its other jobs fail at once."""
        suspended = self._health.note_end(job)
        if suspended:
            self._fail_all(f"{suspended.value} are suspended: {job.reason}", suspended)
        self._changed.notify_all()

    def _fail_all(self, reason: str, access: Access | None = None) -> None:
        for job in self._ledger.all():
            if access in (None, ACCESS_OF[job.kind]):
                self._ledger.end(job, JobStatus.FAILED, reason)

    def _has_living_thread(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _replace_dead_threads(self) -> None:
        for at, thread in enumerate(self._threads):
            if self._is_off or thread.is_alive():
                continue
            self._num_thread_deaths += 1
            logger.error("tier %s: an I/O thread died", self.tier.name)
            if thread.job is not None:
                self._end(thread.job, JobStatus.FAILED, "the I/O thread died")
            if self._num_thread_deaths > self.config.max_thread_deaths:
                logger.error("tier %s is off for good: its I/O threads keep dying", self.tier.name)
                self._is_off = True
                self._fail_all("the I/O threads keep dying")
                self._changed.notify_all()
            else:
                try:
                    self._threads[at] = IoThread(self, self.tier)
                except (RuntimeError, OSError, MemoryError):
                    # The next poll finds the dead thread again, and counts it once more.
                    logger.exception("tier %s: an I/O thread could not be replaced", self.tier.name)
