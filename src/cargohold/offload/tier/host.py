"""Host memory as a tier: one worker's shard of it."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from cargohold.errors import ConfigError
from cargohold.machine import memory_limit_bytes
from cargohold.units import format_bytes

ByteRows = npt.NDArray[np.uint8]


class HostMemory:
    """One worker's shard of host memory: rows of one block each, in anonymous memory.

    The memory is private to the process and is freed with it, however it ends. Pages are committed when first written, so a
    large tier costs nothing at the start.

    Args:
        num_rows: number of rows.
        row_bytes: bytes per row.

    Raises:
        ConfigError: this machine does not have so much memory; it need not be the one where the options were checked.
    """

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        num_bytes, limit = num_rows * row_bytes, memory_limit_bytes()
        if num_bytes > limit:
            reason = f"that is one worker's share, and its machine allows {format_bytes(limit)} in all"
            raise ConfigError("host_bytes", num_bytes, reason)
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # The first write to small pages would cost more than the copy itself.
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.rows: ByteRows = np.frombuffer(self._memory, dtype=np.uint8).reshape(num_rows, row_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return int(self.rows.shape[1])
