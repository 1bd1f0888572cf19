"""Copies between blocks on a device and rows of host memory: what is enqueued on a stream, and in what order.

A copy between a device and the host runs in the background only if its host side is one contiguous piece of page-locked memory.
Any other copy is made by the thread that asked for it, through an extra buffer, after waiting until the model has computed the
blocks. So a block that lies in many pieces on the device (in most engines, one per layer) is gathered there first, by kernels
at the device's own speed, into a buffer with the same rows as host memory::

    layer 0   | .. b3 .. b7 ....... |
    layer 1   | .. b3 .. b7 ....... |  --one kernel per layer-->  | b3 b3 b3 | b7 b7 b7 |  --link-->  rows 40, 41
    layer 2   | .. b3 .. b7 ....... |                              a buffer, on the device
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch

from cargohold.offload.transfer.base import Direction
from cargohold.offload.transfer.links import Link, on_device, widest_element

BUFFER_BYTES: Final = 64 * 1024**2
"""Size of the buffer for gathered blocks: copies are then long compared with what starting them costs, and the buffer is small
compared with a device's memory."""


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
        """Hand the blocks to the link as they are."""
        self.link.copy(direction, self._region, block_ids, rows)


class StagedCopies(BlockCopies):
    """Copies for blocks that lie in several pieces on the device.

    Args:
        regions: the paged KV: ``uint8``, shape ``(num_blocks, width)``; the widths add up to a row.
        link: carries rows between the device and host memory.
        num_rows: number of rows of the buffer on the device.
    """

    def __init__(self, regions: Sequence[torch.Tensor], link: Link, num_rows: int) -> None:
        super().__init__(link)
        ends = list(accumulate((region.shape[1] for region in regions), initial=0))
        self._buffer = torch.empty((num_rows, ends[-1]), dtype=torch.uint8, device=regions[0].device)
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


def num_buffer_rows(buffer_bytes: int, row_bytes: int, num_rows: int) -> int:
    """Return how many rows a buffer of about ``buffer_bytes`` has: no more than host memory, and at least one."""
    return max(1, min(buffer_bytes // row_bytes, num_rows))
