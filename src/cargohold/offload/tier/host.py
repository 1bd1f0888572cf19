"""Host memory as a tier: one worker's shard of it."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

ByteRows = npt.NDArray[np.uint8]


class HostMemory:
    """Rows of one block each, in anonymous memory.

    The memory is private to the process and goes with it, whatever ends it. Pages are committed when first written, so a
    large tier costs nothing at start.

    Args:
        num_rows: rows.
        row_bytes: bytes per row.
    """

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self._memory = mmap.mmap(-1, num_rows * row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # First touch of small pages would cost more than the copy itself.
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.rows: ByteRows = np.frombuffer(self._memory, dtype=np.uint8).reshape(num_rows, row_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return int(self.rows.shape[1])
