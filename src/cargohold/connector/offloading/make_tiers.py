"""Makes both sides of the tiers below host memory."""

from __future__ import annotations

from collections import Counter

from cargohold.connector.offloading.config import OffloadConfig
from cargohold.connector.offloading.namespaces import namespace_of, served_model
from cargohold.offload.tier import QueueConfig, TierConfig, TierQueue, check_tier, open_tier
from cargohold.offload.tiering import Admission, TierOptions, WriteMode
from cargohold.protocol import KVCacheLayout, WorkerEnvironment

MAX_INFLIGHT_BYTES = 256 * 1024**2
"""Maximum number of bytes that are being written to one tier at the same time, over all workers."""


def check_tiers(config: OffloadConfig, layout: KVCacheLayout) -> None:
    """Raise ``ConfigError`` if workers on this machine could not open a tier, before they load anything."""
    for tier in config.tiers:
        check_tier(tier, _shard_bytes(config, layout), layout.world_size)


def tier_options(config: OffloadConfig, layout: KVCacheLayout) -> list[TierOptions]:
    """Return how the tiers in ``config`` are to be used. Raises ``ConfigError`` if this engine cannot use tiers at all."""
    if config.tiers:
        served_model(layout)
    chunk_bytes = layout.block_bytes * layout.world_size * config.blocks_per_chunk
    seen: Counter[str] = Counter()
    options = []
    for tier in config.tiers:
        seen[tier.kind] += 1
        options.append(
            _options(tier, tier.kind if seen[tier.kind] == 1 else f"{tier.kind}{seen[tier.kind]}", chunk_bytes)
        )
    return options


def open_queues(config: OffloadConfig, environment: WorkerEnvironment) -> dict[str, TierQueue]:
    """Open each tier on a worker; return a queue per tier with threads of its own, by name. Reads the model's weights.

    Raises:
        ConfigError: a tier cannot be opened; no tier is left open then.
    """
    layout = environment.layout
    namespace = namespace_of(layout, environment.rank, config.blocks_per_chunk)
    queues: dict[str, TierQueue] = {}
    try:
        for tier, options in zip(config.tiers, tier_options(config, layout), strict=True):
            opened = open_tier(tier, namespace, _shard_bytes(config, layout), layout.world_size)
            limits = QueueConfig(num_threads=tier.num_threads, finish_s=config.shutdown_timeout_s)
            queues[options.name] = TierQueue(opened, environment.clock, limits)
    except BaseException:
        for queue in queues.values():
            queue.shutdown()
        raise
    return queues


def _shard_bytes(config: OffloadConfig, layout: KVCacheLayout) -> int:
    return layout.block_bytes * config.blocks_per_chunk


def _options(tier: TierConfig, name: str, chunk_bytes: int) -> TierOptions:
    limits = QueueConfig()  # the workers' queues have these: a job that they refuse looks like a failure of the medium
    return TierOptions(
        name=name,
        admission=Admission(tier.admission),
        write_mode=WriteMode(tier.write),
        max_chunks=_chunks_in(tier.num_max_bytes, chunk_bytes),
        max_daily_chunks=_chunks_in(tier.num_daily_bytes, chunk_bytes),
        has_index=tier.has_index,
        locality=tier.locality,
        max_inflight_chunks=max(1, min(limits.max_store_chunks, MAX_INFLIGHT_BYTES // chunk_bytes)),
        max_asked_chunks=limits.max_urgent_chunks,
        num_asked_at_once=tier.num_asked_at_once,
    )


def _chunks_in(num_bytes: int | None, chunk_bytes: int) -> int | None:
    """Return how many chunks a limit in bytes allows; ``None`` if there is no limit."""
    return None if num_bytes is None else num_bytes // chunk_bytes
