"""Copies between paged KV on a CUDA device and host memory, on streams of their own.

::

    compute stream   | forward pass of step n      | step n + 1 ...
    store stream     |            waits for it --->| copies of step n's stores
    load stream      | copies of loads (into blocks that nobody reads or writes before they have arrived)
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cargohold.offload.tier.host import HostMemory
from cargohold.offload.transfer.base import CopyJob, CopyResult, Direction, TransferWorker
from cargohold.offload.transfer.cpu import consecutive_runs
from cargohold.protocol import Clock, TransferOutcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _InFlight:
    job: CopyJob
    submitted: float
    done: torch.cuda.Event


class CudaTransferWorker(TransferWorker):
    """Carries out jobs on two streams, one per direction, with the device's copy engines.

    Args:
        regions: the paged KV: two-dimensional ``uint8`` tensors of ``num_blocks`` rows on one device.
        memory: the tier; its pages are locked, so that copies need no staging.
        clock: monotonic time in seconds.
    """

    def __init__(self, regions: Sequence[torch.Tensor], memory: HostMemory, clock: Clock) -> None:
        self._memory = memory
        self._rows = torch.from_numpy(memory.rows)
        ends = np.cumsum([0] + [region.shape[1] for region in regions]).tolist()
        self._pairs = [(region, self._rows[:, ends[at] : ends[at + 1]]) for at, region in enumerate(regions)]
        self._clock = clock
        self._device = regions[0].device
        self._streams = {direction: torch.cuda.Stream(self._device) for direction in Direction}
        self._in_flight: dict[Direction, deque[_InFlight]] = {direction: deque() for direction in Direction}
        self._results: list[CopyResult] = []
        self._is_pinned = self._pin()

    def submit(self, job: CopyJob) -> None:
        """Enqueue a job's copies behind what the model has enqueued so far."""
        submitted = self._clock()
        stream = self._streams[job.direction]
        try:
            # A store reads what the forward pass before it writes; a load must not overtake those who read its blocks last.
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                self._enqueue(job)
                done = torch.cuda.Event()
                done.record(stream)
        except RuntimeError:
            logger.exception("enqueueing the copies of job %d failed", job.job_id)
            self._results.append(CopyResult(job, TransferOutcome.FAILED, frozenset(), self._clock() - submitted))
            return
        self._in_flight[job.direction].append(_InFlight(job, submitted, done))

    def poll(self) -> list[CopyResult]:
        """Jobs whose copies have completed."""
        for queue in self._in_flight.values():
            while queue and queue[0].done.query():
                self._complete(queue.popleft())
        results, self._results = self._results, []
        return results

    def finish_stores(self) -> None:
        """Wait for the store stream."""
        self._streams[Direction.STORE].synchronize()

    def shutdown(self) -> None:
        """Wait for both streams and unlock the pages."""
        for direction, queue in self._in_flight.items():
            self._streams[direction].synchronize()
            while queue:
                self._complete(queue.popleft())
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self._rows.data_ptr())

    def _enqueue(self, job: CopyJob) -> None:
        for block, row, length in consecutive_runs(job.block_ids, job.rows, len(job.rows)):
            for region, part in self._pairs:
                device, host = region[block : block + length], part[row : row + length]
                if job.direction is Direction.LOAD:
                    device.copy_(host, non_blocking=self._is_pinned)
                else:
                    host.copy_(device, non_blocking=self._is_pinned)

    def _complete(self, entry: _InFlight) -> None:
        duration_s = self._clock() - entry.submitted
        self._results.append(CopyResult(entry.job, TransferOutcome.DONE, frozenset(), duration_s))

    def _pin(self) -> bool:
        """Lock the tier's pages. Without, copies still work, but block the caller."""
        result = torch.cuda.cudart().cudaHostRegister(self._rows.data_ptr(), self._rows.numel(), 0)
        if int(result) != 0:
            logger.warning(
                "host memory could not be page-locked (CUDA error %d): offloading will be slower", int(result)
            )
            return False
        return True
