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

from cargohold.protocol import KVCacheLayout
from cargohold.tiers.memory import ByteRows
from cargohold.tiers.messages import Gap
from cargohold.transfer.port import CopyJob

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
class Comparer:
    """Compares what a worker has stored into spare rows with what is kept.

    Attributes:
        rows: the worker's shard of host memory.
        layout: the engine's paged KV.
        rows_per_block: rows of a block, by group.
    """

    rows: ByteRows
    layout: KVCacheLayout
    rows_per_block: Sequence[int]

    def compare(self, job: CopyJob) -> tuple[Gap, ...]:
        """Return how the blocks differ that this job, which has ended, has copied. A second's allowance takes milliseconds."""
        rows, gaps = iter(job.rows), []
        for block_id, group in zip(job.block_ids, job.groups, strict=True):
            new = list(islice(rows, self.rows_per_block[group]))
            kept = [job.compared[row] for row in new]
            if (gap := self._gap(block_id, group, self._bytes(kept, group), self._bytes(new, group))) is not None:
                gaps.append(gap)
        return tuple(gaps)

    def _gap(self, block_id: int, group: int, kept: ByteRows, computed: ByteRows) -> Gap | None:
        if np.array_equal(kept, computed):
            return None
        of = self.layout.groups[group]
        return Gap(block_id, *distance_of(kept, computed, of.number_type, len(of.layer_names)))

    def _bytes(self, rows: Sequence[int], group: int) -> ByteRows:
        """Return what the group's layers fill of a block. Its last row ends with it, so it may overlap the one before."""
        width, num_bytes = self.rows.shape[1], self.layout.group_bytes[group]
        if len(rows) == 1:
            return self.rows[rows[0], :num_bytes]
        block = np.empty(num_bytes, dtype=np.uint8)
        for at, row in enumerate(rows):
            start = min(at * width, num_bytes - width)
            block[start : start + width] = self.rows[row]
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
