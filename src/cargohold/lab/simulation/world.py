"""One run's world: drawn from a seed as a scenario, and built around the engine, whose process it outlives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from cargohold.engine.core.request_queues import LoadFailurePolicy, QueuePolicy
from cargohold.errors import ConfigError
from cargohold.lab.simulation.connectors import (
    CONNECTORS,
    ConnectorPlan,
    SimulatedOffloading,
    TierPlan,
    custom_factory,
    draw_connector,
    needs_prefix_cache,
)
from cargohold.lab.simulation.fault_wrappers import (
    FaultyManager,
    FaultyTransfers,
    faulty_factory,
)
from cargohold.lab.simulation.faults import Fault, FaultSource, Spells, Stalls, VirtualClock, draw_rates
from cargohold.lab.simulation.fingerprints import GroupPlan, layout_of, num_blocks_needed
from cargohold.lab.simulation.oracles import Oracle, StatsOracle, WishOracle
from cargohold.lab.simulation.replica import Replica, SimulatedEngine
from cargohold.lab.simulation.tiers import (
    LinkedQueue,
    ListedMedium,
    MediumPlan,
    SimulatedMedium,
    TieredOffloading,
)
from cargohold.lab.simulation.traffic import Action, Ask, Restart, Writer
from cargohold.lab.simulation.transfers import (
    ByteRows,
    CopiesInFlight,
    LinkProfile,
    LinkTransfers,
    WatchedTransfers,
)
from cargohold.lab.simulation.workloads import REUSING, WORKLOADS, DrawnWorkload
from cargohold.protocol import AttentionKind, KVConnectorFactory, WorkerEnvironment
from cargohold.transfer import TransferWorker

ANY = "any"
"""The name of a workload, or a connector, that is drawn again for every seed."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The engine.

    Attributes:
        groups: KV-cache groups.
        num_blocks: blocks of the device pool.
        world_size: workers.
        num_replicas: workers that hold the same shard.
        scheduler: fields of ``SchedulerConfig``.
        link: how fast copies are; each worker's own random numbers make them uneven.
        loads_in_step: see ``SchedulerEnvironment``.
    """

    groups: tuple[GroupPlan, ...]
    num_blocks: int
    world_size: int
    scheduler: Mapping[str, Any]
    link: LinkProfile
    num_replicas: int = 1
    loads_in_step: bool = False


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
        shared = f", {shape.num_replicas} with the same shard" if shape.num_replicas > 1 else ""
        faults = ", ".join(f"{fault.value} {rate:.3f}" for fault, rate in self.rates.items()) or "none"
        return (
            f"seed {self.seed}, workload {self.workload}, {len(self.actions)} actions\n"
            f"engine: groups {groups} (kind/tokens per block), {shape.num_blocks} blocks, "
            f"{shape.world_size} worker(s){shared}, loads_in_step={shape.loads_in_step}, {scheduler}\n"
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
        workload = random.choice([name for name in WORKLOADS if name not in ("small", "adapters", "sleep", *REUSING)])
        # From a source of its own, so that seeds which have found something still draw the same otherwise.
        aside = Random(f"{seed}/reusing")  # noqa: S311  # repeatable, on purpose
        workload = aside.choice(REUSING) if aside.random() < len(REUSING) / len(WORKLOADS) else workload
    load = DrawnWorkload(Writer(Random(f"{seed}/traffic")))  # noqa: S311  # repeatable, on purpose
    WORKLOADS[workload](load)
    rates = draw_rates(faults, Random(f"{seed}/faults"))  # noqa: S311  # repeatable, on purpose
    actions = load.writer.sorted_actions()
    end = actions[-1].at
    if random.random() < rates.pop(Fault.RESTART, 0.0):
        actions = tuple(sorted([*actions, Restart(random.random() * (end + 0.5))], key=lambda action: action.at))
    if needs_prefix_cache(connector):
        load.options["prefix_caching"] = True
    shape = _draw_shape(random, load, actions)
    if Random(f"{seed}/in step").random() < 0.5:  # noqa: S311  # repeatable, on purpose
        shape = replace(shape, loads_in_step=True)
    plan = draw_connector(random, connector, load.options, shape.scheduler["prefix_caching"])
    if not plan.custom:  # which would share memory between processes
        shape = _with_replicas(shape, seed)
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


def _draw_shape(random: Random, load: DrawnWorkload, actions: tuple[Action, ...]) -> Shape:
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


def _with_replicas(shape: Shape, seed: int) -> Shape:
    # From a source of its own, so that seeds which have found something still draw the same otherwise.
    possible = [count for count in range(1, shape.world_size + 1) if shape.world_size % count == 0]
    return replace(shape, num_replicas=Random(f"{seed}/same-shard").choice(possible))  # noqa: S311  # repeatable, on purpose


def _draw_groups(random: Random) -> tuple[GroupPlan, ...]:
    block_tokens = random.choice((2, 4, 4, 8))
    full = GroupPlan(block_tokens=block_tokens)
    if random.random() < 0.6:
        return (full,)
    return (full, GroupPlan(AttentionKind.SLIDING_WINDOW, block_tokens, random.randint(1, 16)))


SLOWNESS = 100.0
"""Factor by which links are slower while ``Fault.SLOW`` is on."""


class World:
    """Builds engines of one scenario, one after the other, over the same tiers.

    Args:
        scenario: the engines and everything around them.
        prepare: called with every engine before its first step; not with engines of vLLM.
        beside: the world around another engine, with which this one shares time and faults.

    Attributes:
        clock: virtual time. The code under test reads it by calls, which may let time pass; what surrounds it does not.
        source: decides when faults strike.
        is_slow: returns whether copies hardly go on at the moment.
        tiers: tiers without lower tiers, in the order of the plan.
        tiered: those with lower tiers.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        prepare: Callable[[SimulatedEngine], None] = lambda _: None,
        beside: World | None = None,
    ) -> None:
        self._scenario = scenario
        self._prepare = prepare
        self.clock: VirtualClock = VirtualClock() if beside is None else beside.clock
        random = Random(f"{scenario.seed}/chance")  # noqa: S311  # repeatable, on purpose
        drawn = FaultSource(scenario.rates, random, self._now, scenario.quiet_from)
        self.source: FaultSource = drawn if beside is None else beside.source
        if Fault.STALLS in scenario.rates and beside is None:
            self.clock.before_reading = Stalls(self.source)
        self._is_gone = Spells(self.source, Fault.GONE)
        self.weights = 0  # version with which the next engine starts
        self.is_slow = Spells(self.source, Fault.SLOW)
        self.copies: list[CopiesInFlight] = []
        self._links: list[LinkTransfers] = []
        self._faulty: list[FaultyTransfers] = []
        self._queues: list[LinkedQueue] = []
        self.tiers: list[SimulatedOffloading] = []
        self.tiered: list[TieredOffloading] = []
        self.factory = scenario.connector.build(self._make_tier, lambda factory: faulty_factory(factory, self.source))

    def new_engine(self) -> Replica:
        """An engine as after a start of its process."""
        shape, connector = self._scenario.shape, self._scenario.connector
        self._links, self._faulty, self._queues = [], [], []
        self.copies = [CopiesInFlight(rank) for rank in range(shape.world_size)]
        engine = SimulatedEngine(
            layout_of(shape.groups, shape.num_blocks, shape.world_size, shape.num_replicas),
            self.factory,
            clock=self.clock,
            with_context=connector.with_context,
            applies_locks=connector.applies_locks,
            copies=self.copies,
            as_tensors=bool(connector.custom),
            loads_in_step=shape.loads_in_step,
            **shape.scheduler,
        )
        engine.runner.before_forward = self._advance_links
        self._prepare(engine)
        return engine

    def listed_media(self) -> Iterator[ListedMedium]:
        """Yield the tiers that list their chunks, under the engine made last."""
        for tiered in self.tiered:
            yield from tiered.listed_media()

    def open_namespace(self) -> None:
        """Make the tiers look empty to the next engine, because it has other weights than the last one started with."""
        for tier in self.tiers:
            tier.open_namespace()
        for tiered in self.tiered:
            tiered.open_namespace()

    def oracles(self, engine: Replica) -> list[Oracle]:
        """Further oracles for this engine, besides those that every run has."""
        connector = self._scenario.connector
        return [] if connector.custom else [StatsOracle(engine), WishOracle(engine, connector.tiers)]

    def next_event(self) -> float:
        """Virtual time of the next event in links and queues; infinity if nothing is in flight."""
        return min(
            (thing.next_event() for things in (self._links, self._faulty, self._queues) for thing in things),
            default=float("inf"),
        )

    def _now(self) -> float:
        return self.clock.now

    def _make_tier(self, plan: TierPlan) -> KVConnectorFactory:
        if plan.lower:
            return self._make_tiered(plan)
        may_change = self.source.is_possible((Fault.GONE, Fault.FULL, Fault.UNDECIDED))
        tier = SimulatedOffloading(
            plan.num_slots,
            lookahead=plan.lookahead,
            make_transfers=self._transfers,
            watch=self._watch,
            wrap_manager=lambda manager: FaultyManager(manager, self.source, self._is_gone) if may_change else manager,
            record_events=self._scenario.shape.scheduler["emit_events"],
            **plan.options,
        )
        self.tiers.append(tier)
        return tier

    def _make_tiered(self, plan: TierPlan) -> KVConnectorFactory:
        tiered = TieredOffloading(
            plan.num_slots, plan.lower, self._transfers, self._watch, self._make_queue, **plan.options
        )
        self.tiered.append(tiered)
        return tiered

    def _make_link(self, region: ByteRows, rows: ByteRows, rank: int) -> LinkTransfers:
        random = Random(f"{self._scenario.seed}/link {rank}/{len(self._links)}")  # noqa: S311  # repeatable, on purpose
        link = LinkTransfers(region, rows, self._now, self._scenario.shape.link, random)
        link.slowness = self._slowness
        self._links.append(link)
        return link

    def _transfers(self, region: ByteRows, rows: ByteRows, environment: WorkerEnvironment) -> TransferWorker:
        """Transfers over a link, with faults."""
        transfers: TransferWorker = self._make_link(region, rows, environment.rank)
        if self.source.rates:
            transfers = faulty = FaultyTransfers(transfers, region, rows, self.source, self._is_gone)
            self._faulty.append(faulty)
        return transfers

    def _watch(self, transfers: TransferWorker, rank: int) -> TransferWorker:
        return WatchedTransfers(transfers, self.copies[rank])

    def _make_queue(self, medium: SimulatedMedium, plan: MediumPlan) -> LinkedQueue:
        queue = LinkedQueue(medium, plan, self.source, self._is_gone, self._slowness)
        self._queues.append(queue)
        return queue

    def _slowness(self) -> float:
        return SLOWNESS if self.is_slow() else 1.0

    def _advance_links(self) -> None:
        for link in self._links:
            link.advance()
