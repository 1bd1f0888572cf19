"""The offloading connector's scheduler side: the kernel, and the guests that it is served with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from cargohold.cache.manager import NUM_NAMESPACES, OffloadKey, OffloadManager
from cargohold.cache.retention import Budget
from cargohold.connector.config import RESTORE_IF_FASTER, OffloadConfig
from cargohold.connector.guests.answers import KeptAnswers
from cargohold.connector.guests.events import tier_events
from cargohold.connector.guests.handoff import HandingOff
from cargohold.connector.guests.hints import Hints
from cargohold.connector.guests.lower_tiers import LowerTierGuest
from cargohold.connector.guests.meters import Meters
from cargohold.connector.kernel.guest import ContainedGuest, Guest, GuestView, counted_by_guests
from cargohold.connector.kernel.jobs import JobTable
from cargohold.connector.kernel.requests import RequestState
from cargohold.connector.kernel.scheduler import KernelScheduler
from cargohold.connector.kernel.shared import Shared
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
from cargohold.tiers.chunk_format import NO_NOTE, Note
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
    * kept answers: before anything of this step can take their place.
    * meters
    * hand-off
    * hints: their prefetches stand after all requests, and before the tiers are asked.
    * lower tiers: they begin the step, and end the waits of requests that are admitted.
    * guests that options name

    Args:
        config: options.
        environment: facts about the engine.
        manager: plans which chunks host memory holds.
        make_stores: makes the planner that decides which chunks are copied down; by default all, as they are computed.
        lower: the tiers below, if there are any; made for this ``manager``.
    """

    worker_metadata_type = TierReport

    def __init__(
        self,
        config: OffloadConfig,
        environment: SchedulerEnvironment,
        manager: OffloadManager,
        *,
        make_stores: MakeStores = EagerStores,
        lower: LowerTiers | None = None,
    ) -> None:
        super().__init__(config, environment, manager, make_stores)
        self.lower = lower
        self._events = tier_events(environment, manager, lower, self._shared)
        self._answers = KeptAnswers(manager, self._mark_used)
        self._meters = Meters(self._shared, environment, lower)
        self._handoff = self._shared.consumer = HandingOff(lower)
        self._hints = Hints(config, manager, self._shared.new_keys, environment.clock, self._requests)
        self._hints.grants.coming = self._stores.coming
        self._below = None
        if lower is not None:
            self._below = self._shared.below = self._make_below(lower, config, environment)
        view = GuestView(environment.layout, environment.clock, manager.lookup, counted_by_guests(self._shared.count))
        own = [ContainedGuest(made_by("guests", guest, Guest, view)) for guest in config.guests]
        guests = (self._events, self._answers, self._meters, self._handoff, self._hints, self._below, *own)
        self._weights = NamedWeights()
        self._keeps_weights = environment.keeps_weights
        self._guests.add([guest for guest in guests if guest is not None])

    def _make_below(
        self, lower: LowerTiers, config: OffloadConfig, environment: SchedulerEnvironment
    ) -> LowerTierGuest:
        """Make what lower tiers are for the kernel, and connect the guests with it."""
        only_if_faster = config.restore == RESTORE_IF_FASTER
        prefetcher = Prefetcher(lower.host, lower, environment, self._pace, only_if_faster=only_if_faster)
        below, hints = LowerTierGuest(lower, prefetcher, self._shared.jobs.new_id, environment), self._hints
        lower.describe_by(self._notes_of)
        below.num_announced = self._handoff.num_announced
        lower.on_arrived = hints.note_stored
        hints.grants.on_retained = lower.rank
        hints.ahead = Prefetches(prefetcher, lower.host, environment.clock, hints.end_ahead)
        if self._events is not None:
            below.on_ask = hints.on_ask = self._events.note_wanted
        return below

    # --- weights ------------------------------------------------------------------------------------------------------

    def use_weights(self, name: str) -> bool:
        """Give chunks keys of other weights' namespace, unless a load is in flight. What is kept stays, and ages."""
        shared = self._shared
        if any(shared.jobs.is_loading(load.job_id) for load in shared.jobs.loads()):
            return False
        namespace = self._weights.number_of(name)
        if namespace is None:
            return self.reset_cache()
        self.give_up_transfers()
        self._answers.reset()
        shared.namespace = namespace
        self._stores.use_namespace()
        for state in self._requests.values():
            state.move_to(shared.new_keys())
        self._meters.reset()
        self._hints.void_all()
        if self._below is not None:
            self._below.use_namespace(namespace, name if self._keeps_weights else "")
        if self._events is not None:
            self._events.use_namespace(namespace)
        return True

    def reset_cache(self) -> bool:
        """Forget every chunk, of all weights, unless a job is in flight or a guest says no."""
        is_reset = super().reset_cache()
        if is_reset:
            self._weights.forget()
        return is_reset

    @property
    def namespace(self) -> int:
        """Number of the namespace in which chunks have their keys now: for inspection."""
        return self._shared.namespace

    @property
    def shared(self) -> Shared:
        """What the kernel's parts share: for inspection."""
        return self._shared

    @property
    def jobs(self) -> JobTable:
        """Transfers in flight: for inspection."""
        return self._shared.jobs

    @property
    def manager(self) -> OffloadManager:
        """The manager of the tier: for inspection."""
        return self._shared.manager

    @property
    def answers(self) -> KeptAnswers:
        """What is pinned for requests that have no blocks for it yet: for inspection."""
        return self._answers

    @property
    def requests(self) -> Mapping[str, RequestState]:
        """The requests that the connector knows, by id: for inspection."""
        return self._requests

    @property
    def blocks_per_chunk(self) -> int:
        """Number of engine blocks in a chunk: for inspection."""
        return self._shared.config.blocks_per_chunk

    @property
    def max_store_blocks(self) -> int:
        """Maximum number of device blocks that stores in flight may hold."""
        return self._shared.max_store_blocks

    @property
    def held_blocks(self) -> Sequence[int]:
        """Blocks of ended requests that are held until their KV is stored: for inspection."""
        return self._stores.held_blocks

    @property
    def hints(self) -> Hints:
        """Leases and priorities: for inspection."""
        return self._hints

    @property
    def below(self) -> LowerTierGuest | None:
        """Lower tiers, as a guest: for inspection."""
        return self._below

    def on_hints(self, request: RequestView, hints: Sequence[Hint]) -> Sequence[HintOutcome]:
        """Carry out hints about a request that it knows, or about a prefix without one."""
        return self._hints.on_hints(request, hints)

    def take_events(self) -> Iterable[KVEvent]:
        """Return the events of chunks that became available in the tiers or were removed, if anyone listens."""
        return () if self._events is None else self._events.take()

    def take_hint_events(self) -> Iterable[HintEvent]:
        """Return how hints have ended since the last call."""
        return self._hints.take_events()

    def get_contents(self) -> Sequence[TierContents]:
        """Return what is in host memory; tiers below have no list by tenant or prefix."""
        shared, hints, meters = self._shared, self._hints, self._meters
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
        of_hints = self._hints.take_stats(self._shared.tier, meters.num_bytes(1))
        below = {} if self._below is None else self._below.take_stats()
        return {**super().get_kv_connector_stats(), **meters.take_stats(), **of_hints, **below}

    def get_outages(self) -> Sequence[Outage]:
        """Return which tiers are out of use, as a whole or in part."""
        return () if self.lower is None else self.lower.outages()

    def _notes_of(self, keys: Sequence[OffloadKey]) -> Sequence[Note]:
        """Return what lower tiers are to keep with chunks that are written down now; nothing if that is nothing for all."""
        notes = [] if self._events is None else self._events.notes_of(keys)
        if not self._hints:
            return notes
        retained = list(map(self._hints.grants.retention_of, keys))
        return [replace(note, retention=of) for note, of in zip(notes or [NO_NOTE] * len(keys), retained, strict=True)]
