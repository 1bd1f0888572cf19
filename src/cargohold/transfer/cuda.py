"""Copies between paged KV on a CUDA device and host memory, on streams of their own.

::

    compute stream   | forward pass of step n      | step n + 1 ...
    store stream     |            waits for it --->| copies of step n's stores
    load stream      | copies of loads (into blocks that are not read or written before they have arrived)

Requests wait for loads, but no request waits for stores, so the load stream has the higher priority. The thread that enqueues
copies waits neither for them nor for the model.

That takes one contiguous piece of page-locked memory on the host's side. Any other copy is made by the thread that asked for
it, through an extra buffer, after waiting until the model has computed the blocks. So a block that lies in many pieces on the
device (in most engines, one per layer) is gathered there first, by kernels at the device's own speed, into a buffer with the
same rows as host memory::

    layer 0   | .. b3 .. b7 ....... |
    layer 1   | .. b3 .. b7 ....... |  --one kernel per layer-->  | b3 b3 b3 | b7 b7 b7 |  --link-->  rows 40, 41
    layer 2   | .. b3 .. b7 ....... |                              a buffer, on the device
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Final

import torch

from cargohold.protocol import TransferOutcome
from cargohold.tiers.memory import HostMemory
from cargohold.transfer import CopyJob, CopyResult, Direction, TransferWorker
from cargohold.transfer.host_pages import PageLocks, lock_pages, nearest_node, place_near, unlock_pages
from cargohold.transfer.links import Link, cuda_links, fastest_link, on_device, widest_element
from cargohold.transfer.parts import span_of
from cargohold.transfer.port import have_succeeded

logger = logging.getLogger(__name__)

BUFFER_BYTES: Final = 64 * 1024**2
"""Size of the buffer for gathered blocks: copies are then long compared with what starting them costs, and the buffer is small
compared with a device's memory."""
_NAP_S: Final = 0.001
_PRIORITIES = {Direction.LOAD: -1, Direction.STORE: 0}
"""Of streams: a lower number is served first."""


class BlockCopies(ABC):
    """Enqueues copies between blocks and rows. Used for one direction, on one stream.

    Args:
        link: carries rows between the device and host memory.
    """

    def __init__(self, link: Link) -> None:
        self.link = link

    @abstractmethod
    def enqueue(self, direction: Direction, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Enqueue the copies of a job on the current stream. Raises ``RuntimeError``; some may be under way then."""


class DirectCopies(BlockCopies):
    """Copies for blocks that are one piece each on the device.

    Args:
        region: the paged KV: ``uint8``, shape ``(num_blocks, row_bytes)``.
        link: carries rows between the device and host memory.
    """

    def __init__(self, region: torch.Tensor, link: Link) -> None:
        super().__init__(link)
        self._region = region

    def enqueue(self, direction: Direction, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        self.link.copy(direction, self._region, block_ids, rows)


class StagedCopies(BlockCopies):
    """Copies for blocks that lie in several pieces on the device.

    Args:
        regions: the paged KV: ``uint8``, shape ``(num_blocks, width)``; the widths add up to a row.
        link: carries rows between the device and host memory.
        buffer: a buffer of rows on the device. Copies on the same stream may share it.
    """

    def __init__(self, regions: Sequence[torch.Tensor], link: Link, buffer: torch.Tensor) -> None:
        super().__init__(link)
        ends = list(accumulate((region.shape[1] for region in regions), initial=0))
        self._buffer = buffer
        parts = [self._buffer[:, start:end] for start, end in pairwise(ends)]
        element = widest_element(*regions, *parts)
        self._pairs = [(region.view(element), part.view(element)) for region, part in zip(regions, parts, strict=True)]

    def enqueue(self, direction: Direction, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Enqueue one kernel for each region around what the link does, a buffer of rows at a time."""
        step = len(self._buffer)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            blocks = on_device(block_ids[start : start + step], self._buffer.device)
            if direction is Direction.STORE:
                for region, buffered in self._pairs:
                    torch.index_select(region, 0, blocks, out=buffered[: len(part)])
            self.link.copy(direction, self._buffer, range(len(part)), part)
            if direction is Direction.LOAD:
                for region, buffered in self._pairs:
                    region.index_copy_(0, blocks, buffered[: len(part)])


class ViewCopies(BlockCopies):
    """Copies for several views of the paged KV, whose blocks are numbered one view after the other; see ``parts``.

    Args:
        copies: the copies of each view.
        span: how many numbers a view takes.
    """

    def __init__(self, copies: Sequence[BlockCopies], span: int) -> None:
        super().__init__(copies[0].link)
        self._copies = copies
        self._span = span

    def enqueue(self, direction: Direction, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        by_view: dict[int, tuple[list[int], list[int]]] = {}
        for number, row in zip(block_ids, rows, strict=True):
            view, block_id = divmod(number, self._span)
            ids, places = by_view.setdefault(view, ([], []))
            ids.append(block_id)
            places.append(row)
        for view, (ids, places) in by_view.items():
            self._copies[view].enqueue(direction, ids, places)


def num_buffer_rows(buffer_bytes: int, row_bytes: int, num_rows: int) -> int:
    """Return how many rows a buffer of about ``buffer_bytes`` has: no more than host memory, and at least one."""
    return max(1, min(buffer_bytes // row_bytes, num_rows))


@dataclass(frozen=True, slots=True)
class _InFlight:
    job: CopyJob
    began: torch.cuda.Event
    done: torch.cuda.Event


class _Lane:
    """One direction: its stream, the copies for it, and the jobs enqueued there."""

    def __init__(self, stream: torch.cuda.Stream, copies: BlockCopies) -> None:
        self.stream = stream
        self.copies = copies
        self.in_flight: deque[_InFlight] = deque()


class CudaTransferWorker(TransferWorker):
    """Carries out jobs on two streams, one per direction, with the device's copy engines.

    A job starts when the work that the model had enqueued before it is done, and cannot be abandoned.

    Args:
        regions: the paged KV: two-dimensional ``uint8`` tensors of ``num_blocks`` rows on one device. A block is its rows in
            all regions, one after the other.
        memory: this worker's shard of host memory; its pages are locked as they come into use.
        buffer_bytes: bytes of device memory that each direction takes for a buffer if blocks lie in several regions.
        further: further views of the paged KV, whose blocks have other numbers; see ``parts``.
    """

    def __init__(
        self,
        regions: Sequence[torch.Tensor],
        memory: HostMemory,
        buffer_bytes: int = BUFFER_BYTES,
        further: Sequence[Sequence[torch.Tensor]] = (),
    ) -> None:
        self._device = regions[0].device
        if not memory.is_shared:  # by devices on several nodes
            place_near(memory.rows, nearest_node(self._device))  # before the first page is committed
        self._locks = PageLocks(memory.rows, partial(lock_pages, self._device), unlock_pages)
        rows = torch.from_numpy(memory.rows)
        links = cuda_links(rows, self._locks, self._device)
        chosen = fastest_link(links, min(len(rows), self._locks.piece_rows), memory.row_bytes, self._measure)
        num_rows = num_buffer_rows(buffer_bytes, memory.row_bytes, len(rows))
        self._lanes = {
            direction: self._lane((regions, *further), chosen[direction], direction, num_rows)
            for direction in Direction
        }
        self._results: list[CopyResult] = []

    def submit(self, job: CopyJob) -> None:
        """Enqueue a job's copies after the work that the model has enqueued so far."""
        lane = self._lanes[job.direction]
        try:
            # A store reads what the forward pass before it writes; a load must not overtake the last readers of its blocks.
            lane.stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(lane.stream):
                began, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                began.record(lane.stream)
                lane.copies.enqueue(job.direction, job.block_ids, job.rows)
                done.record(lane.stream)
        except RuntimeError:
            logger.exception("enqueueing the copies of job %d failed", job.job_id)
            self._drain(lane)
            self._end(job, TransferOutcome.FAILED)
            return
        lane.in_flight.append(_InFlight(job, began, done))

    def poll(self) -> list[CopyResult]:
        """Return the jobs whose copies have completed since the last call. If the device has failed, all jobs are returned."""
        for lane in self._lanes.values():
            try:
                while lane.in_flight and lane.in_flight[0].done.query():
                    self._end_first(lane, TransferOutcome.DONE)
            except RuntimeError:
                logger.exception("the device does not report whether copies have ended")
                self._drain(lane)
        results, self._results = self._results, []
        return results

    def finish_loads(self) -> bool:
        """Make the model's stream wait for the loads; the caller does not."""
        torch.cuda.current_stream(self._device).wait_stream(self._lanes[Direction.LOAD].stream)
        return have_succeeded(self._results)

    def finish_stores(self) -> None:
        """Make the model's stream wait for the stores, so that work enqueued from now on overwrites no block that they read."""
        torch.cuda.current_stream(self._device).wait_stream(self._lanes[Direction.STORE].stream)

    def settle(self, within_s: float) -> bool:
        """Wait for what is enqueued on both streams; what is enqueued cannot be abandoned."""
        deadline = time.monotonic() + within_s
        for lane in self._lanes.values():
            while any(not entry.done.query() for entry in lane.in_flight):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_NAP_S)
        return True

    def shutdown(self) -> None:
        """Wait for both streams and unlock the pages."""
        for lane in self._lanes.values():
            self._drain(lane)
        self._locks.close()

    def _lane(self, views: Sequence[Sequence[torch.Tensor]], link: Link, direction: Direction, num_rows: int) -> _Lane:
        stream = torch.cuda.Stream(self._device, priority=_PRIORITIES[direction])
        is_staged = any(len(regions) > 1 for regions in views)
        shape = (num_rows if is_staged else 0, link.row_bytes)
        buffer = torch.empty(shape, dtype=torch.uint8, device=self._device)
        copies = [
            StagedCopies(regions, link, buffer) if len(regions) > 1 else DirectCopies(regions[0], link)
            for regions in views
        ]
        return _Lane(stream, copies[0] if len(copies) == 1 else ViewCopies(copies, span_of(views[0])))

    def _measure(self, link: Link, direction: Direction, rows: Sequence[int]) -> float:
        """Seconds that a link takes to carry rows from or to unused memory of the device."""
        width = link.row_bytes
        scratch = torch.empty((len(rows), width), dtype=torch.uint8, device=self._device)
        torch.cuda.synchronize(self._device)
        started = time.perf_counter()
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            link.copy(direction, scratch, range(len(rows)), rows)
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - started

    def _drain(self, lane: _Lane) -> None:
        """Wait until nothing enqueued on a lane's stream reads or writes any more, and end all its jobs."""
        outcome = TransferOutcome.DONE
        try:
            lane.stream.synchronize()
        except RuntimeError:
            logger.exception("the device does not report whether copies have ended")
            outcome = TransferOutcome.FAILED
        while lane.in_flight:
            self._end_first(lane, outcome)

    def _end_first(self, lane: _Lane, outcome: TransferOutcome) -> None:
        entry = lane.in_flight.popleft()
        took_s = entry.began.elapsed_time(entry.done) / 1000 if outcome is TransferOutcome.DONE else 0.0
        self._end(entry.job, outcome, took_s)

    def _end(self, job: CopyJob, outcome: TransferOutcome, took_s: float = 0.0) -> None:
        self._results.append(CopyResult(job, outcome, frozenset(), took_s))
