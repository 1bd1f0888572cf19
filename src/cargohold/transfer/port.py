"""The transfer port: a worker's copies between its paged KV and a tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain, islice

from cargohold.protocol import TransferOutcome
from cargohold.protocol.hooks import passed_on


class Direction(Enum):
    """Which way a job copies."""

    LOAD = "load"
    """Tier to device."""
    STORE = "store"
    """Device to tier."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """A job that copies blocks.

    Attributes:
        job_id: unique among the jobs of a connector, never used again.
        direction: which way it copies.
        block_ids: blocks on the device.
        rows: the tier's rows, parallel to ``block_ids``; with ``groups``, as many for each block as its group's take.
        timeout_s: the job is abandoned if it has not started after this time, if the implementation can do that.
        groups: the KV-cache group of each block; may be empty where a block is a row, whatever its group. Those that copy need
            it in ``GroupedTransfers`` alone.
        compared: for a comparison, with which row each of ``rows`` is compared once it is written; see ``compare``.
    """

    job_id: int
    direction: Direction
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]
    timeout_s: float
    groups: tuple[int, ...] = ()
    compared: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CopyResult:
    """How a job ended.

    Attributes:
        job: the job.
        outcome: how it ended.
        failed_block_ids: for a failed load, the blocks that hold garbage; empty if all of them do.
        duration_s: seconds that the copying took, without any wait.
    """

    job: CopyJob
    outcome: TransferOutcome
    failed_block_ids: frozenset[int]
    duration_s: float


class TransferWorker(ABC):
    """Copies blocks in the background.

    One thread owns it, which submits and polls. Every submitted job is returned by ``poll`` exactly once, whatever happens to
    the thread, stream or device that carries it out.
    """

    @abstractmethod
    def submit(self, job: CopyJob) -> None:
        """Queue a job, and return at once. It starts when earlier jobs allow; loads go before stores.

        Nothing else may write to the blocks and rows of a job until it has ended.
        """

    @abstractmethod
    def poll(self) -> list[CopyResult]:
        """Return the jobs that ended since the last call, in the order of their ends. May copy for a few milliseconds."""

    @abstractmethod
    def finish_loads(self) -> bool:
        """Make computations from now on read what the loads submitted so far bring. May wait for the loads, but not for ever.

        Returns:
            Whether they will. If not, loads have failed, or are still under way; ``poll`` returns them when they have ended.
        """

    @abstractmethod
    def finish_stores(self) -> None:
        """Make sure that computations from now on do not overwrite blocks that a store reads. May wait for the stores."""

    @abstractmethod
    def settle(self, within_s: float) -> bool:
        """Abandon the jobs that have not started, and wait for the others, for so many seconds at most.

        Returns:
            Whether nothing is copied any more until the next ``submit``. ``poll`` returns the jobs' results.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Let running jobs end, abandon those not started, and release everything. ``poll`` still returns their results."""


class ForwardingTransfers(TransferWorker):
    """Passes every call on to another transfer worker. Subclasses override the methods that they change.

    Args:
        inner: carries out the copies.
    """

    def __init__(self, inner: TransferWorker) -> None:
        self.inner = inner

    submit = passed_on(TransferWorker.submit)
    poll = passed_on(TransferWorker.poll)
    finish_loads = passed_on(TransferWorker.finish_loads)
    finish_stores = passed_on(TransferWorker.finish_stores)
    settle = passed_on(TransferWorker.settle)
    shutdown = passed_on(TransferWorker.shutdown)


class UnmappedTransfers(ForwardingTransfers):
    """Stands for transfers while the device's memory is not there: every job ends at once, abandoned.

    Args:
        inner: the transfers, settled.
    """

    def __init__(self, inner: TransferWorker) -> None:
        super().__init__(inner)
        self._abandoned: list[CopyResult] = []

    def submit(self, job: CopyJob) -> None:
        """Abandon the job."""
        self._abandoned.append(CopyResult(job, TransferOutcome.ABANDONED, frozenset(), 0.0))

    def poll(self) -> list[CopyResult]:
        """Return the abandoned jobs, after those that had ended before."""
        abandoned, self._abandoned = self._abandoned, []
        return super().poll() + abandoned

    def finish_loads(self) -> bool:
        """Return whether there was nothing to load."""
        return have_succeeded(self._abandoned)


def have_succeeded(results: Iterable[CopyResult]) -> bool:
    """Whether all loads among these have succeeded."""
    loads = (result for result in results if result.job.direction is Direction.LOAD)
    return all(load.outcome is TransferOutcome.DONE for load in loads)


# --- runs of neighbouring blocks and rows -----------------------------------------------------------------------------


def consecutive_runs(block_ids: Sequence[int], rows: Sequence[int], max_length: int) -> Iterator[tuple[int, int, int]]:
    """Cut parallel sequences into runs in which both count up by one, so that each run is one copy.

    Yields:
        First block, first row, and length; at most ``max_length`` long.
    """
    start = 0
    for at in range(1, len(block_ids) + 1):
        if (
            at == len(block_ids)
            or at - start == max_length
            or block_ids[at] != block_ids[at - 1] + 1
            or rows[at] != rows[at - 1] + 1
        ):
            yield block_ids[start], rows[start], at - start
            start = at


# --- blocks of several rows -------------------------------------------------------------------------------------------


class GroupedTransfers(ForwardingTransfers):
    """Takes jobs whose blocks have several rows each, as many as their groups take, and has them copied row by row.

    Args:
        inner: carries out copies of as many blocks as rows; what it calls a block is a part of one, as long as a row.
        rows_per_block: rows of a block, by group.
        part_of: returns the number of a part: called with a group, a block and which of its rows it is.
    """

    def __init__(
        self, inner: TransferWorker, rows_per_block: Sequence[int], part_of: Callable[[int, int, int], int]
    ) -> None:
        super().__init__(inner)
        self._rows_per_block = rows_per_block
        self._part_of = part_of
        self._jobs: dict[int, CopyJob] = {}

    def submit(self, job: CopyJob) -> None:
        """Pass on the job's parts."""
        self._jobs[job.job_id] = job
        super().submit(replace(job, block_ids=tuple([part for _, part in self._parts(job)]), groups=()))

    def poll(self) -> list[CopyResult]:
        """Return how jobs ended. A block has failed if a part of it has."""
        return [self._whole(result) for result in super().poll()]

    def _whole(self, result: CopyResult) -> CopyResult:
        job, failed = self._jobs.pop(result.job.job_id), result.failed_block_ids
        bad = frozenset(block_id for block_id, part in self._parts(job) if part in failed) if failed else failed
        return replace(result, job=job, failed_block_ids=bad)

    def _parts(self, job: CopyJob) -> Iterator[tuple[int, int]]:
        """Yield each block with each of its parts."""
        for group, block_id in zip(job.groups, job.block_ids, strict=True):
            for at in range(self._rows_per_block[group]):
                yield block_id, self._part_of(group, block_id, at)


# --- stores that several workers with the same bytes share ------------------------------------------------------------


class SharedStores(ForwardingTransfers):
    """One of several workers that hold the same bytes: of stores, it copies its share alone, into memory that all of them map.

    ::

        worker 0   blocks of every chunk  --chunks in slots 0, 2, 4 ..-->  |          |  --all chunks-->  worker 0
                                                                           |  shared  |
        worker 1   the same bytes         --chunks in slots 1, 3, 5 ..-->  |          |  --all chunks-->  worker 1

    A load may read any row, no matter which worker wrote it: a chunk can be found only when all workers have reported its
    store, and its slot is written again only when all workers have reported the loads that read it. See
    ``docs/design-decisions.md``.

    Results are of what was copied, so that over all workers each block of a store is counted once.

    Args:
        inner: copies.
        is_own: whether it is this worker that writes a row.
        rows_per_block: rows of a block, by group.
    """

    def __init__(
        self, inner: TransferWorker, is_own: Callable[[int], bool], rows_per_block: Sequence[int] = ()
    ) -> None:
        super().__init__(inner)
        self._is_own = is_own
        self._rows_per_block = rows_per_block
        self._ended: list[CopyResult] = []

    def submit(self, job: CopyJob) -> None:
        """Pass on what this worker copies. If that is nothing, the job ends at once."""
        if job.direction is Direction.STORE:
            job = self._own_part(job)
        if job.rows:
            super().submit(job)
        else:
            self._ended.append(CopyResult(job, TransferOutcome.DONE, frozenset(), 0.0))

    def poll(self) -> list[CopyResult]:
        """Pass on, after the jobs in which there was nothing to copy."""
        ended, self._ended = self._ended, []
        return ended + super().poll()

    def _own_part(self, job: CopyJob) -> CopyJob:
        if not job.groups:
            own = [(block_id, row) for block_id, row in zip(job.block_ids, job.rows, strict=True) if self._is_own(row)]
            return replace(job, block_ids=tuple(block_id for block_id, _ in own), rows=tuple(row for _, row in own))
        rows = iter(job.rows)
        blocks = [
            (group, block_id, tuple(islice(rows, self._rows_per_block[group])))
            for group, block_id in zip(job.groups, job.block_ids, strict=True)
        ]
        mine = [(group, block_id, whole) for group, block_id, whole in blocks if self._is_own(whole[0])]
        groups, block_ids, parts = zip(*mine, strict=True) if mine else ((), (), ())
        return replace(job, block_ids=block_ids, rows=tuple(chain.from_iterable(parts)), groups=groups)


def share_stores(
    inner: TransferWorker, at: int, num_workers: int, rows_per_slot: int, rows_per_block: Sequence[int] = ()
) -> TransferWorker:
    """Return the transfers of one of ``num_workers`` workers with the same bytes; ``inner`` itself if it is the only one.

    Chunks are shared out by their slots, so that every worker's link carries its part of a store.

    Args:
        inner: the worker's transfers.
        at: which of these workers it is, from 0.
        num_workers: number of workers that hold the same bytes.
        rows_per_slot: number of rows that make a slot.
        rows_per_block: rows of a block, by group, for jobs that say their blocks' groups.
    """
    if num_workers == 1:
        return inner
    return SharedStores(inner, lambda row: row // rows_per_slot % num_workers == at, rows_per_block)
