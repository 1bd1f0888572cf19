"""Connectors to simulate, by name: single, composed or nested ones, each with tiers of its own; and what is inside one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType
from typing import Any, Final

from cargohold.cache import OffloadManager, make_manager
from cargohold.cache.policies import POLICIES
from cargohold.cache.retention import NORMAL
from cargohold.cache.rows import RowPlan, plan_rows
from cargohold.connector.config import (
    EAGER,
    EXCLUSIVE,
    LAZY,
    RESTORE_ALWAYS,
    RESTORE_IF_FASTER,
)
from cargohold.connector.multi import MultiConnectorFactory, MultiConnectorScheduler
from cargohold.connector.offloading import OffloadingScheduler, OffloadingWorker
from cargohold.connector.offloading.factory import scheduler_side
from cargohold.connector.options import named_factory
from cargohold.lab.simulation.tiers import HostMemoryShards, MakeTransfers, MediumPlan
from cargohold.lab.simulation.transfers import ByteRows, HeldTransfers
from cargohold.option_values import search_current_directory
from cargohold.protocol import (
    NULL_CONNECTOR,
    ConnectorGuard,
    ForwardingScheduler,
    KVConnectorFactory,
    KVConnectorScheduler,
    SchedulerEnvironment,
    WorkerEnvironment,
)
from cargohold.tiers.scheduler_side import Admission, TierOptions, WriteMode
from cargohold.transfer import TransferWorker


class SimulatedOffloading(HostMemoryShards):
    """Makes offloading connectors whose copies a test controls. Satisfies ``KVConnectorFactory``.

    Engines made with the same object share one tier, as several engines share a store; it outlives them.

    Args:
        num_slots: chunks that the tier holds.
        lookahead: blocks ahead of eviction that a lazy connector copies; ``None`` for another one.
        mode: the mode of another one.
        make_transfers: makes the workers' transfers; by default, ``HeldTransfers``.
        watch: puts a wrapper around a worker's transfers that sees which blocks they copy.
        wrap_manager: puts a wrapper around the manager.
        record_events: whether the manager records events, for engines that emit them.
        options: fields of ``OffloadConfig``; ``host_bytes`` means nothing here.

    Attributes:
        manager: the tier's manager.
        transfers: the transfers of every worker side made so far, in order.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        lookahead: int | None = None,
        mode: str = EAGER,
        make_transfers: MakeTransfers | None = None,
        watch: Callable[[TransferWorker, int], TransferWorker] = lambda transfers, _rank: transfers,
        wrap_manager: Callable[[OffloadManager], OffloadManager] = lambda manager: manager,
        record_events: bool = True,
        **options: Any,
    ) -> None:
        def made(region: ByteRows, rows: ByteRows, environment: WorkerEnvironment) -> TransferWorker:
            make = make_transfers or (lambda *_: HeldTransfers(region, rows, environment.clock))
            self.transfers.append(make(region, rows, environment))
            transfers: TransferWorker = self.transfers[-1]
            return transfers

        mode = mode if lookahead is None else LAZY
        super().__init__(num_slots, made, watch, {"mode": mode, "lookahead_blocks": lookahead, **options})
        self.lookahead = lookahead
        self._make_manager: Callable[[Sequence[int]], OffloadManager] = lambda chunk_rows: wrap_manager(
            make_manager(
                self.config.policy,
                num_slots,
                record_events=record_events,
                quotas=self._quotas,
                chunk_rows=chunk_rows,
            )
        )
        self.manager = self._make_manager(())
        self._plan: RowPlan | None = None
        self.transfers: list[Any] = []

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        """A scheduler side over the shared manager, which is made again if chunks turn out to differ in size."""
        plan = plan_rows(environment.layout)
        if self._plan is None and not plan.is_even:
            self.manager = self._make_manager([count * self.config.blocks_per_chunk for count in plan.per_block])
        self._plan = plan
        return scheduler_side(
            self.config, environment, self.manager, num_spare=self.num_spare, new_epoch=lambda: bytes(16)
        )

    def make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        """A worker side over the shared memory."""
        return self.make_worker(environment)

    def open_namespace(self) -> None:
        """Make the tier empty for engines made from now on. No engine that still reads or writes may be left."""
        if not self.manager.reset():
            raise RuntimeError("the tier is still being written to")


@dataclass(frozen=True, slots=True)
class TierPlan:
    """An offloading connector and its tier.

    Attributes:
        num_slots: chunks that the tier holds.
        lookahead: blocks ahead of eviction that a lazy connector copies; ``None`` for an eager one.
        options: fields of ``OffloadConfig``.
        lower: tiers below host memory. If there are none, the tier itself outlives engines.
        keeps_all: whether it is so large, and stores for so long, that what was computed once is found again.
    """

    num_slots: int
    lookahead: int | None
    options: Mapping[str, Any]
    lower: tuple[MediumPlan, ...] = ()
    keeps_all: bool = False


@dataclass(frozen=True, slots=True)
class ConnectorPlan:
    """A connector to be made.

    Attributes:
        name: as on the command line.
        tiers: its offloading connectors, most preferred first.
        nesting: how connectors are composed. Each number, in order, replaces that many at the end of the list by one that is
            composed of them; empty for a single connector.
        custom: users' own connectors, preferred to those with tiers.
        with_context: whether the engine gives the connector a view of its pool.
        applies_locks: whether the engine applies locks.
    """

    name: str
    tiers: tuple[TierPlan, ...]
    nesting: tuple[int, ...] = ()
    with_context: bool = True
    applies_locks: bool = True
    custom: tuple[KVConnectorFactory, ...] = ()

    @property
    def keeps_all(self) -> bool:
        """Whether the connector that is asked first keeps whatever it can."""
        return not self.custom and bool(self.tiers) and self.tiers[0].keeps_all

    @property
    def restores_if_faster(self) -> bool:
        """Whether there are tiers below host memory, and chunks are restored from them only if that is faster."""
        return any(tier.lower and tier.options["restore"] == RESTORE_IF_FASTER for tier in self.tiers)

    @property
    def holds_copies(self) -> bool:
        """Whether the connector can hold blocks while they are copied."""
        return self.with_context or self.applies_locks

    def build(
        self,
        make_tier: Callable[[TierPlan], KVConnectorFactory],
        wrap: Callable[[KVConnectorFactory], KVConnectorFactory] = lambda factory: factory,
    ) -> KVConnectorFactory:
        """Make the factory of the planned connector.

        Args:
            make_tier: makes the factory of a connector with a tier; called in the order of ``tiers``.
            wrap: wraps the factories of connectors that are not composed of others.
        """
        factories = [wrap(factory) for factory in (*self.custom, *map(make_tier, self.tiers))]
        for count in self.nesting:
            factories[-count:] = [MultiConnectorFactory(tuple(factories[-count:]))]
        return factories[0] if factories else NULL_CONNECTOR

    def describe(self) -> str:
        """A description in a few lines, for people."""
        context = "a view of the pool" if self.with_context else "no view of the pool"
        locks = "" if self.with_context else f", locks {'applied' if self.applies_locks else 'not applied'}"
        composed = f", composed {'+'.join(map(str, self.nesting))}" if self.nesting else ""
        lines = [f"{self.name}, with {context}{locks}{composed}"]
        for tier in self.tiers:
            mode = str(tier.options.get("mode", EAGER))
            kind = mode if tier.lookahead is None else f"lazy, {tier.lookahead} blocks ahead"
            options = "".join(f", {name}={option}" for name, option in tier.options.items())
            lines.append(f"  {kind}: {tier.num_slots} slots{options}")
            lines += [f"    above {medium.describe()}" for medium in tier.lower]
        return "\n".join(lines)


MAX_TIGHT: Final = 4
"""Most spare blocks of a device that has no room for the blocks of one request besides those of another."""
NO_CONNECTOR: Final = ConnectorPlan("none", ())


@dataclass(frozen=True, slots=True)
class _Kind:
    """The tiers of a named connector, how their connectors are composed, and whether they may be one cache with the device."""

    is_lazy: Sequence[bool]
    nesting: tuple[int, ...] = ()
    with_context: bool = True
    applies_locks: bool = True
    has_lower: bool = False
    may_pool: Sequence[bool] = (False, True)


CONNECTORS: Final[Mapping[str, _Kind]] = MappingProxyType(
    {
        "none": _Kind(()),
        "eager": _Kind((False,)),
        "eager-locks": _Kind((False,), with_context=False),
        "eager-requests": _Kind((False,), with_context=False, applies_locks=False),
        "lazy": _Kind((True,)),
        "exclusive": _Kind((False,), may_pool=(True,)),
        "exclusive-tiered": _Kind((False,), has_lower=True, may_pool=(True,)),
        "multi": _Kind((False, True), (2,)),
        "multi-locks": _Kind((False, False), (2,), with_context=False),
        "multi-requests": _Kind((False, False), (2,), with_context=False, applies_locks=False),
        "nested": _Kind((False, False, True), (2, 2)),
        "tiered": _Kind((False,), has_lower=True),
        "tiered-requests": _Kind((False,), with_context=False, applies_locks=False, has_lower=True),
        "multi-tiered": _Kind((False, True), (2,), has_lower=True),
    }
)
"""Connectors by their names on the command line."""


def needs_prefix_cache(name: str) -> bool:
    """Whether a named connector needs a prefix cache: lazy ones keep what it evicts."""
    return name in CONNECTORS and any(CONNECTORS[name].is_lazy)


def draw_connector(random: Random, name: str, options: Mapping[str, Any], prefix_caching: bool) -> ConnectorPlan:
    """Draw a plan for the connector of that name, or for any.

    Args:
        random: source of random numbers.
        name: a key of ``CONNECTORS``, ``MODULE:FACTORY``, or ``any``.
        options: values that must not be drawn: ``tier_slots``, ``blocks_per_chunk``, ``eviction``, ``restore``; and
            ``keeps_all``, for tiers that keep whatever they can.
        prefix_caching: whether the engine has a prefix cache. If not, lazy connectors are left out of ``any``.
    """
    if ":" in name:
        return ConnectorPlan(name, (), with_context=random.random() < 0.7, custom=(custom_factory(name),))
    if name not in CONNECTORS:
        usable = [name for name in CONNECTORS if prefix_caching or not needs_prefix_cache(name)]
        name = random.choice(usable)
    kind = CONNECTORS[name]
    tiers = tuple(_draw_tier(random, is_lazy, options) for is_lazy in kind.is_lazy)
    if kind.has_lower:
        tiers = (_with_lower(random, tiers[0], options), *tiers[1:])
    tiers = tuple(tier if tier.lookahead is not None else _with_waits(tier) for tier in tiers)
    if name != "eager":
        tiers = tuple(tier if tier.lookahead is not None else _maybe_pooled(tier, kind.may_pool) for tier in tiers)
    if "keeps_all" in options:
        tiers = tuple(_keeping_all(tier, has_room=options["num_spare_blocks"] > MAX_TIGHT) for tier in tiers)
    return ConnectorPlan(name, tiers, kind.nesting, kind.with_context, kind.applies_locks)


def custom_factory(name: str) -> KVConnectorFactory:
    """The factory that ``MODULE:FACTORY`` names, see ``named_factory``. Modules in the current directory are found, too.

    Raises:
        ConfigError: it cannot be imported, or is none.
    """
    search_current_directory()
    return named_factory(name)


def _draw_tier(random: Random, is_lazy: bool, options: Mapping[str, Any]) -> TierPlan:
    slots = options.get("tier_slots", random.choice((random.randint(1, 10), random.randint(4, 60), 200)))
    common = {
        "max_inflight_fraction": random.choice((0.1, 0.5, 0.5, 1.0)),
        "transfer_timeout_s": random.choice((0.5, 3.0, 30.0)),
    }
    if is_lazy:
        return TierPlan(slots, random.choice((1, 4, 12, 40)), common)
    eager = {
        "policy": options.get("eviction", random.choice(sorted(POLICIES))),
        "blocks_per_chunk": options.get("blocks_per_chunk", random.choice((1, 1, 2, 3))),
        **{name: options[name] for name in ("hints", "quotas") if name in options},
        "store_generated": random.random() < 0.8,
    }
    return TierPlan(slots, None, {**common, **eager})


def _keeping_all(tier: TierPlan, *, has_room: bool) -> TierPlan:
    # Where a step takes all blocks that an ended request has left, a lazy connector comes too late.
    options = {**tier.options, "max_inflight_fraction": 0.5, "transfer_timeout_s": 30.0}
    if tier.lookahead is not None:
        return replace(tier, lookahead=10**6, options=options, keeps_all=has_room)
    options |= {"store_generated": True, "store_within_steps": 40}
    return replace(tier, options=options, keeps_all=not tier.lower)


def _with_waits(tier: TierPlan) -> TierPlan:
    # From a source of its own, so that seeds which have found something still draw the same otherwise.
    within = Random(str(tier)).choice((0, 8, 8, 40))  # noqa: S311  # repeatable, on purpose
    return replace(tier, options={**tier.options, "store_within_steps": within})


def _maybe_pooled(tier: TierPlan, may_pool: Sequence[bool]) -> TierPlan:
    # From a source of its own, as above.
    is_pooled = Random(f"{tier} pooled").choice(may_pool)  # noqa: S311  # repeatable, on purpose
    return replace(tier, options={**tier.options, "mode": EXCLUSIVE}) if is_pooled else tier


def _with_lower(random: Random, tier: TierPlan, options: Mapping[str, Any]) -> TierPlan:
    # From a source of its own, so that seeds which have found something still draw the same otherwise.
    aside = Random(str(tier))  # noqa: S311  # repeatable, on purpose
    media = tuple(
        MediumPlan(
            TierOptions(
                name=name,
                admission=Admission.ALL if random.random() < 0.7 else Admission.REUSED,
                write_mode=WriteMode.THROUGH if random.random() < 0.7 else WriteMode.BACK,
                max_daily_chunks=random.choice((None, None, None, 40)),
                max_inflight_chunks=random.choice((1, 4, 64)),
                has_index=random.random() < 0.5,
                num_asked_at_once=aside.choice((None, 1, 4)),
                locality="REMOTE" if name == "shared" or aside.random() < 0.7 else "LOCAL",
            ),
            max_chunks=random.choice((random.randint(1, 20), 1000, 1000)),
            latency_s=random.choice((0.0, 0.01, 0.1)),
            chunk_s=random.choice((0.0, 0.002, 0.02)),
        )
        for name in ("disk", "shared")[: random.randint(1, 2)]
    )
    restoring = {
        "restore": options.get("restore", random.choice((RESTORE_ALWAYS, RESTORE_ALWAYS, RESTORE_IF_FASTER))),
        "restore_timeout_s": random.choice((0.05, 0.5, 5.0)),
    }
    # One that others share knows nothing of what they do to it, so it tells no changes either.
    media = tuple(
        replace(
            medium,
            options=replace(medium.options, is_listed=True),
        )
        if medium.options.has_index and medium.options.locality == "LOCAL"
        else medium
        for medium in media
    )
    # Less room than a tier without lower tiers has: otherwise, nothing would ever have to be brought up.
    num_slots = min(tier.num_slots, random.randint(3, 20))
    return replace(tier, num_slots=num_slots, options={**tier.options, **restoring}, lower=media)


# --- finds the connectors that an engine's connector is made of -------------------------------------------------------


def walk(
    connector: KVConnectorScheduler, guards: Sequence[ConnectorGuard] = ()
) -> Iterator[tuple[KVConnectorScheduler, Sequence[ConnectorGuard]]]:
    """Yield ``connector`` and all connectors inside it, outer ones first, each with the guards around it, outermost first."""
    yield connector, guards
    for inner in _parts(connector):
        yield from walk(inner, [*guards, connector] if isinstance(connector, ConnectorGuard) else guards)


def offloading_sides(connector: KVConnectorScheduler) -> Iterator[tuple[OffloadingScheduler, Sequence[ConnectorGuard]]]:
    """Every offloading connector inside ``connector``, with the guards around it, outermost first."""
    return ((side, guards) for side, guards in walk(connector) if isinstance(side, OffloadingScheduler))


def live_sides(connector: KVConnectorScheduler) -> list[OffloadingScheduler]:
    """Every offloading connector inside ``connector`` that is not turned off, and no connector around it either."""
    return [side for side, guards in offloading_sides(connector) if all(guard.broken is None for guard in guards)]


def guards_of(connector: KVConnectorScheduler) -> list[ConnectorGuard]:
    """Every guard around or inside ``connector``."""
    return [guard for guard, _ in walk(connector) if isinstance(guard, ConnectorGuard)]


def innermost_guards(connector: KVConnectorScheduler) -> list[ConnectorGuard]:
    """For every connector that is made of no others, the guard closest around it."""
    return [guards[-1] for part, guards in walk(connector) if guards and not _parts(part)]


def num_stuck_jobs(connector: KVConnectorScheduler) -> int:
    """How many jobs of connectors that are not turned off have not ended in time, and may never end."""
    return sum(side.shared.jobs.num_stuck for side in live_sides(connector))


def forget_engine(connector: KVConnectorScheduler) -> None:
    """End the jobs of a connector whose process has died, so that its tiers give up their pins and reservations.

    Here the tier outlives the process, as if it were another's; what hints asked for does not.
    """
    for side, _ in offloading_sides(connector):
        side.shared.manager.rank([key for grant in side.hints.grants for key in grant.keys], NORMAL)
        side.answers.reset()
        for load in list(side.shared.jobs.loads()):
            load.handle.release()
        for store in list(side.shared.jobs.stores()):
            store.handle.forfeit()


def _parts(connector: KVConnectorScheduler) -> Sequence[KVConnectorScheduler]:
    match connector:
        case ConnectorGuard() | ForwardingScheduler():
            return [connector.inner]
        case MultiConnectorScheduler():
            return connector.children
        case _:
            return []
