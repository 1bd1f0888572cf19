"""Counters of the connectors in vLLM's log and in its Prometheus endpoint.

Both sides' counters meet on the scheduler side, which hands them to vLLM once a step. vLLM's logger adds them up with
``aggregate`` and prints ``reduce``; its metrics endpoint passes each to ``PromMetrics.observe``, in the process that serves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge as PromGauge

from cargohold.integrations.vllm import compat
from cargohold.protocol import Stats


@dataclass(frozen=True, slots=True)
class Metric:
    """One time series.

    Attributes:
        name: in Prometheus; a counter's gets ``_total`` behind it.
        help: what it counts.
        labels: what tells it from others of that name.
        is_level: whether it can go down: its counter comes as differences.
    """

    name: str
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    is_level: bool = False


_HITS = "Prompt tokens of admitted requests by where their KV was found; computed means nowhere."
_BYTES = "Bytes copied between device and tier, over all workers."
_SECONDS = "Seconds between start and end of transfers, over all workers."
_FAILURES = "Transfers that failed or were given up, by kind."
_LOAD, _STORE = (("direction", "load"),), (("direction", "store"),)

METRICS: Mapping[str, Metric] = {
    "device_hit_tokens": Metric("cargohold_prompt_tokens", _HITS, (("tier", "device"),)),
    "host_hit_tokens": Metric("cargohold_prompt_tokens", _HITS, (("tier", "host"),)),
    "computed_tokens": Metric("cargohold_prompt_tokens", _HITS, (("tier", "computed"),)),
    "load_bytes": Metric("cargohold_transfer_bytes", _BYTES, _LOAD),
    "store_bytes": Metric("cargohold_transfer_bytes", _BYTES, _STORE),
    "load_s": Metric("cargohold_transfer_seconds", _SECONDS, _LOAD),
    "store_s": Metric("cargohold_transfer_seconds", _SECONDS, _STORE),
    "loads_failed": Metric("cargohold_failures", _FAILURES, (("kind", "load"),)),
    "stores_failed": Metric("cargohold_failures", _FAILURES, (("kind", "store"),)),
    "connectors_off": Metric("cargohold_failures", _FAILURES, (("kind", "connector_off"),)),
    "deferred_lookups": Metric(
        "cargohold_deferred_lookups", "Requests that waited because a tier, or another request's load, was not ready."
    ),
    "stores_deferred": Metric(
        "cargohold_deferred_stores", "Times that stores waited for room in the tier or in flight."
    ),
    "evicted_chunks": Metric("cargohold_evicted_chunks", "Chunks that left the tier."),
    "stored_chunks": Metric("cargohold_stored_chunks", "Chunks that entered the tier."),
    "ready_chunks": Metric("cargohold_tier_chunks", "Chunks that the tier holds.", is_level=True),
    "tier_slots": Metric("cargohold_tier_capacity_chunks", "Chunks that the tier can hold.", is_level=True),
}
"""By the name of the connectors' counter. Counters that are not here appear in vLLM's log alone."""


def for_vllm(stats: Stats, block_bytes: int) -> dict[str, float]:
    """The connectors' counters as vLLM's users want them: bytes instead of blocks.

    Args:
        stats: counters since the last call.
        block_bytes: of one block on one worker, as it is copied.
    """
    result = {name: value for name, value in stats.items() if value}
    for direction in ("load", "store"):
        blocks = result.pop(f"{direction}_blocks", 0)
        if blocks:
            result[f"{direction}_bytes"] = blocks * block_bytes
    asked = result.pop("asked_tokens", 0)
    computed = asked - sum(result.get(name, 0) for name in ("device_hit_tokens", "host_hit_tokens"))
    if computed > 0:
        result["computed_tokens"] = computed
    return result


_registered: list[Any] = []
# Of the last engine in this process: two cannot have time series of the same name.


class TransferStats(compat.KVConnectorStats):  # type: ignore[misc]  # vLLM's class, or an inert one without it
    """Counters on their way to vLLM's loggers; ``data`` maps their names to increments."""

    data: dict[str, float]

    def reset(self) -> None:
        """Start from zero."""
        self.data = {}

    def aggregate(self, other: TransferStats) -> TransferStats:
        """Both; this object is changed and returned, as vLLM's own do."""
        total: Counter[str] = Counter(self.data)
        total.update(other.data)
        self.data = dict(total)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the log shows of an interval."""
        return {name: round(value, 3) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class PromMetrics(compat.KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM's class, or an inert one without it
    """The time series in ``METRICS``, per engine.

    Args:
        vllm_config: vLLM's configuration.
        metric_types: what vLLM uses for each kind of metric.
        labelnames: labels that all of vLLM's metrics have.
        per_engine_labelvalues: their values, per engine.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _forget_earlier()
        families: dict[str, Any] = {}
        self._series: dict[tuple[int, str], Any] = {}
        for counter, metric in METRICS.items():
            own_labels = [name for name, _ in metric.labels]
            if metric.name not in families:
                kind = metric_types[PromGauge if metric.is_level else PromCounter]
                families[metric.name] = kind(
                    name=metric.name, documentation=metric.help, labelnames=[*labelnames, *own_labels]
                )
                _registered.append(families[metric.name])
            for engine, values in per_engine_labelvalues.items():
                labels = [*values, *(value for _, value in metric.labels)]
                self._series[engine, counter] = families[metric.name].labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counters."""
        for counter, value in transfer_stats_data.items():
            series = self._series.get((engine_idx, counter))
            if series is not None:
                series.inc(value)


def _forget_earlier() -> None:
    while _registered:
        with suppress(KeyError, ValueError):  # somebody cleared the registry, or it is not this one
            REGISTRY.unregister(_registered.pop())
