"""The world around the engine in a run: time, links, tiers, faults. It outlives the engine's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from cargohold.cache import OffloadManager
from cargohold.protocol import KVConnectorFactory, WorkerEnvironment
from cargohold.testing.simulation.clock import VirtualClock, layout_of
from cargohold.testing.simulation.connectors import SimulatedOffloading, TierPlan
from cargohold.testing.simulation.engine import SimulatedEngine
from cargohold.testing.simulation.faults import Fault, FaultSource, Spells, Stalls
from cargohold.testing.simulation.faulty import ChecksummedTransfers, FaultyFactory, FaultyManager, FaultyTransfers
from cargohold.testing.simulation.oracles import Oracle, StatsOracle, WishOracle
from cargohold.testing.simulation.replica import Replica
from cargohold.testing.simulation.scenario import Scenario
from cargohold.testing.simulation.tiers import LinkedQueue, ListedMedium, MediumPlan, SimulatedMedium, TieredOffloading
from cargohold.testing.simulation.transfers import ByteRows, CopiesInFlight, LinkTransfers, WatchedTransfers
from cargohold.transfer import TransferWorker

DAMAGING = (Fault.TORN, Fault.CORRUPT)
SLOWNESS = 100.0
"""Factor by which links are slower while ``Fault.SLOW`` is on."""


class World:
    """Builds engines of one scenario, one after the other, over the same tiers.

    Args:
        scenario: the engines and everything around them.
        checksums: whether tiers notice corruption; if not, the oracles must.
        prepare: called with every engine before its first step; not with engines of vLLM.
        beside: the world around another engine, with which this one shares time, faults, and tiers that machines share.

    Attributes:
        clock: virtual time. The code under test reads it by calls, which may let time pass; what surrounds it does not.
        source: decides when faults strike.
        tiers: tiers without lower tiers, in the order of the plan.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        checksums: bool = True,
        prepare: Callable[[SimulatedEngine], None] = lambda _: None,
        beside: World | None = None,
    ) -> None:
        self._scenario = scenario
        self._prepare = prepare
        self._checksums = checksums
        self.clock: VirtualClock = VirtualClock() if beside is None else beside.clock
        random = Random(f"{scenario.seed}/chance")  # noqa: S311  # repeatable, on purpose
        drawn = FaultSource(scenario.rates, random, self._now, scenario.quiet_from)
        self.source: FaultSource = drawn if beside is None else beside.source
        if Fault.STALLS in scenario.rates and beside is None:
            self.clock.before_reading = Stalls(self.source)
        self._is_gone = Spells(self.source, Fault.GONE)
        self._is_slow = Spells(self.source, Fault.SLOW)
        self.copies: list[CopiesInFlight] = []
        self._links: list[LinkTransfers] = []
        self._faulty: list[FaultyTransfers] = []
        self._queues: list[LinkedQueue] = []
        self.tiers: list[SimulatedOffloading] = []
        self._tiered: list[TieredOffloading] = []
        self._factory = scenario.connector.build(self._make_tier, self._faulty_connector)
        if beside is not None:
            self._share_tiers(beside)

    def new_engine(self) -> Replica:
        """An engine as after a start of its process."""
        shape, connector = self._scenario.shape, self._scenario.connector
        self._links, self._faulty, self._queues = [], [], []
        self.copies = [CopiesInFlight(rank) for rank in range(shape.world_size)]
        engine = SimulatedEngine(
            layout_of(shape.groups, shape.num_blocks, shape.world_size),
            self._factory,
            clock=self.clock,
            with_context=connector.with_context,
            applies_locks=connector.applies_locks,
            copies=self.copies,
            as_tensors=bool(connector.custom),
            **shape.scheduler,
        )
        engine.runner.before_forward = self._advance_links
        self._prepare(engine)
        return engine

    def _share_tiers(self, other: World) -> None:
        for own, theirs in zip(self._tiered, other._tiered, strict=True):  # of the same class
            own.share(theirs, self._scenario.shape.world_size)

    def shared_shards(self) -> Iterator[list[SimulatedMedium]]:
        """Yield the shards of each tier that other machines share."""
        for tiered in self._tiered:
            yield from tiered.shared_shards()

    def listed_media(self) -> Iterator[ListedMedium]:
        """Yield the tiers that list their chunks, under the engine made last."""
        for tiered in self._tiered:
            yield from tiered.listed_media()

    def open_namespace(self) -> None:
        """Make the tiers look empty to the next engine, because it has other weights than the last one started with."""
        for tier in self.tiers:
            tier.open_namespace()
        for tiered in self._tiered:
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
        # Checksums live as long as the tier: per worker, by row.
        sums: dict[int, dict[int, int]] = {}

        def make_transfers(region: ByteRows, rows: ByteRows, environment: WorkerEnvironment) -> TransferWorker:
            transfers: TransferWorker = self._make_link(region, rows, environment.rank)
            if self._checksums and self.source.is_possible(DAMAGING):
                transfers = ChecksummedTransfers(transfers, region, rows, sums.setdefault(environment.rank, {}))
            return self._faulty_transfers(transfers, region, rows, environment.rank, self.source)

        may_change = self.source.is_possible((Fault.GONE, Fault.FULL, Fault.UNDECIDED))
        tier = SimulatedOffloading(
            plan.num_slots,
            lookahead=plan.lookahead,
            make_transfers=make_transfers,
            wrap_manager=self._faulty_manager if may_change else _unchanged,
            record_events=self._scenario.shape.scheduler["emit_events"],
            **plan.options,
        )
        self.tiers.append(tier)
        return tier

    def _make_tiered(self, plan: TierPlan) -> KVConnectorFactory:
        # Host memory has no checksums, so nothing in it may be damaged. The media below it check what they load.
        rates = {fault: rate for fault, rate in self.source.rates.items() if fault not in DAMAGING}
        source = replace(self.source, rates=rates)

        def make_transfers(region: ByteRows, rows: ByteRows, environment: WorkerEnvironment) -> TransferWorker:
            link = self._make_link(region, rows, environment.rank)
            return self._faulty_transfers(link, region, rows, environment.rank, source)

        tiered = TieredOffloading(plan.num_slots, plan.lower, make_transfers, self._make_queue, **plan.options)
        self._tiered.append(tiered)
        return tiered

    def _make_link(self, region: ByteRows, rows: ByteRows, rank: int) -> LinkTransfers:
        random = Random(f"{self._scenario.seed}/link {rank}/{len(self._links)}")  # noqa: S311  # repeatable, on purpose
        link = LinkTransfers(region, rows, self._now, self._scenario.shape.link, random)
        link.slowness = self._slowness
        self._links.append(link)
        return link

    def _faulty_transfers(
        self, transfers: TransferWorker, region: ByteRows, rows: ByteRows, rank: int, source: FaultSource
    ) -> TransferWorker:
        if source.rates:
            transfers = faulty = FaultyTransfers(transfers, region, rows, source, self._is_gone)
            self._faulty.append(faulty)
        return WatchedTransfers(transfers, self.copies[rank])

    def _make_queue(self, medium: SimulatedMedium, plan: MediumPlan) -> LinkedQueue:
        queue = LinkedQueue(medium, plan, self.source, self._is_gone, self._slowness)
        self._queues.append(queue)
        return queue

    def _faulty_connector(self, factory: KVConnectorFactory) -> KVConnectorFactory:
        return FaultyFactory(factory, self.source)

    def _faulty_manager(self, manager: OffloadManager) -> OffloadManager:
        return FaultyManager(manager, self.source, self._is_gone)

    def _slowness(self) -> float:
        return SLOWNESS if self._is_slow() else 1.0

    def _advance_links(self) -> None:
        for link in self._links:
            link.advance()


def _unchanged(manager: OffloadManager) -> OffloadManager:
    return manager
