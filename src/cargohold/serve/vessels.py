"""How full each place is that keeps KV, and what has moved: for the page and for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cargohold.async_llm import AsyncLLM
from cargohold.connector.factory import Offload
from cargohold.connector.offloading import OffloadConfig
from cargohold.connector.offloading.factory import OffloadingFactory
from cargohold.connector.offloading.lazy import LazyOffloadConfig
from cargohold.protocol import last_name
from cargohold.units import parse_bytes


@dataclass(frozen=True, slots=True)
class Vessel:
    """A place that keeps KV.

    Attributes:
        name: ``device``, ``host``, or a tier's.
        held_bytes: bytes of KV in it that can be found again; of a shared store, those that this engine has stored.
        capacity_bytes: bytes that it may hold; ``None`` if it sets its own limit.
        used_bytes: bytes that requests are using now; on the device only.
        in_bytes, out_bytes: bytes copied into it and out of it, since the start.
        stored_chunks, evicted_chunks: chunks that entered and left; ``None`` where that is not counted.
        suspended: how many of its look-ups, loads and writes are suspended, on all workers.
        is_off: whether it is out of use until a restart.
    """

    name: str
    held_bytes: float
    capacity_bytes: float | None
    used_bytes: float | None = None
    in_bytes: float = 0
    out_bytes: float = 0
    stored_chunks: float | None = None
    evicted_chunks: float | None = None
    suspended: int = 0
    is_off: bool = False

    def as_json(self) -> dict[str, Any]:
        """What people are shown."""
        return asdict(self)


def vessels(llm: AsyncLLM, stats: Mapping[str, float]) -> list[Vessel]:
    """All places, the fastest first. Of several connectors, what they keep in places of the same name is added up.

    Args:
        llm: the model.
        stats: its counters.
    """
    total: dict[str, float] = {}
    for name, value in stats.items():
        total[last_name(name)] = total.get(last_name(name), 0) + value
    configs = list(_configs(llm.offload))
    host = [_host(llm, configs, total)] if configs else []
    limits: dict[str, float | None] = {}
    for config in configs:
        for tier in config.tiers:
            limit = getattr(tier, "max_bytes", None)
            limits[tier.kind] = None if limit is None else parse_bytes("max_bytes", limit)
    return [_device(llm), *host, *(_lower(name, limit, total) for name, limit in limits.items())]


def _device(llm: AsyncLLM) -> Vessel:
    status, block_bytes = llm.status, llm.plan.layout.block_bytes * llm.plan.layout.world_size
    used = status.num_blocks - status.num_free_blocks
    capacity = (llm.plan.layout.num_blocks - 1) * block_bytes
    return Vessel("device", status.num_cached_blocks * block_bytes, capacity, used * block_bytes)


def _host(llm: AsyncLLM, configs: Sequence[OffloadConfig], total: Mapping[str, float]) -> Vessel:
    layout = llm.plan.layout
    block_bytes = layout.block_bytes * layout.world_size
    slots = [(OffloadingFactory(config).num_slots(layout), config.blocks_per_chunk * block_bytes) for config in configs]
    capacity = sum(num_slots * chunk_bytes for num_slots, chunk_bytes in slots)
    mean_chunk_bytes = capacity / max(1, sum(num_slots for num_slots, _ in slots))
    return Vessel(
        "host",
        total.get("num_ready_chunks", 0) * mean_chunk_bytes,
        capacity,
        in_bytes=total.get("store_blocks", 0) * layout.block_bytes,
        out_bytes=total.get("load_blocks", 0) * layout.block_bytes,
        stored_chunks=total.get("stored_chunks", 0),
        evicted_chunks=total.get("removed_chunks", 0),
    )


def _lower(name: str, limit: float | None, total: Mapping[str, float]) -> Vessel:
    return Vessel(
        name,
        total.get(f"num_{name}_bytes", 0),
        limit,
        in_bytes=total.get(f"{name}_stored_bytes", 0),
        out_bytes=total.get(f"{name}_loaded_bytes", 0),
        stored_chunks=total.get(f"{name}_stored_chunks", 0),
        suspended=int(total.get(f"num_{name}_suspended", 0)),
        is_off=bool(total.get(f"{name}_off", 0)),
    )


def _configs(offload: Offload | Sequence[Offload] | None) -> Iterator[OffloadConfig]:
    """Options of our own connectors. What others keep is not known."""
    match offload:
        case OffloadConfig():
            yield offload
        case LazyOffloadConfig():
            yield offload.common()
        case Sequence():
            for one in offload:
                yield from _configs(one)
