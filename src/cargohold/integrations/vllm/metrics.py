"""Counters and KV events of the connectors, in the forms that vLLM publishes.

Both sides' counters meet on the scheduler side, which hands them to vLLM once a step. vLLM's logger adds them up with
``aggregate`` and prints ``reduce``; its metrics endpoint passes each to ``PromMetrics.observe``, in the process that serves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge as PromGauge

from cargohold.integrations.vllm import compat
from cargohold.protocol import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Stats, is_level, last_name


@dataclass(frozen=True, slots=True)
class Metric:
    """One time series.

    Attributes:
        name: its name in Prometheus, which appends ``_total`` to the names of counters.
        help: what it counts.
        labels: names and values of the labels that tell it from other series with the same name.
        is_level: whether its value is a level, which can go down.
    """

    name: str
    help: str
    labels: tuple[tuple[str, str], ...] = ()
    is_level: bool = False


_PROMPT = "Prompt tokens of admitted requests by where their KV was found; computed means nowhere."
_BYTES = "Bytes copied between device and host memory, over all workers."
_SECONDS = "Seconds from when copies were asked for to their end, time in line included, over all workers."
_FAILURES = "What failed or was given up, by kind."
_OTHER = "Everything else that connectors and tiers count, by their own names."
_OTHER_LEVELS = "What else connectors and tiers say how much of it there is now, by their own names."

METRICS: Mapping[str, Metric] = {
    "device_tokens": Metric("cargohold_prompt_tokens", _PROMPT, (("tier", "device"),)),
    "computed_tokens": Metric("cargohold_prompt_tokens", _PROMPT, (("tier", "computed"),)),
    "load_bytes": Metric("cargohold_transfer_bytes", _BYTES, (("direction", "load"),)),
    "store_bytes": Metric("cargohold_transfer_bytes", _BYTES, (("direction", "store"),)),
    "load_s": Metric("cargohold_transfer_seconds", _SECONDS, (("direction", "load"),)),
    "store_s": Metric("cargohold_transfer_seconds", _SECONDS, (("direction", "store"),)),
    "loads_failed": Metric("cargohold_failures", _FAILURES, (("kind", "load"),)),
    "stores_failed": Metric("cargohold_failures", _FAILURES, (("kind", "store"),)),
    "connectors_off": Metric("cargohold_failures", _FAILURES, (("kind", "connector_off"),)),
    "deferred_lookups": Metric(
        "cargohold_deferred_lookups",
        "Requests that waited for a tier's answer, or for another request's load of the same.",
    ),
    "stores_deferred": Metric(
        "cargohold_deferred_stores", "Times that stores waited for room in the tier or in flight."
    ),
    "stored_chunks": Metric("cargohold_stored_chunks", "Chunks that entered host memory from the device."),
    "removed_chunks": Metric(
        "cargohold_removed_chunks", "Chunks that left host memory: evicted, found damaged, or dropped by a reset."
    ),
    "num_ready_chunks": Metric("cargohold_tier_chunks", "Chunks that host memory holds.", is_level=True),
}
"""Time series by the name of the connectors' counter."""

_TIER_TOKENS = "_hit_tokens"
# Either counted by each connector, so that several connectors would count a request several times, or told by other counters.
_NOT_SHOWN = frozenset({"asked_tokens", f"device{_TIER_TOKENS}", "loaded_blocks", "stored_blocks"})


def metric_of(counter: str) -> Metric:
    """The time series that a counter belongs to."""
    if counter in METRICS:
        return METRICS[counter]
    if counter.endswith(_TIER_TOKENS):
        return Metric("cargohold_prompt_tokens", _PROMPT, (("tier", counter.removesuffix(_TIER_TOKENS)),))
    name, text = ("cargohold_connector_level", _OTHER_LEVELS) if is_level(counter) else ("cargohold_connector", _OTHER)
    return Metric(name, text, (("counter", counter),), is_level(counter))


def for_vllm(stats: Stats, block_bytes: float) -> dict[str, float]:
    """The connectors' counters as vLLM's users want them: added up over connectors, and bytes instead of blocks.

    Args:
        stats: counters since the last call. Those of one of several connectors have its name and a dot in front.
        block_bytes: bytes of one block on one worker. Where workers differ, their mean: all of them copy the same blocks.
    """
    total: dict[str, float] = {}
    for full_name, value in stats.items():
        name = last_name(full_name)
        total[name] = total.get(name, 0) + value
    for direction in ("load", "store"):
        total[f"{direction}_bytes"] = total.pop(f"{direction}_blocks", 0) * block_bytes
    return {name: value for name, value in total.items() if value and name not in _NOT_SHOWN}


_registered: list[Any] = []
# Time series of the last engine in this process, to be unregistered before the next one: names must be unique.


class TransferStats(compat.KVConnectorStats):  # type: ignore[misc]  # vLLM's class, or an inert one without it
    """Counters on their way to vLLM's loggers; ``data`` maps their names to increments."""

    data: dict[str, float]

    def reset(self) -> None:
        """Start from zero."""
        self.data = {}

    def aggregate(self, other: TransferStats) -> TransferStats:
        """Add ``other`` to this object, and return this object, as vLLM's own classes do."""
        total: Counter[str] = Counter(self.data)
        total.update(other.data)
        self.data = dict(total)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Counters as the log shows them for an interval. Levels are left out: only their change in the interval is known."""
        return {name: round(value, 3) for name, value in sorted(self.data.items()) if not is_level(name)}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class PromMetrics(compat.KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM's class, or an inert one without it
    """The time series in ``METRICS``, per engine.

    Args:
        vllm_config: vLLM's configuration.
        metric_types: the class that vLLM uses for each of Prometheus's kinds of metric.
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
        self._types = metric_types
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[int, str], Any] = {}
        self._levels: Counter[tuple[int, str]] = Counter()
        for engine in per_engine_labelvalues:
            for counter in METRICS:
                self._find(engine, counter)  # so that what has not happened yet is shown as 0

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counters."""
        for counter, value in transfer_stats_data.items():
            series = self._find(engine_idx, counter)
            if metric_of(counter).is_level:
                # Added up here, because vLLM's gauges in Ray can only be set.
                self._levels[engine_idx, counter] += value
                series.set(self._levels[engine_idx, counter])
            else:
                series.inc(value)

    def _find(self, engine: int, counter: str) -> Any:
        """The time series of a counter, made when first asked for."""
        series = self._series.get((engine, counter))
        if series is None:
            metric = metric_of(counter)
            labels = [*self.per_engine_labelvalues[engine], *(value for _, value in metric.labels)]
            series = self._series[engine, counter] = self._family(metric).labels(*labels)
        return series

    def _family(self, metric: Metric) -> Any:
        if metric.name not in self._families:
            kind, options = self._types[PromCounter], {}
            if metric.is_level:
                # Each API server is told only a part of the changes, so the level is the sum over all of them.
                kind, options = self._types[PromGauge], {"multiprocess_mode": "sum"}
            labelnames = [*self._labelnames, *(name for name, _ in metric.labels)]
            family = kind(name=metric.name, documentation=metric.help, labelnames=labelnames, **options)
            self._families[metric.name] = family
            _registered.append(family)
        return self._families[metric.name]


def _forget_earlier() -> None:
    while _registered:
        with suppress(KeyError, ValueError):  # the registry was cleared, or is another one
            REGISTRY.unregister(_registered.pop())


# --- KV events as vLLM's publishers send them -------------------------------------------------------------------------


class EventTranslator:
    """Translates our KV events into vLLM's.

    Args:
        groups: vLLM's KV-cache groups. Events name their kinds, because routers follow only some kinds of groups.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._kinds = [compat.describe_group(group.kv_cache_spec) for group in groups]

    def translate(self, events: Iterable[KVEvent]) -> Iterator[Any]:
        """Yield vLLM's event for each of ours, in order."""
        for event in events:
            match event:
                case BlockStored():
                    yield self._stored(event)
                case BlockRemoved():
                    yield compat.BlockRemoved(
                        block_hashes=[compat.convert_block_hash(block_hash) for block_hash in event.block_hashes],
                        medium=event.medium,
                        group_idx=event.group,
                        locality=event.locality,
                    )
                case AllBlocksCleared():
                    yield compat.AllBlocksCleared()

    def _stored(self, event: BlockStored) -> Any:
        parent = event.parent_block_hash
        kind, window = self._kinds[event.group]
        return compat.BlockStored(
            block_hashes=[compat.convert_block_hash(block_hash) for block_hash in event.block_hashes],
            parent_block_hash=None if parent is None else compat.convert_block_hash(parent),
            token_ids=list(event.token_ids),
            block_size=event.block_tokens,
            lora_id=None if event.adapter is None else event.adapter.number,
            medium=event.medium,
            lora_name=None if event.adapter is None else event.adapter.name,
            extra_keys=[keys or None for keys in event.extra_keys] or None,
            group_idx=event.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            locality=event.locality,
        )
