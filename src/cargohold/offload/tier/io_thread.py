"""A thread that carries out a tier's jobs, one chunk at a time."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from cargohold.errors import TierError, one_line
from cargohold.offload.tier.base import LoadOutcome, StoreOutcome, Tier
from cargohold.offload.tier.jobs import Answer, JobKind
from cargohold.offload.tier.ledger import Piece
from cargohold.offload.tier.staging import Staging, copy_bytes
from cargohold.protocol import Clock

logger = logging.getLogger(__name__)


class Work(Protocol):
    """The source of a thread's work, which also takes the results."""

    def take(self) -> Piece | None:
        """Wait for the next piece of work, and return it; ``None`` when the thread is to stop."""
        ...

    def begin_copy(self, piece: Piece) -> bool:
        """Whether the piece's buffers may be used; if so, ``end_copy`` must follow soon."""
        ...

    def end_copy(self, piece: Piece) -> None:
        """Note that the piece's buffers are not used any more."""
        ...

    def answer(self, piece: Piece, answers: list[Answer], duration_s: float) -> None:
        """Take the answers of a piece that was carried out, one per chunk."""
        ...

    def fail(self, piece: Piece, reason: str) -> None:
        """Take note that a piece could not be carried out, and why."""
        ...


class IoThread:
    """A thread that takes and carries out pieces of work until ``work`` has no more. Started at once.

    Attributes:
        piece: the piece that it works on. If the thread is found dead, its owner must end that piece.

    Args:
        work: where work comes from, and where answers go.
        tier: the tier to work on.
        clock: monotonic time in seconds.
    """

    def __init__(self, work: Work, tier: Tier, clock: Clock) -> None:
        self.piece: Piece | None = None
        self._work = work
        self._tier = tier
        self._clock = clock
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
        while (piece := self._work.take()) is not None:
            self.piece = piece
            started = self._clock()
            try:
                answers = self._carry_out(piece)
            except TierError as error:
                self._work.fail(piece, error.reason)
            except Exception as error:  # a tier's bug costs a miss; it is logged with its traceback
                logger.exception("tier %s: a %s failed with an unexpected error", self._tier.name, piece.kind.value)
                self._work.fail(piece, one_line(error))
            else:
                self._work.answer(piece, answers, self._clock() - started)
            self.piece = None

    def _carry_out(self, piece: Piece) -> list[Answer]:
        match piece.kind:
            case JobKind.PROBE | JobKind.TOUCH:
                is_there = self._tier.probe(piece.keys)
                self._tier.touch(piece.keys)  # a request that asks for chunks uses them, wherever they then come from
                return list(is_there)
            case JobKind.REMOVE:
                self._tier.remove(piece.keys)
                return [True] * piece.count
            case JobKind.LOAD:
                return [self._load(piece)]
            case JobKind.STORE:
                return [self._store(piece)]

    def _load(self, piece: Piece) -> LoadOutcome:
        job, at = piece.live.job, piece.first
        if at == 0:
            self._tier.touch(job.keys)
        staged = self._staging.view[: len(job.buffers[at])]
        outcome = self._tier.load(job.keys[at], staged)
        if outcome is LoadOutcome.LOADED and not self._copy(piece, job.buffers[at], staged):
            return LoadOutcome.ABSENT  # the job has ended, so nobody will see this answer
        return outcome

    def _store(self, piece: Piece) -> StoreOutcome:
        job, at = piece.live.job, piece.first
        staged = self._staging.view[: len(job.buffers[at])]
        if not self._copy(piece, staged, job.buffers[at]):
            return StoreOutcome.REFUSED
        return self._tier.store(job.keys[at], staged, job.parents[at] if job.parents else None)

    def _copy(self, piece: Piece, into: memoryview, source: memoryview) -> bool:
        """Copy if the job is still live; return whether it was."""
        if not self._work.begin_copy(piece):
            return False
        try:
            copy_bytes(into, source)
        finally:
            self._work.end_copy(piece)
        return True
