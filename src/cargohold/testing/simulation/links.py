"""Copies that take time: a link between one worker's paged KV and its shard of a tier, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from random import Random

from cargohold.protocol import Clock, TransferOutcome
from cargohold.testing.simulation.transfers import ByteRows
from cargohold.transfer import CopyJob, CopyResult, Direction, TransferWorker


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """How fast a link is. Times are in virtual seconds.

    Attributes:
        latency_s: least time from submission to start; drawn for each job, up to twice as much.
        block_s: time per block.
        lanes: jobs carried out side by side, per direction. With more than one, or uneven latencies, jobs overtake each other.
    """

    latency_s: float = 0.0
    block_s: float = 0.0
    lanes: int = 1


@dataclass(slots=True)
class _Copy:
    """A job on its way.

    Attributes:
        job: the job.
        submitted, starts, ends: virtual times.
        num_moved: number of leading blocks that have been copied.
    """

    job: CopyJob
    submitted: float
    starts: float
    ends: float
    num_moved: int = 0


class LinkTransfers(TransferWorker):
    """Carries out copies in virtual time. Satisfies the transfer port.

    Blocks of one job move at different moments between its start and its end, so that a change of blocks meanwhile spoils some
    of them.

    Args:
        region: the paged KV, as bytes.
        rows: the tier's memory, a row per block.
        clock: virtual time.
        profile: how fast the link is.
        random: source of random numbers, from the seed.

    Attributes:
        slowness: gives the factor by which jobs submitted now take longer.
    """

    def __init__(self, region: ByteRows, rows: ByteRows, clock: Clock, profile: LinkProfile, random: Random) -> None:
        self._region = region
        self._rows = rows
        self._clock = clock
        self._profile = profile
        self._random = random
        self._lanes = {direction: [0.0] * profile.lanes for direction in Direction}
        self._copies: list[_Copy] = []
        self._results: list[CopyResult] = []
        self.slowness: Callable[[], float] = lambda: 1.0

    def submit(self, job: CopyJob) -> None:
        """Give the job a place in the queue of its direction."""
        now = self._clock()
        lanes = self._lanes[job.direction]
        lane = min(range(len(lanes)), key=lanes.__getitem__)
        slowness = self.slowness()
        latency_s = self._profile.latency_s * (1 + self._random.random()) * slowness
        starts = max(now, lanes[lane]) + latency_s
        if starts - now > job.timeout_s:
            self._copies.append(_Copy(job, now, float("inf"), now + job.timeout_s))
            return
        ends = starts + self._profile.block_s * len(job.block_ids) * slowness
        lanes[lane] = ends
        self._copies.append(_Copy(job, now, starts, ends))

    def advance(self) -> None:
        """Move the blocks that are due by now, and end the jobs that are over. Mutates paged KV and tier."""
        if not self._copies:
            return
        now = self._clock()
        ended = []
        for copy in self._copies:
            if copy.ends <= now:
                ended.append(copy)
            elif copy.starts <= now and not copy.num_moved:
                self._move(copy, self._random.randrange(len(copy.job.block_ids) + 1))
        if ended:
            self._copies = [copy for copy in self._copies if copy.ends > now]
            for copy in sorted(ended, key=attrgetter("ends")):
                self._end(copy)

    def next_event(self) -> float:
        """Virtual time at which the next job starts or ends; infinity if nothing is in flight."""
        times = [copy.ends if copy.num_moved else min(copy.starts, copy.ends) for copy in self._copies]
        return min(times, default=float("inf"))

    def poll(self) -> list[CopyResult]:
        """Results of the jobs that ended since the last call."""
        self.advance()
        results, self._results = self._results, []
        return results

    def finish_stores(self) -> None:
        """Carry out all stores now."""
        stores = [copy for copy in self._copies if copy.job.direction is Direction.STORE]
        self._copies = [copy for copy in self._copies if copy.job.direction is not Direction.STORE]
        for copy in stores:
            self._end(copy)

    def shutdown(self) -> None:
        """Let running jobs end and abandon the others."""
        copies, self._copies = self._copies, []
        for copy in copies:
            if not copy.num_moved:
                copy.starts = float("inf")
            self._end(copy)

    def _end(self, copy: _Copy) -> None:
        outcome = TransferOutcome.DONE if copy.starts < float("inf") else TransferOutcome.ABANDONED
        if outcome is TransferOutcome.DONE:
            self._move(copy, len(copy.job.block_ids))
        self._results.append(CopyResult(copy.job, outcome, frozenset(), self._clock() - copy.submitted))

    def _move(self, copy: _Copy, up_to: int) -> None:
        if copy.num_moved < up_to:
            part = slice(copy.num_moved, up_to)
            move(copy.job.direction, self._region, copy.job.block_ids[part], self._rows, copy.job.rows[part])
            copy.num_moved = up_to


def move(
    direction: Direction, region: ByteRows, block_ids: Sequence[int], rows: ByteRows, row_ids: Sequence[int]
) -> None:
    """Copy each block to the row at the same place in ``row_ids``, or each row to its block."""
    if direction is Direction.LOAD:
        for block_id, row in zip(block_ids, row_ids, strict=True):
            region[block_id] = rows[row]
    else:
        for block_id, row in zip(block_ids, row_ids, strict=True):
            rows[row] = region[block_id]
