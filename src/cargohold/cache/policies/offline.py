"""Upper bounds that no policy can beat: hits when the future is known, and when nothing is ever evicted.

The optimum is Belady's MIN with bypass: keep the chunks whose next use comes first, those of the request at hand included
(L. Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer", IBM Systems Journal 5, 1966). Requests are
paths of a trie, so a chunk is never used before the one in front of it: along a path next uses only get later, and what MIN
keeps never has a hole. That makes it the optimum for prefix hits too.

Chunks that an answer completes are stored but not looked up. A chunk whose next use is in an answer will be computed there
anyway, so until then it is not worth a slot. Such a chunk may be before others that are kept; it is back before those are
looked up.

In a trie, chunks need not be looked at one by one. The part of a path with the same next use is a *span*, and the tier is a set
of spans that lose chunks at their far ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
import numpy.typing as npt

_NEVER: Final = np.iinfo(np.int64).max

_Ints = npt.NDArray[np.int64]


class OfflineTrace:
    """A whole trace, for which the best possible hits are computed.

    Args:
        requests: for each request, the names of the chunks that it uses, in prefix order. A name is any hashable value; it
            stands for the chunk and everything before it.
        num_asked: for each request, how many of its leading chunks are looked up; by default all.

    Raises:
        ValueError: a chunk comes back behind another one than before: the names do not form a trie.

    Attributes:
        num_chunks: number of different chunks.
        num_lookups: number of uses of chunks.
    """

    def __init__(self, requests: Iterable[Sequence[Hashable]], num_asked: Sequence[int] | None = None) -> None:
        numbers: dict[Hashable, int] = {}
        chunks: list[int] = []
        lengths: list[int] = []
        for request in requests:
            chunks += [numbers.setdefault(name, len(numbers)) for name in request]
            lengths.append(len(request))
        self.num_chunks = len(numbers)
        self.num_lookups = len(chunks)
        self._ends = np.cumsum(lengths, dtype=np.int64)
        asked = np.array(lengths if num_asked is None else num_asked, dtype=np.int64)
        self._spans = self._find_spans(np.array(chunks, dtype=np.int64), np.array(lengths, dtype=np.int64), asked)

    def optimal_hits(self, capacity: int) -> list[int]:
        """Return, for each request, how many of its leading chunks the best possible tier of ``capacity`` slots holds."""
        hits = []
        # Spans in the tier, the next to lose chunks on top: (-next use, -end, start).
        heap: list[tuple[int, int, int]] = []
        # By request: how many chunks in the tier it uses next.
        held: dict[int, int] = {}
        num_held = 0
        for request, spans in enumerate(self._spans):
            hits.append(held.pop(request, 0))
            num_held -= hits[-1]
            for start, end, next_use in spans:
                heappush(heap, (-next_use, -end, start))
                held[next_use] = held.get(next_use, 0) + end - start
                num_held += end - start
            while num_held > capacity:
                next_use, end, start = -heap[0][0], -heap[0][1], heap[0][2]
                heappop(heap)
                num_evicted = min(num_held - capacity, end - start)
                if num_evicted < end - start:
                    heappush(heap, (-next_use, num_evicted - end, start))
                held[next_use] -= num_evicted
                num_held -= num_evicted
            if len(heap) > 2 * len(held) + len(self._spans) // 8 + 64:
                heap = [span for span in heap if -span[0] > request]
                heapify(heap)
        return hits

    def _find_spans(self, chunks: _Ints, lengths: _Ints, asked: _Ints) -> list[list[tuple[int, int, int]]]:
        """Return, for each request, its spans that are looked up at their next use: ``(start, end, next request)``."""
        request_of = np.repeat(np.arange(len(lengths)), lengths)
        depth = np.arange(len(chunks)) - np.repeat(self._ends - lengths, lengths)
        next_use = _next_uses(chunks, request_of, depth < np.repeat(asked, lengths))
        _check_trie(chunks, depth)
        is_start = (depth == 0) | (np.diff(next_use, prepend=-1) != 0)
        starts = is_start.nonzero()[0]
        ends = np.append(starts[1:], len(chunks))
        spans: list[list[tuple[int, int, int]]] = [[] for _ in range(len(lengths))]
        used_again = next_use[starts] != _NEVER
        starts, ends = starts[used_again], ends[used_again]
        columns = (request_of[starts], depth[starts], depth[starts] + ends - starts, next_use[starts])
        for request, start, end, again in zip(*(column.tolist() for column in columns), strict=True):
            spans[request].append((start, end, again))
        return spans


def _next_uses(chunks: _Ints, request_of: _Ints, is_asked: npt.NDArray[np.bool_]) -> _Ints:
    """Return, for each use of a chunk, the request that uses it next; ``_NEVER`` if that does not look it up."""
    order = chunks.argsort(kind="stable")
    is_same = chunks[order[:-1]] == chunks[order[1:]]
    next_use = np.full(len(chunks), _NEVER)
    again = order[1:][is_same]
    next_use[order[:-1][is_same]] = np.where(is_asked[again], request_of[again], _NEVER)
    return next_use


def _check_trie(chunks: _Ints, depth: _Ints) -> None:
    before = np.where(depth == 0, -1, np.roll(chunks, 1))
    parents = np.full(int(chunks.max(initial=-1)) + 1, -1)
    parents[chunks] = before
    if (parents[chunks] != before).any():
        raise ValueError("the names of the chunks do not form a trie: one came back behind another chunk than before")
