"""Pages of host memory as a device wants them: on the NUMA node next to it, and locked.

A device's copy engines reach locked pages without an extra buffer. Locking commits memory and takes about a second for a few
gigabytes, during which the driver may make other calls wait. So it is done in a thread, piece by piece, a little ahead of use:
a tier of hundreds of gigabytes costs nothing at the start, and its owner waits only for a piece that it needs before the thread
has got there.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from math import gcd
from typing import Final

import torch

from cargohold.tiers.memory import ByteRows

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 64 * 1024**2
"""Approximate number of bytes to lock at a time."""

_NUM_AHEAD: Final = 4
_MAX_WAIT_S: Final = 30.0

_UNKNOWN, _LOCKED, _REFUSED = range(3)

_HOST_NUMA_ID: Final = 134
"""``CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID``: the NUMA node of the host that is closest to a device; -1 if there are none."""
_MPOL_PREFERRED: Final = 1
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
"""Numbers of the system call, which the C library does not wrap."""
_MAX_NODES: Final = 64


class PageLocks:
    """Locks the pages that rows of host memory lie in, one piece of whole pages and whole rows at a time.

    A piece is locked before the first copy from or to it, or never: its state does not change after that. When one piece cannot
    be locked, no other is tried.

    Args:
        rows: the memory; starts at a page.
        lock: called with an address and a number of bytes; locks these pages, and returns why that failed, or ``None``. Called
            only in a thread that this class starts.
        unlock: called with the address that was given to ``lock``; unlocks the pages.
        piece_bytes: approximate number of bytes to lock at a time.
    """

    def __init__(
        self,
        rows: ByteRows,
        lock: Callable[[int, int], str | None],
        unlock: Callable[[int], object],
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        num_rows, row_bytes = rows.shape
        # The smallest number of rows that ends where a page ends.
        unit = mmap.PAGESIZE // gcd(mmap.PAGESIZE, row_bytes)
        self.piece_rows: int = unit * max(1, piece_bytes // (unit * row_bytes))
        self._row_bytes, self._end = row_bytes, rows.nbytes
        self._address = rows.ctypes.data
        self._lock, self._unlock = lock, unlock
        self._changed = threading.Condition()
        self._states = [_UNKNOWN] * -(-num_rows // self.piece_rows)
        self._wanted: deque[int] = deque()
        self._next_ahead = self._end_ahead = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="cargohold-page-locks", daemon=True)
        self._thread.start()

    def parts(self, row: int, length: int) -> Iterator[tuple[int, int, bool]]:
        """Cut a run of rows into parts where pieces end. Waits for each part until it is locked, or known not to be.

        Yields:
            First row, number of rows, and whether their pages are locked.

        Raises:
            RuntimeError: it took too long, or the thread that locks pages has stopped.
        """
        end = row + length
        while row < end:
            piece = row // self.piece_rows
            stop = min(end, (piece + 1) * self.piece_rows)
            yield row, stop - row, self._is_locked(piece)
            row = stop

    def all_locked(self, rows: Iterable[int]) -> bool:
        """Return whether the pages of all of these rows are locked. Waits as ``parts`` does, and raises what it raises."""
        return all(self._is_locked(piece) for piece in {row // self.piece_rows for row in rows})

    def lock_first(self) -> bool:
        """Lock the first piece and nothing ahead of it, wait for that, and return whether it is locked.

        For the time when nothing is copied yet: an engine may be capturing graphs soon, and no page may be locked meanwhile.
        """
        return (self._states[0] or self._wait_for(0, num_ahead=0)) == _LOCKED

    def close(self) -> None:
        """Stop the thread, and unlock all pages. No copy may be under way."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        for piece, state in enumerate(self._states):
            if state == _LOCKED:
                self._unlock(self._address + self._span(piece)[0])
                self._states[piece] = _REFUSED

    def _is_locked(self, piece: int) -> bool:
        state = self._states[piece]  # changes only once, so no lock is needed to read it
        if state == _UNKNOWN:
            state = self._wait_for(piece)
        return state == _LOCKED

    def _wait_for(self, piece: int, num_ahead: int = _NUM_AHEAD) -> int:
        with self._changed:
            self._wanted.append(piece)
            self._end_ahead = max(self._end_ahead, piece + 1 + num_ahead)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._states[piece] != _UNKNOWN or self._is_closed, _MAX_WAIT_S)
            if self._states[piece] == _UNKNOWN:
                raise RuntimeError(f"the pages of rows from {piece * self.piece_rows} on were not locked in time")
            return self._states[piece]

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        fault: str | None = None
        try:
            while (piece := self._next()) is not None:
                if fault is None:
                    fault = self._lock_piece(piece)
                with self._changed:
                    self._states[piece] = _LOCKED if fault is None else _REFUSED
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()

    def _next(self) -> int | None:
        """Wait for the piece to lock next, and return it; ``None`` when the thread is to stop."""
        with self._changed:
            while not self._is_closed:
                while self._next_ahead < len(self._states) and self._states[self._next_ahead] != _UNKNOWN:
                    self._next_ahead += 1
                if self._wanted:
                    piece = self._wanted.popleft()
                    if self._states[piece] == _UNKNOWN:
                        return piece
                elif self._next_ahead < min(self._end_ahead, len(self._states)):
                    return self._next_ahead
                else:
                    self._changed.wait()
        return None

    def _lock_piece(self, piece: int) -> str | None:
        """Lock a piece; return why that failed, or ``None``."""
        start, num_bytes = self._span(piece)
        try:
            fault = self._lock(self._address + start, num_bytes)
        except Exception as error:  # noqa: BLE001  # whatever a driver does, copies go on without
            fault = str(error) or type(error).__name__
        if fault is not None:
            logger.warning(
                "host memory cannot be page-locked (%s): copies are slower, and the model waits for them", fault
            )
        return fault

    def _span(self, piece: int) -> tuple[int, int]:
        """Return the offset of a piece's first byte, and its number of bytes."""
        start = piece * self.piece_rows * self._row_bytes
        return start, min(self.piece_rows * self._row_bytes, self._end - start)


def lock_pages(device: torch.device, address: int, num_bytes: int) -> str | None:
    """Lock pages of host memory for all devices. Returns why that failed, or ``None``."""
    # A failure stays the last error of the thread that called this, and would be taken for an error of its next kernel.
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
    return f"CUDA error {error}" if error else None


def unlock_pages(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def nearest_node(device: torch.device) -> int | None:
    """Return the NUMA node whose memory a device reaches fastest; ``None`` if the driver does not know, as before CUDA 12.2.

    Source: CUDA driver API, ``cuDeviceGetAttribute``.
    """
    handle, node = ctypes.c_int(), ctypes.c_int(-1)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        error = driver.cuDeviceGet(ctypes.byref(handle), device.index or 0)
        error = error or driver.cuDeviceGetAttribute(ctypes.byref(node), _HOST_NUMA_ID, handle)
    except (OSError, AttributeError):
        return None
    return node.value if not error and node.value >= 0 else None


def place_near(rows: ByteRows, node: int | None) -> bool:
    """Ask for the pages of host memory on a NUMA node; on others when it is full. Returns whether the system takes the wish.

    Across the sockets of a machine, copies have a fraction of the link's speed. Pages that are committed stay where they are.

    Args:
        rows: host memory; starts at a page.
        node: the node; ``None`` asks for nothing.

    Source: Linux manual, ``mbind(2)``.
    """
    number = _MBIND.get(platform.machine())
    if node is None or number is None or node >= _MAX_NODES:
        return False
    nodes = ctypes.c_ulong(1 << node)
    system = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(rows.ctypes.data), ctypes.c_size_t(rows.nbytes), _MPOL_PREFERRED)
    if system.syscall(ctypes.c_long(number), *arguments, ctypes.byref(nodes), ctypes.c_ulong(_MAX_NODES + 1), 0):
        logger.info(
            "host memory is not placed on NUMA node %d, next to the device: %s", node, os.strerror(ctypes.get_errno())
        )
        return False
    return True
