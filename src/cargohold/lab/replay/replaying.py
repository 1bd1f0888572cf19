"""Replays workloads with policies at sizes, and for bounds that no policy can beat; many of them in parallel processes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
import numpy.typing as npt

from cargohold.cache.policies import DEFAULT_POLICY, find_policy
from cargohold.errors import CargoholdError, ConfigError
from cargohold.lab.replay.hints import OrchestratorHints
from cargohold.lab.replay.tiers import DEFAULT_DISK_POLICY, HOST, TierLog, TierRun, TierTraffic, run_tiers
from cargohold.lab.replay.workload import Workload
from cargohold.process import WorkerPool

INFINITE: Final = "infinite"
"""Name of a bound, not of a policy: nothing is ever evicted."""
OPTIMUM: Final = "optimum"
"""Name of a bound, not of a policy: the future is known."""
BOUNDS: Final = (OPTIMUM, INFINITE)
HINTED: Final = "+hints"
"""What is appended to a policy's name where it gets hints; see ``cargohold.lab.replay.hints``."""

Capacities = tuple[int, ...]
"""Slots of each tier, first tier first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The result of one policy at one size.

    Attributes:
        policy: the policy's name, or one of ``BOUNDS``.
        capacities: slots of each tier, first tier first; of an infinite cache, the number of different chunks.
        num_requests: requests that are counted.
        num_lookups: chunks of their prompts.
        num_prefix_hits: chunks found with all chunks before them, without those that the device pool finds by itself: the hits
            that save prefill.
        num_block_hits: chunks found, after a hole or not, without the same.
        num_hit_tokens: tokens of the prefix hits; ``None`` if the trace does not say how many a block has.
        tiers: traffic of each tier; empty for the optimum, for which it is not known.
        seconds: real time that the replay took.
        run: what these numbers were counted in, request by request.
    """

    policy: str
    capacities: Capacities
    num_requests: int
    num_lookups: int
    num_prefix_hits: int
    num_block_hits: int
    num_hit_tokens: int | None
    tiers: tuple[TierTraffic, ...]
    seconds: float
    run: TierRun = dataclasses.field(compare=False, repr=False)

    @property
    def prefix_hit_ratio(self) -> float:
        """Prefix hits per look-up."""
        return self.num_prefix_hits / self.num_lookups

    @property
    def block_hit_ratio(self) -> float:
        """Block hits per look-up."""
        return self.num_block_hits / self.num_lookups


def replay(
    workload: Workload,
    policy: str,
    capacities: Sequence[Capacities],
    disk_policy: str = DEFAULT_DISK_POLICY,
    *,
    learns_first: bool = False,
) -> Iterator[ReplayResult]:
    """Yield one result per size, in the order of ``capacities``.

    Args:
        workload: the requests.
        policy: one of ``BOUNDS``, or see ``cargohold.cache.policies.find_policy``; with ``HINTED`` after it, hints are given.
        capacities: the sizes. For an infinite cache there is only one result.
        disk_policy: policy of a second tier.
        learns_first: see ``run_tiers``.

    Raises:
        ConfigError: there is no such policy, a tier has no slot, or the optimum is asked for where ids form no trie.
    """
    if policy == OPTIMUM:
        yield from _optimum(workload, capacities)
    elif policy == INFINITE:
        yield _infinite(workload)
    else:
        for sizes in capacities:
            yield _production(workload, policy, sizes, disk_policy, learns_first)


def check_policies(policies: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a name that is neither a policy nor a bound."""
    for policy in policies:
        if policy not in BOUNDS:
            find_policy(policy.removesuffix(HINTED), besides=BOUNDS)


def count(
    workload: Workload, policy: str, capacities: Capacities, run: TierRun, first: int, seconds: float
) -> ReplayResult:
    hits = run.hits[first:] - workload.on_device[first:]
    tokens, on_device = workload.tokens_in(run.hits, first), workload.tokens_in(workload.on_device, first)
    return ReplayResult(
        policy=policy,
        capacities=capacities,
        num_requests=len(hits),
        num_lookups=workload.lookups_from(first),
        num_prefix_hits=int(hits.sum()),
        num_block_hits=int((run.present - workload.on_device)[first:].sum()),
        num_hit_tokens=None if tokens is None or on_device is None else tokens - on_device,
        tiers=run.traffic(first),
        seconds=seconds,
        run=run,
    )


def _counted(workload: Workload, policy: str, capacities: Capacities, run: TierRun, started: float) -> ReplayResult:
    return count(workload, policy, capacities, run, 0, time.perf_counter() - started)


def _production(
    workload: Workload, policy: str, capacities: Capacities, disk_policy: str, learns_first: bool
) -> ReplayResult:
    started = time.perf_counter()
    give_hints = partial(OrchestratorHints, workload) if policy.endswith(HINTED) else None
    run = run_tiers(
        workload, policy.removesuffix(HINTED), capacities, disk_policy, give_hints, learns_first=learns_first
    )
    return _counted(workload, policy, capacities, run, started)


def _optimum(workload: Workload, capacities: Sequence[Capacities]) -> Iterator[ReplayResult]:
    """Results of the best possible tier, as large as all tiers and the device pool together."""
    started = time.perf_counter()
    requests = (workload.chunks[start:end].tolist() for start, _, end in workload.spans())
    try:
        trace = OfflineTrace(requests, (workload.prompt_ends - workload.starts).tolist())
    except ValueError as error:
        raise ConfigError(
            "policy", OPTIMUM, "the trace's ids do not form a trie, so no optimum can be computed"
        ) from error
    for sizes in capacities:
        hits = np.array(trace.optimal_hits(sum(sizes) + workload.device_chunks), dtype=np.int64)
        yield _counted(workload, OPTIMUM, sizes, TierRun(hits, hits, ()), started)
        started = time.perf_counter()


def _infinite(workload: Workload) -> ReplayResult:
    started = time.perf_counter()
    num_used = len(workload.chunks)
    _, first_uses = np.unique(workload.chunks, return_index=True)
    is_hit = np.ones(num_used + 1, dtype=bool)
    is_hit[first_uses] = False
    # Counts as a miss after the last chunk, so that every request has a next miss.
    is_hit[num_used] = False
    misses = np.flatnonzero(~is_hit)
    starts, prompt_ends = workload.starts, workload.prompt_ends
    hits = np.minimum(misses[misses.searchsorted(starts)], prompt_ends) - starts
    hits_before = np.concatenate(([0], np.cumsum(is_hit)))
    stored = np.diff(np.searchsorted(np.sort(first_uses), workload.ends), prepend=0)
    log = TierLog(HOST, len(first_uses), hits, stored, np.cumsum(stored))
    run = TierRun(hits, hits_before[prompt_ends] - hits_before[starts], (log,))
    return _counted(workload, INFINITE, (len(first_uses),), run, started)


@dataclass(frozen=True, slots=True)
class Task:
    """Replays that one process does together.

    Attributes:
        policy: name of a policy or bound.
        capacities: the sizes to replay.
        disk_policy: policy of a second tier.
        learns_first: see ``run_tiers``.
    """

    policy: str
    capacities: tuple[Capacities, ...]
    disk_policy: str = DEFAULT_DISK_POLICY
    learns_first: bool = False


def plan_tasks(
    policies: Sequence[str],
    capacities: Sequence[Capacities],
    disk_policy: str = DEFAULT_DISK_POLICY,
    *,
    learns_first: bool = False,
) -> list[Task]:
    """Divide the replays of all policies at all sizes into tasks. Raises ``ConfigError`` for a policy that does not exist.

    Of these, only the default policy keeps what it has learned, so it alone ``learns_first``.
    """
    check_policies(policies)
    sizes = tuple(dict.fromkeys(capacities))
    tasks: list[Task] = []
    for policy in dict.fromkeys(policies):
        if policy == INFINITE:
            tasks.append(Task(policy, sizes[:1]))
        elif policy == OPTIMUM:
            tasks.append(Task(policy, sizes))  # what it computes about the future serves all sizes
        else:
            learns = learns_first and policy == DEFAULT_POLICY
            tasks += [Task(policy, (size,), disk_policy, learns) for size in sizes]
    return tasks


def run_tasks(workload: Workload, tasks: Sequence[Task], num_processes: int = 1) -> Generator[list[ReplayResult]]:
    """Yield the results of each task as tasks end. If it is closed early, processes that still replay are ended.

    Args:
        workload: the requests.
        tasks: what to replay.
        num_processes: processes to use; with 1, everything is replayed in this process.

    Raises:
        ConfigError: a tier has no slot, or the optimum is asked for where ids form no trie.
        CargoholdError: a process died.
    """
    if num_processes <= 1 or len(tasks) <= 1:
        for task in tasks:
            yield _replayed(workload, task)
        return
    try:
        with WorkerPool(min(num_processes, len(tasks)), _start_process, workload) as pool:
            for future in as_completed([pool.submit(_run_task, task) for task in tasks]):
                yield future.result()
    except BrokenProcessPool as error:
        raise CargoholdError("a replay process died; was it out of memory? Use fewer with --jobs") from error


_workload: Workload | None = None
"""In a process of the pool, the workload that all its tasks replay."""


def _start_process(workload: Workload) -> None:
    global _workload  # noqa: PLW0603  # how a pool gives its processes something once
    _workload = workload


def _run_task(task: Task) -> list[ReplayResult]:
    assert _workload is not None
    return _replayed(_workload, task)


def _replayed(workload: Workload, task: Task) -> list[ReplayResult]:
    return list(replay(workload, task.policy, task.capacities, task.disk_policy, learns_first=task.learns_first))


_NEVER: Final = np.iinfo(np.int64).max

_Ints = npt.NDArray[np.int64]


class OfflineTrace:
    """A whole trace, for which the best possible hits are computed.

    Args:
        requests: for each request, the names of the chunks that it uses, in prefix order. A name is any hashable value; it
            stands for the chunk and everything before it.
        num_asked: for each request, how many of its leading chunks are looked up; by default all.

    Raises:
        ValueError: a chunk comes back after another one than before: the names do not form a trie.

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
