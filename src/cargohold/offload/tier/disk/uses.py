"""The time at which each slot was last used, kept on the disk so that a restart does not forget what is worth keeping.

A segment's table is written as a whole, now and then and at the end: a process that is killed loses the uses of some seconds.
Times that are read back are only hints: a time before the chunk was stored, or in the future, is ignored.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cargohold.offload.tier.disk.files import USE_BYTES
from cargohold.offload.tier.disk.shard import Shard

Uses: TypeAlias = npt.NDArray[np.int64]
"""Per slot, the time at which it was last used, in nanoseconds since 1970; 0 if that is not known."""

SAVE_EVERY_NS: Final = 10 * 10**9
_ON_DISK: Final = np.dtype("<i8")


class LastUses:
    """The last uses of a shard's slots. Thread-safe.

    Args:
        shard: the shard; its tables are read.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._per_segment = shard.geometry.slots_per_segment
        self._uses = np.zeros(shard.capacity, dtype=np.int64)
        self._lock = threading.Lock()
        self._changed: set[int] = set()
        self._saved_ns = 0
        for at, segment in enumerate(shard.segments):
            try:
                found = segment.read_uses()
            except OSError:
                continue  # a bad place on the disk: the uses of this segment are not known
            count = len(found) // USE_BYTES
            self._of(at)[:count] = np.frombuffer(found, _ON_DISK, count)

    def snapshot(self) -> Uses:
        """Return a copy of the last uses of all slots up to the shard's capacity."""
        with self._lock:
            return self._uses.copy()

    def note(self, slots: Sequence[int], now_ns: int) -> bool:
        """Note that slots are used now; return whether it is time to call ``save``."""
        with self._lock:
            self._uses[slots] = now_ns
            self._changed.update(slot // self._per_segment for slot in slots)
            is_due = bool(self._changed) and not 0 <= now_ns - self._saved_ns < SAVE_EVERY_NS
            if is_due:
                self._saved_ns = now_ns
            return is_due

    def save(self) -> None:
        """Write the tables of segments with new uses. Raises ``OSError``; the next call writes them all again."""
        with self._lock:
            changed, self._changed = self._changed, set()
            tables = [(at, self._of(at).astype(_ON_DISK).tobytes()) for at in changed]
        try:
            for at, table in tables:
                self._shard.segments[at].write_uses(table)
        except OSError:
            with self._lock:
                self._changed |= changed
            raise

    def _of(self, segment: int) -> Uses:
        first = segment * self._per_segment
        return self._uses[first : first + self._per_segment]
