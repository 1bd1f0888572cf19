"""Oracle of wishes: what clients and options allow to be loaded and stored, and nothing more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from cargohold.blocks import READY
from cargohold.cache import OffloadKey, OffloadManager
from cargohold.cache.manager import SlotReservation, StoreOffer, offload_key
from cargohold.connector.kernel.jobs import Load, Store
from cargohold.connector.offloading import OffloadingScheduler
from cargohold.engine.core.request import Request, SchedulerStep, StepOutput
from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.lab.simulation.connectors import TierPlan, offloading_sides
from cargohold.lab.simulation.fault_wrappers import FaultyManager
from cargohold.lab.simulation.replica import Oracle, Replica
from cargohold.protocol import ConnectorGuard, KVConnectorOutput, TransferOutcome


@dataclass(slots=True)
class _SideWishes:
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
      prompt; what the device is about to lose only if that is so of some request.
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
            _SideWishes(
                side,
                guards,
                plan,
                manager.inner if isinstance(manager := side.shared.manager, FaultyManager) else manager,
            )
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
                watched.allowed[update.request.request_id] |= _storable(update.request, self._engine, watched)

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Nothing forbidden was begun in the step, and chunks that a load has found bad cannot be found."""
        if self._violations:
            self.fail("; ".join(self._violations))
        self._invalid_block_ids |= output.connector.invalid_block_ids
        for watched in self._sides:
            in_flight = {load.job_id for load in watched.side.shared.jobs.loads()}
            for job_id in [job_id for job_id in watched.loads if job_id not in in_flight]:
                load, stored = watched.loads.pop(job_id), watched.stored.pop(job_id)
                if all(guard.broken is None for guard in watched.guards):
                    self._check_bad(watched.manager, load, stored, has_failed=job_id in watched.failed)
                watched.failed.discard(job_id)
                self._invalid_block_ids.difference_update(load.block_ids)

    def _watch(self, watched: _SideWishes) -> None:
        jobs, manager = watched.side.shared.jobs, watched.manager
        add_load, add_store = jobs.add_load, jobs.add_store
        prepare_stores, prepare_saves = manager.prepare_stores, manager.prepare_saves

        def load(job: Load) -> None:
            self._check_load(job)
            watched.loads[job.job_id], watched.stored[job.job_id] = job, set()
            add_load(job)

        def store(job: Store) -> None:
            self._check_store(watched, job)
            add_store(job)

        def place(offers: Sequence[StoreOffer]) -> SlotReservation:
            return noted(prepare_stores(offers))

        def save(keys: Sequence[OffloadKey], **options: bool) -> SlotReservation:
            return noted(prepare_saves(keys, **options))

        def noted(handle: SlotReservation) -> SlotReservation:
            for stored in watched.stored.values():
                stored.update(handle.keys)
            return handle

        update = watched.side.update_connector_output

        def note_failed(output: KVConnectorOutput) -> None:
            watched.failed |= {
                job_id
                for job_id, job in watched.loads.items()
                if output.jobs.get(job_id) is TransferOutcome.FAILED and job.request_id in output.failed_recving
            }
            update(output)

        vars(jobs).update(add_load=load, add_store=store)
        vars(manager).update(prepare_stores=place, prepare_saves=save)
        vars(watched.side).update(update_connector_output=note_failed)

    def _check_load(self, load: Load) -> None:
        num_tokens = len(load.origins)
        limit = _limit(self._engine.requests[load.request_id], "max_load_tokens")
        if limit is not None and num_tokens > limit:
            self._violations.append(
                f"{num_tokens} tokens are loaded for request {load.request_id}, which allows {limit}"
            )

    def _check_store(self, watched: _SideWishes, store: Store) -> None:
        allowed: set[OffloadKey] = set()
        for request_id in self._engine.requests if store.is_save else store.request_ids:
            allowed |= watched.allowed[request_id]
            allowed |= _storable(self._engine.requests[request_id], self._engine, watched)
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


def _storable(request: Request, engine: Replica, watched: _SideWishes) -> set[OffloadKey]:
    """The chunks of a request that may be stored."""
    plan, namespace = watched.plan, watched.side.shared.namespace
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
            keys.add(offload_key(hashes[end // layout.hash_block_tokens - 1], group.index, namespace))
    return keys
