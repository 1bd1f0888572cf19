"""What Prometheus reads. Names are those of the connectors inside vLLM, where they count the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as PromCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cargohold.connector.metrics import (
    FROM_THE_START,
    PROMPT,
    TTFT,
    Family,
    Kind,
    OutageLevels,
    Series,
    for_operators,
    series_of,
)
from cargohold.protocol import times_part
from cargohold.serve.desk import Desk, State, Watch
from cargohold.serve.records import Record


class Meters:
    """Counts requests, in a registry of its own: several servers may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = PromCounter(
            "cargohold_requests", "Requests that have ended, by how.", ("endpoint", "state"), registry=self.registry
        )
        self._prompt_tokens = PromCounter(
            PROMPT.name,
            PROMPT.help,
            PROMPT.labels,
            registry=self.registry,
        )
        self._output_tokens = PromCounter("cargohold_generated_tokens", "Tokens generated.", registry=self.registry)
        self._ttft = Histogram(
            TTFT.name,
            TTFT.help,
            TTFT.labels,
            buckets=TTFT.bounds_s,
            registry=self.registry,
        )

    def count(self, record: Record) -> None:
        """Count a request that has ended."""
        self._requests.labels(record.endpoint, record.state).inc()
        for source, tokens in record.sources().items():
            self._prompt_tokens.labels(source).inc(tokens)
        outputs = [sequence.metrics.output_tokens for sequence in record.sequences if sequence.metrics is not None]
        self._output_tokens.inc(sum(outputs))
        if record.ttft_s is not None:
            self._ttft.labels("hit" if record.is_hit else "miss").observe(record.ttft_s)

    def read_also(self, desk: Desk, watch: Watch) -> None:
        """Show the engine's own counters and levels, too."""
        self.registry.register(EngineMeters(desk, watch))


class EngineMeters(Collector):
    """The engine's queues, what its connectors count, how full each tier is, and what is out of use.

    Args:
        desk: has the model.
        watch: has the counters.
    """

    def __init__(self, desk: Desk, watch: Watch) -> None:
        self._desk = desk
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """All of them, as they are now."""
        desk = self._desk
        yield GaugeMetricFamily("cargohold_up", "Whether requests are taken.", desk.state is State.SERVING)
        yield GaugeMetricFamily("cargohold_answers_in_progress", "Answers that clients wait for.", desk.num_answers)
        yield CounterMetricFamily("cargohold_refused_requests", "Requests that found the queue full.", desk.num_refused)
        if desk.loaded is None:
            return
        status, layout = desk.loaded.status, desk.loaded.plan.layout
        requests = GaugeMetricFamily("cargohold_engine_requests", "Requests in the engine.", labels=("state",))
        for state in ("running", "waiting", "loading"):
            requests.add_metric((state,), getattr(status, f"num_{state}"))
        yield requests
        block_bytes = layout.block_bytes * layout.world_size
        device = {
            "num_device_capacity_bytes": status.num_blocks * block_bytes,
            "num_device_bytes": status.num_cached_blocks * block_bytes,
            "num_device_in_use_bytes": (status.num_blocks - status.num_free_blocks) * block_bytes,
        }
        shown = for_operators({**self._watch.stats, **device}, layout.block_bytes, layout.token_bytes)
        shown |= OutageLevels(epoch=0.0).take_changes(status.outages)
        yield from _families(shown)


def _families(counters: Mapping[str, float]) -> Iterator[Metric]:
    """What connectors count, as Prometheus reads it, without what the server counts itself."""
    families: dict[Family, dict[Series, dict[str, float]]] = {}
    for series in FROM_THE_START:
        families.setdefault(series.family, {})[series] = {}
    for counter, value in counters.items():
        series = series_of(counter)
        families.setdefault(series.family, {}).setdefault(series, {})[counter] = value
    for family, of_series in families.items():
        if family in (PROMPT, TTFT):
            continue
        made = Metric(family.name, family.help, family.kind.value)
        for series, values in of_series.items():
            labels = dict(zip(family.labels, series.values, strict=True))
            if family.kind is Kind.HISTOGRAM:
                _add_histogram(made, family, labels, values)
            else:
                suffix = "_total" if family.kind is Kind.COUNTER else ""
                made.add_sample(f"{family.name}{suffix}", labels, sum(values.values()))
        yield made


def _add_histogram(made: Metric, family: Family, labels: dict[str, str], values: Mapping[str, float]) -> None:
    """Add a histogram's samples: numbers up to each bound, as Prometheus has them, from numbers per bucket."""
    counts: Counter[float] = Counter()
    total_s = 0.0
    for counter, value in values.items():
        part = times_part(counter)
        assert part is not None, "only they belong to such a family"
        if part.sum_counter is None:
            total_s += value
        else:
            counts[part.bound_s] += int(value)
    num_values = 0
    for bound in (*family.bounds_s, float("inf")):
        num_values += counts[bound]
        shown = floatToGoString(bound)  # type: ignore[no-untyped-call]  # the package annotates only a part of itself
        made.add_sample(f"{family.name}_bucket", {**labels, "le": shown}, num_values)
    made.add_sample(f"{family.name}_count", labels, num_values)
    made.add_sample(f"{family.name}_sum", labels, total_s)
