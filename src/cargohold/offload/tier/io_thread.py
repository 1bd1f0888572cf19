"""A thread that carries out a tier's jobs, one chunk at a time."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from cargohold.errors import TierError, one_line
from cargohold.offload.tier.base import LoadOutcome, StoreOutcome, Tier
from cargohold.offload.tier.jobs import Answer, JobKind, TierJob
from cargohold.offload.tier.staging import Staging, copy_bytes

logger = logging.getLogger(__name__)


class Work(Protocol):
    """The source of a thread's work, which also takes the answers."""

    def take(self) -> tuple[TierJob, int] | None:
        """Wait for the next job to work on, and return it with the index of its chunk; ``None`` when the thread is to stop.

        The index counts for loads and stores; of other jobs, all chunks are one piece of work.
        """
        ...

    def begin_copy(self, job: TierJob) -> bool:
        """Whether the job's buffers may be used; if so, ``end_copy`` must follow soon."""
        ...

    def end_copy(self, job: TierJob) -> None:
        """Note that the job's buffers are not used any more."""
        ...

    def answer(self, job: TierJob, at: int, answers: list[Answer]) -> None:
        """Take the answers for the job's chunks from index ``at`` on."""
        ...

    def fail(self, job: TierJob, at: int, reason: str) -> None:
        """Take note that the work on the job at index ``at`` could not be carried out, and why."""
        ...


class IoThread:
    """A thread that takes and carries out work until there is no more. Started at once.

    Attributes:
        job: the job that it works on. If the thread is found dead, its owner must end that job.

    Args:
        work: where work comes from, and where answers go.
        tier: the tier to work on.
    """

    def __init__(self, work: Work, tier: Tier) -> None:
        self.job: TierJob | None = None
        self._work = work
        self._tier = tier
        self._staging = Staging(tier.chunk_bytes)
        # A daemon, so that it does not keep the process alive when its medium hangs.
        self._thread = threading.Thread(target=self._run, name=f"cargohold-{tier.name}", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds for the thread's end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (taken := self._work.take()) is not None:
            self.job, at = taken
            try:
                answers = self._carry_out(self.job, at)
            except TierError as error:
                self._work.fail(self.job, at, error.reason)
            except Exception as error:  # a tier's bug costs a miss; it is logged with its traceback
                kind = self.job.kind.value
                logger.exception("tier %s: a %s failed with an unexpected error", self._tier.name, kind)
                self._work.fail(self.job, at, one_line(error))
            else:
                self._work.answer(self.job, at, answers)
            self.job = None

    def _carry_out(self, job: TierJob, at: int) -> list[Answer]:
        match job.kind:
            case JobKind.PROBE | JobKind.TOUCH:
                is_there = self._tier.probe(job.keys)
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
        staged = self._staging.view[: len(job.buffers[at])]
        outcome = self._tier.load(job.keys[at], staged)
        if outcome is LoadOutcome.LOADED and not self._copy(job, job.buffers[at], staged):
            return LoadOutcome.ABSENT  # the job has ended, so nobody will see this answer
        return outcome

    def _store(self, job: TierJob, at: int) -> StoreOutcome:
        staged = self._staging.view[: len(job.buffers[at])]
        if not self._copy(job, staged, job.buffers[at]):
            return StoreOutcome.REFUSED
        return self._tier.store(job.keys[at], staged, job.parents[at] if job.parents else None)

    def _copy(self, job: TierJob, into: memoryview, source: memoryview) -> bool:
        """Copy if the job is still live; return whether it was."""
        if not self._work.begin_copy(job):
            return False
        try:
            copy_bytes(into, source)
        finally:
            self._work.end_copy(job)
        return True
