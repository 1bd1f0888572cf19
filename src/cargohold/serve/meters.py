"""What Prometheus reads of a server: what it counts itself, and what its engine and its connectors count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cargohold.connector.factory import lower_tiers
from cargohold.connector.metrics import (
    PROMPT,
    TTFT,
    TTFT_MS,
    Family,
    Kind,
    OutageLevels,
    Series,
    counter,
    for_operators,
    from_the_start,
    gauge,
    series_of,
)
from cargohold.llm import AsyncLLM
from cargohold.protocol import Times, times_part
from cargohold.serve.desk import Desk, State, Watch
from cargohold.serve.records import COMPUTED, DEVICE, Record

_ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
_ENDS: Final = [(endpoint, state) for endpoint in _ENDPOINTS for state in ("finished", "gone", "failed")]

UP: Final = gauge("up", "Whether requests are taken.")
REQUESTS: Final = counter("requests", "Requests that have ended, by how.", "endpoint", "state", start=_ENDS)
REFUSED: Final = counter("refused_requests", "Requests that found the queue full.")
ANSWERS: Final = gauge("answers_in_progress", "Answers that clients wait for.")
IN_ENGINE: Final = gauge("engine_requests", "Requests in the engine.", "state")
GENERATED: Final = counter("generated_tokens", "Tokens generated.")
OWN_FAMILIES: Final = (UP, REQUESTS, REFUSED, ANSWERS, IN_ENGINE, GENERATED)
"""All families that servers have beside those of connectors."""

_TTFT: Final = {label: Times(f"{label}_ttft", TTFT_MS) for (label,) in TTFT.start}


class Meters(Collector):
    """Counts requests, and tells of the engine, in a registry of its own: several servers may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seen: tuple[Desk, Watch] | None = None
        # Under the names that connectors give it: theirs count no requests that they were not asked about.
        self._stats: Counter[str] = Counter()
        self._own: Counter[Series] = Counter({Series(REQUESTS, values): 0 for values in REQUESTS.start})
        self._own[Series(GENERATED)] = 0

    def count(self, record: Record) -> None:
        """Count a request that has ended."""
        self._own[Series(REQUESTS, (record.endpoint, record.state))] += 1
        for source, tokens in record.sources().items():
            name = f"{source}_tokens" if source in (DEVICE, COMPUTED) else f"{source}_hit_tokens"
            self._stats[name] += tokens
        outputs = [sequence.metrics.output_tokens for sequence in record.sequences if sequence.metrics is not None]
        self._own[Series(GENERATED)] += sum(outputs)
        if record.ttft_s is not None:
            _TTFT[record.cache_label].note(record.ttft_s, self._stats)

    def read_also(self, desk: Desk, watch: Watch) -> None:
        """Show all that there is of an engine. ``desk`` has the model, ``watch`` its counters."""
        self._seen = desk, watch
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """All of them, as they are now."""
        assert self._seen is not None, "nothing collects before"
        desk, watch = self._seen
        llm = desk.loaded
        own: dict[Series, float] = {
            **self._own,
            Series(UP): desk.state is State.SERVING,
            Series(ANSWERS): desk.num_answers,
            Series(REFUSED): desk.num_refused,
        }
        if llm is not None:
            for state in ("running", "waiting", "loading"):
                own[Series(IN_ENGINE, (state,))] = getattr(llm.status, f"num_{state}")
        yield from _shown({series: {"": value} for series, value in own.items()})
        if llm is not None:
            yield from _shown(self._of_connectors(llm, watch.stats))

    def _of_connectors(self, llm: AsyncLLM, stats: Mapping[str, float]) -> dict[Series, dict[str, float]]:
        """What connectors count by time series, and by counter; of prompts what the server counts itself."""
        status, layout = llm.status, llm.plan.layout
        block_bytes = layout.block_bytes * layout.world_size
        device = {
            "num_device_capacity_bytes": status.num_blocks * block_bytes,
            "num_device_bytes": status.num_cached_blocks * block_bytes,
            "num_device_in_use_bytes": (status.num_blocks - status.num_free_blocks) * block_bytes,
        }
        told = for_operators({**stats, **device}, layout.block_bytes, layout.token_bytes, layout.num_replicas)
        told |= OutageLevels(epoch=0.0).take_changes(status.outages)
        told = {name: value for name, value in told.items() if series_of(name).family not in (PROMPT, TTFT)}
        found: dict[Series, dict[str, float]] = {series: {} for series in from_the_start(lower_tiers(llm.offload))}
        for name, value in {**told, **self._stats}.items():
            found.setdefault(series_of(name), {})[name] = value
        return found


@dataclass(frozen=True, slots=True)
class OfNobody(Collector):
    """Metrics without those that tell tenants apart."""

    registry: CollectorRegistry

    def collect(self) -> Iterator[Metric]:
        """All others."""
        for family in self.registry.collect():
            if not any("tenant" in sample.labels for sample in family.samples):
                yield family


# --- as Prometheus reads it -------------------------------------------------------------------------------------------


def _shown(found: Mapping[Series, Mapping[str, float]]) -> Iterator[Metric]:
    """Time series, family by family."""
    made: dict[Family, Metric] = {}
    for series, values in found.items():
        family = series.family
        metric = made.setdefault(family, Metric(family.name, family.help, family.kind.value))
        labels = dict(zip(family.labels, series.values, strict=True))
        if family.kind is Kind.HISTOGRAM:
            _add_histogram(metric, family, labels, values)
        else:
            suffix = "_total" if family.kind is Kind.COUNTER else ""
            metric.add_sample(f"{family.name}{suffix}", labels, sum(values.values()))
    yield from made.values()


def _add_histogram(made: Metric, family: Family, labels: dict[str, str], values: Mapping[str, float]) -> None:
    """Add a histogram's samples: numbers up to each bound, as Prometheus has them, from numbers per bucket."""
    counts: Counter[float] = Counter()
    total_s = 0.0
    for counter_name, value in values.items():
        part = times_part(counter_name)
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
