"""Copies between blocks on a device and rows of host memory: what is enqueued on a stream, and in what order.

A copy between a device and the host runs in the background only if its host side is one contiguous piece of page-locked memory.
Any other copy is made by the thread that asked for it, through an extra buffer, after waiting until the model has computed the
blocks. So a block that lies in many pieces on the device (in most engines, one per layer) is gathered there first, by kernels
at the device's own speed, into a buffer with the same rows as host memory::

    layer 0   | .. b3 .. b7 ....... |
    layer 1   | .. b3 .. b7 ....... |  --one kernel per layer-->  | b3 b3 b3 | b7 b7 b7 |  --one copy-->  rows 40, 41
    layer 2   | .. b3 .. b7 ....... |                              a buffer, on the device
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import gcd
from typing import Final

import torch

from cargohold.offload.tier.host import HostMemory
from cargohold.offload.transfer.base import Direction
from cargohold.offload.transfer.page_locks import PageLocks
from cargohold.offload.transfer.runs import consecutive_runs

BUFFER_BYTES: Final = 64 * 1024**2
"""Size of the buffer for gathered blocks: copies are then long compared with what starting them costs, and the buffer is small
compared with a device's memory."""

_ELEMENTS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class BlockCopies(ABC):
    """Enqueues copies between blocks and rows. Used for one direction, on one stream.

    Args:
        memory: this worker's shard of host memory.
        locks: the locks on its pages.
    """

    def __init__(self, memory: HostMemory, locks: PageLocks) -> None:
        self._rows = torch.from_numpy(memory.rows)
        self._locks = locks

    @abstractmethod
    def enqueue(self, direction: Direction, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Enqueue the copies of a job on the current stream. Raises ``RuntimeError``; some may be under way then."""

    def _copy(self, direction: Direction, device: torch.Tensor, row: int) -> None:
        """Enqueue the copy between neighbouring rows on the device and the rows of host memory from ``row`` on."""
        at = 0
        for first, length, is_locked in self._locks.parts(row, len(device)):
            ours, theirs = self._rows[first : first + length], device[at : at + length]
            if direction is Direction.LOAD:
                theirs.copy_(ours, non_blocking=is_locked)
            else:
                ours.copy_(theirs, non_blocking=is_locked)
            at += length


class DirectCopies(BlockCopies):
    """Copies for blocks that are one piece each on the device.

    Args:
        region: the paged KV: ``uint8``, shape ``(num_blocks, row_bytes)``.
        memory: this worker's shard of host memory.
        locks: the locks on its pages.
    """

    def __init__(self, region: torch.Tensor, memory: HostMemory, locks: PageLocks) -> None:
        super().__init__(memory, locks)
        self._region = region

    def enqueue(self, direction: Direction, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Enqueue one copy for each run of neighbours."""
        for block, row, length in consecutive_runs(block_ids, rows, len(rows)):
            self._copy(direction, self._region[block : block + length], row)


class StagedCopies(BlockCopies):
    """Copies for blocks that lie in several pieces on the device.

    Args:
        regions: the paged KV: ``uint8``, shape ``(num_blocks, width)``; the widths add up to a row.
        memory: this worker's shard of host memory.
        locks: the locks on its pages.
        buffer_bytes: maximum size of the buffer on the device, but it has at least one row.
    """

    def __init__(
        self, regions: Sequence[torch.Tensor], memory: HostMemory, locks: PageLocks, buffer_bytes: int
    ) -> None:
        super().__init__(memory, locks)
        num_rows = max(1, min(buffer_bytes // memory.row_bytes, len(memory.rows)))
        self._buffer = torch.empty((num_rows, memory.row_bytes), dtype=torch.uint8, device=regions[0].device)
        # Kernels move one element per thread, so the widest element that fits everywhere is the fastest.
        element = _ELEMENTS[gcd(max(_ELEMENTS), *(number for region in regions for number in _byte_counts(region)))]
        ends = accumulate((region.shape[1] for region in regions), initial=0)
        self._pairs = [
            (region.view(element), self._buffer[:, start:end].view(element))
            for region, (start, end) in zip(regions, pairwise(ends), strict=True)
        ]

    def enqueue(self, direction: Direction, block_ids: Sequence[int], rows: Sequence[int]) -> None:
        """Enqueue one kernel for each region and one copy for each run of rows, a buffer of rows at a time."""
        step = len(self._buffer)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            blocks = self._on_device(block_ids[start : start + step])
            if direction is Direction.STORE:
                for region, buffered in self._pairs:
                    torch.index_select(region, 0, blocks, out=buffered[: len(part)])
            for at, row, length in consecutive_runs(range(len(part)), part, len(part)):
                self._copy(direction, self._buffer[at : at + length], row)
            if direction is Direction.LOAD:
                for region, buffered in self._pairs:
                    region.index_copy_(0, blocks, buffered[: len(part)])

    def _on_device(self, block_ids: Sequence[int]) -> torch.Tensor:
        device = self._buffer.device
        # A copy from pages that are not locked would wait for the stream, and so for the model.
        return torch.tensor(block_ids, dtype=torch.int64, pin_memory=device.type != "cpu").to(device, non_blocking=True)


def _byte_counts(region: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the byte counts of a region that the size of an element must divide."""
    return region.shape[1], region.stride(0), int(region.storage_offset()), region.data_ptr()
