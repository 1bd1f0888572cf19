"""Memory for one chunk on its way between a job's buffers and a medium."""

from __future__ import annotations

import mmap
import threading

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


class _PerThread(threading.local):
    staging: Staging | None = None


_per_thread = _PerThread()


def bounce_buffer(num_bytes: int) -> memoryview:
    """Page-aligned memory of this thread, whole pages; what was in it before is gone. Valid until the thread's next call."""
    staging = _per_thread.staging
    if staging is None or len(staging.view) < num_bytes:
        staging = _per_thread.staging = Staging(max(1, num_bytes))
    return staging.view[: padded(num_bytes)]


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copy as many bytes as both have, without holding the interpreter's lock."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
