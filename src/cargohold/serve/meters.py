"""What Prometheus reads of a server: what it counts itself, and what its engine and its connectors count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cargohold.connector.factory import lower_tiers, row_plan
from cargohold.connector.held import held_levels
from cargohold.connector.metrics import OutageLevels, for_operators
from cargohold.llm import AsyncLLM
from cargohold.protocol import Family, Kind, Series, Stats, Tally, metrics
from cargohold.protocol.metrics import Bucket
from cargohold.serve.admission import EngineWatch, RequestAdmission, State
from cargohold.serve.records import Record
from cargohold.serve.scrape import ANSWERS, GENERATED, IN_ENGINE, OWN_FAMILIES, REFUSED, REQUESTS, UP


class ServerMeters(Collector):
    """Counts requests, and reports about the engine, in a registry of its own: several servers may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seen: tuple[RequestAdmission, EngineWatch] | None = None
        self._own = Tally({family.of(*labels): 0 for family in OWN_FAMILIES for labels in family.start})
        # Connectors count no requests that they were not asked about.
        self._prompts = Tally()

    def count(self, record: Record) -> None:
        """Count a request that has ended."""
        self._own[REQUESTS.of(record.endpoint, record.state)] += 1
        for source, tokens in record.sources().items():
            self._prompts[metrics.PROMPT.of(source)] += tokens
        outputs = [sequence.metrics.output_tokens for sequence in record.sequences if sequence.metrics is not None]
        self._own[GENERATED.of()] += sum(outputs)
        if record.ttft_s is not None:
            metrics.TTFT.of(record.cache_label).note(record.ttft_s, self._prompts)

    def read_also(self, admission: RequestAdmission, watch: EngineWatch) -> None:
        """Show all that there is of an engine. ``admission`` has the model, ``watch`` its counters."""
        self._seen = admission, watch
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """All of them, as they are now."""
        assert self._seen is not None, "nothing collects before"
        admission, watch = self._seen
        llm = admission.loaded
        found = Tally(self._own)
        found.update(
            {
                UP.of(): admission.state is State.SERVING,
                ANSWERS.of(): admission.num_answers,
                REFUSED.of(): admission.num_refused,
            }
        )
        if llm is not None:
            for state in ("running", "waiting", "loading"):
                found[IN_ENGINE.of(state)] = getattr(llm.status, f"num_{state}")
            found.add(self._of_connectors(llm, watch.stats))
        yield from _shown(found)

    def _of_connectors(self, llm: AsyncLLM, stats: Stats) -> Tally:
        """What connectors count, and what was there from the start; of prompts what the server counts itself."""
        own = {metrics.PROMPT, metrics.TTFT}
        found = Tally(dict.fromkeys(metrics.from_the_start(lower_tiers(llm.offload)), 0))
        found.add({series: value for series, value in told_of(llm, stats).items() if series.family not in own})
        found.add(self._prompts)
        return found


def told_of(llm: AsyncLLM, stats: Stats) -> Tally:
    """What there is to tell of an engine, from what its connectors have counted."""
    status, layout = llm.status, llm.plan.layout
    block_bytes = layout.block_bytes * layout.world_size
    device = {
        metrics.TIER_CAPACITY.of("device"): status.num_blocks * block_bytes,
        metrics.TIER_READY.of("device"): status.num_cached_blocks * block_bytes,
        metrics.TIER_IN_USE.of("device"): (status.num_blocks - status.num_free_blocks) * block_bytes,
        **held_levels(layout, llm.offload),
    }
    plan = row_plan(llm.offload, layout)
    copied, token_bytes = plan.mean_block_bytes(layout), plan.token_bytes(layout)
    shown = for_operators({**stats, **device}, copied, token_bytes, layout.token_bytes)
    shown.add(OutageLevels(epoch=0.0).take_changes(status.outages))
    return shown


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


def _shown(found: Stats) -> Iterator[Metric]:
    """Time series, family by family."""
    made: dict[Family, Metric] = {}
    histograms: dict[Series, dict[Bucket, float]] = {}
    for series, value in found.items():
        family = series.family
        metric = made.setdefault(family, Metric(family.full_name, family.help, family.kind.value))
        if family.kind is Kind.HISTOGRAM:
            buckets = histograms.setdefault(family.of(*series.labels), {})
            if series.bucket is not None:
                buckets[series.bucket] = value
        else:
            metric.add_sample(family.sample, _labels(series), value)
    for series, buckets in histograms.items():
        _add_histogram(made[series.family], series, buckets)
    yield from made.values()


def _labels(series: Series) -> dict[str, str]:
    return dict(zip(series.family.labels, series.labels, strict=True))


def _add_histogram(made: Metric, series: Series, buckets: Mapping[Bucket, float]) -> None:
    """Add a histogram's samples: numbers up to each bound, as Prometheus has them, from numbers per bucket."""
    name, labels, num_values = series.family.sample, _labels(series), 0.0
    for bound in series.family.bounds_s:
        num_values += buckets.get(Bucket(bound, is_sum=False), 0)
        shown = floatToGoString(bound)  # type: ignore[no-untyped-call]  # the package annotates only a part of itself
        made.add_sample(f"{name}_bucket", {**labels, "le": shown}, num_values)
    made.add_sample(f"{name}_count", labels, num_values)
    made.add_sample(f"{name}_sum", labels, sum(value for bucket, value in buckets.items() if bucket.is_sum))
