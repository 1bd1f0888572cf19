"""Scenarios that can be played with vLLM's scheduler, what surrounds its engines, and the runs that play them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, ClassVar, Final
from unittest.mock import patch

from cargohold.errors import ConfigError
from cargohold.lab.simulation.campaign import Recipe
from cargohold.lab.simulation.connectors import CONNECTORS
from cargohold.lab.simulation.fingerprints import GroupPlan
from cargohold.lab.simulation.fingerprints import num_blocks_needed as num_own_blocks_needed
from cargohold.lab.simulation.oracles import Oracle
from cargohold.lab.simulation.replica import Replica
from cargohold.lab.simulation.run import RunResult, ScenarioRun, quiet_logging
from cargohold.lab.simulation.timeline import NO_TIMELINE, Timeline
from cargohold.lab.simulation.traffic import Action, Ask, Reset, SendHints, without_used_ids
from cargohold.lab.simulation.transfers import CopiesInFlight
from cargohold.lab.simulation.workloads import ADAPTERS, REUSING
from cargohold.lab.simulation.world import ANY, Scenario, World, draw_scenario
from cargohold.lab.vllm.adapter import AdapterEngine, transfer_config
from cargohold.lab.vllm.configuration import (
    ADAPTED,
    ASYNC,
    CAN_RETAIN_LESS,
    MATCH_UNIT,
    MAX_MODEL_LEN,
    RETAINED,
    SLEEPS,
    WORLD,
    num_blocks_needed,
)
from cargohold.lab.vllm.engine import VllmEngine
from cargohold.lab.vllm.late_blocks import LATE_BLOCKS
from cargohold.protocol import AttentionKind

APPLICABLE: Final = tuple(name for name, kind in CONNECTORS.items() if kind.with_context and kind.applies_locks)
"""Names of our connectors that can be played: inside vLLM there is always a view of the pool."""
_WHOLE_HASHES: Final = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}
"""Environment in which vLLM's events name blocks by whole hashes, which can be looked up, not by 64 bits of them."""


class VllmWorld(World):
    """Makes engines around vLLM's scheduler, in the same world of links, tiers and faults.

    Attributes:
        engine_class: their class.
    """

    engine_class: ClassVar[type[VllmEngine]] = AdapterEngine

    def new_engine(self) -> Replica:
        scenario, shape = self._scenario, self._scenario.shape
        self._links, self._faulty, self._queues = [], [], []
        self.copies = [CopiesInFlight(rank) for rank in range(shape.world_size)]
        random = Random(f"{scenario.seed}/vllm")  # noqa: S311  # repeatable, on purpose
        WORLD.set(self)
        engine = self.engine_class(shape, self.transfer_config(), clock=self.clock, copies=self.copies, random=random)
        engine.workers[0].runner.before_forward = self._advance_links
        return engine

    def transfer_config(self) -> Any:
        """VLLM's configuration of the connector."""
        return transfer_config(self._scenario.shape.scheduler["load_failure_policy"].value)

    def oracles(self, engine: Replica) -> list[Oracle]:
        """The oracle for what must hold in vLLM and in the connector."""
        assert isinstance(engine, VllmEngine)
        return [LeftoverOracle(engine)]


class VllmRun(ScenarioRun):
    """A run whose engines are vLLM's. Sets the environment variable that vLLM needs, and quiets its log."""

    _reset_pause = _next_reset = 0

    def _try_to_reset(self, reset: Reset) -> None:
        """Try to reset all caches. What is refused is tried again later and later, as clients would.

        In every step, it would do harm: running requests start over each time, and some connectors forget what they hold. Where
        copies that never end hold blocks, vLLM refuses every reset, and goes on without one.
        """
        engine = self._engine
        assert isinstance(engine, VllmEngine)
        if engine.num_steps >= self._next_reset or not engine.view.has_work():
            super()._try_to_reset(reset)
            if self._reset_due is not None and not engine.view.has_work():
                engine.view.resume()
                self._reset_due = None
            self._reset_pause = 0 if self._reset_due is None else 1 + 2 * self._reset_pause
            self._next_reset = engine.num_steps + self._reset_pause

    def play(self) -> RunResult:
        with quiet_logging("vllm"), patch.dict(os.environ, _WHOLE_HASHES):
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
            scenario = fitted(draw_scenario(seed, self.workload, connector, self.faults), random)
        if scenario.workload == "sleep" or Random(f"{seed}/sleep").random() < 0.5:  # noqa: S311  # so, too
            scenario = with_option(scenario, SLEEPS, True)
        late = Random(f"{seed}/late blocks")  # noqa: S311  # so, too
        if scenario.workload in ("sleep", *REUSING) or late.random() < 0.8:
            return scenario
        # vLLM tells the connector late of blocks, and takes nothing of some hits.
        return with_option(scenario, LATE_BLOCKS, late.uniform(0.1, 0.6))

    def run(self, scenario: Scenario, timeline: Timeline = NO_TIMELINE) -> ScenarioRun:
        return VllmRun(scenario, timeline=timeline, world=VllmWorld(scenario))


def with_option(scenario: Scenario, name: str, value: object) -> Scenario:
    """The scenario with another option of vLLM's scheduler."""
    scheduler = {**scenario.shape.scheduler, name: value}
    return replace(scenario, shape=replace(scenario.shape, scheduler=scheduler))


def fitted(scenario: Scenario, random: Random) -> Scenario:
    """Change the scenario's engine into one that vLLM supports. Options that our own engine does not have are drawn.

    * Recurrent state needs a prefix cache, and blocks no larger than those of other groups.
    * With chunked local attention, vLLM needs blocks of one size, and chunks of whole blocks.
    * vLLM gives every request an id of its own, and knows its tenant by its salt.
    * The pool keeps its number of spare blocks, beyond those without which vLLM does not start. Where a prefix may end
      inside a block, it gets one more per group: vLLM copies such blocks, and does not make sure that it ever has room to.
    """
    asks = [action for action in scenario.actions if isinstance(action, Ask)]
    longest = max((len(ask.prompt) + ask.max_tokens for ask in asks), default=1)
    shape, options = scenario.shape, dict(scenario.shape.scheduler)
    num_needed = num_own_blocks_needed(shape.groups, longest, options["max_num_batched_tokens"])
    num_spare = max(shape.num_blocks - num_needed, 0)  # with fewer groups than were drawn, the pool may be too small
    if any(plan.kind is AttentionKind.RECURRENT for plan in shape.groups):
        options["prefix_caching"] = True  # without it vLLM keeps one state per request, which is no prefix of anything
    options |= {
        # vLLM refuses to start without room for one token of each request in a step.
        "max_num_batched_tokens": max(options["max_num_batched_tokens"], options["max_num_seqs"]),
        MAX_MODEL_LEN: longest + 1,
        ASYNC: random.random() < 0.4,
    }
    if any(ask.salt in ADAPTERS for ask in asks):
        options[ADAPTED] = True
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
    actions = tuple(map(_with_salt, without_used_ids(scenario.actions)))
    return replace(scenario, shape=shape, connector=plan, actions=actions)


def _with_salt(action: Action) -> Action:
    return (
        replace(action, salt=action.tenant or action.salt, tenant=None)
        if isinstance(action, Ask | SendHints)
        else action
    )


def _match_unit(groups: tuple[GroupPlan, ...], random: Random) -> int | None:
    """Draw tokens per block hash where users may set it: with recurrent state next to attention. States are left there, too."""
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


# --- what must hold with any connector --------------------------------------------------------------------------------


_CONNECTORS: Final = (
    "vllm.distributed.kv_transfer",
    "vllm.v1.kv_offload",
    "vllm.v1.simple",
    "cargohold.integrations.vllm",
)
"""Beginnings of the names of modules with parts of connectors."""


class LeftoverOracle(Oracle):
    """At the end, vLLM waits for nothing, and no part of a connector still knows a request.

    Args:
        engine: the replica.
    """

    name = "leftovers"

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def at_end(self) -> None:
        """Look at all that is remembered."""
        vllm, aggregator = self._engine.vllm, self._engine.aggregator
        for what, left in {
            "vLLM waits for loads that have ended": vllm.finished_recving_kv_req_ids,
            "vLLM remembers failed loads": vllm.failed_recving_kv_req_ids,
            "vLLM has not freed blocks": vllm.deferred_frees,
            "vLLM remembers prefills": vllm._inflight_prefills,
            "vLLM waits for more ranks to end loads": aggregator._recv_remaining_count,
            "vLLM waits for more ranks to end sending": aggregator._send_remaining_count,
            "vLLM waits for more ranks whose loads failed": aggregator._failed_recving_pending,
        }.items():
            self.require(not left, f"{what}: {left}")
        names = set(self._engine.requests)
        for side in (vllm.connector, *(worker.connector for worker in self._engine.workers)):
            for path, known in _remembered(side, names, type(side).__name__):
                self.fail(f"{path} still knows {', '.join(known)}, which have ended")


def _remembered(part: Any, names: set[str], path: str, depth: int = 4) -> Iterator[tuple[str, list[str]]]:
    """Attributes that are sets or dictionaries with ids of requests in them, in ``part`` and what it is made of."""
    for name, value in list(getattr(part, "__dict__", {}).items()):
        where = f"{path}.{name}"
        if isinstance(value, dict | set | frozenset):
            left = sorted(str(key) for key in value if isinstance(key, str) and key in names)
            if left:
                yield where, left
        elif isinstance(value, list):
            for at, item in enumerate(value):
                yield from _remembered(item, names, f"{where}[{at}]", depth - 1)
        elif depth and type(value).__module__.startswith(_CONNECTORS):
            yield from _remembered(value, names, where, depth - 1)
