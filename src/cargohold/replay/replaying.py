"""Replays one workload: with a policy at a size, or for a bound that no policy can beat."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from cargohold.cache.policies import find_policy
from cargohold.cache.policies.offline import OfflineTrace
from cargohold.errors import ConfigError
from cargohold.replay.results import BOUNDS, INFINITE, OPTIMUM, ReplayResult
from cargohold.replay.tiers import DEFAULT_DISK_POLICY, HOST, TierTraffic, run_tiers
from cargohold.replay.workload import Ints, Workload

Capacities = tuple[int, ...]
"""Slots of each tier, first tier first."""


def replay(
    workload: Workload, policy: str, capacities: Sequence[Capacities], disk_policy: str = DEFAULT_DISK_POLICY
) -> Iterator[ReplayResult]:
    """Yield one result per size, in the order of ``capacities``.

    Args:
        workload: the requests.
        policy: one of ``BOUNDS``, or see ``cargohold.cache.policies.find_policy``.
        capacities: the sizes. For an infinite cache there is only one result.
        disk_policy: policy of a second tier.

    Raises:
        ConfigError: there is no such policy, a tier has no slot, or the optimum is asked for where ids form no trie.
    """
    if policy == OPTIMUM:
        yield from _optimum(workload, capacities)
    elif policy == INFINITE:
        yield _infinite(workload)
    else:
        for sizes in capacities:
            yield _production(workload, policy, sizes, disk_policy)


def check_policies(policies: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a name that is neither a policy nor a bound."""
    for policy in policies:
        if policy not in BOUNDS:
            find_policy(policy, besides=BOUNDS)


def _production(workload: Workload, policy: str, capacities: Capacities, disk_policy: str) -> ReplayResult:
    started = time.perf_counter()
    run = run_tiers(workload, policy, capacities, disk_policy)
    return _result(workload, policy, capacities, run.hits, started, num_present=run.num_present, tiers=run.tiers)


def _optimum(workload: Workload, capacities: Sequence[Capacities]) -> Iterator[ReplayResult]:
    """Results of the best possible tier, as large as all tiers together."""
    started = time.perf_counter()
    requests = (workload.chunks[start:end].tolist() for start, _, end in workload.spans())
    try:
        trace = OfflineTrace(requests, (workload.prompt_ends - workload.starts).tolist())
    except ValueError as error:
        raise ConfigError(
            "policy", OPTIMUM, "the trace's ids do not form a trie, so no optimum can be computed"
        ) from error
    for sizes in capacities:
        hits = np.array(trace.optimal_hits(sum(sizes)), dtype=np.int64)
        yield _result(workload, OPTIMUM, sizes, hits, started)
        started = time.perf_counter()


def _infinite(workload: Workload) -> ReplayResult:
    started = time.perf_counter()
    num_used = len(workload.chunks)
    _, first_uses = np.unique(workload.chunks, return_index=True)
    is_hit = np.ones(num_used + 1, dtype=bool)
    is_hit[first_uses] = False
    # Counts as a miss behind the last chunk, so that every request has a next miss.
    is_hit[num_used] = False
    misses = np.flatnonzero(~is_hit)
    starts, prompt_ends = workload.starts, workload.prompt_ends
    hits = np.minimum(misses[misses.searchsorted(starts)], prompt_ends) - starts
    hits_before = np.concatenate(([0], np.cumsum(is_hit)))
    traffic = TierTraffic(HOST, len(first_uses), int(hits.sum()), len(first_uses), 0, len(first_uses))
    num_present = int((hits_before[prompt_ends] - hits_before[starts]).sum())
    return _result(workload, INFINITE, (len(first_uses),), hits, started, num_present=num_present, tiers=(traffic,))


def _result(
    workload: Workload,
    policy: str,
    capacities: Capacities,
    hits: Ints,
    started: float,
    *,
    num_present: int | None = None,
    tiers: tuple[TierTraffic, ...] = (),
) -> ReplayResult:
    num_prefix_hits = int(hits.sum())
    return ReplayResult(
        policy=policy,
        capacities=capacities,
        num_requests=workload.num_requests,
        num_lookups=workload.num_lookups,
        num_prefix_hits=num_prefix_hits,
        num_block_hits=num_prefix_hits if num_present is None else num_present,
        num_hit_tokens=workload.tokens_in(hits),
        tiers=tiers,
        seconds=time.perf_counter() - started,
    )
