"""Deliberately broken connectors, managers, pools, workers and schedulers, which the simulator must find.

Each mutant breaks one thing, as a plausible mistake would, and names the traffic in which an oracle should find it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Final, TypeAlias

import pytest

import cargohold.connector.guests.hints as hints_module
import cargohold.connector.kernel.loads as loads_module
import cargohold.connector.kernel.offers as offers_module
import cargohold.engine.core.request as request_module
import cargohold.tiers.messages as messages_module
import cargohold.tiers.scheduler_side.tasks as tasks_module
from cargohold.blocks import _Windowed, root_hash
from cargohold.cache import OffloadKey
from cargohold.cache.chunk_table import READY, ChunkTable
from cargohold.cache.grants import Grant, Grants
from cargohold.cache.manager import ChunkKeys, ChunkPins
from cargohold.cache.policies.base import FIFOPolicy, LRUPolicy
from cargohold.cache.policies.runs import Runs
from cargohold.cache.retention import HELD, NO_RETENTION, Budget, Budgets
from cargohold.cache.rows import PooledTable, RowTable
from cargohold.cache.shares import Limits, Share, Shares
from cargohold.cache.tier_manager import TierManager
from cargohold.connector.guests.events import TierEvents
from cargohold.connector.guests.hints import Hints
from cargohold.connector.guests.lower_tiers import LowerTierGuest
from cargohold.connector.kernel.device import DeviceChunks
from cargohold.connector.kernel.jobs import JobTable, Load, LoadJob, OffloadingMetadata, Store, TouchHolder
from cargohold.connector.kernel.loads import Loads, TierLookup, blocks_to_load
from cargohold.connector.kernel.offers import blocks_to_store
from cargohold.connector.kernel.pooled_stores import PooledStores
from cargohold.connector.kernel.requests import RequestState, TransferParams
from cargohold.connector.kernel.stores import EagerStores
from cargohold.connector.multi import MultiConnectorScheduler
from cargohold.connector.multi_worker import MultiConnectorWorker
from cargohold.connector.offloading.scheduler import OffloadingScheduler
from cargohold.connector.offloading.worker import OffloadingWorker
from cargohold.engine.core.block_pool import BlockPool, KVCacheBlock
from cargohold.engine.core.connector_reports import ConnectorReports
from cargohold.engine.core.kv_cache_manager import KVCacheManager
from cargohold.engine.core.request_queues import RequestQueues, TransferTable
from cargohold.engine.core.scheduler import Scheduler
from cargohold.lab.simulation.campaign import Recipe
from cargohold.lab.simulation.transfers import LinkTransfers
from cargohold.protocol import (
    NULL_BLOCK_ID,
    AttentionKind,
    ConnectorGuard,
    Hint,
    HintEnd,
    HintOutcome,
    KVCacheGroup,
    KVConnectorOutput,
    KVConnectorTransferResults,
    OutputAggregator,
    RequestView,
    TransferOutcome,
)
from cargohold.tiers.chunk_format import Note
from cargohold.tiers.health import CircuitBreaker, MediumHealth
from cargohold.tiers.port import Access
from cargohold.tiers.scheduler_side import Fetch, LowerTiers, Prefetcher, Waiting
from cargohold.tiers.scheduler_side.fetches import Fetches
from cargohold.tiers.scheduler_side.tasks import TaskTable, TierTask
from cargohold.tiers.scheduler_side.tier_state import TierState
from cargohold.tiers.scheduler_side.waiting import Event
from cargohold.tiers.scheduler_side.writing import Writes
from cargohold.transfer import CopyJob, CopyResult, Direction, TransferWorker
from cargohold.transfer.port import GroupedTransfers, SharedStores
from tests.simulation.mutation import Mutant, Patch, registrar

Blocks: TypeAlias = tuple[Sequence[int], Sequence[int]]
MUTANTS: Final[list[Mutant]] = []
mutant = registrar(MUTANTS, Recipe)


# --- connectors -------------------------------------------------------------------------------------------------------


@mutant()
def skips_a_hold(patch: Patch) -> None:
    patch.setattr(TouchHolder, "hold", lambda self, block_ids: None)
    patch.setattr(TouchHolder, "release", lambda self, block_ids: None)


@mutant()
def releases_holds_when_the_copy_starts(patch: Patch) -> None:
    hold, release = TouchHolder.hold, TouchHolder.release

    def held_for_a_moment(self: TouchHolder, block_ids: Sequence[int]) -> None:
        hold(self, block_ids)
        release(self, block_ids)

    patch.setattr(TouchHolder, "hold", held_for_a_moment)
    patch.setattr(TouchHolder, "release", lambda self, block_ids: None)


@mutant()
def never_releases_holds(patch: Patch) -> None:
    patch.setattr(TouchHolder, "release", lambda self, block_ids: None)


@mutant()
def loads_a_chunk_twice_at_a_time(patch: Patch) -> None:
    patch.setattr(JobTable, "load_of_any", lambda self, keys: None)


@mutant()
def waits_for_ever_for_a_load_that_has_ended(patch: Patch) -> None:
    patch.setattr(JobTable, "_forget_loading", lambda self, keys: None)


@mutant()
def computes_before_a_load_of_the_same_step_has_arrived(patch: Patch) -> None:
    def start_only(self: OffloadingWorker, loads: Sequence[LoadJob]) -> None:
        for load in loads:
            self._start(load)

    patch.setattr(OffloadingWorker, "_load_in_step", start_only)


@mutant(faults="failed", first_seed=12)
def takes_a_load_that_fails_within_a_step_for_a_good_one(patch: Patch) -> None:
    def wait_for_all(self: OffloadingWorker, loads: Sequence[LoadJob]) -> None:
        for load in loads:
            self._start(load)
        if loads:
            self._running.finish_loads()

    patch.setattr(OffloadingWorker, "_load_in_step", wait_for_all)


@mutant(faults="lost")
def never_notices_that_a_job_was_lost(patch: Patch) -> None:
    patch.setattr(JobTable, "take_overdue", lambda self, after_s: [])
    patch.setattr(ConnectorReports, "check_progress", lambda self: None)


@mutant(faults="lost")
def releases_the_blocks_of_a_stuck_copy(patch: Patch) -> None:
    note_stuck = OffloadingScheduler._note_stuck

    def hasty(self: OffloadingScheduler, job: Load | Store, limit_s: float) -> None:
        note_stuck(self, job, limit_s)
        self.shared.jobs.end(job.job_id)
        self.shared.holder.release(job.block_ids)

    patch.setattr(OffloadingScheduler, "_note_stuck", hasty)


@mutant(faults="lost")
def steps_on_for_a_stuck_copy(patch: Patch) -> None:
    patch.setattr(OffloadingScheduler, "num_stuck_references", lambda self: 0)


@mutant(faults="failed")
def makes_failed_stores_visible(patch: Patch) -> None:
    end = EagerStores.end
    patch.setattr(EagerStores, "end", lambda self, store, outcome: end(self, store, TransferOutcome.DONE))


@mutant(workload="windows")
def stores_chunks_with_null_blocks(patch: Patch) -> None:
    def all_chunks(
        group: KVCacheGroup, table: Sequence[int], blocks_per_chunk: int, first_chunk: int, end_chunk: int
    ) -> Blocks:
        del group
        block_ids = table[first_chunk * blocks_per_chunk : end_chunk * blocks_per_chunk]
        return range(first_chunk, end_chunk), block_ids

    patch.setattr(offers_module, "blocks_to_store", all_chunks)


@mutant(workload="shared-beginnings")
def keeps_of_windows_and_states_only_the_last_block(patch: Patch) -> None:
    def last(group: KVCacheGroup, table: Sequence[int], per_chunk: int, first: int, end: int) -> Blocks:
        is_full = group.kind is AttentionKind.FULL
        return blocks_to_store(group, table, per_chunk, first if is_full else max(first, end - 1), end)

    patch.setattr(offers_module, "blocks_to_store", last)


@mutant(workload="forks")
def stores_nothing_behind_a_hit(patch: Patch) -> None:
    plan_for = EagerStores.plan_for

    def without_hits(self: EagerStores, shares: Any) -> Any:
        return plan_for(self, [share for share in shares if not self._requests[share.request_id].hit_tokens])

    patch.setattr(EagerStores, "plan_for", without_hits)


@mutant(workload="chunks")
def confuses_rows_inside_a_chunk(patch: Patch) -> None:
    def packed(
        pins: ChunkPins, wanted: Sequence[tuple[ChunkKeys, Sequence[int]]], blocks_per_chunk: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        slot_of = dict(zip(pins.keys, pins.slots, strict=True))
        counts: Counter[bytes] = Counter()
        rows = []
        for keys, numbers in wanted:
            for number in numbers:
                key = keys.keys[number // blocks_per_chunk]
                rows.append(slot_of[key] * blocks_per_chunk + counts[key])
                counts[key] += 1  # counted from the first that takes part, not from the chunk's start
        return tuple(rows), ()

    patch.setattr(loads_module, "rows_to_load", packed)


@mutant(workload="recurrent")
def stores_a_state_that_was_advanced_past_its_boundary(patch: Patch) -> None:
    def with_the_latest_state(
        group: KVCacheGroup, table: Sequence[int], blocks_per_chunk: int, first_chunk: int, end_chunk: int
    ) -> Blocks:
        chunks, block_ids = blocks_to_store(group, table, blocks_per_chunk, first_chunk, end_chunk)
        if group.kind is not AttentionKind.RECURRENT:
            return chunks, block_ids
        is_last = [at % blocks_per_chunk == blocks_per_chunk - 1 for at in range(len(block_ids))]
        return chunks, [table[-1] if last else own for last, own in zip(is_last, block_ids, strict=True)]

    patch.setattr(offers_module, "blocks_to_store", with_the_latest_state)


@mutant(workload="recurrent")
def loads_the_state_of_one_block_too_early(patch: Patch) -> None:
    def early(table: Sequence[int], block_tokens: int, *tokens: int) -> Blocks:
        numbers, block_ids = blocks_to_load(table, block_tokens, *tokens)
        if numbers and numbers[0] and table[numbers[0] - 1] == NULL_BLOCK_ID:
            numbers = [number - 1 for number in numbers]
        return numbers, block_ids

    patch.setattr(loads_module, "blocks_to_load", early)


@mutant()
def ignores_the_limit_on_stores_in_flight(patch: Patch) -> None:
    patch.setattr(JobTable, "num_storable_blocks", 10**6)


@mutant(connector="eager-requests", workload="aborts")
def frees_blocks_of_ended_requests_while_stores_read_them(patch: Patch) -> None:
    patch.setattr(OffloadingScheduler, "_needs_request", lambda self, request_id: False)


@mutant(connector="eager-requests", workload="aborts")
def forgets_to_release_ended_requests(patch: Patch) -> None:
    patch.setattr(OffloadingScheduler, "_take_released", lambda self: ())


@mutant(connector="lazy", workload="multi-turn")
def forgets_blocks_that_were_stored_lazily(patch: Patch) -> None:
    def end(self: PooledStores, store: Store, outcome: TransferOutcome) -> None:
        offers_module.end_store(self._shared, store, outcome)

    patch.setattr(PooledStores, "end", end)


@mutant(workload="tiny-pool")
def forgets_an_event_when_chunks_are_evicted(patch: Patch) -> None:
    patch.setattr(TierEvents, "_take_back", lambda self, medium, keys: None)


@mutant(connector="multi", faults="raises", first_seed=38)
def still_counts_the_chunks_of_a_connector_that_was_turned_off(patch: Patch) -> None:
    patch.setattr(ConnectorGuard, "_keep_levels", lambda self, stats: stats)


@mutant(workload="tiny-pool")
def counts_evicted_chunks_as_if_they_were_there(patch: Patch) -> None:
    get_kv_connector_stats = OffloadingScheduler.get_kv_connector_stats
    patch.setattr(
        OffloadingScheduler,
        "get_kv_connector_stats",
        lambda self: {name: max(0, value) for name, value in get_kv_connector_stats(self).items()},
    )


@mutant()
def remembers_ended_requests_for_ever(patch: Patch) -> None:
    explain = OffloadingScheduler.explain

    def remembers(self: OffloadingScheduler, request_id: str) -> Any:
        state = self.requests[request_id]
        report = explain(self, request_id)
        self.requests[request_id] = state
        return report

    patch.setattr(OffloadingScheduler, "explain", remembers)


@mutant(connector="multi", first_seed=6)
def tells_every_child_to_load_what_one_child_found(patch: Patch) -> None:
    def all_load(self: MultiConnectorScheduler, request: Any, blocks: Any, num_external_tokens: int) -> None:
        chosen = self._chosen.pop(request.request_id, None) if num_external_tokens else None
        if chosen is not None:
            self._loading[request.request_id] = chosen[0]
            self._new_loads.append(request.request_id)
        for child in self.children:
            child.update_state_after_alloc(request, blocks, num_external_tokens)

    patch.setattr(MultiConnectorScheduler, "update_state_after_alloc", all_load)


@mutant(connector="multi-requests", workload="aborts", first_seed=23)
def releases_a_request_when_its_first_child_has_finished(patch: Patch) -> None:
    bind = MultiConnectorWorker.bind_connector_metadata

    def first_keeper_only(self: MultiConnectorWorker, metadata: Any) -> None:
        sends = {ident: keepers[:1] for ident, keepers in metadata.new_sends.items()}
        bind(self, replace(metadata, new_sends=sends))

    patch.setattr(MultiConnectorWorker, "bind_connector_metadata", first_keeper_only)


@mutant()
def stores_what_options_forbid(patch: Patch) -> None:
    create = RequestState.create
    patch.setattr(RequestState, "create", lambda *args, **_: create(*args))


@mutant(workload="limits")
def stores_more_than_a_client_allows(patch: Patch) -> None:
    parse = TransferParams.parse
    patch.setattr(TransferParams, "parse", lambda *args: replace(parse(*args), max_store_tokens=None))


@mutant(workload="limits")
def loads_more_than_a_client_allows(patch: Patch) -> None:
    parse = TransferParams.parse
    patch.setattr(TransferParams, "parse", lambda *args: replace(parse(*args), max_load_tokens=None))


@mutant(faults="failed")
def finds_a_chunk_again_that_is_known_to_be_bad(patch: Patch) -> None:
    end = Loads.end

    def forgetful(self: Loads, load: Load, outcome: TransferOutcome, output: KVConnectorOutput) -> None:
        with pytest.MonkeyPatch.context() as inner:
            release = type(load.handle).release
            inner.setattr(type(load.handle), "release", lambda handle, bad=(): release(handle))
            end(self, load, outcome, output)

    patch.setattr(Loads, "end", forgetful)


@mutant(connector="any", workload="any", faults="all", first_seed=154)
def finds_a_full_hit_without_what_the_last_query_sees(patch: Patch) -> None:
    init = _Windowed.__init__

    def behind(self: _Windowed, units: Any, step: int, last_query: int, *others: Any, **options: Any) -> None:
        init(self, units, step, last_query + 1, *others, **options)

    patch.setattr(_Windowed, "__init__", behind)


# --- workers ----------------------------------------------------------------------------------------------------------


@mutant()
def reports_stores_before_they_are_copied(patch: Patch) -> None:
    get_transfer_results = OffloadingWorker.get_transfer_results

    def hasty(self: OffloadingWorker, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        finished = get_transfer_results(self, finished_req_ids)
        metadata = self._metadata
        assert isinstance(metadata, OffloadingMetadata)
        stores = {store.job_id for store in metadata.stores}
        told = vars(self).setdefault("told", set())
        jobs = {job_id: outcome for job_id, outcome in finished.jobs.items() if job_id not in told}
        told |= stores
        return replace(finished, jobs={**jobs, **dict.fromkeys(stores, TransferOutcome.DONE)})

    patch.setattr(OffloadingWorker, "get_transfer_results", hasty)


@mutant()
def starts_stores_before_the_forward_pass(patch: Patch) -> None:
    start, save = OffloadingWorker.start_load_kv, OffloadingWorker.wait_for_save

    def both(self: OffloadingWorker) -> None:
        start(self)
        save(self)

    patch.setattr(OffloadingWorker, "start_load_kv", both)
    patch.setattr(OffloadingWorker, "wait_for_save", lambda self: None)


@mutant(faults="failed")
def ignores_failed_loads(patch: Patch) -> None:
    get_transfer_results = OffloadingWorker.get_transfer_results

    def rosy(self: OffloadingWorker, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        finished = get_transfer_results(self, finished_req_ids)
        self._invalid_block_ids.clear()
        jobs = dict.fromkeys(finished.jobs, TransferOutcome.DONE)
        return replace(finished, failed_recving=frozenset(), jobs=jobs)

    patch.setattr(OffloadingWorker, "get_transfer_results", rosy)


@mutant(connector="eager-requests", workload="preemption")
def does_not_end_stores_of_preempted_requests(patch: Patch) -> None:
    patch.setattr(OffloadingWorker, "handle_preemptions", lambda self: None)


@mutant(connector="eager-requests", first_seed=15)
def remembers_only_one_of_the_requests_whose_blocks_a_job_reads(patch: Patch) -> None:
    patch.setattr(
        JobTable,
        "is_storing",
        lambda self, request_id: any(request_id == min(store.request_ids) for store in self.stores()),
    )


@mutant()
def mixes_up_the_slots_of_several_prefixes(patch: Patch) -> None:
    prepare = TierManager.prepare_stores

    def mixed_up(self: TierManager, offers: Any) -> Any:
        handle: Any = prepare(self, offers)
        if len(offers) > 1:
            handle.slots = handle.slots[::-1]
        return handle

    patch.setattr(TierManager, "prepare_stores", mixed_up)


@mutant(workload="ranks")
def aggregates_too_early(patch: Patch) -> None:
    init = OutputAggregator.__init__

    def hasty(self: OutputAggregator, world_size: int, *args: Any, **options: Any) -> None:
        init(self, world_size, *args, **options)
        self._expected = 1

    patch.setattr(OutputAggregator, "__init__", hasty)


@mutant(workload="ranks")
def believes_the_best_of_several_workers(patch: Patch) -> None:
    report = OutputAggregator._count

    def rosy(self: OutputAggregator, rank: int, finished: KVConnectorTransferResults) -> None:
        # Loads count as ended as soon as one worker has loaded.
        report(self, rank, finished)
        for transfer in self._recving._pending.values():
            transfer.ranks = set(range(self._world_size))

    patch.setattr(OutputAggregator, "_count", rosy)


@mutant(workload="ranks", first_seed=29)
def lets_only_its_own_loads_wait_for_what_a_worker_stores(patch: Patch) -> None:
    # A store ends when the blocks were read. Rows are written when the same worker loads: others load before that.
    submit = LinkTransfers.submit

    def behind(self: LinkTransfers, job: CopyJob) -> None:
        unwritten = vars(self).setdefault("unwritten", [])
        if job.direction is Direction.STORE:
            unwritten.append((list(job.rows), self._region[list(job.block_ids)].copy()))
            self._results.append(CopyResult(job, TransferOutcome.DONE, frozenset(), 0.0))
            return
        while unwritten:
            rows, blocks = unwritten.pop(0)
            self._rows[rows] = blocks
        submit(self, job)

    patch.setattr(LinkTransfers, "submit", behind)


@mutant(workload="ranks")
def leaves_what_another_worker_should_write_to_nobody(patch: Patch) -> None:
    init = SharedStores.__init__

    def careless(
        self: SharedStores, inner: TransferWorker, is_own: Callable[[int], bool], rows_per_block: Sequence[int] = ()
    ) -> None:
        init(self, inner, lambda row: row % 2 == 0 and is_own(row), rows_per_block)

    patch.setattr(SharedStores, "__init__", careless)


@mutant(workload="mixed-groups")
def loads_the_rows_of_a_block_in_another_order(patch: Patch) -> None:
    submit = GroupedTransfers.submit

    def reversed_loads(self: GroupedTransfers, job: CopyJob) -> None:
        is_load = job.direction is Direction.LOAD
        submit(self, replace(job, rows=job.rows[::-1]) if is_load else job)

    patch.setattr(GroupedTransfers, "submit", reversed_loads)


@mutant(workload="mixed-groups")
def gives_a_row_to_two_chunks(patch: Patch) -> None:
    give_back = RowTable._give_back

    def twice(self: RowTable, slot: int) -> None:
        rows = self.rows_at[slot]
        give_back(self, slot)
        self._free_rows += rows[:1]

    patch.setattr(RowTable, "_give_back", twice)


# --- managers and policies --------------------------------------------------------------------------------------------


@mutant(workload="tiny-pool")
def forgets_a_pin(patch: Patch) -> None:
    prepare = TierManager.prepare_load

    def unpinned(self: TierManager, keys: Any) -> Any:
        handle: Any = prepare(self, keys)
        self.table.unpin(handle.places)
        return handle

    patch.setattr(TierManager, "prepare_load", unpinned)


@mutant()
def finds_chunks_that_are_being_written(patch: Patch) -> None:
    prepare = TierManager.prepare_stores

    def visible_at_once(self: TierManager, offers: Any) -> Any:
        handle: Any = prepare(self, offers)
        for slot in handle.places:
            self.table.states[slot] = READY
        return handle

    patch.setattr(TierManager, "prepare_stores", visible_at_once)


@mutant(workload="tiny-pool")
def evicts_what_is_in_use(patch: Patch) -> None:
    evict = Runs.evict

    def heedless(self: Runs, *options: Any) -> Any:
        pins = self._table.pins
        self._table.pins = array("i", [0]) * len(pins)
        victims = evict(self, *options)
        self._table.pins = pins
        return victims

    patch.setattr(Runs, "evict", heedless)


@mutant(faults="failed")
def leaks_the_slots_of_failed_stores(patch: Patch) -> None:
    end = TierManager._end_store
    patch.setattr(TierManager, "_end_store", lambda self, handle, is_stored: is_stored and end(self, handle, is_stored))


@mutant(workload="stops")
def keeps_chunks_after_a_reset(patch: Patch) -> None:
    patch.setattr(TierManager, "reset", lambda self: not self.num_writing)


@mutant()
def a_policy_forgets_what_it_added(patch: Patch) -> None:
    for policy in (LRUPolicy, FIFOPolicy):
        patch.setattr(policy, "add", lambda self, keys, parent, slots: None)


@mutant(workload="tiny-pool")
def gives_a_slot_to_two_chunks(patch: Patch) -> None:
    take = ChunkTable.take

    def twice(self: ChunkTable, num_slots: int) -> list[int]:
        slots = take(self, num_slots)
        slots[-1:] = slots[:1]
        return slots

    patch.setattr(ChunkTable, "take", twice)


# --- tiers below host memory ------------------------------------------------------------------------------------------


@mutant(connector="tiered", workload="ranks", faults="failed,corrupt", first_seed=93)
def believes_one_worker_that_a_chunk_has_arrived(patch: Patch) -> None:
    def either(left: bytes, right: bytes) -> bytes:
        return bytes(map(max, left, right))

    patch.setattr(tasks_module, "both", either)
    patch.setattr(messages_module, "both", either)


@mutant(connector="tiered", workload="returning", faults="failed")
def keeps_chunks_whose_fetch_failed(patch: Patch) -> None:
    end = Fetches._end_load

    def good(self: Fetches, handle: Any, fetch: Any, task: Any, succeeded: Sequence[bool], is_done: bool) -> None:
        end(self, handle, fetch, task, [True] * len(succeeded), is_done)

    patch.setattr(Fetches, "_end_load", good)


@mutant(connector="tiered", workload="returning", faults="slow,restart")
def writes_down_what_it_has_not_pinned(patch: Patch) -> None:
    prepare = TierManager.prepare_load
    take = Writes.take

    def unpinned(self: Writes) -> Any:
        with pytest.MonkeyPatch.context() as inner:

            def without_hold(manager: TierManager, keys: Any) -> Any:
                handle: Any = prepare(manager, keys)
                manager.table.unpin(handle.places)
                return handle

            inner.setattr(TierManager, "prepare_load", without_hold)
            return list(take(self))

    patch.setattr(Writes, "take", unpinned)


@mutant(connector="tiered", workload="endurance", faults="hangs", first_seed=8)
def gives_slots_back_before_the_workers_have_reported(patch: Patch) -> None:
    def at_once(self: Fetches, fetch: Fetch) -> None:
        self.live.discard(fetch)
        for task in [task for task in self._tasks if task.owner is fetch]:
            task.on_end(task, [False] * len(task.keys), False)
            task.on_end = lambda *_: None

    patch.setattr(Fetches, "_forget", at_once)


@mutant(connector="tiered", workload="returning")
def never_lets_go_of_what_it_has_fetched(patch: Patch) -> None:
    patch.setattr(Fetch, "release", lambda self: None)


@mutant(connector="tiered", workload="returning", first_seed=5)
def reserves_slots_while_it_looks_a_request_up(patch: Patch) -> None:
    must_wait = Prefetcher.must_wait

    def at_once(self: Prefetcher, *arguments: Any) -> bool:
        answer = must_wait(self, *arguments)
        self._current = self._asked
        self._advance_all()
        return answer

    patch.setattr(Prefetcher, "must_wait", at_once)


@mutant(connector="tiered", workload="returning")
def shortens_the_waits_of_others_while_it_looks_a_request_up(patch: Patch) -> None:
    must_wait = Prefetcher.must_wait

    def selfish(self: Prefetcher, waiting: Waiting | None, *arguments: Any) -> bool:
        for other in self._asked:
            if other is not waiting:
                other.limit_s -= 0.001
        return must_wait(self, waiting, *arguments)

    patch.setattr(Prefetcher, "must_wait", selfish)


@mutant(connector="eager", workload="shared-prefix")
def marks_chunks_as_used_before_admission(patch: Patch) -> None:
    find = TierLookup.find

    def touching(self: TierLookup, state: Any, num_computed_tokens: int) -> Any:
        lookup = find(self, state, num_computed_tokens)
        for keys in state.keys:
            self._manager.touch(keys.keys)
        return lookup

    patch.setattr(TierLookup, "find", touching)


@mutant(connector="tiered", workload="stops", first_seed=5)
def keeps_the_names_of_chunks_after_a_reset(patch: Patch) -> None:
    patch.setattr(TaskTable, "rename", lambda self: None)


# --- patience with tiers below host memory ----------------------------------------------------------------------------


@mutant(connector="tiered", workload="endurance", faults="hangs", first_seed=8)
def waits_longer_than_computing_takes(patch: Patch) -> None:
    patch.setattr(Prefetcher, "_limit_by_computing", lambda *_: None)


@mutant(connector="tiered", workload="endurance", faults="hangs", first_seed=8)
def never_counts_the_time_of_a_wait(patch: Patch) -> None:
    patch.setattr(Waiting, "waited_s", property(lambda self: 0.0, lambda self, seconds: None))


@mutant(connector="tiered", workload="endurance", first_seed=3)
def waits_although_there_is_nothing_worth_waiting_for(patch: Patch) -> None:
    go = Waiting.go
    patch.setattr(Waiting, "go", lambda self, event: None if event is Event.NOTHING else go(self, event))


@mutant(connector="tiered", workload="endurance", faults="hangs", first_seed=83)
def never_leaves_a_tier_that_hangs_alone(patch: Patch) -> None:
    patch.setattr(CircuitBreaker, "note_failure", lambda self: False)


@mutant(connector="tiered", workload="endurance", faults="hangs", first_seed=28)
def takes_a_job_that_hangs_for_one_too_many(patch: Patch) -> None:
    patch.setattr(MediumHealth, "_was_one_too_many", lambda *_: True)


@mutant(connector="tiered", workload="endurance", faults="hangs", first_seed=257)
def takes_writes_that_succeed_for_loads(patch: Patch) -> None:
    original = MediumHealth.__init__

    def one_for_all(self: MediumHealth, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self._breakers = dict.fromkeys(Access, self._breakers[Access.LOAD])

    patch.setattr(MediumHealth, "__init__", one_for_all)


@mutant(connector="tiered", workload="endurance", first_seed=42)
def never_learns_how_slow_loads_are(patch: Patch) -> None:
    patch.setattr(Fetches, "_note_pace", lambda *_: None)


@mutant(connector="tiered", workload="endurance", first_seed=58)
def always_asks_tiers_however_slow_they_are(patch: Patch) -> None:
    patch.setattr(Prefetcher, "_skip_slow", lambda *_: False)


# --- the device pool and the scheduler --------------------------------------------------------------------------------


@mutant()
def finds_evicted_blocks(patch: Patch) -> None:
    forget = BlockPool._forget

    def only_when_asked(self: BlockPool, block: KVCacheBlock) -> None:
        prefix = block.prefix
        forget(self, block)
        assert prefix is not None
        self._index.setdefault(prefix, {})[block.block_id] = block

    patch.setattr(BlockPool, "_forget", only_when_asked)


@mutant()
def frees_shared_blocks_at_once(patch: Patch) -> None:
    def free_ids(self: BlockPool, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        del evict_first
        for block in self._own(block_ids, "free"):
            if block.ref_cnt:
                block.ref_cnt = 0
                self._free.append(block)

    patch.setattr(BlockPool, "free_ids", free_ids)


@mutant()
def touches_without_leaving_the_free_queue(patch: Patch) -> None:
    def touch_ids(self: BlockPool, block_ids: Sequence[int]) -> None:
        for block in self._own(block_ids, "touch"):
            block.ref_cnt += 1

    patch.setattr(BlockPool, "touch_ids", touch_ids)


@mutant()
def lets_tenants_share_kv(patch: Patch) -> None:
    def saltless(*, salt: str | None) -> bytes:
        del salt
        return root_hash()

    patch.setattr(request_module, "root_hash", saltless)


@mutant()
def runs_requests_before_their_loads_end(patch: Patch) -> None:
    load = RequestQueues.load

    def at_once(self: RequestQueues, request: Any) -> None:
        load(self, request)
        request.num_computed_tokens = min(request.num_reused_tokens, request.num_tokens - 1)
        self.wait(request)

    patch.setattr(RequestQueues, "load", at_once)
    patch.setattr(TransferTable, "strays", lambda self, finished: [])


@mutant(workload="aborts")
def frees_aborted_requests_while_they_load(patch: Patch) -> None:
    def freed_at_once(self: RequestQueues, request: Any) -> None:
        self._kv.free(request)

    patch.setattr(RequestQueues, "free_unless_in_use", freed_at_once)
    patch.setattr(TouchHolder, "hold", lambda self, block_ids: None)
    patch.setattr(TouchHolder, "release", lambda self, block_ids: None)


@mutant(workload="retries")
def takes_a_request_while_an_earlier_one_of_its_id_is_copied(patch: Patch) -> None:
    add = Scheduler.add_request

    def without_asking(self: Scheduler, request: Any) -> None:
        with pytest.MonkeyPatch.context() as blindfold:
            blindfold.setattr(self._queues.transfers, "holds", lambda request: False)
            add(self, request)

    patch.setattr(Scheduler, "add_request", without_asking)


@mutant(workload="retries")
def computes_a_request_in_the_step_that_ends_an_earlier_one_of_its_id(patch: Patch) -> None:
    patch.setattr(RequestQueues, "has_just_ended", lambda self, request_id: False)


@mutant(faults="failed")
def keeps_invalid_blocks_in_the_prefix_cache(patch: Patch) -> None:
    patch.setattr(ConnectorReports, "_discard_blocks", lambda self, block_ids: None)


@mutant()
def caches_blocks_that_are_not_full(patch: Patch) -> None:
    cache = KVCacheManager.cache_blocks

    def too_many(self: KVCacheManager, request: Any, num_tokens: int) -> None:
        cache(self, request, min(num_tokens + 3, request.num_tokens))

    patch.setattr(KVCacheManager, "cache_blocks", too_many)


@mutant()
def stops_while_stores_are_in_flight(patch: Patch) -> None:
    patch.setattr(Scheduler, "has_work", lambda self: bool(self._queues))


@mutant(connector="eager-requests", workload="preemption")
def does_not_tell_the_connector_of_preemptions(patch: Patch) -> None:
    preempt = RequestQueues.preempt

    def silent(self: RequestQueues, request: Any) -> None:
        preempt(self, request)
        self._preempted_ids.clear()

    patch.setattr(RequestQueues, "preempt", silent)


# --- hints and quotas -------------------------------------------------------------------------------------------------


@mutant(workload="hints")
def evicts_chunks_under_a_lease(patch: Patch) -> None:
    aside = Share.give_up_aside
    patch.setattr(Share, "give_up_aside", lambda self, count, first, end: aside(self, count, first, max(end, HELD + 1)))


@mutant(workload="hints")
def gives_leases_beyond_their_budget(patch: Patch) -> None:
    patch.setattr(Budgets, "room", lambda self, tenant, budget: 1_000_000)


@mutant(workload="hints")
def lets_all_tenants_together_pin_more_than_the_budget(patch: Patch) -> None:
    room = Budgets.room

    def of_its_own(self: Budgets[Any], tenant: str | None, budget: Budget) -> int:
        used, self._used = self._used, Counter()
        own = room(self, tenant, budget)
        self._used = used
        return own

    patch.setattr(Budgets, "room", of_its_own)


@mutant(workload="hints", first_seed=17)
def lets_a_tenant_release_what_another_has_pinned(patch: Patch) -> None:
    release = Hints._release

    def of_anybody(self: Hints, request: RequestView, hint: Hint) -> HintOutcome:
        outcome = release(self, request, hint)
        about = [key for keys in self._keys_about(request) for key in keys.keys]
        for grant in self.grants.on(about) if hint.lease is None else ():
            self._end(grant, HintEnd.RELEASED)
        return outcome

    patch.setattr(Hints, "_release", of_anybody)


@mutant(workload="hints", first_seed=11)
def lets_requests_of_others_renew_a_lease(patch: Patch) -> None:
    note_used = Hints.note_used

    def of_anybody(self: Hints, state: RequestState) -> None:
        note_used(self, state)
        for grant in self.grants.on([key for keys in state.keys for key in keys.keys]):
            grant.ends_at = max(grant.ends_at, self._clock() + grant.ttl_s)
            self.grants._ends.set(grant, grant.ends_at)

    patch.setattr(Hints, "note_used", of_anybody)


@mutant(workload="hints")
def covers_a_chunk_behind_the_range_of_a_hint(patch: Patch) -> None:
    in_range = hints_module._in_range

    def wider(keys: Sequence[ChunkKeys], hint: Hint) -> list[OffloadKey]:
        return in_range(keys, hint if hint.end is None else replace(hint, end=hint.end + keys[0].chunk_tokens))

    patch.setattr(hints_module, "_in_range", wider)


@mutant(workload="hints")
def carries_out_hints_that_their_tenant_may_not_give(patch: Patch) -> None:
    patch.setattr(Hints, "_refusal_of", lambda self, hint, tenant: "")


@mutant(workload="hints", first_seed=13)
def claims_leases_on_what_counts_for_another_tenant(patch: Patch) -> None:
    patch.setattr(TierManager, "others", lambda self, keys, tenant: [])


@mutant(workload="hints")
def lets_leases_last_for_ever(patch: Patch) -> None:
    patch.setattr(Hints, "expire", lambda self: None)


@mutant(workload="hints")
def leaves_chunks_out_of_order_when_their_hint_ends(patch: Patch) -> None:
    end, rank = Grants.end, Grants.rank

    def forgetful(self: Grants, grant: Grant) -> list[OffloadKey]:
        patch.setattr(Grants, "rank", lambda *_: None)
        keys = end(self, grant)
        patch.setattr(Grants, "rank", rank)
        return keys

    patch.setattr(Grants, "end", forgetful)


@mutant(workload="hints")
def does_not_give_budgets_back(patch: Patch) -> None:
    take = Budgets.take
    patch.setattr(Budgets, "take", lambda self, tenant, budget, count: take(self, tenant, budget, max(count, 0)))


@mutant(workload="hints")
def takes_what_is_reserved_for_a_tenant(patch: Patch) -> None:
    init = Share.__init__

    def unreserved(self: Share, policy: Any, number: int = 0, limits: Limits = Limits()) -> None:  # noqa: B008  # frozen
        init(self, policy, number, replace(limits, reserved=0))

    patch.setattr(Share, "__init__", unreserved)


@mutant(workload="hints")
def lets_a_tenant_pass_its_hard_limit(patch: Patch) -> None:
    patch.setattr(Shares, "num_allowed", lambda self, keys, parent: len(keys))


@mutant(workload="hints")
def forgets_a_hint_in_its_answer(patch: Patch) -> None:
    on_hints = Hints.on_hints
    patch.setattr(Hints, "on_hints", lambda self, request, hints: on_hints(self, request, hints)[:1])


# --- what is held and not found ---------------------------------------------------------------------------------------


@mutant("tiered", "queues", first_seed=157)
def never_looks_for_what_it_has_lost_while_it_waited(patch: Patch) -> None:
    patch.setattr(Waiting, "has_lost", lambda self, num_tokens: False)


@mutant("tiered", "returning", first_seed=105)
def says_of_what_it_did_not_fetch_that_it_is_not_there(patch: Patch) -> None:
    patch.setattr(LowerTierGuest, "where_is", lambda self, key: "")


@mutant("tiered", "returning", first_seed=42)
def takes_what_host_memory_lacks_for_absent(patch: Patch) -> None:
    patch.setattr(Prefetcher, "_may_have_more", lambda self, wanted, num_found_tokens: False)


# --- what disks are told, and tell ------------------------------------------------------------------------------------


@mutant("tiered", "hints", first_seed=90)
def tells_disks_nothing_of_hints_that_come_later(patch: Patch) -> None:
    patch.setattr(LowerTiers, "rank", lambda self, keys: None)


@mutant("tiered", "hints", first_seed=90)
def writes_chunks_down_without_their_leases(patch: Patch) -> None:
    notes = TaskTable._notes

    def unclaimed(self: TaskTable, keys: Sequence[OffloadKey]) -> tuple[Note, ...]:
        return tuple(replace(note, retention=NO_RETENTION) for note in notes(self, keys))

    patch.setattr(TaskTable, "_notes", unclaimed)


@mutant("tiered", "shared-beginnings", first_seed=23)
def goes_on_announcing_what_a_disk_has_evicted(patch: Patch) -> None:
    patch.setattr(TierState, "note_lost", lambda self, keys: None)


@mutant("tiered", "returning", faults="failed", first_seed=49)
def announces_nothing_that_is_found_once_a_job_has_failed(patch: Patch) -> None:
    conclude = LowerTiers._conclude

    def silent(self: LowerTiers, task: TierTask, *, is_done: bool) -> None:
        conclude(self, task, is_done=is_done)
        if not is_done:
            vars(self.tiers[task.tier])["_note_events"] = lambda *_: None

    patch.setattr(LowerTiers, "_conclude", silent)


# --- host memory and the device pool as one cache ---------------------------------------------------------------------


@mutant(connector="exclusive", workload="multi-turn")
def never_takes_a_copy(patch: Patch) -> None:
    patch.setattr(PooledTable, "take_copies", lambda self, num_free_rows, may_take: [])
    patch.setattr(FIFOPolicy, "give_up", lambda self, num_chunks, worth=0: None)


@mutant(connector="exclusive", first_seed=175)
def takes_copies_that_are_being_read(patch: Patch) -> None:
    patch.setattr(TierManager, "may_be_taken", lambda self, slots: self._may_take(self.table.keys_at(slots)))


@mutant(connector="exclusive")
def never_sees_what_the_device_evicts(patch: Patch) -> None:
    patch.setattr(DeviceChunks, "take_lost", lambda self: {})


@mutant(connector="exclusive")
def watches_nothing_for_a_request_that_is_about_to_get_blocks(patch: Patch) -> None:
    patch.setattr(PooledStores, "expect", lambda self, state, num_computed_tokens, num_hit_tokens: None)


@mutant(connector="exclusive", first_seed=175)
def does_not_watch_the_blocks_of_a_request_that_ends(patch: Patch) -> None:
    patch.setattr(DeviceChunks, "watch_ended", lambda self, block_ids: None)


@mutant(connector="exclusive")
def saves_what_was_evicted_after_the_step_has_overwritten_it(patch: Patch) -> None:
    def build(self: OffloadingScheduler, step: Any) -> Any:
        metadata: Any = build_connector_meta(self, step)
        return replace(metadata, stores=(*metadata.stores, *metadata.saves), saves=())

    build_connector_meta = OffloadingScheduler.build_connector_meta
    patch.setattr(OffloadingScheduler, "build_connector_meta", build)


@mutant(connector="exclusive")
def takes_whatever_was_evicted_at_any_time_for_evicted_just_now(patch: Patch) -> None:
    watch = DeviceChunks.watch

    def keep(self: DeviceChunks) -> dict[bytes, int]:
        watched = dict(self._watched)
        lost = take_lost(self)
        self._watched |= {at: known for at, known in watched.items() if at not in lost.values()}
        return lost

    take_lost = DeviceChunks.take_lost
    patch.setattr(DeviceChunks, "take_lost", keep)
    patch.setattr(
        DeviceChunks, "watch", lambda self, num_blocks: watch(self, num_blocks) if not self._watched else None
    )
