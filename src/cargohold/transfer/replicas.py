"""Stores that several workers with the same bytes share: each copies some of the chunks, into memory that all of them map.

::

    worker 0   blocks of every chunk  --chunks in slots 0, 2, 4 ..-->  |          |  --all chunks-->  worker 0
                                                                       |  shared  |
    worker 1   the same bytes         --chunks in slots 1, 3, 5 ..-->  |          |  --all chunks-->  worker 1

A load may read any row, whoever wrote it: a chunk can be found only when all workers have reported its store, and its slot is
written anew only when all workers have reported the loads that read it. See ``docs/design-decisions.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from cargohold.protocol import TransferOutcome
from cargohold.transfer.port import CopyJob, CopyResult, Direction, TransferWorker


class SharedStores(TransferWorker):
    """One of several workers that hold the same bytes: of stores, it copies its share alone.

    Results are of what was copied, so that over all workers each block of a store is counted once.

    Args:
        inner: copies.
        is_own: whether it is this worker that writes a row.
    """

    def __init__(self, inner: TransferWorker, is_own: Callable[[int], bool]) -> None:
        self._inner = inner
        self._is_own = is_own
        self._ended: list[CopyResult] = []

    def submit(self, job: CopyJob) -> None:
        """Pass on what this worker copies. If that is nothing, the job ends at once."""
        if job.direction is Direction.STORE:
            own = [(block_id, row) for block_id, row in zip(job.block_ids, job.rows, strict=True) if self._is_own(row)]
            job = replace(job, block_ids=tuple(block_id for block_id, _ in own), rows=tuple(row for _, row in own))
        if job.rows:
            self._inner.submit(job)
        else:
            self._ended.append(CopyResult(job, TransferOutcome.DONE, frozenset(), 0.0))

    def poll(self) -> list[CopyResult]:
        """Pass on, behind the jobs in which there was nothing to copy."""
        ended, self._ended = self._ended, []
        return ended + self._inner.poll()

    def finish_loads(self) -> bool:
        """Pass on: each worker loads all blocks itself."""
        return self._inner.finish_loads()

    def finish_stores(self) -> None:
        """Pass on: of blocks that other workers copy, nothing is read here."""
        self._inner.finish_stores()

    def shutdown(self) -> None:
        """Pass on."""
        self._inner.shutdown()


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
