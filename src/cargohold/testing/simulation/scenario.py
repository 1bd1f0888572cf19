"""One run's world, drawn from a seed: the engine's shape, its connector, its links, its faults, its traffic."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from cargohold.engine.core.config import LoadFailurePolicy
from cargohold.engine.core.roster import QueuePolicy
from cargohold.errors import ConfigError
from cargohold.protocol import AttentionKind
from cargohold.testing.simulation.clock import GroupPlan, num_blocks_needed
from cargohold.testing.simulation.connectors import (
    CONNECTORS,
    ConnectorPlan,
    custom_factory,
    draw_connector,
    needs_prefix_cache,
)
from cargohold.testing.simulation.faults import Fault, draw_rates
from cargohold.testing.simulation.transfers import LinkProfile
from cargohold.testing.simulation.workloads import WORKLOADS, Action, Ask, Restart, Workload, Writer

ANY = "any"
"""The name of a workload, or a connector, that is drawn anew for every seed."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The engine.

    Attributes:
        groups: KV-cache groups.
        num_blocks: blocks of the device pool.
        world_size: workers.
        scheduler: fields of ``SchedulerConfig``.
        link: how fast copies are; each worker's own random numbers make them uneven.
    """

    groups: tuple[GroupPlan, ...]
    num_blocks: int
    world_size: int
    scheduler: Mapping[str, Any]
    link: LinkProfile


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a run depends on, except the code.

    Attributes:
        seed: the number that it was drawn from, and that random numbers during the run are drawn from.
        workload: name of the traffic.
        shape: the engine.
        connector: the connector and its tiers.
        rates: faults that may strike, with their probabilities.
        quiet_from: virtual time from which on no fault strikes.
        actions: the traffic, in order of time.
    """

    seed: int
    workload: str
    shape: Shape
    connector: ConnectorPlan
    rates: Mapping[Fault, float]
    quiet_from: float
    actions: tuple[Action, ...]

    def truncated(self, num_actions: int) -> Scenario:
        """A copy with the first ``num_actions`` actions only."""
        return replace(self, actions=self.actions[:num_actions])

    def without(self, at: int) -> Scenario:
        """A copy without the action at index ``at``."""
        return replace(self, actions=self.actions[:at] + self.actions[at + 1 :])

    def describe(self) -> str:
        """A description in a few lines, for people."""
        shape = self.shape
        groups = ", ".join(
            f"{plan.kind.value}{'' if plan.window_tokens is None else f' {plan.window_tokens}'}/{plan.block_tokens}"
            for plan in shape.groups
        )
        scheduler = ", ".join(f"{name}={getattr(value, 'value', value)}" for name, value in shape.scheduler.items())
        faults = ", ".join(f"{fault.value} {rate:.3f}" for fault, rate in self.rates.items()) or "none"
        return (
            f"seed {self.seed}, workload {self.workload}, {len(self.actions)} actions\n"
            f"engine: groups {groups} (kind/tokens per block), {shape.num_blocks} blocks, "
            f"{shape.world_size} worker(s), {scheduler}\n"
            f"link: {shape.link}\n"
            f"connector: {self.connector.describe()}\n"
            f"faults until {self.quiet_from:.2f} s: {faults}"
        )


def draw_scenario(
    seed: int, workload: str = ANY, connector: str = ANY, faults: Collection[Fault] = frozenset(Fault)
) -> Scenario:
    """The scenario of a seed. Raises ``ConfigError`` if there is no such workload or connector."""
    check_names(workload, connector)
    # Each part has its own random numbers, so that a change in one leaves the others alone.
    random = Random(f"{seed}/scenario")  # noqa: S311  # repeatable, on purpose
    if workload == ANY:
        workload = random.choice([name for name in WORKLOADS if name != "small"])
    load = Workload(Writer(Random(f"{seed}/traffic")))  # noqa: S311  # repeatable, on purpose
    WORKLOADS[workload](load)
    rates = draw_rates(faults, Random(f"{seed}/faults"))  # noqa: S311  # repeatable, on purpose
    actions = load.writer.sorted_actions()
    end = actions[-1].at
    if random.random() < rates.pop(Fault.RESTART, 0.0):
        actions = tuple(sorted([*actions, Restart(random.random() * (end + 0.5))], key=lambda action: action.at))
    if needs_prefix_cache(connector):
        load.options["prefix_caching"] = True
    shape = _draw_shape(random, load, actions)
    plan = draw_connector(random, connector, load.options, shape.scheduler["prefix_caching"])
    return Scenario(seed, workload, shape, plan, rates, end + 1.0, actions)


def check_names(workload: str, connector: str) -> None:
    """Raise ``ConfigError`` if there is no such workload or connector."""
    if workload != ANY and workload not in WORKLOADS:
        raise ConfigError("workload", workload, f"it must be {ANY}, or one of {', '.join(sorted(WORKLOADS))}")
    if connector == ANY or connector in CONNECTORS:
        return
    if ":" not in connector:
        raise ConfigError(
            "connector",
            connector,
            f"it must be {ANY}, one of {', '.join(sorted(CONNECTORS))}, or MODULE:FACTORY for your own",
        )
    custom_factory(connector)


def _draw_shape(random: Random, load: Workload, actions: tuple[Action, ...]) -> Shape:
    options = load.options
    groups = load.groups or _draw_groups(random)
    max_step_tokens = options.get(
        "max_num_batched_tokens", random.choice((random.randint(1, 8), random.randint(4, 32), 64))
    )
    longest = max(len(ask.prompt) + ask.max_tokens for ask in actions if isinstance(ask, Ask))
    needed = num_blocks_needed(groups, longest, max_step_tokens)
    # Mostly too few blocks to keep the prefixes of earlier requests: otherwise, tiers would be of no use.
    spare = options.get(
        "num_spare_blocks", random.choice((random.randint(0, 6), random.randint(0, 6), random.randint(0, 2 * needed)))
    )
    scheduler = {
        "max_num_seqs": options.get("max_num_seqs", random.randint(1, 6)),
        "max_num_batched_tokens": max_step_tokens,
        "policy": options.get("policy", QueuePolicy.FCFS),
        "prefix_caching": options.get("prefix_caching", random.random() < 0.8),
        "load_failure_policy": LoadFailurePolicy.FAIL if random.random() < 0.1 else LoadFailurePolicy.RECOMPUTE,
        "emit_events": options.get("emit_events", random.random() < 0.6),
        "emit_salted_events": options.get("emit_salted_events", bool(max_step_tokens % 2)),
    }
    drawn = LinkProfile(
        latency_s=random.choice((0.0, 0.005, 0.03, 0.2)),
        block_s=random.choice((0.0, 0.001, 0.01)),
        lanes=random.choice((1, 1, 2, 4)),
    )
    link = options.get("link", drawn)
    world_size = options.get("world_size", random.choice((1, 1, 1, 2)))
    return Shape(groups, needed + spare, world_size, scheduler, link)


def _draw_groups(random: Random) -> tuple[GroupPlan, ...]:
    block_tokens = random.choice((2, 4, 4, 8))
    full = GroupPlan(block_tokens=block_tokens)
    if random.random() < 0.6:
        return (full,)
    return (full, GroupPlan(AttentionKind.SLIDING_WINDOW, block_tokens, random.randint(1, 16)))
