"""What Prometheus reads. Names are those of the connectors inside vLLM, where they count the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cargohold.protocol import is_level
from cargohold.serve.cache import Vessel, vessels
from cargohold.serve.desk import Desk, State, Watch
from cargohold.serve.records import Record

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

Family = CounterMetricFamily | GaugeMetricFamily


class Meters:
    """Counts requests, in a registry of its own: several servers may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "cargohold_requests", "Requests that have ended, by how.", ("endpoint", "state"), registry=self.registry
        )
        self._prompt_tokens = Counter(
            "cargohold_prompt_tokens",
            "Prompt tokens of requests by where their KV was found; computed means nowhere.",
            ("tier",),
            registry=self.registry,
        )
        self._output_tokens = Counter("cargohold_generated_tokens", "Tokens generated.", registry=self.registry)
        self._ttft = Histogram(
            "cargohold_time_to_first_token_seconds",
            "From a request's arrival in the engine to its first token; hit if half of its prompt or more was found.",
            ("cache",),
            buckets=_SECONDS,
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
    """The engine's queues, what its connectors count, and how full each place is.

    Args:
        desk: has the model.
        watch: has the counters.
    """

    def __init__(self, desk: Desk, watch: Watch) -> None:
        self._desk = desk
        self._watch = watch

    def collect(self) -> Iterator[Family]:
        """All of them, as they are now."""
        desk = self._desk
        yield _gauge("cargohold_up", "Whether requests are taken.", desk.state is State.SERVING)
        yield _gauge("cargohold_answers_in_progress", "Answers that clients wait for.", desk.num_answers)
        yield CounterMetricFamily("cargohold_refused_requests", "Requests that found the queue full.", desk.num_refused)
        if desk.loaded is None:
            return
        status = desk.loaded.status
        requests = GaugeMetricFamily("cargohold_engine_requests", "Requests in the engine.", labels=("state",))
        for state in ("running", "waiting", "loading"):
            requests.add_metric((state,), getattr(status, f"num_{state}"))
        yield requests
        yield from _places(vessels(desk.loaded, self._watch.stats))
        yield from self._connectors()

    def _connectors(self) -> Iterator[Family]:
        counters = CounterMetricFamily(
            "cargohold_connector", "What connectors and tiers count, by name.", labels=("counter",)
        )
        levels = GaugeMetricFamily("cargohold_connector_level", "How much there is now, by name.", labels=("counter",))
        for name, value in self._watch.stats.items():
            (levels if is_level(name) else counters).add_metric((name,), value)
        yield counters
        yield levels


def _gauge(name: str, text: str, value: float) -> Family:
    return GaugeMetricFamily(name, text, value)


def _places(places: list[Vessel]) -> Iterator[Family]:
    held = GaugeMetricFamily("cargohold_tier_bytes", "Bytes of KV that can be found again.", labels=("tier",))
    capacity = GaugeMetricFamily("cargohold_tier_capacity_bytes", "Bytes that it may hold.", labels=("tier",))
    suspended = GaugeMetricFamily("cargohold_tier_suspended", "Ways of access that are suspended.", labels=("tier",))
    moved = CounterMetricFamily("cargohold_tier_moved_bytes", "Bytes copied in and out.", labels=("tier", "direction"))
    for place in places:
        held.add_metric((place.name,), place.held_bytes)
        if place.capacity_bytes is not None:
            capacity.add_metric((place.name,), place.capacity_bytes)
        suspended.add_metric((place.name,), place.suspended)
        moved.add_metric((place.name, "in"), place.in_bytes)
        moved.add_metric((place.name, "out"), place.out_bytes)
    yield from (held, capacity, suspended, moved)
