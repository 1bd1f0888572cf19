"""What an engine's ``/metrics`` say, and what happened between two looks at them: for the page and ``cargohold top``."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from itertools import product
from math import inf
from typing import Any, Final, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from cargohold.errors import ConfigError, one_line
from cargohold.protocol import Family, Kind, metrics

_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
_ENDS: Final = tuple(product(_PATHS, ("finished", "gone", "failed")))

UP: Final = Family("up", Kind.GAUGE, "0 or 1", "Whether requests are accepted.")
REQUESTS: Final = Family(
    "requests", Kind.COUNTER, "requests", "Ended; gone: the client disconnected.", ("endpoint", "state"), _ENDS
)
REFUSED: Final = Family("refused_requests", Kind.COUNTER, "requests", "Found the queue full.", start=((),))
ANSWERS: Final = Family("answers_in_progress", Kind.GAUGE, "answers", "That clients wait for.")
IN_ENGINE: Final = Family(
    "engine_requests", Kind.GAUGE, "requests", "In the engine: running, waiting, loading.", ("state",)
)
GENERATED: Final = Family("generated_tokens", Kind.COUNTER, "tokens", "Generated.", start=((),))

OWN_FAMILIES: Final = (UP, REQUESTS, REFUSED, ANSWERS, IN_ENGINE, GENERATED)


LEAST_TOKENS: Final = 500
"""Fewer tokens restored, or computed, say nothing of how fast that is: a block takes as long as a step, whatever is in it."""
BUCKET_S: Final = 10.0
MAX_BUCKETS: Final = 180
"""Half an hour of history."""
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

        return cls.of_families(at, text_string_to_metric_families(text))

    @classmethod
    def of_families(cls, at: float, families: Iterable[Any]) -> Scrape:
        """Read families as ``prometheus_client`` has them."""
        samples: defaultdict[str, defaultdict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        replicas = set()
        for family in families:
            for sample in family.samples:
                replicas.add(sample.labels.get("engine", "0"))
                labels = frozenset((name, value) for name, value in sample.labels.items() if name not in _OF_VLLM)
                samples[sample.name][labels] += sample.value
        return cls(at, samples, max(1, len(replicas)))

    def of(self, family: Family) -> Mapping[Labels, float]:
        return self.samples.get(family.sample, {})

    def by(self, family: Family, label: str, **only: str) -> dict[str, float]:
        """Return the values of a family by one of its labels, added up over the others: those with these labels alone."""
        values: defaultdict[str, float] = defaultdict(float)
        for labels, value in self.of(family).items():
            if only.items() <= dict(labels).items():
                values[dict(labels).get(label, "")] += value
        return dict(values)

    def known(self, *what: Family | str) -> float | None:
        """Return the sum of all values of the first of these metrics that there is; ``None`` if there is none."""
        names = map(_name, what)
        return next((sum(self.samples[name].values()) for name in names if name in self.samples), None)

    def total(self, *what: Family | str) -> float:
        """Return the same; 0 if there is none."""
        return self.known(*what) or 0.0

    def seconds(self, family: Family) -> float:
        """Return the sum of a histogram's values."""
        return self.total(f"{family.sample}_sum")

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

    def times(self, family: Family) -> dict[str, Window]:
        """Return the histograms of a family, by tier."""
        buckets: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
        for labels, value in self.samples.get(f"{family.sample}_bucket", {}).items():
            of = dict(labels)
            buckets[of.get("tier", "")][float(of["le"])] += value
        return {tier: Window(dict(sorted(found.items())), found[inf]) for tier, found in buckets.items()}


def _name(what: Family | str) -> str:
    """The name of a family's samples; those of other software are named by it."""
    return what if isinstance(what, str) else what.sample


def metrics_url(text: str) -> str:
    """Return the URL of an engine's metrics. Raises ``ConfigError`` if the text is no address of one."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    with suppress(ValueError):  # of a port that is none
        if parts.scheme in {"http", "https"} and parts.hostname and (parts.port is None or parts.port > 0):
            path = parts.path if parts.path.strip("/") else "/metrics"
            return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
    raise ConfigError("URL", text, "it must be an engine's address, such as localhost:8000 or http://host:8000/metrics")


def scrape(url: str, key: str | None = None) -> Scrape:
    """Ask an engine, with the key that it may need; what went wrong is in the answer."""
    at, request = time.monotonic(), Request(url)  # noqa: S310  # its scheme was checked
    if key:
        request.add_unredirected_header("authorization", f"Bearer {key}")
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310  # as above
            data = answer.read(_MAX_BYTES)
        return Scrape.parse(at, data.decode())
    except HTTPError as error:
        needs_key = error.code == HTTPStatus.UNAUTHORIZED
        return Scrape(at, error="it needs a key (--metrics-key)" if needs_key else f"{error.code} {error.reason}")
    except URLError as error:
        reason = error.reason if isinstance(error.reason, str) else one_line(error.reason)
        return Scrape(at, error=reason)
    except (OSError, HTTPException, ValueError) as error:
        return Scrape(at, error=one_line(error) or type(error).__name__)


def tiers_of(now: Scrape) -> list[str]:
    """Return the tiers that an engine has, the fastest first."""
    names = now.by(metrics.TIER_CAPACITY, "tier") | now.by(metrics.TIER_READY, "tier")
    order = {"device": 0, "host": 1, "disk": 2}
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))


# --- how full each tier is --------------------------------------------------------------------------------------------


def verified(now: Scrape) -> str:
    """Return how many kept chunks were compared with what was computed again, and how many were true; empty for none."""
    by_outcome = now.by(metrics.VERIFIED, "outcome")
    total, lying = sum(by_outcome.values()), by_outcome.get("different", 0)
    return f"{total:,.0f} chunks, {total - lying:,.0f} equal or close" if total else ""


def tier_uses(now: Scrape) -> list[dict[str, Any]]:
    """Return how full each tier is and how well, the device first.

    ``capacity_bytes`` is ``None`` where the tier sets its own limit, and ``evicted_chunks`` where that is not counted;
    ``suspended`` is how many of its look-ups, loads and writes are, and ``is_off`` whether it is out of use until a restart.
    """
    moved, evicted = moved_bytes(now), now.by(metrics.REMOVED, "tier", reason="evicted")
    ready, capacity = now.by(metrics.TIER_READY, "tier"), now.by(metrics.TIER_CAPACITY, "tier")
    outages = [(dict(labels)["tier"], labels) for labels, since in now.of(metrics.OUTAGE_SINCE).items() if since]
    out = Counter(tier for tier, _ in outages)
    off = {tier for tier, labels in outages if labels not in now.of(metrics.OUTAGE_RETRY)}
    return [
        {
            "name": tier,
            "held_bytes": ready.get(tier, 0),
            "capacity_bytes": capacity.get(tier),
            "used_bytes": _used_bytes(now, capacity) if tier == "device" else None,
            "in_bytes": moved[tier, "in"],
            "out_bytes": moved[tier, "out"],
            "evicted_chunks": evicted.get(tier),
            "suspended": out[tier],
            "is_off": tier in off,
        }
        for tier in tiers_of(now)
    ]


def moved_bytes(scraped: Scrape) -> Mapping[tuple[str, str], float]:
    """Bytes by tier and direction."""
    moved: defaultdict[tuple[str, str], float] = defaultdict(float)
    for labels, value in scraped.of(metrics.MOVED).items():
        moved[dict(labels)["tier"], dict(labels)["direction"]] += value
    return moved


def _used_bytes(now: Scrape, capacity: Mapping[str, float]) -> float:
    """Bytes that requests are using now on the device. vLLM says which part of it, of each replica."""
    part = now.total("vllm:kv_cache_usage_perc") / now.num_replicas
    return now.by(metrics.TIER_IN_USE, "tier").get("device", part * capacity.get("device", 0))


# --- what has happened ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TimeSpan:
    """What happened in one span of time.

    Attributes:
        start: of the span, in seconds since 1970.
        tokens: prompt tokens by source.
        requests: requests that have got a first token.
        ttft_s: their times to the first token, added up.
        up_bytes: copied from tiers below the device towards it.
        down_bytes: copied to be kept.
        evicted_chunks: chunks that made room in host memory.
        restored_tokens, restore_s: tokens that loads brought; how long requests waited for these, and for lower tiers.
        prefill_tokens, prefill_s: tokens computed in steps that mostly compute prompts; how long these steps took.
    """

    start: float
    tokens: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    ttft_s: float = 0.0
    up_bytes: float = 0
    down_bytes: float = 0
    evicted_chunks: float = 0
    restored_tokens: float = 0
    restore_s: float = 0
    prefill_tokens: float = 0
    prefill_s: float = 0

    def add(self, grown: Scrape) -> None:
        """Count what has happened."""
        for tier, tokens in grown.by(metrics.PROMPT, "tier").items():
            if tokens:
                self.tokens[tier] = self.tokens.get(tier, 0) + int(tokens)
        self.requests += int(grown.total(f"{metrics.TTFT.sample}_count"))
        self.ttft_s += grown.seconds(metrics.TTFT)
        for (tier, way), value in moved_bytes(grown).items():
            if tier != "device":
                self.up_bytes += value * (way == "out")
                self.down_bytes += value * (way == "in")
        self.evicted_chunks += grown.by(metrics.REMOVED, "tier", reason="evicted").get("host", 0)
        self.restored_tokens += grown.total(metrics.LOAD_TOKENS)
        self.restore_s += grown.seconds(metrics.LOAD) + grown.seconds(metrics.WAIT)
        self.prefill_tokens += grown.total(metrics.PREFILL_TOKENS)
        self.prefill_s += grown.total(metrics.PREFILL_SECONDS)


class History:
    """What an engine's metrics say now, and what has happened since the first look, in spans of time.

    Args:
        now: what they said first; ``None`` before the first look.
        clock: seconds since 1970.

    Attributes:
        now: what they said last.
    """

    def __init__(self, now: Scrape | None = None, clock: Callable[[], float] = time.time) -> None:
        self.now = now
        self._clock = clock
        self._spans: deque[TimeSpan] = deque(maxlen=MAX_BUCKETS)

    def add(self, now: Scrape) -> None:
        """Add a look."""
        before, self.now = self.now, now
        if before is None or before.error or now.error:
            return
        start = self._clock() // BUCKET_S * BUCKET_S
        if not self._spans or start > self._spans[-1].start:
            self._spans.append(TimeSpan(start))
        self._spans[-1].add(now.since(before))

    def as_json(self) -> list[dict[str, Any]]:
        """What people are shown."""
        return list(map(asdict, self._spans))
