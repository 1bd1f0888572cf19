"""LRU, FIFO and ARC against another implementation, on blocks without prefixes, where nothing of ours should matter."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cargohold.lab.replay.replaying import replay
from cargohold.lab.replay.traces import TraceRequest
from cargohold.lab.replay.workload import load_workload

libcachesim: Any = pytest.importorskip("libcachesim", reason="cross-check needs libCacheSim: pip install libcachesim")

NAMES = {"lru": "LRU", "fifo": "FIFO", "arc": "ARC"}


def theirs(policy: str, capacity: int, stream: list[int]) -> int:
    cache = getattr(libcachesim, NAMES[policy])(cache_size=capacity)
    num_hits = 0
    for chunk in stream:
        request = libcachesim.Request()
        request.obj_id, request.obj_size = chunk + 1, 1
        num_hits += cache.get(request)
    return num_hits


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("capacity", [10, 100, 500])
def test_hits_are_the_same(policy: str, capacity: int) -> None:
    rng = random.Random(capacity)
    stream = [int(rng.paretovariate(0.6)) % 3000 for _ in range(8000)]
    # Phases, so that recency and frequency disagree.
    stream += [3000 + at % (2 * capacity) for at in range(4000)] + stream[:2000]
    workload = load_workload(TraceRequest(hash_ids=[chunk]) for chunk in stream)
    (ours,) = replay(workload, policy, [(capacity,)])
    assert ours.num_prefix_hits == theirs(policy, capacity, stream) > 0
