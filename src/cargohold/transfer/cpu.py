"""Copies between paged KV in CPU memory and host memory, in a background thread and, for loads, in the owner's too.

While a request waits for its load, the engine often has nothing to compute. It then makes empty steps as fast as it can, which
keep the interpreter's lock from the background thread, and OpenMP's threads spin on the other cores. So ``poll`` copies for
loads itself, for a short time; the thread goes on with what is left, and with stores.

The copies are plain ``memcpy`` through numpy, which releases the interpreter's lock, for a run of neighbouring rows at a time.
PyTorch operations are avoided: in a second thread they would start a second OpenMP team, which competes with the model for
cores.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cargohold.protocol import Clock, TransferOutcome
from cargohold.tiers.memory import ByteRows, HostMemory
from cargohold.transfer import CopyJob, CopyResult, Direction, TransferWorker
from cargohold.transfer.parts import parts_of, span_of
from cargohold.transfer.port import GroupedTransfers, consecutive_runs, have_succeeded

logger = logging.getLogger(__name__)

RUN_BYTES = 4 * 1024**2
"""Maximum number of bytes copied at a time: a load waits for a store under way only as long as one such copy takes."""

SHARE_S = 0.01
"""Maximum time in seconds that ``poll`` copies for; the copy under way is completed."""

MAX_WAIT_S = 1.0
"""Maximum time in seconds that ``finish_loads`` copies for."""


@dataclass(slots=True, eq=False)
class _Pending:
    job: CopyJob
    submitted: float
    runs: Iterator[tuple[int, int, int]] | None = None
    started: bool = False
    copying_s: float = 0.0


class CpuTransferWorker(TransferWorker):
    """Carries out jobs in a thread of its own, loads first; ``poll`` takes part in loads.

    Args:
        regions: the paged KV, as two-dimensional byte arrays of ``num_blocks`` rows. A block is its rows in all regions,
            one after the other.
        rows: this worker's shard of host memory; a row is as long as a block.
        clock: monotonic time in seconds.
        further: further views of the paged KV, whose blocks have other numbers; see ``parts``.
    """

    def __init__(
        self, regions: Sequence[ByteRows], rows: ByteRows, clock: Clock, further: Sequence[Sequence[ByteRows]] = ()
    ) -> None:
        self._views = [_with_rows(view, rows) for view in (regions, *further)]
        self._span = span_of(regions)
        self._max_run = max(1, RUN_BYTES // rows.shape[1])
        self._clock = clock
        self._changed = threading.Condition()
        self._queues: dict[Direction, deque[_Pending]] = {Direction.LOAD: deque(), Direction.STORE: deque()}
        self._results: deque[CopyResult] = deque()
        self._is_closed = False
        # Held while copying: one thread at a time.
        self._copying = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="cargohold-transfer", daemon=True)
        self._thread.start()

    def submit(self, job: CopyJob) -> None:
        """Queue a job. If the thread has died, the job ends as failed."""
        pending = _Pending(job, self._clock())
        with self._changed:
            if not self._thread.is_alive():
                self._end(pending, TransferOutcome.FAILED)
                return
            self._queues[job.direction].append(pending)
            self._changed.notify_all()

    def poll(self) -> list[CopyResult]:
        """Copy loads for a short time, and return the results since the last call.

        If the thread has died, all its jobs are among them, as failed. Jobs past their timeouts are abandoned here, too: the
        copy that the thread is busy with may never end.
        """
        if self._queues[Direction.LOAD]:
            self._take_part(SHARE_S)
        with self._changed:
            if not self._thread.is_alive():
                self._end_all(TransferOutcome.FAILED)
            self._abandon_late()
            results = list(self._results)
            self._results.clear()
        return results

    def finish_loads(self) -> bool:
        """Copy all loads, in the caller's thread if the other one is not at it."""
        if self._queues[Direction.LOAD]:
            self._take_part(MAX_WAIT_S)
        with self._changed:
            return not self._queues[Direction.LOAD] and have_succeeded(self._results)

    def finish_stores(self) -> None:
        """Wait until all stores have ended, or the thread has died."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queues[Direction.STORE] or not self._thread.is_alive())

    def settle(self, within_s: float) -> bool:
        """Abandon what has not started; let the thread end the rest."""
        with self._changed:
            for queue in self._queues.values():
                for pending in [pending for pending in queue if not pending.started]:
                    queue.remove(pending)
                    self._end(pending, TransferOutcome.ABANDONED)
            return self._changed.wait_for(lambda: not any(self._queues.values()), timeout=within_s)

    def shutdown(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._end_all(TransferOutcome.ABANDONED)

    # --- copying ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Copy in the background until shutdown."""
        while self._await_work():
            with self._copying:
                self._copy_next(self._queues)

    def _take_part(self, limit_s: float) -> None:
        """Copy loads in the caller's thread, for at most ``limit_s``."""
        deadline = self._clock() + limit_s
        if not self._copying.acquire(timeout=limit_s):
            return
        try:
            while self._copy_next((Direction.LOAD,)) and self._clock() < deadline:
                pass
        finally:
            self._copying.release()

    def _copy_next(self, directions: Iterable[Direction]) -> bool:
        """Copy the next run of the first job of the first direction that has any; return whether there was one."""
        with self._changed:
            pending = self._first(directions)
            if pending is None:
                return False
            pending.started = True
        outcome: TransferOutcome | None = TransferOutcome.FAILED
        began_at = time.thread_time()  # of the processor: a thread that waits for the interpreter's lock copies nothing
        try:
            outcome = TransferOutcome.DONE if self._advance(pending) else None
        except Exception:
            logger.exception("copying for job %d failed", pending.job.job_id)
        finally:  # whatever interrupts a copy, the job must not go on after it
            pending.copying_s += time.thread_time() - began_at
            if outcome is not None:
                self._finish(pending, outcome)
        return True

    def _advance(self, pending: _Pending) -> bool:
        """Copy the next run of rows; return whether none was left."""
        if pending.runs is None:
            pending.runs = consecutive_runs(pending.job.block_ids, pending.job.rows, self._max_run)
        run = next(pending.runs, None)
        if run is None:
            return True
        part_number, row, length = run
        view, block = divmod(part_number, self._span)
        for region, part in self._views[view]:
            device, host = region[block : block + length], part[row : row + length]
            if pending.job.direction is Direction.LOAD:
                np.copyto(device, host)
            else:
                np.copyto(host, device)
        return False

    def _finish(self, pending: _Pending, outcome: TransferOutcome) -> None:
        with self._changed:
            self._queues[pending.job.direction].popleft()
            self._end(pending, outcome)

    def _await_work(self) -> bool:
        """Wait until there is a job; ``False`` when the thread is to stop, which lets a job that was started end."""
        with self._changed:
            while True:
                pending = self._first(self._queues)
                if self._is_closed and (pending is None or not pending.started):
                    return False
                if pending is not None:
                    return True
                self._changed.wait()

    # --- under the lock -----------------------------------------------------------------------------------------------

    def _first(self, directions: Iterable[Direction]) -> _Pending | None:
        """The job to work on: a store that was started goes on when no load waits. Abandons jobs past their timeouts."""
        self._abandon_late()
        return next((self._queues[direction][0] for direction in directions if self._queues[direction]), None)

    def _end(self, pending: _Pending, outcome: TransferOutcome) -> None:
        self._results.append(CopyResult(pending.job, outcome, frozenset(), pending.copying_s))
        self._changed.notify_all()

    def _is_late(self, pending: _Pending) -> bool:
        return not pending.started and self._clock() - pending.submitted > pending.job.timeout_s

    def _abandon_late(self) -> None:
        for queue in self._queues.values():
            for pending in [pending for pending in queue if self._is_late(pending)]:
                queue.remove(pending)
                self._end(pending, TransferOutcome.ABANDONED)

    def _end_all(self, outcome: TransferOutcome) -> None:
        for queue in self._queues.values():
            while queue:
                self._end(queue.popleft(), outcome)


def _with_rows(regions: Sequence[ByteRows], rows: ByteRows) -> list[tuple[ByteRows, ByteRows]]:
    """Return each region with its part of every row."""
    assert sum(region.shape[1] for region in regions) == rows.shape[1], "a row must be as long as a block"
    ends = np.cumsum([0] + [region.shape[1] for region in regions]).tolist()
    return [(region, rows[:, ends[at] : ends[at + 1]]) for at, region in enumerate(regions)]


# --- makes the transfer worker for the device that the paged KV is on -------------------------------------------------


def make_transfer_worker(
    regions: Sequence[torch.Tensor], memory: HostMemory, clock: Clock, further: Sequence[Sequence[torch.Tensor]] = ()
) -> TransferWorker:
    """Make a transfer worker between paged KV and host memory.

    Args:
        regions: the paged KV; see ``KVConnectorWorker.register_kv_caches``.
        memory: this worker's shard of host memory.
        clock: monotonic time in seconds.
        further: further views of the paged KV, whose blocks have other numbers; see ``parts``.
    """
    if regions[0].is_cuda:
        from cargohold.transfer.cuda import CudaTransferWorker  # noqa: PLC0415  # needs a CUDA runtime

        return CudaTransferWorker(regions, memory, further=further)
    views = [[region.numpy() for region in view] for view in (regions, *further)]
    return CpuTransferWorker(views[0], memory.rows, clock, views[1:])


def make_grouped_transfers(
    kv_caches: Sequence[Sequence[torch.Tensor]], rows_per_block: Sequence[int], memory: HostMemory, clock: Clock
) -> TransferWorker:
    """Make a transfer worker for a model whose groups' blocks take several rows each.

    Args:
        kv_caches: the regions of each group.
        rows_per_block: rows of a block, by group.
        memory: this worker's shard of host memory.
        clock: monotonic time in seconds.
    """
    views, part_of = parts_of(kv_caches, rows_per_block, memory.row_bytes)
    return GroupedTransfers(make_transfer_worker(views[0], memory, clock, views[1:]), rows_per_block, part_of)
