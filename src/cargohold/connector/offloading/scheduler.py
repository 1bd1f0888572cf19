"""The offloading connector's scheduler side: the kernel, and the guests that it is served with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from cargohold.cache.manager import NUM_NAMESPACES, OffloadManager
from cargohold.cache.retention import Budget
from cargohold.connector.config import RESTORE_IF_FASTER, OffloadConfig
from cargohold.connector.guests.events import tier_events
from cargohold.connector.guests.handoff import HandingOff
from cargohold.connector.guests.hints import Hints
from cargohold.connector.guests.lower_tiers import LowerTierGuest
from cargohold.connector.guests.meters import Meters
from cargohold.connector.guests.verification import Verifier
from cargohold.connector.kernel.guest import ContainedGuest, Guest, GuestView, counted_by_guests
from cargohold.connector.kernel.scheduler import KernelScheduler
from cargohold.connector.kernel.stores import EagerStores, MakeStores
from cargohold.option_values import made_by
from cargohold.protocol import (
    Hint,
    HintEvent,
    HintOutcome,
    KVEvent,
    Outage,
    RequestView,
    SchedulerEnvironment,
    Stats,
    TenantUse,
    TierContents,
)
from cargohold.tiers.messages import TierReport
from cargohold.tiers.scheduler_side import LowerTiers, Prefetcher, Prefetches

MAX_WEIGHTS: Final = 64
"""Maximum number of weights of which it is remembered which namespace is theirs."""


class NamedWeights:
    """Which namespace is that of which weights: those of the model's files have number 0, until all chunks are forgotten."""

    def __init__(self) -> None:
        self._files: int | None = 0
        self._number = 0
        # Those used last are last.
        self._numbers: OrderedDict[str, int] = OrderedDict()

    def number_of(self, name: str) -> int | None:
        """Return the number of the namespace of these weights; ``None`` if there are no numbers any more."""
        if not name and self._files is not None:
            return self._files
        number = self._numbers.pop(name, None)
        if number is None:
            if self._number == NUM_NAMESPACES - 1:
                return None
            self._number = number = self._number + 1
        self._numbers[name] = number
        if len(self._numbers) > MAX_WEIGHTS:
            self._numbers.popitem(last=False)
        return number

    def forget(self) -> None:
        """Forget all: nothing is kept of any weights, and of which ones the next chunks will be is not known."""
        self._files = None
        self._numbers.clear()


class OffloadingScheduler(KernelScheduler):
    """Copies KV down as it is computed, and loads it back on a prefix hit.

    This is the one place that knows both the kernel and its guests. Their order matters: each finds done what those
    before it do.

    * KV events: they note what chunks are before other guests see them.
    * meters
    * hand-off
    * hints: their prefetches stand after all requests, and before the tiers are asked.
    * lower tiers: they begin the step, and end the waits of requests that are admitted.
    * verification, if requests are to compute what could be restored
    * guests that options name

    Args:
        config: options.
        environment: facts about the engine.
        manager: plans which chunks host memory holds.
        make_stores: makes the planner that decides which chunks are copied down; by default all, as they are computed.
        lower: the tiers below, if there are any; made for this ``manager``.
        num_spare: number of spare slots of host memory, after those of the manager; without any, nothing is verified.
    """

    worker_metadata_type = TierReport
    _below_type: type[LowerTierGuest] = LowerTierGuest

    def __init__(
        self,
        config: OffloadConfig,
        environment: SchedulerEnvironment,
        manager: OffloadManager,
        *,
        make_stores: MakeStores = EagerStores,
        lower: LowerTiers | None = None,
        num_spare: int = 0,
    ) -> None:
        super().__init__(config, environment, manager, make_stores)
        self.lower = lower
        self._events = tier_events(environment, manager, lower, self.shared)
        self._meters = Meters(self.shared, environment, lower)
        self._handoff = self.shared.consumer = HandingOff(lower)
        self.hints = Hints(config, manager, self.shared.new_keys, environment.clock, self.requests)
        self.hints.grants.coming = self.stores.coming
        self.below = None
        if lower is not None:
            self.below = self.shared.below = self._make_below(lower, config, environment)
        if num_spare:
            self.shared.checker = Verifier(self.shared, config, lower, num_spare)
        view = GuestView(environment.layout, environment.clock, manager.lookup, counted_by_guests(self.shared.count))
        own = [ContainedGuest(made_by("guests", guest, Guest, view)) for guest in config.guests]
        chooses = self.shared.checker if config.verified_share else None
        guests = (self._events, self._meters, self._handoff, self.hints, self.below, chooses, *own)
        self._weights = NamedWeights()
        self._keeps_weights = environment.keeps_weights
        self._guests.add([guest for guest in guests if guest is not None])

    def _make_below(
        self, lower: LowerTiers, config: OffloadConfig, environment: SchedulerEnvironment
    ) -> LowerTierGuest:
        """Make what lower tiers are for the kernel, and connect the guests with it."""
        only_if_faster = config.restore == RESTORE_IF_FASTER
        prefetcher = Prefetcher(lower.host, lower, environment, self._pace, only_if_faster=only_if_faster)
        below, hints = self._below_type(lower, prefetcher, self.shared.jobs.new_id, environment), self.hints
        lower.tasks.granted, lower.tasks.retention_of = hints.grants.in_force, hints.grants.retention_of
        below.num_announced = self._handoff.num_announced
        lower.on_arrived = hints.note_stored
        hints.grants.on_retained = lower.rank
        hints.ahead = Prefetches(prefetcher, lower.host, environment.clock, hints.end_ahead)
        if self._events is not None:
            below.on_ask = hints.on_ask = self._events.note_wanted
            lower.tasks.notes_of = self._events.notes_of
        return below

    # --- weights ------------------------------------------------------------------------------------------------------

    def use_weights(self, name: str) -> bool:
        """Give chunks keys of other weights' namespace, unless a load is in flight. What is kept stays, and ages."""
        shared = self.shared
        if any(shared.jobs.is_loading(load.job_id) for load in shared.jobs.loads()):
            return False
        namespace = self._weights.number_of(name)
        if namespace is None:
            return self.reset_cache()
        self.give_up_transfers()
        self.answers.reset()
        shared.namespace = namespace
        self.stores.use_namespace()
        for state in self.requests.values():
            state.move_to(shared.new_keys())
        self._meters.reset()
        self.hints.void_all()
        if self.below is not None:
            self.below.use_namespace(namespace, name if self._keeps_weights else "")
        if self._events is not None:
            self._events.use_namespace(namespace)
        return True

    def reset_cache(self) -> bool:
        """Forget every chunk, of all weights, unless a job is in flight or a guest says no."""
        is_reset = super().reset_cache()
        if is_reset:
            self._weights.forget()
        return is_reset

    def on_hints(self, request: RequestView, hints: Sequence[Hint]) -> Sequence[HintOutcome]:
        """Carry out hints about a request that it knows, or about a prefix without one."""
        return self.hints.on_hints(request, hints)

    def take_events(self) -> Iterable[KVEvent]:
        """Return the events of chunks that became available in the tiers or were removed, if anyone listens."""
        return () if self._events is None else self._events.take()

    def take_hint_events(self) -> Iterable[HintEvent]:
        """Return how hints have ended since the last call."""
        return self.hints.take_events()

    def get_contents(self) -> Sequence[TierContents]:
        """Return what is in host memory; tiers below have no list by tenant or prefix."""
        shared, hints, meters = self.shared, self.hints, self._meters
        return [
            TierContents(
                tier=shared.tier,
                pins=hints.pins(),
                max_pinned_chunks=hints.grants.budgets.limit_of(None, Budget.PINNED),
                max_pinned_chunks_each=hints.grants.budgets.limit_of("any", Budget.PINNED),
                tenants=[
                    TenantUse(tenant, num_chunks, meters.num_bytes(num_chunks))
                    for tenant, num_chunks in shared.manager.usage().items()
                ],
                prefixes=meters.prefixes.kept(),
            )
        ]

    def get_kv_connector_stats(self) -> Stats:
        """Return counters since the last call."""
        meters = self._meters
        of_hints = self.hints.take_stats(self.shared.tier, meters.num_bytes(1))
        below = {} if self.below is None else self.below.take_stats()
        return {**super().get_kv_connector_stats(), **meters.take_stats(), **of_hints, **below}

    def get_outages(self) -> Sequence[Outage]:
        """Return which tiers are out of use, as a whole or in part."""
        return () if self.lower is None else self.lower.outages()
