"""How bytes cross between a device and rows of host memory: two ways, of which the faster is measured at the start.

================  =======================================================  ==================================================
way               how                                                      good for
================  =======================================================  ==================================================
``runs``          one asynchronous copy for each run of neighbours         few long runs; the only way to pages not locked
``batch``         one call of the driver for all copies of a job           many scattered rows: a call costs microseconds,
                  (``cuMemcpyBatchAsync``, drivers for CUDA 12.8 and up)   and a copy of 256 KiB takes five
================  =======================================================  ==================================================

Both leave the device's processors to the model. Which one is faster depends on the device, its driver, its link and the length
of a row, so ``fastest_link`` tries them.
"""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from cargohold.transfer import Direction
from cargohold.transfer.host_pages import PageLocks
from cargohold.transfer.port import consecutive_runs

logger = logging.getLogger(__name__)

TRIAL_BYTES: Final = 32 * 1024**2
"""Most bytes of one trial copy."""
_TRIAL_ROWS: Final = 64
_ROUNDS: Final = 3

_ELEMENTS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

Addresses = npt.NDArray[np.uint64]
BatchCopy = Callable[[Addresses, Addresses, Addresses, int], None]
"""Enqueues copies: targets, sources and byte counts, and the handle of a stream. Raises ``RuntimeError``."""


class Link(ABC):
    """Enqueues copies between rows on a device and rows of host memory, on the current stream.

    Args:
        rows: this worker's shard of host memory: ``uint8``, shape ``(num_rows, row_bytes)``.
        locks: the locks on its pages.
    """

    name: str

    def __init__(self, rows: torch.Tensor, locks: PageLocks) -> None:
        self._rows = rows
        self._locks = locks

    @property
    def row_bytes(self) -> int:
        return int(self._rows.shape[1])

    @abstractmethod
    def copy(self, direction: Direction, device: torch.Tensor, device_rows: Sequence[int], rows: Sequence[int]) -> None:
        """Enqueue the copies between ``device[device_rows]`` and the host's ``rows``, which are parallel.

        Args:
            direction: which way.
            device: ``uint8``, shape ``(number of rows there, row_bytes)``; its rows may have gaps between them.
            device_rows: numbers of rows on the device.
            rows: numbers of rows of host memory.

        Raises:
            RuntimeError: some may be under way then.
        """


class RunLink(Link):
    """One asynchronous copy for each run of neighbours. Copies from or to pages that are not locked hold their caller up."""

    name = "runs"

    def copy(self, direction: Direction, device: torch.Tensor, device_rows: Sequence[int], rows: Sequence[int]) -> None:
        for device_row, row, length in consecutive_runs(device_rows, rows, len(rows)):
            at = device_row
            for first, part, is_locked in self._locks.parts(row, length):
                ours, theirs = self._rows[first : first + part], device[at : at + part]
                if direction is Direction.LOAD:
                    theirs.copy_(ours, non_blocking=is_locked)
                else:
                    ours.copy_(theirs, non_blocking=is_locked)
                at += part


class BatchLink(Link):
    """All copies of a job in one call.

    Args:
        rows: this worker's shard of host memory.
        locks: the locks on its pages.
        batch_copy: enqueues many copies at once.
        otherwise: copies rows whose pages are not locked.
    """

    name = "batch"

    def __init__(self, rows: torch.Tensor, locks: PageLocks, batch_copy: BatchCopy, otherwise: Link) -> None:
        super().__init__(rows, locks)
        self._batch_copy = batch_copy
        self._otherwise = otherwise

    def copy(self, direction: Direction, device: torch.Tensor, device_rows: Sequence[int], rows: Sequence[int]) -> None:
        if not self._locks.all_locked(rows):
            self._otherwise.copy(direction, device, device_rows, rows)
            return
        theirs, ours = np.asarray(device_rows, np.int64), np.asarray(rows, np.int64)
        firsts, lengths = self._runs(theirs, ours, is_dense=device.stride(0) == device.shape[1])
        there = (device.data_ptr() + theirs[firsts] * device.stride(0)).astype(np.uint64)
        here = (self._rows.data_ptr() + ours[firsts] * self._rows.stride(0)).astype(np.uint64)
        sizes = (lengths * device.shape[1]).astype(np.uint64)
        targets, sources = (there, here) if direction is Direction.LOAD else (here, there)
        self._batch_copy(targets, sources, sizes, torch.cuda.current_stream(device.device).cuda_stream)

    def _runs(
        self, theirs: npt.NDArray[np.int64], ours: npt.NDArray[np.int64], *, is_dense: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where runs of neighbours begin, and their lengths. A run ends where a piece of locked pages ends."""
        if not is_dense:
            return np.arange(len(ours)), np.ones(len(ours), np.int64)
        goes_on = (np.diff(theirs) == 1) & (np.diff(ours) == 1) & (np.diff(ours // self._locks.piece_rows) == 0)
        firsts = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
        return firsts, np.diff(np.concatenate((firsts, [len(ours)])))


def on_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return numbers as a tensor on a device, without waiting for its stream, and so for the model."""
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type != "cpu").to(device, non_blocking=True)


def widest_element(*tensors: torch.Tensor) -> torch.dtype:
    """Return the widest integer type that all of these ``uint8`` tensors of two dimensions can be viewed as.

    Kernels move one element per thread, so the widest one is the fastest.
    """
    numbers = [
        number
        for tensor in tensors
        for number in (tensor.shape[1], tensor.stride(0), int(tensor.storage_offset()), tensor.data_ptr())
    ]
    return _ELEMENTS[int(np.gcd.reduce([max(_ELEMENTS), *numbers]))]


# --- on a CUDA device -------------------------------------------------------------------------------------------------


class _BatchAttributes(ctypes.Structure):
    """``CUmemcpyAttributes`` of the CUDA driver API: order of access, two hints where the memory is, and flags."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER: Final = 1
_OVERLAP_WITH_COMPUTE: Final = 1


def driver_batch_copy() -> BatchCopy | None:
    """Return the driver's batched copy, or ``None`` if it is older than CUDA 12.8.

    Source: CUDA driver API, ``cuMemcpyBatchAsync``. From CUDA 13 on, it no longer says which copy was wrong (``_v2``).
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    call = getattr(driver, "cuMemcpyBatchAsync_v2", None)
    which_failed: tuple[Any, ...] = ()
    if call is None:
        call = getattr(driver, "cuMemcpyBatchAsync", None)
        which_failed = (ctypes.byref(ctypes.c_size_t()),)
    if call is None:
        return None
    attributes = _BatchAttributes(source_access_order=_IN_STREAM_ORDER, flags=_OVERLAP_WITH_COMPUTE)
    first = ctypes.c_size_t(0)  # the attributes hold from the first copy on

    def batch_copy(targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        pointers = (ctypes.c_void_p(numbers.ctypes.data) for numbers in (targets, sources, sizes))
        error = call(
            *pointers,
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *which_failed,
            ctypes.c_void_p(stream),
        )
        if error:
            raise RuntimeError(f"cuMemcpyBatchAsync failed: CUDA error {error}")

    return batch_copy


def cuda_links(rows: torch.Tensor, locks: PageLocks, device: torch.device) -> list[Link]:
    """Return all ways between a CUDA device and host memory that work there; the first one always does."""
    plain = RunLink(rows, locks)
    links: list[Link] = [plain]
    if not locks.lock_first():
        return links
    if (batch_copy := driver_batch_copy()) is not None:
        links.append(BatchLink(rows, locks, batch_copy, plain))
    return links


Measure = Callable[[Link, Direction, Sequence[int]], float]
"""Seconds that a link takes for these rows of host memory."""


def fastest_link(links: Sequence[Link], num_rows: int, row_bytes: int, measure: Measure) -> dict[Direction, Link]:
    """Return the fastest way for each direction, by trial copies of rows that are no neighbours.

    Args:
        links: the ways, of which the first always works; one that fails in a trial is left out.
        num_rows: rows that trials may use, from the first one on. Trial loads read them, trial stores overwrite them.
        row_bytes: bytes of a row.
        measure: carries out a trial. May raise ``RuntimeError``.
    """
    if len(links) == 1 or num_rows < 2:
        return dict.fromkeys(Direction, links[0])
    count = min(num_rows, _TRIAL_ROWS, max(2, TRIAL_BYTES // row_bytes))
    rows = range(count - 1, -1, -1)  # counts down, so that no two are neighbours on both sides
    chosen: dict[Direction, Link] = {}
    for direction in Direction:
        times = {link: _trial(link, direction, rows, measure) for link in links}
        chosen[direction] = min(times, key=times.__getitem__)
        logger.info(
            "%s between device and host memory in rows of %d bytes: %s (%s)",
            direction.value,
            row_bytes,
            chosen[direction].name,
            ", ".join(f"{link.name} {count * row_bytes / time_s / 1e9:.3g} GB/s" for link, time_s in times.items()),
        )
    return chosen


def _trial(link: Link, direction: Direction, rows: Sequence[int], measure: Measure) -> float:
    """Return the shortest time of a few, without the first one; infinite if the way does not work."""
    try:
        measure(link, direction, rows)
        return min(measure(link, direction, rows) for _ in range(_ROUNDS))
    except RuntimeError as error:
        logger.warning("copies between device and host memory by %s do not work here: %s", link.name, error)
        return float("inf")
