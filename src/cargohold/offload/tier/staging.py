"""Memory for one chunk on its way between a job's buffers and a medium."""

from __future__ import annotations

import mmap

import numpy as np

PAGE_BYTES = 4096
"""What direct I/O wants addresses, offsets and lengths to be multiples of, on any disk of today."""


def padded(num_bytes: int) -> int:
    """The next multiple of ``PAGE_BYTES``."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class Staging:
    """Page-aligned memory that one thread owns.

    Attributes:
        view: all of it; whole pages.

    Args:
        num_bytes: of the largest chunk.
    """

    def __init__(self, num_bytes: int) -> None:
        self.view = memoryview(mmap.mmap(-1, padded(num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copy as many bytes as both have, without holding the interpreter's lock."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
