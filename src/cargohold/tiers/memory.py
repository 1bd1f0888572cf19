"""Memory for KV and for I/O: host memory, and pages that media read from and write to directly."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cargohold.errors import ConfigError
from cargohold.option_values import format_bytes
from cargohold.process import memory_limit_bytes
from cargohold.protocol import Exchange

PAGE_BYTES = 4096
"""Direct I/O needs addresses, offsets and lengths that are multiples of this, on any disk of today."""


HUGE_PAGE_BYTES = 2 * 1024**2
"""Size of a huge page. A transfer to or from huge pages reaches the disk in few large pieces instead of hundreds."""


def padded(num_bytes: int, page_bytes: int = PAGE_BYTES) -> int:
    """Round ``num_bytes`` up to a multiple of ``page_bytes``."""
    return -(-num_bytes // page_bytes) * page_bytes


class Staging:
    """Page-aligned memory that one thread owns.

    Attributes:
        view: all of the memory; whole pages.

    Args:
        num_bytes: bytes of the largest chunk.
    """

    def __init__(self, num_bytes: int) -> None:
        size = padded(num_bytes)
        # Small chunks would waste most of a huge page.
        self.view = _in_huge_pages(size) if size >= HUGE_PAGE_BYTES // 2 else memoryview(_anonymous(size))


def _in_huge_pages(num_bytes: int) -> memoryview:
    """Return memory that begins at a huge page, if the system has them. Pages are committed when first written to."""
    # One huge page more than needed, so that the memory can begin at one; pages that are never written to cost nothing.
    memory = _anonymous(padded(num_bytes, HUGE_PAGE_BYTES) + HUGE_PAGE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages; ordinary pages do
            memory.madvise(mmap.MADV_HUGEPAGE)
    first = -address_of(memoryview(memory)) % HUGE_PAGE_BYTES
    return memoryview(memory)[first : first + num_bytes]


def _anonymous(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


_per_thread = threading.local()


def bounce_buffer(num_bytes: int, purpose: str = "bounce") -> memoryview:
    """Return page-aligned memory of this thread, in whole pages, with undefined contents.

    Valid until its next call for the same purpose.
    """
    staging: Staging | None = getattr(_per_thread, purpose, None)
    if staging is None or len(staging.view) < num_bytes:
        staging = Staging(max(1, num_bytes))
        setattr(_per_thread, purpose, staging)
    return staging.view[: padded(num_bytes)]


def address_of(view: memoryview) -> int:
    """Return the address of a view's first byte."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


class Pieces:
    """Memory of one chunk that lies in several places.

    Args:
        views: the pieces, in the order in which the chunk has their bytes.
    """

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._num_bytes = sum(len(view) for view in views)

    def __len__(self) -> int:
        return self._num_bytes

    def fill(self, source: memoryview) -> None:
        """Copy bytes to the pieces."""
        for view, at in self._places():
            copy_bytes(view, source[at : at + len(view)])

    def gather(self, into: memoryview) -> None:
        """Copy the bytes of all pieces."""
        for view, at in self._places():
            copy_bytes(into[at : at + len(view)], view)

    def _places(self) -> Iterator[tuple[memoryview, int]]:
        at = 0
        for view in self._views:
            yield view, at
            at += len(view)


Buffer: TypeAlias = memoryview | Pieces
"""Memory of one chunk, in one place or in several."""


def copy_bytes(into: Buffer, source: Buffer) -> None:
    """Copy ``source`` to ``into``, which has the same length, without holding the interpreter's lock.

    One of them at most lies in several places.
    """
    if isinstance(into, Pieces):
        assert isinstance(source, memoryview)
        into.fill(source)
    elif isinstance(source, Pieces):
        source.gather(into)
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))


def bytes_in(buffer: Buffer) -> bytes:
    """Return a copy of what is in a buffer."""
    into = bytearray(len(buffer))
    copy_bytes(memoryview(into), buffer)
    return bytes(into)


# --- host memory as a tier --------------------------------------------------------------------------------------------

ByteRows = npt.NDArray[np.uint8]


class HostMemory:
    """One worker's shard of host memory: rows of one block each, in anonymous memory.

    The memory belongs to the process, or to all workers that hold the same shard, and is freed with them, however they end.
    Pages are committed when first written, so a large tier costs nothing at the start.

    Args:
        num_rows: number of rows.
        row_bytes: bytes per row.
        exchange: with which the workers that share the memory talk; ``None`` if it is this worker's alone.

    Attributes:
        rows: the rows; shape ``(num_rows, row_bytes)``.
        is_shared: whether other processes use the same memory.

    Raises:
        ConfigError: this machine does not have so much memory; it need not be the one where the options were checked.
        OSError: one of the workers cannot share memory. It is raised in all of them.
    """

    def __init__(self, num_rows: int, row_bytes: int, exchange: Exchange | None = None) -> None:
        num_bytes, limit = num_rows * row_bytes, memory_limit_bytes()
        if num_bytes > limit:
            reason = f"that is one worker's share, and its machine allows {format_bytes(limit)} in all"
            raise ConfigError("host_bytes", num_bytes, reason)
        self.is_shared = exchange is not None
        self._memory = _anonymous(num_bytes) if exchange is None else _shared(num_rows, row_bytes, exchange)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # The first write to small pages would cost more than the copy itself.
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.rows: ByteRows = np.frombuffer(self._memory, dtype=np.uint8).reshape(num_rows, row_bytes)

    @property
    def row_bytes(self) -> int:
        return int(self.rows.shape[1])


def _shared(num_rows: int, row_bytes: int, exchange: Exchange) -> mmap.mmap:
    """Return memory that all callers of ``exchange`` get. It has no name in any file system, so nothing is left behind.

    Each worker offers some, and all take the first one's. It is reached through its owner's open files: the system lets only
    processes of the same user do that.

    Raises:
        OSError: one of the callers cannot have the memory, or has rows of another size. It is raised in all of them.
    """
    offered, memory, fault = -1, None, ""
    try:
        offered = os.memfd_create("cargohold")
        os.ftruncate(offered, num_rows * row_bytes)
    except OSError as error:
        fault = str(error)
    shape = f"{num_rows} rows of {row_bytes} bytes"
    first, *_ = exchange(f"{shape}: /proc/{os.getpid()}/fd/{offered}".encode())
    expected, _, path = first.decode().partition(": ")
    if shape != expected:
        fault = fault or f"it has {shape}, and worker 0 has {expected}"
    try:
        memory = _map(path, num_rows * row_bytes)
    except (OSError, ValueError) as error:  # or the first one could not give it its size
        fault = fault or str(error)
    faults = exchange(fault.encode())  # after this, the one that was offered is not needed
    if offered >= 0:
        os.close(offered)
    if memory is None or any(faults):
        reasons = "; ".join(f"worker {at}: {fault.decode()}" for at, fault in enumerate(faults) if fault)
        raise OSError(f"workers that hold the same KV cannot share memory for it: {reasons}")
    return memory


def _map(path: str, num_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
