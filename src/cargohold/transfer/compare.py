"""Compares blocks that were computed again with what host memory keeps of them.

A comparison is a store into spare rows. When its copy has ended, these rows are compared with the kept ones::

    device   | b7 b9 |  --store-->  spare rows | b7 b9 |  --compare-->  equal, or how far apart
                                    kept rows  | k7 k9 |

Engines compute the same bytes again only if they split and batch prompts in the same way. So where bytes differ, their
distance counts: the largest difference of a layer's numbers, divided by the largest of these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from cargohold.protocol import KVCacheLayout, TransferOutcome
from cargohold.tiers.memory import ByteRows
from cargohold.transfer.port import CopyResult, ForwardingTransfers, TransferWorker

_AS_FLOATS: Final[Mapping[str, Callable[[ByteRows], npt.NDArray[np.float32]]]] = MappingProxyType(
    {
        "float32": lambda raw: raw.view(np.float32),
        "float16": lambda raw: raw.view(np.float16).astype(np.float32),
        "bfloat16": lambda raw: (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
    }
)
"""How bytes become numbers."""
CLOSE: Final[Mapping[str, float]] = MappingProxyType({"float32": 1e-4, "float16": 0.03, "bfloat16": 0.2, "exact": 0.0})
"""Up to which distance two computations of the same chunk are close, by the type of numbers: four times what was measured, or
more; see ``docs/operating.md``. Chunks of other tokens are about 1 apart."""


@dataclass(frozen=True, slots=True)
class KeptRows:
    """What a store into spare rows is compared with.

    Attributes:
        job_id: the store.
        spare: the rows that it fills, over all workers that share out a store.
        rows: the kept rows, parallel to these.
        groups: the KV-cache group of each block.
    """

    job_id: int
    spare: tuple[int, ...]
    rows: tuple[int, ...]
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """How a block that was computed again differs from what is kept of it.

    Attributes:
        block: number of the block in its job.
        layer: number of the layer that differs most, among those of the block's group.
        distance: its distance; infinite if the type of numbers is not known, or they are not finite.
    """

    block: int
    layer: int
    distance: float


class ComparingTransfers(ForwardingTransfers):
    """Compares what it has stored into spare rows, and passes other jobs on.

    Args:
        inner: copies.
        rows: this worker's shard of host memory.
        layout: the engine's paged KV.
        rows_per_block: rows of a block, by group.
    """

    def __init__(
        self, inner: TransferWorker, rows: ByteRows, layout: KVCacheLayout, rows_per_block: Sequence[int]
    ) -> None:
        super().__init__(inner)
        self._rows = rows
        self._layout = layout
        self._rows_per_block = rows_per_block
        self._kept: dict[int, KeptRows] = {}
        self._gaps: dict[int, tuple[Gap, ...]] = {}

    def expect(self, kept: KeptRows) -> None:
        """Compare the store of this id, which is submitted next, when it has ended."""
        self._kept[kept.job_id] = kept

    def poll(self) -> list[CopyResult]:
        """Return the jobs that have ended, once those that compare are compared: a second's allowance takes milliseconds."""
        results = super().poll()
        for result in results if self._kept else ():
            kept = self._kept.pop(result.job.job_id, None)
            if kept is not None and result.outcome is TransferOutcome.DONE:
                self._gaps[kept.job_id] = self._compare(kept, frozenset(result.job.rows))
        return results

    def take_gaps(self) -> dict[int, tuple[Gap, ...]]:
        """Return by job how blocks differ, for the jobs that ``poll`` has returned since the last call."""
        gaps, self._gaps = self._gaps, {}
        return {job_id: of_job for job_id, of_job in gaps.items() if of_job}

    def _compare(self, kept: KeptRows, copied: frozenset[int]) -> tuple[Gap, ...]:
        """Return how blocks differ, as far as this worker has copied them."""
        spare_rows, kept_rows, gaps = iter(kept.spare), iter(kept.rows), []
        for block, group in enumerate(kept.groups):
            count = self._rows_per_block[group]
            new, old = list(islice(spare_rows, count)), list(islice(kept_rows, count))
            if new[0] in copied and (gap := self._gap(block, group, self._bytes(old, group), self._bytes(new, group))):
                gaps.append(gap)
        return tuple(gaps)

    def _gap(self, block: int, group: int, kept: ByteRows, computed: ByteRows) -> Gap | None:
        if np.array_equal(kept, computed):
            return None
        of = self._layout.groups[group]
        return Gap(block, *distance_of(kept, computed, of.number_type, len(of.layer_names)))

    def _bytes(self, rows: Sequence[int], group: int) -> ByteRows:
        """Return what the group's layers fill of a block. Its last row ends with it, so it may overlap the one before."""
        width, num_bytes = self._rows.shape[1], self._layout.group_bytes[group]
        if len(rows) == 1:
            return self._rows[rows[0], :num_bytes]
        block = np.empty(num_bytes, dtype=np.uint8)
        for at, row in enumerate(rows):
            start = min(at * width, num_bytes - width)
            block[start : start + width] = self._rows[row]
        return block


def distance_of(kept: ByteRows, computed: ByteRows, number_type: str, num_layers: int) -> tuple[int, float]:
    """Return the layer of a block that differs most, and its distance. Without a known type of numbers it is infinite."""
    as_floats = _AS_FLOATS.get(number_type)
    if as_floats is None:
        return 0, inf
    old, new = (as_floats(np.ascontiguousarray(raw)) for raw in (kept, computed))
    num_parts = num_layers if len(new) % num_layers == 0 else 1
    old, new = old.reshape(num_parts, -1), new.reshape(num_parts, -1)
    with np.errstate(all="ignore"):
        largest = np.maximum(np.abs(new).max(axis=1), np.finfo(np.float32).tiny)
        distances = np.nan_to_num(np.abs(old - new).max(axis=1) / largest, nan=inf, posinf=inf)
    layer = int(distances.argmax())
    return layer, float(distances[layer])
