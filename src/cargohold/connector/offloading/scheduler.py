"""Scheduler side of the offloading connector: decides which chunks to load and to store, and when that is safe."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Final

from cargohold.cache.manager import OffloadKey, OffloadManager
from cargohold.cache.retention import Budget
from cargohold.connector.config import RESTORE_IF_FASTER, OffloadConfig
from cargohold.connector.guests.events import tier_events
from cargohold.connector.guests.handoff import HandingOff
from cargohold.connector.guests.hints import Hints
from cargohold.connector.guests.meters import Meters
from cargohold.connector.kernel.guest import Admission, Guests, GuestView, own_guests
from cargohold.connector.kernel.jobs import (
    NOTHING_TO_DO,
    JobTable,
    Load,
    LockHolder,
    OffloadingMetadata,
    RequestHolder,
    Store,
    TierReport,
    TouchHolder,
)
from cargohold.connector.kernel.loads import Loads, TierLookup
from cargohold.connector.kernel.requests import NEVER, RequestState
from cargohold.connector.kernel.shared import Shared
from cargohold.connector.kernel.stores import EagerStores, MakeStores
from cargohold.errors import ContractError
from cargohold.protocol import (
    AttentionKind,
    BlockIds,
    CacheReport,
    ConnectorMetadata,
    Hint,
    HintEvent,
    HintOutcome,
    KVConnectorOutput,
    KVConnectorScheduler,
    KVConnectorSchedulerOutput,
    KVEvent,
    Outage,
    RequestView,
    SchedulerContext,
    SchedulerEnvironment,
    Stats,
    StepView,
    TenantUse,
    TierContents,
    answers_to,
)
from cargohold.tiers.chunk_format import NO_NOTE, Note
from cargohold.tiers.scheduler_side import LowerTiers, Prefetcher, Prefetches, StepPace

logger = logging.getLogger(__name__)

HOST_TIER: Final = "host"
"""Name of host memory in reports."""


class OffloadingScheduler(KVConnectorScheduler):
    """Copies KV down as it is computed, and loads it back on a prefix hit.

    Args:
        config: options.
        environment: facts about the engine.
        manager: plans which chunks the tier holds.
        make_stores: makes the planner that decides which chunks are copied down; by default all, as they are computed.
        lower: the tiers below, if there are any; ``manager`` must then be their ``TieringManager``.
    """

    name = "offloading"
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
        holder = LockHolder() if environment.applies_locks else RequestHolder()
        self._shared = Shared(
            config,
            environment.layout,
            manager,
            HOST_TIER,
            holder,
            JobTable(environment.clock),
            environment.clock,
            environment.finds_partial_loads,
            environment.prefix_caching,
        )
        self._pace = StepPace(environment.clock, environment.max_step_tokens)
        self._requests: dict[str, RequestState] = {}
        # Those who were told what they can load, since the last step.
        self._told: list[RequestState] = []
        self._hints = hints = Hints(config, manager, environment.layout, environment.clock, self._requests)
        self._stores = make_stores(self._shared, self._requests)
        self._meters = Meters(self._shared, environment, lower)
        self._events = tier_events(environment, manager, lower, follows_blocks=self._stores.stores_free_blocks)
        handoff = HandingOff(lower)
        # In the order in which they are told.
        own = own_guests(config.guests, GuestView(environment.layout, environment.clock, manager.lookup))
        guests = Guests([*([] if self._events is None else [self._events]), self._meters, handoff, hints, *own])
        self._guests = self._shared.guests = guests
        self._lower = lower
        self._prefetcher = None
        if lower is not None:
            lower.describe_by(self._notes_of)
            only_if_faster = config.restore == RESTORE_IF_FASTER
            self._prefetcher = Prefetcher(lower.host, lower, environment, self._pace, only_if_faster=only_if_faster)
            hints.on_retained, lower.on_arrived = lower.rank, hints.note_stored
            if self._events is not None:
                hints.on_ask = self._events.note_wanted
            hints.ahead = Prefetches(self._prefetcher, lower.host, environment.clock, hints.end_ahead)
        self._lookup = TierLookup(
            manager if lower is None else lower.host,
            self._shared.jobs,
            shares_loads=environment.prefix_caching and environment.shares_loads,
            shares_load_ends=environment.prefix_caching and environment.shares_load_ends,
            full_hits=environment.full_hits,
            prefetcher=self._prefetcher,
            on_ask=None if self._events is None else self._events.note_wanted,
        )
        self._lookup.num_announced = lambda state: guests.call(handoff, handoff.num_announced, (state,)) or 0
        lower_names = () if lower is None else [tier.name for tier in lower.tiers]
        self._loads = Loads(self._shared, self._requests, lower_names)
        hints.coming = self._stores.coming
        # Ended requests whose blocks are kept, because their stores cannot be protected otherwise.
        self._lingering: set[str] = set()
        self._give_up_after_s = environment.give_up_loads_after_s
        self._loads_in_step = environment.loads_in_step

    @property
    def jobs(self) -> JobTable:
        """Transfers in flight: for inspection."""
        return self._shared.jobs

    @property
    def manager(self) -> OffloadManager:
        """The manager of the tier: for inspection."""
        return self._shared.manager

    @property
    def hints(self) -> Hints:
        """Leases and priorities: for inspection."""
        return self._hints

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
    def holds_outlive_requests(self) -> bool:
        """Whether blocks being copied are held for the copy itself; otherwise only their request holds them."""
        return self._shared.holder.outlives_requests

    # --- requests come and go -----------------------------------------------------------------------------------------

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        """Keep the context; from now on hold blocks by touching them."""
        self._shared.context = context
        self._shared.holder = TouchHolder(context)

    def on_new_request(self, request: RequestView) -> None:
        """Remember the request. Raises ``RequestError`` if its ``kv_transfer_params`` are invalid."""
        shared = self._shared
        config = shared.config
        state = RequestState.create(
            request, shared.layout, config.blocks_per_chunk, store_generated=config.store_generated
        )
        self._guests.request_new(state)
        self._requests[request.request_id] = state

    def on_hints(self, request: RequestView, hints: Sequence[Hint]) -> Sequence[HintOutcome]:
        """Carry out hints about a request that it knows, or about a prefix without one."""
        outcomes = None
        if self._guests.has(self._hints):
            outcomes = self._guests.call(self._hints, self._hints.on_hints, (request, hints))
        return (
            answers_to(hints, reason="hints are turned off, because they have failed") if outcomes is None else outcomes
        )

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        """Keep the request's blocks if copies of them are in flight that cannot be protected otherwise.

        Returns what guests tell the client, too.
        """
        keeps_blocks = self._needs_request(request.request_id)
        if keeps_blocks:
            self._lingering.add(request.request_id)
        state = self._requests[request.request_id]
        state.end_waiting()
        state.lookup, state.has_ended = None, True
        self._stores.end_request(state, block_ids)
        self._guests.request_ended(state, block_ids)
        return keeps_blocks, self._guests.told_at_end(state)

    def explain(self, request_id: str) -> CacheReport:
        """Return what was decided for the request, and why; forget the request."""
        state = self._requests.pop(request_id)
        return CacheReport(dict(state.restored_tokens), tuple(state.notes))

    # --- one step -----------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the computed ones the tier can give back; long loads are asynchronous."""
        state = self._requests[request.request_id]
        if self._shared.jobs.num_stuck_blocks > self.max_store_blocks:
            # A load might get stuck, too, and take more blocks out of service.
            state.note_once("nothing was looked up: copies that do not end hold too many blocks")
            return 0, False
        num_tokens = self._lookup.find(state, num_computed_tokens)
        self._guests.request_asked(state, num_tokens is not None)
        if num_tokens is None:
            return None, False
        num_external_tokens = num_tokens - num_computed_tokens
        if num_external_tokens:
            self._told.append(state)
        state.loads_in_step = num_external_tokens > 0 and self._fits_in_step(state, num_computed_tokens, num_tokens)
        return num_external_tokens, num_external_tokens > 0 and not state.loads_in_step

    def get_shared_prefix_end(self, request: RequestView) -> int:
        """Return how far full attention is kept if windows or states are not, as the last look-up has found it."""
        lookup = self._requests[request.request_id].lookup
        return 0 if lookup is None else lookup.shared_end

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        """Plan the load of the tokens that the look-up found, into the blocks allocated for them."""
        state = self._requests[request.request_id]
        self._stores.note_blocks(state, blocks)
        self._guests.request_placed(state, blocks)
        lookup, state.lookup = state.lookup, None
        if lookup is None:
            state.was_admitted = True
            return  # no look-up came before: the load has ended, or the engine did not ask
        # Chunks are marked as used by no look-up, which may be repeated any number of times.
        num_ready = self._mark_used(state)
        state.is_marked = False
        num_hit_tokens = lookup.num_computed_tokens + num_external_tokens
        sources: Mapping[str, int] = {}
        if num_external_tokens:
            sources = self._loads.plan(state, blocks, lookup, num_hit_tokens)
        admission = Admission(lookup.num_computed_tokens, num_hit_tokens, sources, is_first=not state.was_admitted)
        self._guests.request_admitted(state, admission)
        state.end_waiting()
        self._stores.begin_request(state, num_ready, lookup.num_computed_tokens, num_hit_tokens)
        why_no_more = "though more was found: the engine took no more"
        if lookup.num_tokens <= num_hit_tokens:
            why_no_more = self._lookup.why_no_more(state, num_ready, lookup.num_computed_tokens, num_hit_tokens)
        self._note_lookup(state, lookup.num_computed_tokens, sources, why_no_more)
        state.was_admitted = True

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        """Return this step's loads, and the stores of the chunks that its tokens complete.

        Raises ``ContractError`` if a job does not end in time, and its blocks are held by its request alone: they can be
        released only once the workers have stopped.
        """
        self._pace.begin(step)
        self._keep_for_waiting()
        self._guests.step_begins(step)
        if self._prefetcher is not None:
            self._prefetcher.begin_step(step)
        given_up = self._give_up_overdue()
        finish_stores = self._must_finish_stores(step)
        stores = tuple(self._stores.plan(step))
        loads, release = self._loads.take_planned(), self._take_released()
        if self._lower is None:
            if not (loads or stores or finish_stores or release or given_up):
                return NOTHING_TO_DO  # most steps
            return OffloadingMetadata(loads, stores, finish_stores, release, given_up_loads=given_up)
        return OffloadingMetadata(
            loads=loads,
            stores=stores,
            finish_stores=finish_stores,
            release=release,
            tier_commands=self._lower.take_commands(self._shared.jobs.new_id),
            cancelled_tier_jobs=self._lower.take_cancelled(),
            given_up_loads=given_up,
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Release the blocks and pins of jobs that ended; make stored chunks findable; forget chunks that cannot be read."""
        self._guests.worker_reported(output)
        self._loads.note_copied(output.stats)
        self._loads.note_invalid(output.invalid_block_ids)
        if output.finished.step_failed or output.invalid_block_ids:
            self._spoil_stores(output.finished.spoiled_requests)
        if self._lower is not None and isinstance(output.worker_meta, TierReport):
            report = output.worker_meta
            self._lower.note_emptied(at for at, losses in report.losses.items() if losses.is_all)
            self._lower.note_report(report.answers, report.health, report.namespace, report.listings, report.seconds)
        for job_id, outcome in output.finished.jobs.items():
            if self._lower is not None and self._lower.end(job_id, outcome):
                continue
            is_stuck, since = self._shared.jobs.is_stuck(job_id), self._shared.jobs.since(job_id)
            job = self._shared.jobs.end(job_id)
            if isinstance(job, Load):
                if is_stuck:
                    self._loads.end_stuck(job, outcome)
                else:
                    self._loads.end(job, outcome, output)
                self._guests.load_ended(job, since, outcome)
            elif isinstance(job, Store):
                self._stores.end(job, outcome)
                self._guests.store_ended(job, since, outcome)
            else:
                logger.warning("a worker reported job %d, which is not in flight", job_id)
        if self._lower is not None and isinstance(output.worker_meta, TierReport):
            for at, losses in output.worker_meta.losses.items():
                self._lower.note_lost(at, losses.keys)

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:
        """Return locks and unlocks, if blocks are held by locks. Also ends the step for lower tiers."""
        self._pace.end(self._shared.stats)
        if self._prefetcher is not None:
            self._prefetcher.end_step()
        self._guests.step_ends()
        return self._shared.holder.take_report()

    def has_pending_work(self) -> bool:
        """Whether jobs are in flight, or blocks of ended requests are kept or still to be stored.

        Also whether lower tiers need further steps for a short while; see ``LowerTiers.is_settling``.
        """
        is_busy = bool(self._shared.jobs.num_awaited or self._lingering) or self._stores.has_pending_work
        is_busy |= bool(self._hints.ahead)
        return is_busy or (self._lower is not None and self._lower.is_settling)

    # --- on demand ----------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[KVEvent]:
        """Return the events of chunks that became available in the tiers or were removed, if anyone listens."""
        return () if self._events is None else self._events.take()

    def take_hint_events(self) -> Iterable[HintEvent]:
        """Return how hints have ended since the last call."""
        return self._hints.take_events()

    def get_contents(self) -> Sequence[TierContents]:
        """Return what is in host memory; of a tier below, nobody keeps a list by tenant or prefix."""
        shared = self._shared
        hints, chunk_bytes = self._hints, self._meters.chunk_bytes
        return [
            TierContents(
                tier=shared.tier,
                pins=hints.pins(),
                max_pinned_chunks=hints.budgets.limit_of(None, Budget.PINNED),
                max_pinned_chunks_each=hints.budgets.limit_of("any", Budget.PINNED),
                tenants=[
                    TenantUse(tenant, num_chunks, num_chunks * chunk_bytes)
                    for tenant, num_chunks in shared.manager.usage().items()
                ],
                prefixes=self._meters.prefixes.kept(),
            )
        ]

    def num_stuck_references(self) -> int:
        """Return the number of references that it holds for copies that did not end in time."""
        return self._shared.jobs.num_stuck_blocks if self.holds_outlive_requests else 0

    def reset_cache(self) -> bool:
        """Forget every chunk, unless a job is in flight. Leases and priorities are void."""
        # Engines may not show a connector their requests until it is reset: how far these have come is to be asked then.
        for state in self._requests.values():
            state.max_computed_tokens = NEVER
        is_reset = not self._shared.jobs and self._shared.manager.reset()
        if is_reset:
            self._guests.reset()
        return is_reset

    def shutdown(self) -> None:
        """End leases and priorities: the manager may outlive this connector."""
        self._guests.shutdown()

    def get_stats(self) -> Stats:
        """Return counters since the last call."""
        stats, self._shared.stats = dict(self._shared.stats), Counter()
        lower = {} if self._lower is None else self._lower.take_stats()
        hints = self._hints.take_stats(self._shared.tier, self._meters.chunk_bytes)
        return {**stats, **self._meters.take_stats(), **hints, **lower}

    def get_outages(self) -> Sequence[Outage]:
        """Return which tiers are out of use, as a whole or in part."""
        return () if self._lower is None else self._lower.outages()

    def _notes_of(self, keys: Sequence[OffloadKey]) -> Sequence[Note]:
        """Return what lower tiers are to keep with chunks that are written down now; nothing if that is nothing for all."""
        events, hints = self._events, self._hints
        notes = [NO_NOTE] * len(keys) if events is None else list(map(events.note_of, keys))
        if hints:
            return [replace(note, retention=hints.retention_of(key)) for note, key in zip(notes, keys, strict=True)]
        return () if events is None else notes

    # --- inside -------------------------------------------------------------------------------------------------------

    def _fits_in_step(self, state: RequestState, num_computed_tokens: int, num_hit_tokens: int) -> bool:
        """Whether the load of a hit may be part of the step that computes the rest of the request."""
        if not (self._loads_in_step and self.holds_outlive_requests):
            return False
        num_blocks = sum((num_hit_tokens - num_computed_tokens) // keys.group.block_tokens for keys in state.keys)
        num_rest = max(1, state.request.num_tokens - num_hit_tokens)
        return self._loads.fits_in_step(num_blocks, self._pace.predict(num_rest))

    def _keep_for_waiting(self) -> None:
        """Mark what was found for requests that wait for room on the device, so that it is still there when they have it.

        It is used once, however long they wait; in later steps it only counts as used then.
        """
        for state in self._told:
            if state.lookup is None:
                continue  # it was admitted, or has ended
            if not state.is_marked:
                self._mark_used(state)
                state.is_marked = True
            ends = [(keys.keys, state.lookup.num_tokens // keys.chunk_tokens) for keys in state.keys]
            self._shared.manager.renew(keys[end - 1] for keys, end in ends if end)
        self._told.clear()

    def _mark_used(self, state: RequestState) -> list[int]:
        """Mark a request's chunks as used, unless that was done while it waited; return how many leading ones are there."""
        manager = self._shared.manager
        if state.is_marked:
            return [len(manager.lookup_run(keys.keys)) for keys in state.keys]
        return [manager.touch(keys.keys) for keys in state.keys]

    def _give_up_overdue(self) -> tuple[int, ...]:
        """Stop waiting for jobs that have not ended in time; return the loads among them.

        Their blocks and slots stay held until all workers have reported them, however late: a copy may still be at work.
        """
        shared = self._shared
        is_safe = self._give_up_after_s is not None and self.holds_outlive_requests
        limit_s = shared.config.job_timeout_s
        if self._give_up_after_s is not None and is_safe:
            limit_s = min(limit_s, self._give_up_after_s)
        overdue = shared.jobs.take_overdue(limit_s)
        if overdue and not is_safe:
            raise ContractError(self.name, f"its workers did not end job {overdue[0].job_id} within {limit_s:g} s")
        for job in overdue:
            self._note_stuck(job, limit_s)
        return tuple(job.job_id for job in overdue if isinstance(job, Load))

    def _note_stuck(self, job: Load | Store, limit_s: float) -> None:
        shared = self._shared
        is_load = isinstance(job, Load)
        shared.stats["loads_failed" if is_load else "stores_failed"] += 1
        shared.failures.warning(
            "a %s of %d blocks did not end within %g s; they and their slots in %s are out of service until it ends",
            "load" if is_load else "store",
            len(job.block_ids),
            limit_s,
            shared.tier,
        )
        if isinstance(job, Load) and (state := self._requests.get(job.request_id)) is not None:
            num_tokens = len(job.origins.tiers)
            state.notes.append(
                f"the load from {shared.tier} did not end within {limit_s:g} s; {num_tokens} tokens are computed instead"
            )

    def _spoil_stores(self, spoiled_requests: AbstractSet[str]) -> None:
        """Give up stores in flight: a step computed with KV that was not there, and its chunks must never be found.

        Which stores copy from that step cannot be told here, so all are given up, or all of ``spoiled_requests`` if it has
        failed for these alone: failures are rare, and chunks that are given up are offered again.
        """
        for store in self._shared.jobs.stores():
            if spoiled_requests and spoiled_requests.isdisjoint(store.request_ids):
                continue
            store.is_spoiled = True
            for request_id in store.request_ids & self._requests.keys():
                self._requests[request_id].offer_again_from(0)

    def _needs_request(self, request_id: str) -> bool:
        """Whether a store reads the request's blocks and only the request's own references protect them."""
        return not self._shared.holder.outlives_requests and self._shared.jobs.is_storing(request_id)

    def _must_finish_stores(self, step: StepView) -> bool:
        """Whether this step may overwrite blocks that stores read: of preempted requests, or that windows have left behind."""
        if self._shared.holder.outlives_requests or not self._shared.jobs.num_store_blocks:
            return False
        gives_blocks_back = any(group.kind is not AttentionKind.FULL for group in self._shared.layout.groups)
        return gives_blocks_back or any(self._needs_request(request_id) for request_id in step.preempted_req_ids)

    def _take_released(self) -> tuple[str, ...]:
        """Return the ended requests whose last store has ended since the last step; they need not linger any more."""
        if not self._lingering:
            return ()
        released = tuple(sorted(lingering for lingering in self._lingering if not self._needs_request(lingering)))
        self._lingering.difference_update(released)
        return released

    def _note_lookup(
        self, state: RequestState, num_computed_tokens: int, sources: Mapping[str, int], why_no_more: str
    ) -> None:
        num_tokens = state.request.num_tokens
        num_missing = num_tokens - num_computed_tokens - sum(sources.values())
        left = (
            f"{num_missing} were left to compute, {why_no_more}"
            if num_missing
            else "only the last is computed again, for its logits"
        )
        found = " and ".join(f"{count} more in {tier}" for tier, count in (sources or {self._shared.tier: 0}).items())
        state.notes.append(f"of {num_tokens} tokens, {num_computed_tokens} were on the device and {found}; {left}")
        if not state.was_admitted:
            self._shared.stats["asked_tokens"] += num_tokens
            self._shared.stats["device_hit_tokens"] += num_computed_tokens
