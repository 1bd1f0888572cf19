"""The transfer port: a worker's copies between its paged KV and a tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

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
        rows: the tier's block-sized rows, parallel to ``block_ids``.
        timeout_s: the job is abandoned if it has not started after this time, if the implementation can do that.
    """

    job_id: int
    direction: Direction
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]
    timeout_s: float


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

        Nobody else may write to the blocks and rows of a job until it has ended.
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
    shutdown = passed_on(TransferWorker.shutdown)


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


# --- stores that several workers with the same bytes share ------------------------------------------------------------


class SharedStores(ForwardingTransfers):
    """One of several workers that hold the same bytes: of stores, it copies its share alone, into memory that all of them map.

    ::

        worker 0   blocks of every chunk  --chunks in slots 0, 2, 4 ..-->  |          |  --all chunks-->  worker 0
                                                                           |  shared  |
        worker 1   the same bytes         --chunks in slots 1, 3, 5 ..-->  |          |  --all chunks-->  worker 1

    A load may read any row, whoever wrote it: a chunk can be found only when all workers have reported its store, and its slot
    is written anew only when all workers have reported the loads that read it. See ``docs/design-decisions.md``.

    Results are of what was copied, so that over all workers each block of a store is counted once.

    Args:
        inner: copies.
        is_own: whether it is this worker that writes a row.
    """

    def __init__(self, inner: TransferWorker, is_own: Callable[[int], bool]) -> None:
        super().__init__(inner)
        self._is_own = is_own
        self._ended: list[CopyResult] = []

    def submit(self, job: CopyJob) -> None:
        """Pass on what this worker copies. If that is nothing, the job ends at once."""
        if job.direction is Direction.STORE:
            own = [(block_id, row) for block_id, row in zip(job.block_ids, job.rows, strict=True) if self._is_own(row)]
            job = replace(job, block_ids=tuple(block_id for block_id, _ in own), rows=tuple(row for _, row in own))
        if job.rows:
            super().submit(job)
        else:
            self._ended.append(CopyResult(job, TransferOutcome.DONE, frozenset(), 0.0))

    def poll(self) -> list[CopyResult]:
        """Pass on, behind the jobs in which there was nothing to copy."""
        ended, self._ended = self._ended, []
        return ended + super().poll()


def share_stores(inner: TransferWorker, at: int, num_workers: int, rows_per_slot: int) -> TransferWorker:
    """Return the transfers of one of ``num_workers`` workers with the same bytes; ``inner`` itself if it is the only one.

    Chunks are shared out by their slots, so that every worker's link carries its part of a store.

    Args:
        inner: the worker's transfers.
        at: which of these workers it is, from 0.
        num_workers: number of workers that hold the same bytes.
        rows_per_slot: number of rows that make a slot.
    """
    if num_workers == 1:
        return inner
    return SharedStores(inner, lambda row: row // rows_per_slot % num_workers == at)
