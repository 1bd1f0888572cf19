"""What the server remembers of requests, the last ones each and all in sums, and what other engines say of theirs."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from itertools import count
from math import inf
from typing import Any, Final, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from cargohold.connector.metrics import cache_label
from cargohold.engine.outputs import RequestMetrics, RequestOutput
from cargohold.errors import ConfigError, one_line
from cargohold.protocol import Family, metrics
from cargohold.serve.settings import Client

MAX_RECORDS: Final = 200
"""Requests that can still be explained."""
BUCKET_S: Final = 10.0
MAX_BUCKETS: Final = 180
"""Half an hour of history."""
COMPUTED: Final = "computed"
DEVICE: Final = "device"


@dataclass(slots=True)
class Sequence:
    """One answer of a request: how it went so far.

    Attributes:
        metrics: where its tokens came from; ``None`` before the first output.
        finish_reason: why it ended, once it has.
        error: what went wrong, if something did.
        notes: why its prompt hit or missed the cache, once it has ended.
    """

    metrics: RequestMetrics | None = None
    finish_reason: str | None = None
    error: str | None = None
    notes: tuple[str, ...] = ()

    def update(self, output: RequestOutput) -> None:
        """Learn from an output. The output itself is not kept: it has the prompt and the text."""
        self.metrics = output.metrics
        if output.finished:
            self.finish_reason, self.error, self.notes = output.finish_reason, output.error, output.cache_notes

    def sources(self) -> dict[str, int]:
        """Where the prompt's tokens came from, in the order of the prompt."""
        if self.metrics is None:
            return {}
        left = self.metrics.prompt_tokens
        found = {}
        for source, tokens in ((DEVICE, self.metrics.device_tokens), *self.metrics.restored_tokens.items()):
            # After a preemption, tokens were restored twice, or were of the answer.
            found[source] = min(tokens, left)
            left -= found[source]
        return {**found, COMPUTED: left}


@dataclass(slots=True)
class Record:
    """One request over HTTP.

    Attributes:
        request_id: as the client knows it.
        endpoint: which interface it came by.
        client: who has sent it.
        sequences: one per answer.
        arrived: when, in seconds since 1970.
        state: ``running``, ``finished``, ``gone`` (its client is) or ``failed``.
    """

    request_id: str
    endpoint: str
    client: Client
    sequences: list[Sequence]
    arrived: float = field(default_factory=time.time)
    state: str = "running"

    def sources(self) -> Counter[str]:
        """Where the prompt tokens of all answers came from."""
        return sum((Counter(sequence.sources()) for sequence in self.sequences), Counter())

    @property
    def ttft_s(self) -> float | None:
        """From its arrival in the engine to the first token."""
        times = [sequence.metrics.ttft_s for sequence in self.sequences if sequence.metrics is not None]
        return min((time_s for time_s in times if time_s is not None), default=None)

    @property
    def cache_label(self) -> str:
        """What it counts as in times to the first token."""
        sources = self.sources()
        all_tokens, device = sources.total(), sources[DEVICE]
        return cache_label(all_tokens - device - sources[COMPUTED], device, all_tokens)

    def as_json(self) -> dict[str, Any]:
        """What people are shown."""
        metrics = [sequence.metrics for sequence in self.sequences if sequence.metrics is not None]
        return {
            "id": self.request_id,
            "endpoint": self.endpoint,
            "arrived": self.arrived,
            "state": self.state,
            # Unknown before the first token: it may be waiting in the queue.
            "prompt_tokens": sum(one.prompt_tokens for one in metrics) if metrics else None,
            "output_tokens": sum(one.output_tokens for one in metrics) if metrics else None,
            "sources": dict(self.sources()),
            "ttft_s": self.ttft_s,
            "total_s": max((one.total_s for one in metrics if one.total_s is not None), default=None),
            "load_wait_s": max((one.load_wait_s for one in metrics), default=0.0),
            "preemptions": sum(one.preemptions for one in metrics),
            "finish_reasons": [sequence.finish_reason for sequence in self.sequences],
            "notes": list(dict.fromkeys(note for sequence in self.sequences for note in sequence.notes)),
            "errors": [sequence.error for sequence in self.sequences if sequence.error is not None],
        }


@dataclass(frozen=True, slots=True)
class Moved:
    """What the engine has moved and computed, and how long that took.

    Attributes:
        up_bytes: copied from tiers below the device towards it.
        down_bytes: copied to be kept.
        evicted_chunks: chunks that made room.
        restored_tokens, restore_s: tokens that loads brought; how long requests waited for these, and for lower tiers.
        prefill_tokens, prefill_s: tokens computed in steps that mostly compute prompts; how long these steps took.
    """

    up_bytes: float = 0
    down_bytes: float = 0
    evicted_chunks: float = 0
    restored_tokens: float = 0
    restore_s: float = 0
    prefill_tokens: float = 0
    prefill_s: float = 0

    def since(self, earlier: Moved) -> Moved:
        """What was moved since then. Counters that begin anew, as those of another connector, have moved nothing."""
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return Moved(*(max(0, now - before) for now, before in pairs))

    def __add__(self, other: Moved) -> Moved:
        return Moved(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(slots=True)
class TimeSpan:
    """Requests that ended in one span of time.

    Attributes:
        start: of the span, in seconds since 1970.
        tokens: prompt tokens by source.
        num_requests: requests that have got a first token.
        ttft_s: their times to the first token, added up.
        moved: what the engine moved and computed meanwhile.
    """

    start: float
    tokens: Counter[str] = field(default_factory=Counter)
    num_requests: int = 0
    ttft_s: float = 0.0
    moved: Moved = Moved()

    def add(self, record: Record) -> None:
        """Count a request that has ended and has tokens."""
        self.tokens.update(record.sources())
        self.num_requests += 1
        self.ttft_s += record.ttft_s or 0.0

    def as_json(self) -> dict[str, Any]:
        """What people are shown."""
        return {
            "start": self.start,
            "tokens": dict(self.tokens),
            "requests": self.num_requests,
            "ttft_s": self.ttft_s,
            **asdict(self.moved),
        }


class Records:
    """The last requests, and the history of all.

    Args:
        ended: called with each request that has ended.
        clock: seconds since 1970.
    """

    def __init__(self, ended: Callable[[Record], object], clock: Callable[[], float] = time.time) -> None:
        self._ended = ended
        self._clock = clock
        self._records: dict[str, Record] = {}
        self._history: deque[TimeSpan] = deque(maxlen=MAX_BUCKETS)
        self._ids = count(1)
        self._start = f"{time.time_ns():x}"
        self._moved = Moved()

    def new_id(self) -> str:
        """The end of a request's id, unlike all others of this server and of earlier ones."""
        return f"{self._start}-{next(self._ids)}"

    def begin(self, request_id: str, endpoint: str, client: Client, num_answers: int) -> Record:
        """Remember a request that begins, in place of the oldest."""
        if len(self._records) >= MAX_RECORDS:
            del self._records[next(iter(self._records))]
        record = Record(request_id, endpoint, client, [Sequence() for _ in range(num_answers)], self._clock())
        self._records[request_id] = record
        return record

    def end(self, record: Record, state: str) -> None:
        """Note how a request has ended."""
        record.state = state
        bucket = self._bucket()
        if record.ttft_s is not None:
            bucket.add(record)
        self._ended(record)

    def note_moves(self, moved: Moved) -> None:
        """Note what the tiers have moved since the start."""
        before, self._moved = self._moved, moved
        lately = moved.since(before)
        if lately != Moved():
            bucket = self._bucket()
            bucket.moved += lately

    def _bucket(self) -> TimeSpan:
        """The present one."""
        now = self._clock()
        if not self._history or now >= self._history[-1].start + BUCKET_S:
            self._history.append(TimeSpan(now - now % BUCKET_S))
        return self._history[-1]

    def find(self, request_id: str, client: Client) -> Record | None:
        """The request, if it is remembered and this client may see it."""
        record = self._records.get(request_id)
        return record if record is not None and client.sees(record.client.tenant) else None

    def latest(self, client: Client) -> Iterator[Record]:
        """The requests that this client may see, the latest first."""
        return (record for record in self.latest_of_all() if client.sees(record.client.tenant))

    def latest_of_all(self) -> Iterator[Record]:
        """The requests of all clients, the latest first."""
        return reversed(self._records.values())

    def history(self) -> list[TimeSpan]:
        """What happened over time, the oldest first."""
        return list(self._history)


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

    def of(self, family: Family) -> Mapping[Labels, float]:
        return self.samples.get(family.sample, {})

    def by(self, family: Family, label: str) -> dict[str, float]:
        """Return the values of a family by one of its labels, added up over the others."""
        values: Counter[str] = Counter()
        for labels, value in self.of(family).items():
            values[dict(labels).get(label, "")] += value  # type: ignore[assignment]  # a Counter adds what can be added
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
        buckets: dict[str, Counter[float]] = {}
        for labels, value in self.samples.get(f"{family.sample}_bucket", {}).items():
            of = dict(labels)
            buckets.setdefault(of.get("tier", ""), Counter())[float(of["le"])] += value  # type: ignore[assignment]  # as above
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
