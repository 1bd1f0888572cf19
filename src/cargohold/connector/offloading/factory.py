"""Puts both sides of the offloading connector together for an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cargohold.cache import OffloadManager, make_manager
from cargohold.cache.rows import RowPlan, even_rows
from cargohold.cache.shares import Limits
from cargohold.connector.config import EAGER, LAZY, OffloadConfig, limits_in_chunks
from cargohold.connector.kernel.pooled_stores import PooledStores
from cargohold.connector.kernel.stores import EagerStores, MakeStores
from cargohold.connector.offloading.scheduler import OffloadingScheduler
from cargohold.connector.offloading.tails import TailedScheduler
from cargohold.connector.offloading.worker import OffloadingWorker
from cargohold.deadlines import FINISH, REQUEST, WRITE
from cargohold.errors import ConfigError, option_path
from cargohold.option_values import MAX_TIMEOUT_S, format_bytes, made_by, too_small
from cargohold.process import memory_limit_bytes
from cargohold.protocol import AttentionKind, Clock, KVCacheLayout, SchedulerEnvironment, ServedModel, WorkerEnvironment
from cargohold.tiers import HostMemory, Namespace, QueueConfig, TierConfig, TierQueue, check_tier, open_tier, tier_names
from cargohold.tiers.chunk_format import room_for_details
from cargohold.tiers.namespace import digest_model
from cargohold.tiers.opening import namespace_in
from cargohold.tiers.scheduler_side import (
    Admission,
    LowerTiers,
    TieringConfig,
    TierOptions,
    WriteMode,
    random_epoch,
)
from cargohold.tiers.worker import JobQueue, TierWorker
from cargohold.transfer import TransferWorker
from cargohold.transfer.compare import Comparer
from cargohold.transfer.port import share_stores


def served_model(layout: KVCacheLayout) -> ServedModel:
    """Return the model that the engine serves. Raises ``ConfigError`` if the engine cannot say all that determines its KV."""
    if layout.model is None:
        raise ConfigError("tiers", None, "this engine does not say which model it serves, so KV cannot outlive it")
    if layout.model.obstacle:
        raise ConfigError("tiers", layout.model.name, f"{layout.model.obstacle}, so KV cannot outlive the engine")
    return layout.model


def namespace_of(layout: KVCacheLayout, rank: int, blocks_per_chunk: int, plan: RowPlan | None = None) -> Namespace:
    """Return all that determines the bytes of one worker's chunks and the meaning of their keys. Reads the model's files."""
    model = served_model(layout)
    weights, config = digest_model(model)
    return Namespace(
        label=model.name,
        weights=weights,
        config=config,
        dtype=model.dtype,
        layout=_describe(layout, blocks_per_chunk, plan or even_rows(layout)),
        split=_split(layout, rank),
        hashing=f"{layout.hash_block_tokens} tokens per hash",
        details_bytes=details_bytes(layout, blocks_per_chunk),
    )


def details_bytes(layout: KVCacheLayout, blocks_per_chunk: int) -> int:
    """Return the most bytes that a chunk's details may take."""
    return room_for_details(blocks_per_chunk * max(group.block_tokens for group in layout.groups), blocks_per_chunk)


def _split(layout: KVCacheLayout, rank: int) -> str:
    """What one worker holds. Sums over another number of workers are rounded in another way: such KV is not the same."""
    shard = f"rank {rank // layout.num_replicas} of {layout.num_shards}"
    return shard if layout.num_replicas == 1 else f"{shard}, each on {layout.num_replicas} workers"


def _describe(layout: KVCacheLayout, blocks_per_chunk: int, plan: RowPlan) -> str:
    groups = "; ".join(
        f"group {group.index}: {group.kind.value}, window {group.window_tokens}, {group.block_tokens} tokens per block, "
        f"layers {' '.join(group.layer_names)}"
        for group in layout.groups
    )
    rows = "" if plan.is_even else f", in rows of {plan.row_bytes} bytes, {' '.join(map(str, plan.per_block))} by group"
    return f"{blocks_per_chunk} blocks of {layout.block_bytes} bytes per chunk{rows}; {groups}"


# --- makes both sides of the tiers below host memory ------------------------------------------------------------------

MAX_INFLIGHT_BYTES = 256 * 1024**2
"""Maximum number of bytes that are being written to one tier at the same time, over all workers."""


def check_tiers(config: OffloadConfig, layout: KVCacheLayout) -> None:
    """Raise ``ConfigError`` if workers on this machine could not open a tier, before they load anything."""
    for at, tier in enumerate(config.tiers):
        with option_path(f"tiers[{at}]."):
            check_tier(tier, chunk_sizes(config, layout), layout.num_shards)
            tier.require_unused(partial(_namespace_ids, tier, config, layout))


def _namespace_ids(tier: TierConfig, config: OffloadConfig, layout: KVCacheLayout) -> set[str]:
    """Return the ids of all workers' namespaces in a tier. Reads the model's files."""
    of_first = namespace_of(layout, 0, config.blocks_per_chunk, config.plan_rows(layout))
    of_all = [replace(of_first, split=_split(layout, rank)) for rank in range(layout.world_size)]
    return {namespace_in(tier, of_one).id for of_one in of_all}


def require_memory(host_bytes: int | str, num_bytes: int) -> None:
    """Raise ``ConfigError`` for ``host_bytes`` if this machine does not allow the ``num_bytes`` that it is to have of them."""
    limit = memory_limit_bytes()
    if num_bytes > limit:
        raise ConfigError("host_bytes", host_bytes, f"this machine allows {format_bytes(limit)} in all")


def tier_options(config: OffloadConfig, layout: KVCacheLayout) -> list[TierOptions]:
    """Return how the tiers in ``config`` are to be used. Raises ``ConfigError`` if this engine cannot use tiers at all."""
    if config.tiers:
        served_model(layout)
    sizes = [size * layout.num_shards for size in chunk_sizes(config, layout)]
    named = zip(config.tiers, tier_names(config.tiers), strict=True)
    options = [_options(tier, name, sizes) for tier, name in named]
    return [replace(of_tier, is_read_only=config.read_only) for of_tier in options]


def open_queues(config: OffloadConfig, environment: WorkerEnvironment, namespace: Namespace) -> dict[str, TierQueue]:
    """Open each tier on a worker, for chunks of a namespace; return a queue per tier with threads of its own, by name.

    Raises:
        ConfigError: a tier cannot be opened; no tier is left open then.
    """
    layout = environment.layout
    queues: dict[str, TierQueue] = {}
    try:
        for at, (tier, options) in enumerate(zip(config.tiers, tier_options(config, layout), strict=True)):
            with option_path(f"tiers[{at}]."):
                opened = open_tier(
                    tier,
                    namespace,
                    chunk_sizes(config, layout),
                    layout.num_shards,
                    request_s=min(REQUEST.seconds(config.transfer_timeout_s), MAX_TIMEOUT_S),
                    number_types=[group.number_type for group in layout.groups],
                )
            opened.begin()
            limits = QueueConfig(num_threads=tier.num_threads, finish_s=FINISH.seconds(config.shutdown_timeout_s))
            queues[options.name] = TierQueue(opened, environment.clock, limits)
    except BaseException:
        for queue in queues.values():
            queue.shutdown()
        raise
    return queues


def chunk_sizes(config: OffloadConfig, layout: KVCacheLayout) -> list[int]:
    """Return the bytes of a chunk of each group on one worker."""
    plan = config.plan_rows(layout)
    return [count * plan.row_bytes * config.blocks_per_chunk for count in plan.per_block]


def _options(tier: TierConfig, name: str, sizes: Sequence[int]) -> TierOptions:
    """Return how a tier is to be used, if chunks have these sizes, by group, over all workers."""
    most = max(sizes)
    limits = QueueConfig()  # the workers' queues have these: a job that they refuse looks like a failure of the medium
    return TierOptions(
        name=name,
        admission=Admission(tier.admission),
        write_mode=WriteMode(tier.write),
        max_chunks=_chunks_in(tier.num_max_bytes, min(sizes)),
        max_daily_chunks=_chunks_in(tier.num_daily_bytes, most),
        chunk_parts=() if min(sizes) == most else tuple([size / most for size in sizes]),
        has_index=tier.has_index,
        locality=tier.locality,
        is_listed=tier.is_listed,
        max_inflight_chunks=max(1, min(limits.max_store_chunks, MAX_INFLIGHT_BYTES // most)),
        max_asked_chunks=limits.max_urgent_chunks,
        num_asked_at_once=tier.num_asked_at_once,
    )


def _chunks_in(num_bytes: int | None, chunk_bytes: int) -> int | None:
    """Return how many chunks a limit in bytes allows; ``None`` if there is no limit."""
    return None if num_bytes is None else num_bytes // chunk_bytes


_SPARE_PART = 64
"""Part of host memory that may be spare for verification."""

# --- puts both sides of the offloading connector together for an engine -----------------------------------------------


def scheduler_side(
    config: OffloadConfig,
    environment: SchedulerEnvironment,
    host: OffloadManager,
    tiers: Sequence[TierOptions] = (),
    *,
    num_spare: int = 0,
    new_epoch: Callable[[], bytes] = random_epoch,
) -> OffloadingScheduler:
    """Make the scheduler side over host memory, and over tiers below it if there are any.

    Args:
        config: options.
        environment: facts about the engine.
        host: the manager of host memory.
        tiers: how each tier below host memory is to be used, the fastest first.
        num_spare: number of slots that host memory has after the manager's, for verification.
        new_epoch: makes a new name at each reset; it becomes part of the chunks' names in lower tiers.
    """
    lower = None
    if tiers:
        tiering = TieringConfig(
            num_workers=environment.layout.world_size,
            restore_timeout_s=config.restore_timeout_s,
            store_timeout_s=WRITE.seconds(config.transfer_timeout_s),
            record_events=environment.emits_events,
            local_hashes=environment.local_hashes,
        )
        lower = LowerTiers(host, tiers, environment.clock, tiering, new_epoch=new_epoch)
    make_stores = _planner_of(config, environment)
    has_tails = environment.layout.has_tails and config.blocks_per_chunk == 1
    make_side = TailedScheduler if has_tails else OffloadingScheduler
    side = make_side(config, environment, host, make_stores=make_stores, lower=lower, num_spare=num_spare)
    side.name = _name_of(config)
    return side


def _name_of(config: OffloadConfig) -> str:
    """Return the name of both sides: a composed connector puts it in front of their counters."""
    return LAZY if config.mode == LAZY else OffloadingScheduler.name


def _planner_of(config: OffloadConfig, environment: SchedulerEnvironment) -> MakeStores:
    """Return what decides which chunks are copied down."""
    if config.mode == EAGER or config.read_only:
        return EagerStores
    if config.mode != LAZY:
        return partial(PooledStores, lookahead=config.lookahead_blocks)
    per_step = sum(-(-environment.max_step_tokens // group.block_tokens) for group in environment.layout.groups)
    return partial(PooledStores, lookahead=config.lookahead_blocks or 2 * per_step, is_lazy=True)


def host_manager(
    config: OffloadConfig, layout: KVCacheLayout, num_slots: int, quotas: Mapping[str, Limits], *, record_events: bool
) -> OffloadManager:
    """Make the manager of host memory: ours, or the one that options name. Raises ``ConfigError`` if that cannot be made."""
    if config.manager is None:
        plan = config.plan_rows(layout)
        chunk_rows = () if plan.is_even else [count * config.blocks_per_chunk for count in plan.per_block]
        return make_manager(config.policy, num_slots, record_events=record_events, quotas=quotas, chunk_rows=chunk_rows)
    own: OffloadManager = made_by("manager", config.manager, OffloadManager, num_slots, record_events=record_events)
    return own


def _whole_blocks(kv_caches: Sequence[Sequence[Any]], plan: RowPlan) -> Sequence[Any]:
    """Return regions with all bytes of a block, whatever its group. Raises ``ValueError`` if no group has them."""
    for regions in kv_caches:
        if sum(region.shape[1] for region in regions) == plan.row_bytes:
            return regions
    raise ValueError(f"no group's regions have {plan.row_bytes} bytes per block")


@dataclass(frozen=True, slots=True)
class OffloadingFactory:
    """Makes the offloading connector. Satisfies ``cargohold.protocol.KVConnectorFactory``.

    Attributes:
        config: options.
    """

    config: OffloadConfig

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        """Make the scheduler side. Raises ``ConfigError`` if host memory cannot hold a single chunk."""
        layout, config = environment.layout, self.config
        num_slots = self.num_slots(layout)
        quotas = limits_in_chunks(config.quotas, num_slots, config.num_host_bytes // num_slots)
        host = host_manager(config, layout, num_slots, quotas, record_events=environment.emits_events)
        options, num_spare = tier_options(config, layout), self.num_spare(layout)
        return scheduler_side(config, environment, host, options, num_spare=num_spare)

    def make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        """Make the worker side, with this worker's shards of the tiers. Raises ``ConfigError`` if one cannot be opened."""
        worker = self._make_worker_side(environment)
        worker.name = _name_of(self.config)
        return worker

    def _make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        layout, per_chunk = environment.layout, self.config.blocks_per_chunk
        # Workers that each had memory of their own would miss what the others store.
        assert (environment.exchange is None) == (layout.num_replicas == 1), "replicas share memory"
        plan = self.config.plan_rows(layout)
        num_rows = (self.num_slots(layout) + self.num_spare(layout)) * per_chunk * plan.most
        require_memory(self.config.host_bytes, num_rows * plan.row_bytes)
        memory = HostMemory(num_rows, plan.row_bytes, environment.exchange)
        replica = environment.rank % layout.num_replicas

        def make_transfers(kv_caches: Sequence[Sequence[Any]]) -> TransferWorker:
            transfers = self._make_transfers(kv_caches, plan, memory, environment.clock)
            return share_stores(transfers, replica, layout.num_replicas, per_chunk * plan.most, plan.per_block)

        compare = Comparer(memory.rows, layout, plan.per_block).compare
        if not self.config.tiers:
            return OffloadingWorker(make_transfers, compare=compare)
        if replica:
            bystanders = {options.name: JobQueue() for options in tier_options(self.config, layout)}
            part = TierWorker(bystanders, memory.rows, per_chunk, environment.clock, environment.rank)
            return OffloadingWorker(make_transfers, part, compare)
        namespace = namespace_of(layout, environment.rank, per_chunk, plan)
        queues = open_queues(self.config, environment, namespace)
        shared = next((tier for tier in self.config.tiers if tier.locality == "REMOTE"), None)
        outline = None if shared is None else namespace_in(shared, namespace).outline()
        part = TierWorker(queues, memory.rows, per_chunk, environment.clock, environment.rank, outline)
        return OffloadingWorker(make_transfers, part, compare)

    def _make_transfers(
        self, kv_caches: Sequence[Sequence[Any]], plan: RowPlan, memory: HostMemory, clock: Clock
    ) -> TransferWorker:
        from cargohold.transfer.cpu import make_grouped_transfers, make_transfer_worker  # noqa: PLC0415  # imports torch

        if self.config.transfer is not None:
            own: TransferWorker = made_by(
                "transfer", self.config.transfer, TransferWorker, _whole_blocks(kv_caches, plan), memory, clock
            )
            return own
        if plan.is_even:
            return make_transfer_worker(_whole_blocks(kv_caches, plan), memory, clock)
        return make_grouped_transfers(kv_caches, plan.per_block, memory, clock)

    def num_slots(self, layout: KVCacheLayout) -> int:
        """Return the number of slots in host memory, for chunks of the largest group, without spare ones.

        Raises:
            ConfigError: it cannot hold a single one.
        """
        num_spare, chunk_bytes = self.num_spare(layout), self._slot_bytes(layout)
        num_slots = self.config.num_host_bytes // chunk_bytes - num_spare
        if num_slots < 1:
            needed = f"one chunk takes {format_bytes(chunk_bytes)}" + ", and verify as much" * bool(num_spare)
            raise too_small("host_bytes", self.config.host_bytes, needed)
        return num_slots

    def num_spare(self, layout: KVCacheLayout) -> int:
        """Return the number of slots in host memory that are spare for verification: as many as it may fill in a second."""
        share, spare_bytes = self.config.verified_share, self.config.num_host_bytes // _SPARE_PART
        chunk_bytes = self._slot_bytes(layout)
        # Engines may compute other states where steps end elsewhere, as vLLM does LFM2's on CPUs.
        has_states = any(group.kind is AttentionKind.RECURRENT for group in layout.groups)
        if share is None or (not share and (spare_bytes < chunk_bytes or has_states)):
            return 0
        return max(1, min(spare_bytes, self.config.num_verify_bytes_per_s) // chunk_bytes)

    def _slot_bytes(self, layout: KVCacheLayout) -> int:
        return max(chunk_sizes(self.config, layout)) * layout.num_shards
