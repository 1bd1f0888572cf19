"""The scheduler side of the kernel: what is there, what to load, what to store, and when that is safe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

from cargohold.cache.manager import OffloadManager
from cargohold.connector.kernel.answers import KeptAnswers
from cargohold.connector.kernel.config import KernelConfig
from cargohold.connector.kernel.guest import AdmissionReport
from cargohold.connector.kernel.jobs import (
    NOTHING_TO_DO,
    JobTable,
    Load,
    LockHolder,
    OffloadingMetadata,
    RequestHolder,
    Store,
)
from cargohold.connector.kernel.loads import Loads, TierLookup
from cargohold.connector.kernel.requests import NEVER, RequestState
from cargohold.connector.kernel.shared import Shared
from cargohold.connector.kernel.stores import EagerStores, MakeStores
from cargohold.deadlines import CONNECTOR, END
from cargohold.errors import ContractError
from cargohold.pace import StepPace
from cargohold.protocol import (
    AttentionKind,
    BlockIds,
    CacheReport,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorScheduler,
    KVConnectorSchedulerOutput,
    RequestView,
    SchedulerContext,
    SchedulerEnvironment,
    Stats,
    StepView,
    Tally,
    metrics,
)

HOST_TIER: Final = "host"
"""Name of host memory in reports."""


class KernelScheduler(KVConnectorScheduler):
    """Moves chunks between the device and host memory, and tells guests of it.

    A derived class makes the guests, from what the kernel shares, and adds them to ``_guests``.

    Args:
        config: options.
        environment: facts about the engine.
        manager: plans which chunks host memory holds.
        make_stores: makes the planner that decides which chunks are copied down; by default all, as they are computed.
    """

    name = "offloading"
    _lookup_type: type[TierLookup] = TierLookup
    _loads_type: type[Loads] = Loads
    _answers_type: type[KeptAnswers] = KeptAnswers

    def __init__(
        self,
        config: KernelConfig,
        environment: SchedulerEnvironment,
        manager: OffloadManager,
        make_stores: MakeStores = EagerStores,
    ) -> None:
        self._pace = StepPace(environment.clock, environment.max_step_tokens)
        holder = LockHolder() if environment.applies_locks else RequestHolder()
        max_store_blocks = int(environment.layout.num_blocks * config.max_inflight_fraction)
        self.shared = Shared(
            config,
            environment.layout,
            manager,
            HOST_TIER,
            holder,
            JobTable(environment.clock, max(config.blocks_per_chunk, max_store_blocks), config.blocks_per_chunk),
            environment.clock,
            self._pace,
            environment.finds_partial_loads,
            environment.prefix_caching,
            environment.shares_loads,
        )
        self._guests = self.shared.guests
        self.requests: dict[str, RequestState] = {}
        self._lookup = self._lookup_type(
            self.shared,
            shares_loads=environment.prefix_caching and environment.shares_loads,
            shares_load_ends=environment.prefix_caching and environment.shares_load_ends,
            full_hits=environment.full_hits,
        )
        self.answers = self._answers_type(manager, self._mark_used)
        self._loads = self._loads_type(self.shared, self.requests)
        self.stores = make_stores(self.shared, self.requests)
        # Ended requests whose blocks are kept, because their stores cannot be protected otherwise.
        self._lingering: set[str] = set()
        self._give_up_after_s = environment.give_up_loads_after_s
        timeout_s = config.transfer_timeout_s
        self._end_s, self._connector_end_s = END.seconds(timeout_s), CONNECTOR.seconds(timeout_s)
        # Loads that were given up since the last step.
        self._given_up: list[int] = []
        self._loads_in_step = environment.loads_in_step

    @property
    def holds_outlive_requests(self) -> bool:
        """Whether blocks being copied are held for the copy itself; otherwise only their request holds them."""
        return self.shared.holder.outlives_requests

    # --- requests come and go -----------------------------------------------------------------------------------------

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        """Keep the context; from now on hold blocks by touching them."""
        self.shared.use_context(context)
        self.stores.use_context()

    def on_new_request(self, request: RequestView) -> None:
        """Remember the request. Raises ``RequestError`` if its ``kv_transfer_params`` are invalid."""
        shared = self.shared
        options = {"store_generated": shared.config.store_generated, "read_only": shared.config.read_only}
        state = RequestState.create(request, shared.new_keys(), **options)
        self._guests.request_new(state)
        self.requests[request.request_id] = state

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        """Keep the request's blocks if copies of them are in flight that cannot be protected otherwise.

        Returns what guests tell the client, too.
        """
        keeps_blocks = self._needs_request(request.request_id)
        if keeps_blocks:
            self._lingering.add(request.request_id)
        state = self.requests[request.request_id]
        state.lookup, state.has_ended = None, True
        if self.answers.kept:
            self.answers.release(request.request_id)
        state.extend_keys()
        self.stores.end_request(state, block_ids)
        for keys in state.keys:
            self.shared.manager.end_turn(keys.keys, request.turn_end)
        self._guests.request_ended(state, block_ids)
        return keeps_blocks, self.shared.consumer.response_params(state)

    def explain(self, request_id: str) -> CacheReport:
        """Return what was decided for the request, and why; forget the request."""
        state = self.requests.pop(request_id)
        return CacheReport(dict(state.restored_tokens), tuple(state.notes))

    # --- one step -----------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the computed ones the tier can give back; long loads are asynchronous."""
        state = self.requests[request.request_id]
        if self.shared.jobs.num_stuck_blocks > self.shared.jobs.max_store_blocks:
            # A load might get stuck, too, and take more blocks out of service.
            state.note_once("nothing was looked up: stuck copies hold too many blocks")
            return 0, False
        if state.asked_at is None:
            state.asked_at = self.shared.clock()
        num_tokens = self._lookup.find(state, num_computed_tokens)
        if num_tokens is None:
            state.answered_at = None
            if state.deferred_at is None:
                state.deferred_at = self.shared.clock()
            return None, False
        if state.answered_at is None:
            state.answered_at = self.shared.clock()
        if self.shared.device is not None:
            self.stores.expect(state, num_tokens, is_loaded=num_tokens > num_computed_tokens)
        num_external_tokens = num_tokens - num_computed_tokens
        if num_external_tokens <= 0:
            state.loads_in_step = False
            return num_external_tokens, False
        if state.is_recomputed:
            self.shared.checker.chunks_found(state, num_computed_tokens, num_tokens)
            return 0, False
        self.answers.answered.append(state)
        state.loads_in_step = self._fits_in_step(state, num_computed_tokens, num_tokens)
        return num_external_tokens, not state.loads_in_step

    def get_shared_prefix_end(self, request: RequestView) -> int:
        """Return how far full attention is kept if windows or states are not, as the last look-up has found it."""
        lookup = self.requests[request.request_id].lookup
        return 0 if lookup is None else lookup.shared_end

    def expect_tokens(self, request: RequestView, num_tokens: int) -> None:
        """Expect the device to lose what lies in the blocks that the request gets for another connector's load."""
        self.stores.expect(self.requests[request.request_id], num_tokens, is_loaded=True)

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        """Plan the load of the tokens that the look-up found, into the blocks allocated for them."""
        state = self.requests[request.request_id]
        state.max_computed_tokens = request.num_tokens  # how many are computed by now is to be asked
        lookup, state.lookup = state.lookup, None
        if lookup is None and state.was_admitted:
            return  # the load has ended
        # Chunks are marked as used by no look-up, which may be repeated any number of times.
        state.extend_keys()
        num_ready = self._mark_used(state)
        state.is_marked = False
        if lookup is None:
            state.was_admitted = True
            return  # nothing was asked here: another connector loads, which is a use all the same
        num_hit_tokens = lookup.num_computed_tokens + num_external_tokens
        sources: Mapping[str, int] = {}
        if num_external_tokens:
            sources = self._loads.plan(state, blocks, lookup, num_hit_tokens)
        admission = AdmissionReport(
            lookup.num_computed_tokens, num_hit_tokens, sources, is_first=not state.was_admitted
        )
        if self.answers.kept:
            self.answers.release(request.request_id)
        self._guests.request_admitted(state, admission)
        state.asked_at = state.deferred_at = state.answered_at = None
        self.stores.begin_request(state, num_ready, lookup.num_computed_tokens, num_hit_tokens)
        why_no_more = "although more was found: the engine loaded no more"
        if lookup.num_tokens <= num_hit_tokens:
            why_no_more = self._lookup.why_no_more(state, num_ready, lookup.num_computed_tokens, num_hit_tokens)
        self._note_lookup(state, lookup.num_computed_tokens, sources, why_no_more)
        state.was_admitted = True

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        """Return this step's loads, and the stores of the chunks that its tokens complete.

        Raises ``ContractError`` if a job does not end in time, and its blocks are held by its request alone: they can be
        released only once the workers have stopped.
        """
        self._pace.begin(step)
        if self.answers.answered or self.answers.kept:
            self.answers.keep()  # before anything of this step can take its place
        self._guests.step_begins(step)
        if (below := self.shared.below).tiers:
            below.begin_step(step)
        saves = self.stores.plan_saves()
        given_up, self._given_up = (*self._given_up, *self._give_up_overdue()), []
        finish_stores = not self.shared.holder.outlives_requests and self._must_finish_stores(step)
        stores = tuple(self.stores.plan(step))
        loads, self._loads.planned = tuple(self._loads.planned), []
        release = self._take_released() if self._lingering else ()
        worker_message = below.worker_message() if below.tiers else ()
        if not (loads or stores or saves or finish_stores or release or given_up or worker_message):
            return NOTHING_TO_DO  # most steps
        return OffloadingMetadata(loads, stores, saves, finish_stores, release, given_up, worker_message)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Release the blocks and pins of jobs that ended; make stored chunks findable; forget chunks that cannot be read."""
        if (checker := self.shared.checker).comparing:  # first: what is dropped is found by nothing else
            checker.note_compared(connector_output)
        if (below := self.shared.below).tiers:
            below.worker_reported(connector_output)
        self._loads.note_copied(connector_output.kv_connector_stats)
        if connector_output.step_failed or connector_output.invalid_block_ids:
            self._loads.note_invalid(connector_output.invalid_block_ids)
            self._spoil_stores(connector_output.spoiled_requests)
        for job_id, outcome in connector_output.jobs.items():
            job, since = self.shared.jobs.end(job_id)
            if isinstance(job, Load):
                if since is None:
                    self._loads.end_given_up(job, outcome)
                else:
                    self._loads.end(job, outcome, connector_output)
                self._guests.load_ended(job, since, outcome)
            elif isinstance(job, Store):
                self.stores.end(job, outcome)
                self._guests.store_ended(job, since, outcome)

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:
        """Return locks and unlocks, if blocks are held by locks."""
        self._pace.end(self.shared.stats)
        if (below := self.shared.below).tiers:
            below.step_ends()
        return self.shared.holder.take_report()

    def has_pending_work(self) -> bool:
        """Whether jobs are in flight, blocks of ended requests are kept or still to be stored, or a guest is busy."""
        is_busy = bool(self.shared.jobs.num_awaited or self._lingering) or self.stores.has_pending_work
        return is_busy or self._guests.is_busy()

    # --- on demand ----------------------------------------------------------------------------------------------------

    def num_stuck_references(self) -> int:
        """Return the number of references that it holds for copies that did not end in time."""
        return self.shared.jobs.num_stuck_blocks if self.holds_outlive_requests else 0

    def on_pause(self, request_ids: Iterable[str]) -> None:
        """Store what only the device holds of these requests."""
        self.stores.pause([self.requests[request_id] for request_id in request_ids])

    def give_up_transfers(self) -> None:
        """Make transfers in flight void. Stores let go of their blocks at once, loads when their copies have ended.

        Slots stay theirs until then, too.
        """
        shared = self.shared
        shared.holder.release(shared.jobs.give_up_stores())
        self.stores.give_up()
        for load in shared.jobs.give_up_loads() if self._can_give_up_loads else ():
            self._given_up.append(load.job_id)
            if (state := self.requests.get(load.request_id)) is not None:
                state.notes.append(f"the load from {shared.tier} was abandoned, because the device's cache was reset")
                state.offer_again_from(0)

    def reset_cache(self) -> bool:
        """Forget every chunk, unless a job is in flight or a guest says no."""
        # Engines may not show a connector their requests until it is reset: how far these have come is to be asked then.
        for state in self.requests.values():
            state.max_computed_tokens = NEVER
        is_reset = not self.shared.jobs and self.shared.below.may_reset() and self.shared.manager.reset()
        if is_reset:
            self.stores.use_namespace()
            self.answers.reset()
            self._guests.reset()
        return is_reset

    def shutdown(self) -> None:
        """Release what it holds, and let guests do so: the manager may outlive this connector."""
        self.answers.reset()
        self._guests.shutdown()

    def get_kv_connector_stats(self) -> Stats:
        """Return the kernel's counters since the last call."""
        stats, self.shared.stats = self.shared.stats, Tally()
        return stats

    # --- inside -------------------------------------------------------------------------------------------------------

    def _fits_in_step(self, state: RequestState, num_computed_tokens: int, num_hit_tokens: int) -> bool:
        """Whether the load of a hit may be part of the step that computes the rest of the request."""
        if not (self._loads_in_step and self.holds_outlive_requests):
            return False
        num_blocks = sum((num_hit_tokens - num_computed_tokens) // keys.group.block_tokens for keys in state.keys)
        num_rest = max(1, state.request.num_tokens - num_hit_tokens)
        return self._loads.fits_in_step(num_blocks, self._pace.predict(num_rest))

    def _mark_used(self, state: RequestState) -> list[int]:
        """Mark a request's chunks as used, unless that was done while it waited; return how many leading ones are there."""
        manager = self.shared.manager
        if state.is_marked:
            return [len(manager.lookup_run(keys.keys)) for keys in state.keys]
        num_ready = [manager.touch(keys.keys) for keys in state.keys]
        self.shared.below.chunks_used(state)
        return num_ready

    @property
    def _can_give_up_loads(self) -> bool:
        """Whether requests need not wait for copies: the engine accepts that, and the blocks stay held."""
        return self._give_up_after_s is not None and self.holds_outlive_requests

    def _give_up_overdue(self) -> tuple[int, ...]:
        """Stop waiting for jobs that have not ended in time; return the loads among them.

        Their blocks and slots stay held until all workers have reported them, however late: a copy may still be at work.
        """
        limit_s = self._connector_end_s
        if self._give_up_after_s is not None and self.shared.holder.outlives_requests:
            limit_s = min(self._end_s, self._give_up_after_s)
        overdue = self.shared.jobs.take_overdue(limit_s)
        if not overdue:
            return ()  # nearly always
        if not self._can_give_up_loads:
            raise ContractError(self.name, f"its workers did not end job {overdue[0].job_id} within {limit_s:g} s")
        for job in overdue:
            self._note_stuck(job, limit_s)
        return tuple(job.job_id for job in overdue if isinstance(job, Load))

    def _note_stuck(self, job: Load | Store, limit_s: float) -> None:
        shared = self.shared
        is_load = isinstance(job, Load)
        shared.stats[metrics.FAILURES.of("load" if is_load else "store")] += 1
        shared.failures.warning(
            "a %s of %d blocks did not end within %g s; they and their slots in %s are out of service until it ends",
            "load" if is_load else "store",
            len(job.block_ids),
            limit_s,
            shared.tier,
        )
        if isinstance(job, Load) and (state := self.requests.get(job.request_id)) is not None:
            num_tokens = len(job.origins)
            state.notes.append(
                f"the load from {shared.tier} did not end within {limit_s:g} s; {num_tokens} tokens are computed instead"
            )

    def _spoil_stores(self, spoiled_requests: AbstractSet[str]) -> None:
        """Give up stores in flight: a step computed with KV that was not there, and its chunks must never be found.

        Which stores copy from that step is unknown here, so all are given up, or all of ``spoiled_requests`` if it has
        failed for these alone: failures are rare, and chunks that are given up are offered again. So are those that were
        listed: they are computed again in other blocks of the device.
        """
        if self.shared.device is not None:
            for request_id in self.requests.keys() & spoiled_requests or self.requests:
                self.requests[request_id].offer_again_from(0)
        for store in self.shared.jobs.stores():
            if spoiled_requests and spoiled_requests.isdisjoint(store.request_ids):
                continue
            store.is_spoiled = True
            for request_id in store.request_ids & self.requests.keys():
                self.requests[request_id].offer_again_from(0)

    def _needs_request(self, request_id: str) -> bool:
        """Whether a store reads the request's blocks and only the request's own references protect them."""
        return not self.shared.holder.outlives_requests and self.shared.jobs.is_storing(request_id)

    def _must_finish_stores(self, step: StepView) -> bool:
        """Whether this step may overwrite blocks that stores read: of preempted requests, or that windows have left behind."""
        if not self.shared.jobs.num_store_blocks:
            return False
        gives_blocks_back = any(group.kind is not AttentionKind.FULL for group in self.shared.layout.groups)
        return gives_blocks_back or any(self._needs_request(request_id) for request_id in step.preempted_req_ids)

    def _take_released(self) -> tuple[str, ...]:
        """Return the ended requests whose last store has ended since the last step; they need not linger any more."""
        released = tuple(sorted(lingering for lingering in self._lingering if not self._needs_request(lingering)))
        self._lingering.difference_update(released)
        return released

    def _note_lookup(
        self, state: RequestState, num_computed_tokens: int, sources: Mapping[str, int], why_no_more: str
    ) -> None:
        num_tokens = state.request.num_tokens
        num_missing = num_tokens - num_computed_tokens - sum(sources.values())
        left = (
            f"{num_missing} had to be computed, {why_no_more}"
            if num_missing
            else "only the last is computed again, for its logits"
        )
        found = " and ".join(f"{count} more in {tier}" for tier, count in (sources or {self.shared.tier: 0}).items())
        state.notes.append(f"of {num_tokens} tokens, {num_computed_tokens} were on the device and {found}; {left}")
        if not state.was_admitted:
            self.shared.stats[metrics.ASKED.of()] += num_tokens
            self.shared.stats[metrics.FOUND_ON_DEVICE.of()] += num_computed_tokens
