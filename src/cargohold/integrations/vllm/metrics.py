"""Counters and KV events of the connectors, in the forms that vLLM publishes, and how long requests wait for their first token.

Both sides' counters meet on the scheduler side, which hands them to vLLM once a step. vLLM's logger adds them up with
``aggregate`` and prints ``reduce``; its metrics endpoint passes each to ``PromMetrics.observe``, in the process that serves it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Self

from prometheus_client import REGISTRY, Histogram
from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge as PromGauge

from cargohold.connector.metrics import cache_label
from cargohold.integrations.vllm import compat
from cargohold.integrations.vllm.records import RequestRecord
from cargohold.protocol import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Family,
    Kind,
    KVEvent,
    Series,
    Stats,
    Tally,
    metrics,
)

_KINDS: Final[Mapping[Kind, type]] = {Kind.COUNTER: PromCounter, Kind.GAUGE: PromGauge, Kind.HISTOGRAM: Histogram}
_ROWS: Final = "rows"

_registered: list[Any] = []
# Time series of the last engine in this process, to be unregistered before the next one: names must be unique.


class TransferStats(compat.KVConnectorStats):  # type: ignore[misc]  # vLLM's class, or an inert one without it
    """Values on their way to vLLM's loggers; ``data`` is what ``pack`` makes of them, because it travels."""

    data: dict[str, Any]

    @classmethod
    def of(cls, stats: Stats) -> Self:
        """Make those of these values."""
        return cls(data={_ROWS: metrics.pack(stats)} if stats else {})

    @property
    def values(self) -> Tally:
        """The values."""
        return metrics.unpack(self.data.get(_ROWS, ()))

    def reset(self) -> None:
        """Start from zero."""
        self.data = {}

    def aggregate(self, other: TransferStats) -> TransferStats:
        """Add ``other`` to this object, and return this object, as vLLM's own classes do."""
        total = self.values
        total.add(other.values)
        self.data = {_ROWS: metrics.pack(total)} if total else {}
        return self

    def reduce(self) -> dict[str, int | float]:
        """Counters as the log shows them for an interval, without histograms.

        Levels are left out: only their change in the interval is known.
        """
        counted = {str(series): value for series, value in self.values.items() if series.family.kind is Kind.COUNTER}
        return {name: round(value, 3) for name, value in sorted(counted.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class PromMetrics(compat.KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM's class, or an inert one without it
    """The time series of the connectors, per engine; see ``cargohold.protocol.metrics``.

    Args:
        vllm_config: vLLM's configuration.
        metric_types: the class that vLLM uses for each of Prometheus's kinds of metric.
        labelnames: labels that all of vLLM's metrics have.
        per_engine_labelvalues: their values, per engine.
        lower: names of the tiers below host memory.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        lower: Sequence[str] = (),
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _forget_earlier()
        self._types = metric_types
        self._families: dict[str, Any] = {}
        self._series: dict[tuple[int, Series], Any] = {}
        self._levels: Counter[tuple[int, Series]] = Counter()
        for engine in per_engine_labelvalues:
            for series in metrics.from_the_start(lower):
                self._find(engine, series)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's values."""
        values = TransferStats(data=transfer_stats_data).values
        for series, value in values.items():
            shown = self._find(engine_idx, series._replace(bucket=None))
            match series.family.kind:
                case Kind.COUNTER:
                    shown.inc(value)
                case Kind.GAUGE:
                    # Added up here, because vLLM's gauges in Ray can only be set.
                    self._levels[engine_idx, series] += value  # type: ignore[assignment]  # a Counter adds what can be added
                    shown.set(self._levels[engine_idx, series])
                case Kind.HISTOGRAM:
                    if series.bucket is not None and not series.bucket.is_sum:
                        # The mean of the values in a bucket is in that bucket, so numbers and sum are right.
                        total = values[series._replace(bucket=series.bucket._replace(is_sum=True))]
                        for _ in range(int(value)):
                            shown.observe(total / value)

    def _find(self, engine: int, series: Series) -> Any:
        """The time series, made when first asked for."""
        shown = self._series.get((engine, series))
        if shown is None:
            labels = [*self.per_engine_labelvalues[engine], *series.labels]
            shown = self._series[engine, series] = self._made(series.family).labels(*labels)
        return shown

    def _made(self, family: Family) -> Any:
        if family.name not in self._families:
            kind, options = self._types[_KINDS[family.kind]], dict[str, Any]()
            if family.kind is Kind.GAUGE:
                # Each API server gets only a part of the changes, so the level is the sum over all of them.
                options = {"multiprocess_mode": "sum"}
            elif family.kind is Kind.HISTOGRAM:
                options = {"buckets": list(family.bounds_s[:-1])}
            labelnames = [*self._labelnames, *family.labels]
            made = kind(name=family.full_name, documentation=family.help, labelnames=labelnames, **options)
            self._families[family.name] = made
            _registered.append(made)
        return self._families[family.name]


def _forget_earlier() -> None:
    while _registered:
        with suppress(KeyError, ValueError):  # the registry was cleared, or is another one
            REGISTRY.unregister(_registered.pop())


# --- KV events as vLLM's publishers send them -------------------------------------------------------------------------


class EventTranslator:
    """Translates our KV events into vLLM's.

    Args:
        groups: vLLM's KV-cache groups. Events name their kinds, because routers follow only some kinds of groups.
        numbers: vLLM's number for each of ours.
    """

    def __init__(self, groups: Sequence[Any], numbers: Sequence[int] = ()) -> None:
        self._numbers = numbers
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
                        group_idx=self._numbers[event.group],
                        locality=event.locality,
                    )
                case AllBlocksCleared():
                    yield compat.AllBlocksCleared()

    def _stored(self, event: BlockStored) -> Any:
        parent = event.parent_block_hash
        number = self._numbers[event.group]
        kind, window = self._kinds[number]
        return compat.BlockStored(
            block_hashes=[compat.convert_block_hash(block_hash) for block_hash in event.block_hashes],
            parent_block_hash=None if parent is None else compat.convert_block_hash(parent),
            token_ids=list(event.token_ids),
            block_size=event.block_tokens,
            lora_id=None if event.adapter is None else event.adapter.number,
            medium=event.medium,
            lora_name=None if event.adapter is None else event.adapter.name,
            extra_keys=[keys or None for keys in event.extra_keys] or None,
            group_idx=number,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            locality=event.locality,
        )


class FirstTokens:
    """Measures from when vLLM's front end has received a request until the step after the one that makes its first token.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._epoch = time.time() - clock()  # vLLM notes arrivals in seconds since 1970
        self._awaited: list[RequestRecord] = []

    def note_admitted(self, record: RequestRecord, num_device_tokens: int, num_restored_tokens: int) -> None:
        """Note that a request is admitted for the first time, and how many tokens of its prompt were found where."""
        if getattr(record.own, "arrival_time", None) is not None:
            record.first_token = cache_label(num_restored_tokens, num_device_tokens, record.own.num_prompt_tokens)
            self._awaited.append(record)

    def look(self, stats: Tally) -> None:
        """Count in ``stats`` the requests that have their first token by now. Called once a step."""
        if self._awaited:
            for record in self._awaited:
                if record.own.num_tokens > record.own.num_prompt_tokens:
                    self.note_ended(record, stats)
            self._awaited = [record for record in self._awaited if record.first_token]

    def note_ended(self, record: RequestRecord, stats: Tally) -> None:
        """Await no first token of a request. Counts it in ``stats`` if it has a token that was not counted."""
        label, record.first_token = record.first_token, ""
        if label and record.own.num_tokens > record.own.num_prompt_tokens:
            waited_s = self._epoch + self._clock() - record.own.arrival_time
            metrics.TTFT.of(label).note(max(0.0, waited_s), stats)
