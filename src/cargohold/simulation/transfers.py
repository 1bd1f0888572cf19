"""Transfers whose copies a test controls, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from cargohold.offload.transfer import CopyJob, CopyResult, Direction, TransferWorker
from cargohold.protocol import Clock, TransferOutcome

ByteRows = npt.NDArray[np.uint8]


def as_array(region: Any) -> ByteRows:
    """The same memory as a numpy array. Regions may be tensors, if the engine has connectors that need these."""
    array: ByteRows = region if isinstance(region, np.ndarray) else region.numpy()
    return array


class HeldTransfers(TransferWorker):
    """Carries out each job at the next poll, or only when told to: then the test decides when and how it ends.

    Args:
        region: the paged KV, as bytes.
        rows: the tier's memory.
        clock: virtual time.
        auto: whether jobs are carried out at the next poll, without being told to.
    """

    def __init__(self, region: ByteRows, rows: ByteRows, clock: Clock, *, auto: bool = True) -> None:
        self._region = region
        self._rows = rows
        self._clock = clock
        self.auto = auto
        self.pending: list[CopyJob] = []
        self._submitted: dict[int, float] = {}
        self._results: list[CopyResult] = []
        self.on_copy: Callable[[CopyJob], None] = lambda _: None

    def submit(self, job: CopyJob) -> None:
        """Remember the job."""
        self.pending.append(job)
        self._submitted[job.job_id] = self._clock()

    def complete(
        self, job: CopyJob, outcome: TransferOutcome = TransferOutcome.DONE, bad_blocks: Iterable[int] = ()
    ) -> None:
        """Carry out a pending job now, or end it with another outcome without copying. ``bad_blocks`` are reported."""
        self.pending.remove(job)
        if outcome is TransferOutcome.DONE:
            self.on_copy(job)
            blocks, rows = list(job.block_ids), list(job.rows)
            if job.direction is Direction.LOAD:
                self._region[blocks] = self._rows[rows]
            else:
                self._rows[rows] = self._region[blocks]
        duration_s = self._clock() - self._submitted.pop(job.job_id)
        self._results.append(CopyResult(job, outcome, frozenset(bad_blocks), duration_s))

    def poll(self) -> list[CopyResult]:
        """Results of the jobs that ended since the last call."""
        if self.auto:
            for job in list(self.pending):
                self.complete(job)
        results, self._results = self._results, []
        return results

    def finish_stores(self) -> None:
        """Carry out the pending stores."""
        for job in list(self.pending):
            if job.direction is Direction.STORE:
                self.complete(job)

    def shutdown(self) -> None:
        """Abandon all pending jobs."""
        for job in list(self.pending):
            self.complete(job, TransferOutcome.ABANDONED)
