"""Scenarios that can be played with vLLM's scheduler, and the world around it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Final

from cargohold.errors import ConfigError
from cargohold.protocol import AttentionKind
from cargohold.testing.simulation.campaign import Recipe
from cargohold.testing.simulation.clock import GroupPlan
from cargohold.testing.simulation.clock import num_blocks_needed as num_own_blocks_needed
from cargohold.testing.simulation.connectors import CONNECTORS
from cargohold.testing.simulation.oracles import Oracle
from cargohold.testing.simulation.replica import Replica
from cargohold.testing.simulation.run import NO_TIMELINE, Run, RunResult, Timeline, quiet_logging
from cargohold.testing.simulation.scenario import ANY, Scenario, draw_scenario
from cargohold.testing.simulation.transfers import CopiesInFlight
from cargohold.testing.simulation.workloads import Ask, without_used_ids
from cargohold.testing.simulation.world import World
from cargohold.testing.vllm.configuration import (
    ASYNC,
    CAN_RETAIN_LESS,
    MATCH_UNIT,
    MAX_MODEL_LEN,
    RETAINED,
    num_blocks_needed,
)
from cargohold.testing.vllm.connector import standing_on
from cargohold.testing.vllm.engine import VllmEngine


class BridgeOracle(Oracle):
    """At the end, neither vLLM nor either side of the adapter remembers requests and transfers that are over.

    Args:
        engine: the replica.
    """

    name = "bridge"

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def at_end(self) -> None:
        """Check that nothing is remembered any more."""
        for what, left in self._remembered().items():
            self.require(not left, f"{what}: {left}")

    def _remembered(self) -> Mapping[str, Sized]:
        vllm, side, aggregator = self._engine.vllm, self._engine.side, self._engine.aggregator
        remembered: dict[str, Sized] = {
            "vLLM waits for loads that have ended": vllm.finished_recving_kv_req_ids,
            "vLLM remembers failed loads": vllm.failed_recving_kv_req_ids,
            "vLLM has not freed blocks": vllm.deferred_frees,
            "vLLM remembers prefills": vllm._inflight_prefills,
            "vLLM waits for more ranks to end loads": aggregator._recv_remaining_count,
            "vLLM waits for more ranks to end sending": aggregator._send_remaining_count,
            "vLLM waits for more ranks whose loads failed": aggregator._failed_recving_pending,
            "the adapter knows requests": side._requests,
            "the adapter waits for loads": side._loading,
            "the adapter waits for look-ups": side._deferrals,
            "the adapter remembers failed loads": side._failed,
            "the adapter remembers loads": side._parked,
            "the adapter remembers hits": side._num_computed,
            "the adapter remembers admissions": side._admitted,
        }
        for rank, worker in enumerate(self._engine.workers):
            own = worker.connector._worker
            remembered[f"the adapter on rank {rank} waits for loads"] = own._loading
            remembered[f"the adapter on rank {rank} waits for sending"] = own._sending
            remembered[f"the adapter on rank {rank} remembers failed loads"] = own._failed
        return remembered


# --- the environment variables that vLLM reads ------------------------------------------------------------------------

_INT_HASHES: Final = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"


@contextmanager
def whole_hashes() -> Iterator[None]:
    """Within the ``with`` block, vLLM's events name blocks by whole hashes, which can be looked up, not by 64 bits of them."""
    before = os.environ.get(_INT_HASHES)
    os.environ[_INT_HASHES] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INT_HASHES]
        else:
            os.environ[_INT_HASHES] = before


# --- scenarios that can be played with vLLM's scheduler ---------------------------------------------------------------

APPLICABLE: Final = tuple(name for name, kind in CONNECTORS.items() if kind.with_context and kind.applies_locks)
"""Names of the connectors that can be played: inside vLLM there is always a view of the pool."""


class VllmWorld(World):
    """Makes engines around vLLM's scheduler, in the same world of links, tiers and faults."""

    def new_engine(self) -> Replica:
        """An engine as after a start of its process."""
        scenario = self._scenario
        self._links, self._faulty, self._queues = [], [], []
        self.copies = [CopiesInFlight(rank) for rank in range(scenario.shape.world_size)]
        random = Random(f"{scenario.seed}/vllm")  # noqa: S311  # repeatable, on purpose
        with standing_on(self._factory, self.clock):
            engine = VllmEngine(scenario.shape, clock=self.clock, copies=self.copies, random=random)
        engine.workers[0].runner.before_forward = self._advance_links
        return engine

    def oracles(self, engine: Replica) -> list[Oracle]:
        """The oracle for what must hold in vLLM and in the adapter."""
        assert isinstance(engine, VllmEngine)
        return [BridgeOracle(engine)]


class VllmRun(Run):
    """A run whose engines are vLLM's. Sets the environment variable that vLLM needs, and quiets its log."""

    def play(self) -> RunResult:
        """Play to the end, or to the first failure."""
        with quiet_logging("vllm"), whole_hashes():
            return super().play()


class VllmRecipe(Recipe):
    """The same scenarios, with vLLM's scheduler in the place of ours. Raises ``ConfigError`` for an inapplicable connector."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.connector in CONNECTORS and self.connector not in APPLICABLE:
            expected = f"with vLLM, where connectors always see the pool, {ANY} or one of {', '.join(APPLICABLE)}"
            raise ConfigError("connector", self.connector, expected)

    def scenario(self, seed: int) -> Scenario:
        """The scenario of a seed, fitted for vLLM."""
        random = Random(f"{seed}/vllm scenario")  # noqa: S311  # repeatable, on purpose
        connector = random.choice(APPLICABLE) if self.connector == ANY else self.connector
        with quiet_logging("vllm"):
            return fitted(draw_scenario(seed, self.workload, connector, self.faults), random)

    def run(self, scenario: Scenario, timeline: Timeline = NO_TIMELINE) -> Run:
        """A run of ``scenario``."""
        return VllmRun(scenario, timeline=timeline, world=VllmWorld(scenario))


def fitted(scenario: Scenario, random: Random) -> Scenario:
    """Change the scenario's engine into one that vLLM supports. Options that our own engine does not have are drawn.

    * Recurrent state needs a prefix cache, and blocks no larger than those of other groups.
    * With chunked local attention, vLLM needs blocks of one size, and chunks of whole blocks.
    * vLLM gives every request an id of its own.
    * The pool keeps its number of spare blocks, beyond those without which vLLM does not start. Where a prefix may end
      inside a block, it gets one more per group: vLLM copies such blocks, and does not make sure that it ever has room to.
    """
    asks = [action for action in scenario.actions if isinstance(action, Ask)]
    longest = max((len(ask.prompt) + ask.max_tokens for ask in asks), default=1)
    shape, options = scenario.shape, dict(scenario.shape.scheduler)
    num_spare = shape.num_blocks - num_own_blocks_needed(shape.groups, longest, options["max_num_batched_tokens"])
    if any(plan.kind is AttentionKind.RECURRENT for plan in shape.groups):
        options["prefix_caching"] = True  # without it vLLM keeps one state per request, which is no prefix of anything
    options |= {
        # vLLM refuses to start without room for one token of each request in a step.
        "max_num_batched_tokens": max(options["max_num_batched_tokens"], options["max_num_seqs"]),
        MAX_MODEL_LEN: longest + 1,
        ASYNC: random.random() < 0.4,
    }
    groups = _fitted_groups(shape.groups)
    if CAN_RETAIN_LESS and random.random() < 0.3:
        options[RETAINED] = 0  # vLLM's default
    match_unit = _match_unit(groups, random)
    if match_unit is not None:
        options[MATCH_UNIT] = match_unit
        num_spare += len(groups)
    shape = replace(shape, groups=groups, scheduler=options)
    shape = replace(shape, num_blocks=num_blocks_needed(shape) + num_spare)
    plan = replace(scenario.connector, with_context=True, applies_locks=True)
    return replace(scenario, shape=shape, connector=plan, actions=without_used_ids(scenario.actions))


def _match_unit(groups: tuple[GroupPlan, ...], random: Random) -> int | None:
    """Draw tokens per block hash where users may set it: with recurrent state beside attention. States are left there, too."""
    if len(groups) == 1 or not any(plan.kind is AttentionKind.RECURRENT for plan in groups):
        return None
    return random.choice((None, random.choice((1, 2, min(plan.block_tokens for plan in groups)))))


def _fitted_groups(groups: tuple[GroupPlan, ...]) -> tuple[GroupPlan, ...]:
    smallest = min(plan.block_tokens for plan in groups)
    fitted = [replace(plan, block_tokens=smallest) if plan.kind is AttentionKind.RECURRENT else plan for plan in groups]
    if any(plan.kind is AttentionKind.CHUNKED_LOCAL for plan in groups):
        block_tokens = groups[0].block_tokens
        fitted = [replace(plan, block_tokens=block_tokens) for plan in fitted]
        fitted = [
            replace(plan, window_tokens=-(-plan.window_tokens // block_tokens) * block_tokens)
            if plan.kind is AttentionKind.CHUNKED_LOCAL and plan.window_tokens is not None
            else plan
            for plan in fitted
        ]
    return tuple(fitted)
