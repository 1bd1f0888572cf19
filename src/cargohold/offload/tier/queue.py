"""The asynchronous front of a tier: bounded, with deadlines, and without waits for its caller.

A tier blocks as long as its medium does: a network file system may hang for minutes. So that nobody waits for it:

* Threads work on *staging* memory of their own. They read or write a job's buffers only for one short copy, and only while the
  job is live. So a thread that hangs does no harm: its job ends in time, and the job's buffers are free.
* Jobs end at their deadline, whatever the threads do. Probes, touches and loads go before stores and removals; look-ups
  take turns with the chunks of loads. A job that finds the queue full is refused at once.
* Circuit breakers let a tier rest whose medium keeps failing; then one job at a time tries whether it works again. Look-ups,
  loads and writes have a breaker each. A job that is late though the medium has worked meanwhile was only one too many.
* A thread that died is replaced, a few times; then the tier is turned off and an error is logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from typing import Final

from cargohold.offload.tier.base import StoreOutcome, Tier
from cargohold.offload.tier.breaker import BreakerState, TierBreakers
from cargohold.offload.tier.health import QueueConfig, TierHealth, TierState, Totals
from cargohold.offload.tier.io_thread import IoThread
from cargohold.offload.tier.jobs import ACCESS_OF, FROM_INDEX, Access, Answer, JobKind, JobStatus, TierJob, TierResult
from cargohold.offload.tier.ledger import URGENT, JobLedger, LiveJob, Piece
from cargohold.protocol import Clock
from cargohold.sparing_log import SparingLog

logger = logging.getLogger(__name__)

_STOP_S: Final = 5.0
_CLOSE_S: Final = 1.0
"""Seconds that closing a tier may always take, even if stopping has taken all the time that it may."""
_STATE_OF_BREAKER = {
    BreakerState.CLOSED: TierState.ON,
    BreakerState.HALF_OPEN: TierState.TRYING,
    BreakerState.OPEN: TierState.RESTING,
}


class TierQueue:
    """Carries out jobs on one tier in threads of its own.

    One thread owns the queue: it submits, cancels and polls. Only ``drain`` and ``shutdown`` wait. Every job that was taken is
    returned by ``poll`` exactly once.

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
        self._breakers = TierBreakers(clock, self.config.breaker)
        self._totals = Totals()
        # When the medium last carried out anything in time, per access, and for which job.
        self._worked: dict[Access, tuple[float, LiveJob | None]] = dict.fromkeys(Access, (float("-inf"), None))
        self._failed_trials = SparingLog(logger)
        self._is_off = False
        self._threads: list[IoThread] = []
        self._closing: threading.Thread | None = None
        try:
            while len(self._threads) < self.config.num_threads:
                self._threads.append(self._new_thread())
        except BaseException:
            self._stop(time.monotonic() + _STOP_S)  # threads that were started must not keep the tier open
            raise

    # --- for the owner ------------------------------------------------------------------------------------------------

    def submit(self, job: TierJob) -> bool:
        """Queue a job. Returns ``False`` if it is not taken, because the queue is full or the tier rests or is off."""
        with self._changed:
            if self._is_off or self._is_full(job) or not self._breakers.admit(job.kind):
                self._totals.num_refused += 1
                return False
            self._ledger.add(job)
            if not job.keys:
                # It is done already; the medium was not asked.
                self._breakers.note_cancelled(job.kind)
            self._changed.notify_all()
        return True

    def poll(self) -> list[TierResult]:
        """Return the jobs that ended since the last call, in the order of their ends. Also ends jobs at their deadlines."""
        with self._changed:
            self._replace_dead_threads()
            for live in self._ledger.late():
                self._fail(live, JobStatus.EXPIRED, "not done by its deadline")
            results, self._ledger.results = self._ledger.results, []
        return results

    def cancel(self, job_id: int) -> None:
        """Cancel a job that has not ended yet, because nobody waits for it any more."""
        with self._changed:
            live = self._ledger.find(job_id)
            if live is not None and self._ledger.end(live, JobStatus.CANCELLED):
                self._breakers.note_cancelled(live.job.kind)

    @property
    def state(self) -> TierState:
        """Whether the queue takes jobs; if not all of its breakers are in the same state, that of the worst."""
        with self._changed:
            return TierState.OFF if self._is_off else _STATE_OF_BREAKER[self._breakers.worst_state]

    @property
    def is_off(self) -> bool:
        """Whether the queue takes no jobs any more, because it was shut down or its threads kept dying."""
        return self._is_off

    def health(self) -> TierHealth:
        """Return the tier's state and its counters since the start."""
        state = self.state
        with self._changed:
            return self._totals.snapshot(state, len(self._ledger))

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job has ended or no thread lives, at most ``timeout_s`` seconds; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not len(self._ledger) or not self._has_living_thread(), timeout_s)

    def shutdown(self, timeout_s: float = _STOP_S) -> None:
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
        """Cancel probes, touches and loads, which nobody needs any more, and wait for the other jobs.

        Chunks that only host memory has would be lost with it.
        """
        if timeout_s <= 0:
            return
        with self._changed:
            for live in self._ledger.all():
                if live.job.kind in URGENT:
                    self._ledger.end(live, JobStatus.CANCELLED)
        if not self.drain(timeout_s):
            logger.warning("tier %s: not everything was written within %g s", self.tier.name, timeout_s)

    def _stop(self, patience_ends: float) -> None:
        with self._changed:
            self._is_off = True
            for live in self._ledger.all():
                self._ledger.end(live, JobStatus.CANCELLED)
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
        self._closing.join(max(_CLOSE_S, patience_ends - time.monotonic()))
        if self._closing.is_alive():
            logger.warning("tier %s: its medium hangs, so the tier is not closed", self.tier.name)

    # --- for the threads ----------------------------------------------------------------------------------------------

    def take(self) -> Piece | None:
        """Wait for the next piece of work, and return it; ``None`` when the thread is to stop."""
        with self._changed:
            while True:
                if self._is_off:
                    return None
                piece = self._ledger.take()
                if piece is None:
                    self._changed.wait()
                elif self._clock() <= piece.live.job.deadline:
                    return piece
                else:
                    self._fail(piece.live, JobStatus.EXPIRED, "not begun by its deadline")

    def begin_copy(self, piece: Piece) -> bool:
        """Whether the piece's buffers may be used; if so, ``end_copy`` must follow soon."""
        with self._changed:
            return self._ledger.begin_copy(piece)

    def end_copy(self, piece: Piece) -> None:
        """Note that the piece's buffers are not used any more."""
        with self._changed:
            if self._ledger.end_copy(piece):
                self._changed.notify_all()

    def answer(self, piece: Piece, answers: list[Answer], duration_s: float) -> None:
        """Note that a piece was carried out: one answer per chunk, and the seconds that it took."""
        with self._changed:
            self._totals.count(piece, answers, duration_s)
            self._note_answers(piece, answers)

    def fail(self, piece: Piece, reason: str) -> None:
        """Note that a piece failed. A store job goes on with its other chunks, which may belong to other requests."""
        with self._changed:
            if self._may_go_on(piece):
                self._totals.note_failure(reason)
                self._note_answers(piece, [StoreOutcome.FAILED])
            else:
                self._fail(piece.live, JobStatus.FAILED, reason)

    # --- under the lock -----------------------------------------------------------------------------------------------

    def _note_answers(self, piece: Piece, answers: list[Answer]) -> None:
        if not piece.live.end and self._told_by(answers) - {StoreOutcome.FAILED}:
            self._worked[ACCESS_OF[piece.kind]] = self._clock(), piece.live
        if self._ledger.answer(piece, answers):
            self._note_end(piece.kind, piece.live.answers)
            self._changed.notify_all()

    def _note_end(self, kind: JobKind, answers: Sequence[Answer | None]) -> None:
        """Tell the breaker what the answers of a job say about the medium."""
        told = self._told_by(answers)
        if told - {StoreOutcome.FAILED}:
            self._breakers.note_success(kind)
        elif told:
            self._note_failure(kind, self._totals.last_failure)
        else:
            self._breakers.note_cancelled(kind)

    def _told_by(self, answers: Sequence[Answer | None]) -> set[Answer | None]:
        """Return those answers that the medium was asked for."""
        return set(answers) - (FROM_INDEX if self.tier.has_index else set())

    def _may_go_on(self, piece: Piece) -> bool:
        """Whether to go on with a job though a chunk failed.

        Only with a store while the breaker is closed, and not if all chunks failed, or so many that the medium seems to fail.
        """
        answers = piece.live.answers
        num_failed = answers.count(StoreOutcome.FAILED) + 1
        return (
            piece.kind is JobKind.STORE
            and self._breakers.of(piece.kind).state is BreakerState.CLOSED
            and num_failed < min(len(answers), self.config.breaker.failures_to_open)
        )

    def _is_full(self, job: TierJob) -> bool:
        is_urgent = job.kind in URGENT
        limit = self.config.max_urgent_chunks if is_urgent else self.config.max_store_chunks
        return self._ledger.num_chunks[is_urgent] + len(job.keys) > limit

    def _fail(self, live: LiveJob, status: JobStatus, reason: str) -> None:
        if not self._ledger.end(live, status, reason):
            return
        self._totals.note_failure(reason)
        if status is JobStatus.EXPIRED and self._was_one_too_many(live):
            self._breakers.note_cancelled(live.job.kind)
        else:
            self._note_failure(live.job.kind, reason)
        self._changed.notify_all()

    def _was_one_too_many(self, live: LiveJob) -> bool:
        """Whether a job is late though the medium works: it has worked for others meanwhile, or done most of this one.

        A little of a job says nothing: a medium may begin each one, and then hang.
        """
        worked_at, worked_for = self._worked[ACCESS_OF[live.job.kind]]
        if worked_for is live:
            return 2 * live.num_answered >= len(live.job.keys)
        return worked_at > live.queued_at

    def _note_failure(self, kind: JobKind, reason: str) -> None:
        was_trial = self._breakers.of(kind).state is BreakerState.HALF_OPEN
        if self._breakers.note_failure(kind):
            access = ACCESS_OF[kind]
            self._tell_of_rest(access, reason, was_trial=was_trial)
            self._end_all(f"the tier rests: {reason}", [access])

    def _tell_of_rest(self, access: Access, reason: str, *, was_trial: bool) -> None:
        """Log that an access rests: of a medium that stays bad, trials fail every minute, for days."""
        if was_trial:
            message = "tier %s rests again: a trial failed, so there are still no %s; the reason: %s"
            self._failed_trials.warning(message, self.tier.name, access.value, reason)
        else:
            message = "tier %s rests: after several failures in a row, there are no %s for a while; the last: %s"
            logger.warning(message, self.tier.name, access.value, reason)

    def _end_all(self, reason: str, accesses: Collection[Access] = tuple(Access)) -> None:
        for live in self._ledger.all():
            if ACCESS_OF[live.job.kind] in accesses:
                self._ledger.end(live, JobStatus.FAILED, reason)

    def _new_thread(self) -> IoThread:
        return IoThread(self, self.tier, self._clock)

    def _has_living_thread(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def _replace_dead_threads(self) -> None:
        for at, thread in enumerate(self._threads):
            if self._is_off or thread.is_alive():
                continue
            self._totals.num_thread_deaths += 1
            logger.error("tier %s: an I/O thread died", self.tier.name)
            if thread.piece is not None:
                self._fail(thread.piece.live, JobStatus.FAILED, "the I/O thread died")
            if self._totals.num_thread_deaths > self.config.max_thread_deaths:
                logger.error("tier %s is off for good: its I/O threads keep dying", self.tier.name)
                self._is_off = True
                self._end_all("the I/O threads keep dying")
                self._changed.notify_all()
            else:
                try:
                    self._threads[at] = self._new_thread()
                except (RuntimeError, OSError, MemoryError):
                    # The next poll finds the dead thread again, and counts it once more.
                    logger.exception("tier %s: an I/O thread could not be replaced", self.tier.name)
