"""Oracles: what clients wish for and forbid: hints, quotas and options hold what they say, and nothing more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from cargohold.blocks import READY
from cargohold.cache import OffloadKey, OffloadManager
from cargohold.cache.manager import StoreHandle, StoreOffer, offload_key
from cargohold.cache.shares import HELD, NORMAL
from cargohold.cache.tier_manager import TierManager
from cargohold.connector.offloading import OffloadingScheduler
from cargohold.connector.offloading.jobs import Load, Store
from cargohold.engine.core.request import Request, SchedulerStep, StepOutput
from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.protocol import ConnectorGuard, KVConnectorOutput, TransferOutcome
from cargohold.testing.simulation.connectors import TierPlan, live_sides, offloading_sides
from cargohold.testing.simulation.fault_wrappers import FaultyManager
from cargohold.testing.simulation.replica import STEP_S, Oracle, Replica
from cargohold.testing.simulation.tiers import ListedMedium
from cargohold.tiers.chunk_format import NO_CLAIM
from cargohold.tiers.scheduler_side import TieringManager

_LATE_S = 2.0
"""Seconds by which a lease may be overdue: an engine with nothing to do makes no steps."""


class HintOracle(Oracle):
    """Watches grants and evictions of the offloading connectors' tiers.

    * Budgets are kept, for all tenants together and for each, and count what grants cover.
    * A chunk under a lease is not evicted.
    * No tenant has more than its hard limit; nobody else's store pushes a tenant below what is reserved for it.
    * What has expired, was released or is void weighs nothing: no chunk is out of the policy's order then.
    * In the end, disks know of leases and priorities what the hints in force ask, unless a fault has struck.

    Args:
        engine: the replica.
        media: yields each tier that lists its chunks and takes what hints ask.
        is_excused: whether a fault has struck.
    """

    name = "hints"

    def __init__(
        self,
        engine: Replica,
        media: Callable[[], Iterable[ListedMedium]] = tuple,
        is_excused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._media = media
        self._is_excused = is_excused
        self._found = ""
        for side in live_sides(engine.scheduler.connector):
            manager = _tier_manager(side.manager)
            if manager is not None:
                self._watch(side, manager)

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Check grants, budgets and quotas."""
        if self._found:
            self.fail(self._found)
        for side in live_sides(self._engine.scheduler.connector):
            hints = side.hints
            try:
                hints.check()
            except AssertionError as error:
                self.fail(f"{side.name}: {error}")
            now = self._engine.clock() - STEP_S
            overdue = [grant for grant in hints.grants if grant.ends_at < now - _LATE_S and step.scheduled]
            if overdue:
                self.fail(
                    f"{side.name}: hint {overdue[0].hint.action_id} should have ended at {overdue[0].ends_at:.3f} s"
                )
            manager = _tier_manager(side.manager)
            if manager is not None:
                self._check_quotas(side, manager)
                num_aside = 0 if manager.shares is None else manager.shares.num_aside
                if num_aside and not hints.grants:
                    self.fail(f"{side.name}: {num_aside} chunks are out of order although there are no hints")

    def at_end(self) -> None:
        """Compare what hints ask with what disks were told."""
        sides = {id(side.manager): side for side in live_sides(self._engine.scheduler.connector)}
        for medium in self._media():
            side = sides.get(id(medium.manager))
            if side is not None and medium.is_certain and medium.tier.ranks and not self._is_excused():
                self._check_claims(side, medium)

    def _check_claims(self, side: OffloadingScheduler, medium: ListedMedium) -> None:
        now = self._engine.clock()
        covered = [key for grant in side.hints.grants for key in grant.keys]
        for key in medium.find(covered):
            told = medium.claimed(key)
            if told is None:
                continue
            (claim, ends), asked = told, side.hints.claim_of(key)
            is_live = ends > now
            what = f"{side.name}: of chunk {key.hex()[:8]}, the disk was told {claim}, and hints ask {asked}"
            if asked == NO_CLAIM:
                self.require(ends <= now + _LATE_S and (claim.priority or NORMAL) >= NORMAL, what)
            elif asked.priority is not None and asked.priority < NORMAL:
                self.require(claim.priority == asked.priority, what)
            elif asked.lasts_s > 0:
                self.require(is_live and claim.priority == asked.priority, what)

    def _check_quotas(self, side: OffloadingScheduler, manager: TierManager) -> None:
        used = manager.usage()
        for tenant, limits in manager.quotas.items():
            if limits.hard is not None and used[tenant] > limits.hard:
                self.fail(f"{side.name}: {tenant} has {used[tenant]} chunks, and at most {limits.hard} are allowed")

    def _watch(self, side: OffloadingScheduler, manager: TierManager) -> None:
        """Look at every eviction as it happens. Not raised there: guards would catch that."""
        table: Any = manager.table
        evict_end = table.evict_end

        def watched(slots: list[int], num_chunks: int) -> tuple[list[int], list[int]]:
            keys, owners, used = table.keys[:], table.owners, list(table.used)
            victims, exposed = evict_end(slots, num_chunks)
            for slot in victims:
                key = keys[slot]
                level = side.hints.level_of(key)
                if level == HELD:
                    self._found = f"{side.name} evicted chunk {key.hex()[:8]} although a lease holds it"
                if owners is not None:
                    self._check_reserved(manager, owners[slot], used, is_lowered=level < NORMAL)
                    used[owners[slot]] -= 1
            return victims, exposed

        table.evict_end = watched

    def _check_reserved(self, manager: TierManager, owner: int, used: list[int], *, is_lowered: bool) -> None:
        shares = manager.shares
        if shares is None or owner in (0, shares.tenant) or is_lowered:
            return
        tenant, limits = list(manager.quotas.items())[owner - 1]
        if used[owner] <= limits.reserved:
            self._found = f"{tenant} was pushed below the {limits.reserved} chunks that are reserved for it"


def _tier_manager(manager: object) -> TierManager | None:
    """The manager of host memory itself, without what is around it."""
    while isinstance(manager, FaultyManager | TieringManager):
        manager = manager.inner
    return manager if isinstance(manager, TierManager) else None


@dataclass(slots=True)
class _WatchedSide:
    """One offloading connector.

    Attributes:
        side, guards, plan: its scheduler side, the guards around it, and its options.
        manager: its manager, without the faults around it.
        loads: its loads in flight, and those that ended in the step that is going on, by job id.
        failed: the ids of those that failed as a whole. Composed connectors give ids of their own to the engine.
        stored: for each of these loads, the chunks that have come into the tier since, computed or from below: another load has
            found them bad, too.
        allowed: by request id, the chunks that may be stored for the requests of that id which have ended.
    """

    side: OffloadingScheduler
    guards: Sequence[ConnectorGuard]
    plan: TierPlan
    manager: OffloadManager
    loads: dict[int, Load] = field(default_factory=dict)
    stored: dict[int, set[OffloadKey]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    allowed: defaultdict[str, set[OffloadKey]] = field(default_factory=lambda: defaultdict(set))


class WishOracle(Oracle):
    """Watches every load and store of the offloading connectors as it begins.

    * No more is loaded for a request than its ``max_load_tokens``.
    * A chunk is stored for a request only if it lies in its first ``max_store_tokens`` and, without ``store_generated``, in its
      prompt. Lazy connectors do not know whose blocks they store.
    * When a load has ended, chunks that it has found bad are not there.

    Args:
        engine: the replica.
        plans: the options of its offloading connectors, in order.
    """

    name = "wishes"

    def __init__(self, engine: Replica, plans: Sequence[TierPlan]) -> None:
        self._engine = engine
        sides = offloading_sides(engine.scheduler.connector)
        self._sides = [
            _WatchedSide(side, guards, plan, _innermost(side.manager))
            for (side, guards), plan in zip(sides, plans, strict=True)
        ]
        self._invalid_block_ids: set[int] = set()
        # What was found within a connector's call, where a guard would contain an exception.
        self._violations: list[str] = []
        for watched in self._sides:
            self._watch(watched)

    def on_update(self, update: RequestUpdate) -> None:
        """Remember what may be stored of a request that has ended: some of it may be stored later."""
        if update.request.is_finished:
            for watched in self._sides:
                watched.allowed[update.request.request_id] |= _storable(update.request, self._engine, watched.plan)

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Nothing forbidden was begun in the step, and chunks that a load has found bad cannot be found."""
        if self._violations:
            self.fail("; ".join(self._violations))
        self._invalid_block_ids |= output.connector.invalid_block_ids
        for watched in self._sides:
            in_flight = {load.job_id for load in watched.side.jobs.loads()}
            for job_id in [job_id for job_id in watched.loads if job_id not in in_flight]:
                load, stored = watched.loads.pop(job_id), watched.stored.pop(job_id)
                if all(guard.broken is None for guard in watched.guards):
                    self._check_bad(watched.manager, load, stored, has_failed=job_id in watched.failed)
                watched.failed.discard(job_id)
                self._invalid_block_ids.difference_update(load.block_ids)

    def _watch(self, watched: _WatchedSide) -> None:
        jobs, manager = watched.side.jobs, watched.manager
        add_load, add_store, prepare_stores = jobs.add_load, jobs.add_store, manager.prepare_stores

        def load(job: Load) -> None:
            self._check_load(job)
            watched.loads[job.job_id], watched.stored[job.job_id] = job, set()
            add_load(job)

        def store(job: Store) -> None:
            self._check_store(watched, job)
            add_store(job)

        def place(offers: Sequence[StoreOffer]) -> StoreHandle:
            handle = prepare_stores(offers)
            for stored in watched.stored.values():
                stored.update(handle.keys)
            return handle

        update = watched.side.update_connector_output

        def note_failed(output: KVConnectorOutput) -> None:
            finished = output.finished
            watched.failed |= {
                job_id
                for job_id, job in watched.loads.items()
                if finished.jobs.get(job_id) is TransferOutcome.FAILED and job.request_id in finished.failed_recving
            }
            update(output)

        vars(jobs).update(add_load=load, add_store=store)
        vars(manager).update(prepare_stores=place)
        vars(watched.side).update(update_connector_output=note_failed)

    def _check_load(self, load: Load) -> None:
        num_tokens = len(load.origins.tiers)
        limit = _limit(self._engine.requests[load.request_id], "max_load_tokens")
        if limit is not None and num_tokens > limit:
            self._violations.append(
                f"{num_tokens} tokens are loaded for request {load.request_id}, which allows {limit}"
            )

    def _check_store(self, watched: _WatchedSide, store: Store) -> None:
        if watched.plan.lookahead is not None:
            return
        allowed: set[OffloadKey] = set()
        for request_id in store.request_ids:
            allowed |= watched.allowed[request_id]
            allowed |= _storable(self._engine.requests[request_id], self._engine, watched.plan)
        forbidden = set(store.handle.keys) - allowed
        if forbidden:
            names = " ".join(sorted(key.hex()[:8] for key in forbidden))
            self._violations.append(
                f"chunks {names} of {sorted(store.request_ids)} are stored against options or wishes"
            )

    def _check_bad(
        self, manager: OffloadManager, load: Load, stored: AbstractSet[OffloadKey], *, has_failed: bool
    ) -> None:
        found = [
            key.hex()[:8]
            for block_id, key in zip(load.block_ids, load.block_keys, strict=True)
            if (has_failed or block_id in self._invalid_block_ids)
            and key not in stored
            and manager.lookup([key])[0] == READY
        ]
        if found:
            self.fail(f"chunks {' '.join(found)} are found although load {load.job_id} has found them bad")


def _limit(request: Request, name: str) -> int | None:
    limit = (request.kv_transfer_params or {}).get(name)
    assert limit is None or isinstance(limit, int)
    return limit


def _storable(request: Request, engine: Replica, plan: TierPlan) -> set[OffloadKey]:
    """The chunks of a request that may be stored."""
    num_tokens = request.num_tokens
    if not plan.options.get("store_generated", True):
        num_tokens = min(num_tokens, request.num_prompt_tokens)
    limit = _limit(request, "max_store_tokens")
    if limit is not None:
        num_tokens = min(num_tokens, limit)
    layout, hashes = engine.layout, request.block_hashes
    keys = set()
    for group in layout.groups:
        chunk_tokens = group.block_tokens * plan.options.get("blocks_per_chunk", 1)
        for end in range(chunk_tokens, num_tokens + 1, chunk_tokens):
            keys.add(offload_key(hashes[end // layout.hash_block_tokens - 1], group.index))
    return keys


def _innermost(manager: OffloadManager) -> OffloadManager:
    return manager.inner if isinstance(manager, FaultyManager) else manager
