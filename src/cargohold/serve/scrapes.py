"""What engines say of themselves: their ``/metrics``, read from elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Final, NamedTuple
from urllib.error import URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import urlopen

from cargohold.errors import ConfigError, one_line

_TIMEOUT_S: Final = 3.0
_MAX_BYTES: Final = 32 * 1024**2
_OF_VLLM: Final = frozenset({"model_name", "engine"})

Labels = frozenset[tuple[str, str]]


class Window(NamedTuple):
    """A histogram's values in a span of time.

    Attributes:
        buckets: number of values up to each bound.
        num_values: number of values.
    """

    buckets: Mapping[float, float]
    num_values: float

    def quantile(self, part: float) -> float | None:
        """Return a time in seconds that ``part`` of the values do not exceed: a bucket's bound. ``None`` without values."""
        if not self.num_values:
            return None
        return min((bound for bound, number in self.buckets.items() if number >= part * self.num_values), default=None)


@dataclass(frozen=True, slots=True)
class Scrape:
    """What one engine's ``/metrics`` said, or why it said nothing.

    Attributes:
        at: when, in seconds of a monotonic clock.
        samples: values by name and labels, added up over vLLM's own labels: models and data-parallel replicas.
        num_replicas: number of these replicas.
        error: why there is nothing; empty if there is.
    """

    at: float
    samples: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)
    num_replicas: int = 1
    error: str = ""

    @classmethod
    def parse(cls, at: float, text: str) -> Scrape:
        """Read the text format of Prometheus. Raises ``ValueError`` if it is something else."""
        from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415  # may be absent

        samples: dict[str, Counter[Labels]] = {}
        replicas = set()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                replicas.add(sample.labels.get("engine", "0"))
                labels = frozenset((name, value) for name, value in sample.labels.items() if name not in _OF_VLLM)
                samples.setdefault(sample.name, Counter())[labels] += sample.value  # type: ignore[assignment]  # a Counter adds what can be added
        return cls(at, samples, max(1, len(replicas)))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a metric by one of its labels, added up over the others."""
        values: Counter[str] = Counter()
        for labels, value in self.samples.get(name, {}).items():
            values[dict(labels).get(label, "")] += value  # type: ignore[assignment]  # a Counter adds what can be added
        return dict(values)

    def total(self, *names: str) -> float:
        """Return the sum of all values of the first of these metrics that there is; 0 if there is none."""
        return next((sum(self.samples[name].values()) for name in names if name in self.samples), 0.0)

    def since(self, before: Scrape | None) -> Scrape:
        """Return how counters have grown since an earlier scrape, or since the start: if there is none, or it restarted."""
        if before is None or before.error or self.error:
            return self
        grown = {
            name: {labels: value - before.samples.get(name, {}).get(labels, 0) for labels, value in series.items()}
            for name, series in self.samples.items()
        }
        counters = (values for name, values in grown.items() if name.endswith(("_total", "_count")))
        has_restarted = any(value < 0 for values in counters for value in values.values())
        return self if has_restarted else Scrape(self.at, grown)

    def times(self, name: str) -> dict[str, Window]:
        """Return the histograms of a name, by tier."""
        buckets: dict[str, Counter[float]] = {}
        for labels, value in self.samples.get(f"{name}_bucket", {}).items():
            of = dict(labels)
            buckets.setdefault(of.get("tier", ""), Counter())[float(of["le"])] += value  # type: ignore[assignment]  # as above
        counts = self.by(f"{name}_count", "tier")
        return {tier: Window(dict(sorted(found.items())), counts.get(tier, 0)) for tier, found in buckets.items()}


def metrics_url(text: str) -> str:
    """Return the URL of an engine's metrics. Raises ``ConfigError`` if the text is no address of one."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    with suppress(ValueError):  # of a port that is none
        if parts.scheme in {"http", "https"} and parts.hostname and (parts.port is None or parts.port > 0):
            path = parts.path if parts.path.strip("/") else "/metrics"
            return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
    raise ConfigError("URL", text, "it must be an engine's address, such as localhost:8000 or http://host:8000/metrics")


def scrape(url: str) -> Scrape:
    """Ask an engine; what went wrong is in the answer."""
    at = time.monotonic()
    try:
        with urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310  # its scheme was checked
            data = answer.read(_MAX_BYTES)
        return Scrape.parse(at, data.decode())
    except URLError as error:
        reason = error.reason if isinstance(error.reason, str) else one_line(error.reason)
        return Scrape(at, error=reason)
    except (OSError, HTTPException, ValueError) as error:
        return Scrape(at, error=one_line(error) or type(error).__name__)


def tiers_of(now: Scrape) -> list[str]:
    """Return the tiers that an engine has, the fastest first."""
    names = now.by("cargohold_tier_capacity_bytes", "tier") | now.by("cargohold_tier_ready_bytes", "tier")
    order = {"device": 0, "host": 1, "disk": 2}
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))
