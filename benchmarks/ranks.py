"""What steps cost beside the model: in process, and over one, two and four worker processes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from cargohold.connector.factory import connector_factory
from cargohold.engine.core.request import SampleSpec, ScheduledTokens, SchedulerStep
from cargohold.engine.executor import Executor, LayerHooks, ModelRunner, RankPlace
from cargohold.engine.ranks.choice import ExecutorConfig, ExecutorKind, make_executor
from cargohold.engine.ranks.rank import RankSpec
from cargohold.protocol import (
    AttentionKind,
    KVCacheGroup,
    KVCacheLayout,
    NullConnectorScheduler,
)

NUM_REQUESTS = 64
BLOCKS_PER_REQUEST = 125


@dataclass(frozen=True)
class NoModels:
    """Ranks that compute nothing, so that what is left is the cost of control."""

    def make_runner(self, place: RankPlace) -> ModelRunner:
        return _NoModel()


class _NoModel:
    def kv_regions(self) -> Sequence[Sequence[Any]]:
        return [[np.zeros((1, 1), dtype=np.uint8)]]

    def execute(self, step: SchedulerStep, hooks: LayerHooks | None) -> Mapping[str, int]:
        return {share.request_id: 1 for share in step.scheduled}


def run(*, quick: bool) -> dict[str, Any]:
    rounds = 3 if quick else 400
    kinds = [
        (ExecutorKind.INLINE, 1),
        *((ExecutorKind.MULTIPROCESS, ranks) for ranks in ((1, 2) if quick else (1, 2, 4))),
    ]
    executors = [_start(kind, num_ranks) for kind, num_ranks in kinds]
    times: list[list[float]] = [[] for _ in kinds]
    try:
        for number in range(rounds):
            step = _decode_step(number)
            for executor, of in zip(executors, times, strict=True):  # in turns, so that disturbances hit all of them
                started = time.perf_counter()
                executor.execute(step)
                of.append(time.perf_counter() - started)
    finally:
        for executor in executors:
            executor.shutdown()
    rows = [
        {"executor": kind.value, "ranks": num_ranks, "step_ms": round(1e3 * median(of), 3)}
        for (kind, num_ranks), of in zip(kinds, times, strict=True)
    ]
    two, one = times[2], times[1]
    return {
        "workload": {"running_requests": NUM_REQUESTS, "blocks_per_request": BLOCKS_PER_REQUEST, "rounds": rounds},
        "rows": rows,
        "added_by_second_rank_ms": round(1e3 * median(b - a for a, b in zip(one, two, strict=True)), 3),
    }


def _start(kind: ExecutorKind, num_ranks: int) -> Executor:
    group = KVCacheGroup(0, AttentionKind.FULL, 16, ("layers.0",))
    layout = KVCacheLayout((group,), NUM_REQUESTS * BLOCKS_PER_REQUEST + 1, 1, 16, num_ranks)
    return make_executor(
        ExecutorConfig(kind), RankSpec(NoModels(), connector_factory(None), layout), NullConnectorScheduler()
    )


def _decode_step(number: int) -> SchedulerStep:
    """A step in which every request computes one token."""
    return SchedulerStep(
        scheduled=tuple(
            ScheduledTokens(
                request_id=f"request-{at}",
                token_ids=(number,),
                num_computed_tokens=BLOCKS_PER_REQUEST * 16 - 1,
                write_from=0,
                block_ids=(list(range(at * BLOCKS_PER_REQUEST, (at + 1) * BLOCKS_PER_REQUEST)),),
                sample=SampleSpec(index=number),
            )
            for at in range(NUM_REQUESTS)
        )
    )
