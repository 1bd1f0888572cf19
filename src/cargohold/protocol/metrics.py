"""What is counted: families of time series, each declared once, and their values on the way to what shows them.

Prometheus, vLLM's log, the page, ``cargohold top``, ``LLM.stats`` and the table in ``docs/api/metrics.md`` are made from these
declarations. Your own connector or guest declares its families where it counts them::

    SWAPS = counter("swaps", "swaps", "Times that two chunks changed places.", "tier", start=["host"])
    ...
    tally[SWAPS.of("host")] += 1

All values add up, over steps, workers and connectors: those of counters and histograms are increments, those of gauges changes.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from math import inf, isfinite
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from cargohold.protocol.hints import HintEnd, HintStatus


class Kind(Enum):
    """Kinds of time series, as Prometheus calls them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


MAX_SERIES: Final = 1024
"""Maximum number of time series of a family; beyond it, all labels are ``other``. Also that of families."""
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
LOWER: Final = "<lower>"


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Time series of one name: one object in a process, however it came there.

    Attributes:
        name: the name, without ``cargohold_`` in front, and without the ``_total`` after those of counters.
        kind: what kind they are.
        unit: of their values.
        help: what they say.
        labels: names of the labels that tell them apart.
        start: labels that are known before anything has happened; ``LOWER`` in them stands for each lower tier.
        bounds_s: of a histogram, the upper bounds of its buckets, in seconds; the last one is infinite.
        is_exported: whether it is exported to Prometheus. What is not is for connectors themselves, and for ``LLM.stats``.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    start: tuple[tuple[str, ...], ...] = ()
    bounds_s: tuple[float, ...] = ()
    is_exported: bool = True
    _series: dict[tuple[str, ...], Series] = field(default_factory=dict, init=False, repr=False)

    def of(self, *labels: str) -> Series:
        """Return the time series with these labels."""
        series = self._series.get(labels)
        if series is None:
            if len(labels) != len(self.labels) or not all(isinstance(label, str) for label in labels):
                raise TypeError(f"{self.name} has the labels {self.labels}, texts, not {labels}")
            if len(self._series) >= MAX_SERIES:
                return Series(self, ("other",) * len(labels))
            series = self._series[labels] = Series(self, labels)
        return series

    @property
    def full_name(self) -> str:
        """The name as Prometheus has it in its list of families."""
        return f"cargohold_{self.name}"

    @property
    def sample(self) -> str:
        """The name of its samples; histograms have several, which begin with it."""
        return self.full_name + "_total" * (self.kind is Kind.COUNTER)

    @property
    def declaration(self) -> tuple[Any, ...]:
        """All that it was declared with, as plain data."""
        kind = self.kind.value
        return self.name, kind, self.unit, self.help, self.labels, self.start, self.bounds_s, self.is_exported

    def __reduce__(self) -> tuple[Any, ...]:
        return _declare, self.declaration


class Bucket(NamedTuple):
    """Part of a histogram's value: how many values are in a bucket, or their sum.

    An engine's own histogram takes nothing but values: it is given a bucket's mean for each.
    """

    bound_s: float
    is_sum: bool


class Series(NamedTuple):
    """One time series.

    Attributes:
        family: its family.
        labels: values of the family's labels. ``Family.of`` keeps their number within limits.
        connector: which of several connectors counts, such as ``lazy``; of composed ones within others, ``outer.inner``.
        bucket: which part of a histogram.
    """

    family: Family
    labels: tuple[str, ...] = ()
    connector: str = ""
    bucket: Bucket | None = None

    def note(self, seconds: float, tally: Tally) -> None:
        """Count a time in a histogram."""
        bounds = self.family.bounds_s
        number, total = _parts(self, bounds[bisect_left(bounds, seconds)])
        tally[number] += 1
        tally[total] += seconds

    def __repr__(self) -> str:
        labels = [f'{name}="{value}"' for name, value in zip(self.family.labels, self.labels, strict=True)]
        if self.bucket is not None:
            labels.append(f"{'sum_' * self.bucket.is_sum}le={self.bucket.bound_s:g}")
        name = f"{self.connector}.{self.family.name}" if self.connector else self.family.name
        return f"{name}{{{', '.join(labels)}}}" if labels else name


def is_countable(series: Any, amount: Any) -> bool:
    """Whether an amount can be added to a time series wherever it is shown: it is finite, and no counter falls."""
    is_number = isinstance(series, Series) and isinstance(amount, int | float) and isfinite(amount)
    return is_number and (amount >= 0 or series.family.kind is Kind.GAUGE)


Stats: TypeAlias = Mapping[Series, float]
"""Values by time series: of counters and histograms since they were taken last, of gauges how they have changed since then.

A gauge's values sum up to what there is now. They come from scheduler sides; a guard sets them back to 0 when it turns one off.
"""


@cache  # as many as there are series and buckets, which are limited
def _parts(series: Series, bound_s: float) -> tuple[Series, Series]:
    """Return the two parts of a histogram that a time counts in: how many there are in its bucket, and their sum."""
    return series._replace(bucket=Bucket(bound_s, False)), series._replace(bucket=Bucket(bound_s, True))


class Tally(dict[Series, float]):
    """Values to count in; 0 for what was never counted."""

    def __missing__(self, series: Series) -> float:
        return 0

    def add(self, more: Stats) -> None:
        """Add other values."""
        for series, value in more.items():
            self[series] = self.get(series, 0) + value

    def seconds(self, family: Family) -> float:
        """Return the sum of all values of a family of histograms."""
        of_family = ((series.bucket, value) for series, value in self.items() if series.family is family)
        return sum(value for bucket, value in of_family if bucket is not None and bucket.is_sum)


def add_stats(left: Stats, right: Stats) -> Stats:
    """Return the sum. Neither is changed; the result may be ``left`` itself."""
    if not right:
        return left
    total = Tally(left)
    total.add(right)
    return total


def of_connector(name: str, stats: Stats) -> Stats:
    """Return what one of several connectors has counted, with its name."""
    return {
        series._replace(connector=f"{name}.{series.connector}".strip(".")): value for series, value in stats.items()
    }


def part_of_connector(name: str, stats: Stats) -> Stats:
    """Return what ``of_connector`` made of one connector's, as it was."""
    own = {series: value for series, value in stats.items() if f"{series.connector}.".startswith(f"{name}.")}
    return {series._replace(connector=series.connector[len(name) + 1 :]): value for series, value in own.items()}


def over_connectors(stats: Stats) -> Tally:
    """Return the sum over all connectors."""
    total = Tally()
    for series, value in stats.items():
        total[series._replace(connector="") if series.connector else series] += value
    return total


def level_changes(before: Stats, now: Stats) -> Stats:
    """Return by how much gauges have changed, new ones from 0: all such reports of a connector sum up to the level."""
    gone = {series: -level for series, level in before.items() if level and series not in now}
    changed = {series: level - before.get(series, 0) for series, level in now.items() if level != before.get(series)}
    return {**gone, **changed}


# --- declaring --------------------------------------------------------------------------------------------------------

WAITS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Bounds of the buckets for what a request waits for."""
AGES_S: Final = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 3 * 3600.0, 12 * 3600.0, 86_400.0, 7 * 86_400.0)
"""Bounds of the buckets for how long KV is kept, or not asked for."""

_Start: TypeAlias = Iterable[str | Iterable[str]]
_declared: Final[dict[str, Family]] = {}


def counter(name: str, unit: str, text: str, *labels: str, start: _Start = (), is_exported: bool = True) -> Family:
    """Declare a family of counters. Those of a single label may name its values in ``start`` as they are."""
    return _declare(name, Kind.COUNTER, unit, text, labels, start, (), is_exported)


def gauge(name: str, unit: str, text: str, *labels: str, start: _Start = ()) -> Family:
    """Declare a family of levels; see ``counter``."""
    return _declare(name, Kind.GAUGE, unit, text, labels, start)


def histogram(
    name: str,
    text: str,
    *labels: str,
    start: _Start = (),
    bounds_s: Iterable[float] = WAITS_S,
    unit: str = "seconds",
) -> Family:
    """Declare a family of histograms, nearly always of times; see ``counter``."""
    return _declare(name, Kind.HISTOGRAM, unit, text, labels, start, (*bounds_s, inf), True)


def _declare(
    name: str, kind: Kind | str, unit: str, text: str, labels: Iterable[str], start: _Start, *more: Any
) -> Family:
    """Return the family that this process has, or a new one: another process may have sent it, whose modules are not here."""
    labels = tuple(labels)
    if not all(_NAME.fullmatch(one) for one in (name, *labels)) or len(_declared) >= MAX_SERIES:
        raise ValueError(
            f"no metric can be named {name!r}, with labels {labels}: letters, digits, _; {MAX_SERIES} in all"
        )
    bounds_s, is_exported = more or ((), True)
    known = tuple((values,) if isinstance(values, str) else tuple(values) for values in start)
    known = known if labels else ((),)
    family = Family(name, Kind(kind), unit, text, labels, known, tuple(bounds_s), is_exported)
    first = _declared.setdefault(name, family)
    if first.declaration != family.declaration:
        raise ValueError(f"the metric {name} is declared already, otherwise")
    return first


def from_the_start(lower: Iterable[str]) -> Iterator[Series]:
    """Yield what is shown as 0 before anything has happened: rates need an earlier value.

    Args:
        lower: names of the tiers below host memory.
    """
    names = tuple(lower)
    for family in tuple(_declared.values()):
        for labels in family.start if family.is_exported else ():
            for tier in names if any(LOWER in value for value in labels) else ("",):
                yield family.of(*(value.replace(LOWER, tier) for value in labels))


# --- from process to process ------------------------------------------------------------------------------------------

Row: TypeAlias = tuple[str | tuple[Any, ...], tuple[str, ...], str, Bucket | None, float]
"""A series and its value. Instead of a family's name its declaration, if that is in a third party's module."""


def pack(stats: Stats) -> list[Row]:
    """Return values in a form of which any serializer can make bytes; numpy's numbers are ``float`` then."""
    return [
        (family.name if family in _OURS else family.declaration, labels, connector, bucket, float(value))
        for (family, labels, connector, bucket), value in stats.items()
    ]


def unpack(rows: Iterable[Any]) -> Tally:
    """Return values that were packed; their rows may be lists by now."""
    total = Tally()
    for declaration, labels, connector, bucket, value in rows:
        family = _declared[declaration] if isinstance(declaration, str) else _declare(*declaration)
        series = family.of(*labels)._replace(connector=connector, bucket=None if bucket is None else Bucket(*bucket))
        total[series] += value
    return total


# --- all families of connectors ---------------------------------------------------------------------------------------

_TIERS: Final = ("host", LOWER)
"""The tiers below the device."""
_WAYS: Final = [(tier, way) for tier in _TIERS for way in ("in", "out")]
_OUTCOMES: Final = sorted({one.value for one in (*HintStatus, *HintEnd)})
_TTFT_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_SOURCES: Final = ("device", *_TIERS, "computed", "bypassed")
_FAILED: Final = ("load", "store", "connector_off", "promise")
_OTHERS: Final = ("loads_in_step", "stored_again_chunks", f"{LOWER}_loaded_chunks", f"{LOWER}_off")

PROMPT: Final = counter(
    "prompt_tokens",
    "tokens",
    "Of prompts, by where their KV was found, each request once; computed: nowhere; bypassed: it cannot use the cache.",
    "tier",
    start=_SOURCES,
)
TIER_CAPACITY: Final = gauge(
    "tier_capacity_bytes", "bytes", "Capacity of a tier; missing if it has no limit of its own.", "tier"
)
TIER_READY: Final = gauge(
    "tier_ready_bytes", "bytes", "Content of a tier; of a shared store, only what this engine has stored.", "tier"
)
TIER_PLAIN: Final = gauge(
    "tier_plain_bytes", "bytes", "Size of that content before packing; approximate if chunks differ in size.", "tier"
)
TIER_PINNED: Final = gauge("tier_pinned_bytes", "bytes", "Protected from eviction by hints.", "tier")
TIER_IN_USE: Final = gauge(
    "tier_in_use_bytes",
    "bytes",
    "Held in host memory by copies and waiting requests; on the device, by requests (server only).",
    "tier",
)
OF_TENANT: Final = gauge(
    "tenant_bytes",
    "bytes",
    "Held by each tenant with a quota, and by all others together; from the server only with a key.",
    "tier",
    "tenant",
)
QUOTA: Final = gauge(
    "tenant_quota_bytes", "bytes", "Their quotas: reserved, soft and hard limit.", "tier", "tenant", "limit"
)
IN_TOKENS: Final[Mapping[Family, Family]] = MappingProxyType(
    {
        family: gauge(family.name.replace("_bytes", "_tokens"), "tokens", f"{family.help} In tokens.", *family.labels)
        for family in (TIER_CAPACITY, TIER_READY, TIER_PINNED, TIER_IN_USE, OF_TENANT, QUOTA)
    }
)
"""What is counted in tokens, too."""

TOKENS_PER_GIB: Final = gauge(
    "tokens_per_gib",
    "tokens",
    "Of long prompts: held per GiB of host memory, held_disk per GiB of a disk, and possible by the sizes of their KV.",
    "what",
)
HINTS: Final = counter(
    "hints", "hints", "Outcomes of hints, and how those that were carried out ended.", "outcome", start=_OUTCOMES
)
MOVED: Final = counter(
    "moved_bytes", "bytes", "Copied into a tier (in) and out of it (out).", "tier", "direction", start=_WAYS
)
STORED: Final = counter(
    "stored_chunks", "chunks", "Entered a tier, from the device (host) or by a write.", "tier", start=_TIERS
)
REMOVED: Final = counter(
    "removed_chunks",
    "chunks",
    "Left host memory, by reason: evicted, damaged or reset.",
    "tier",
    "reason",
    start=[("host", reason) for reason in ("evicted", "damaged", "reset")],
)
NOT_STORED: Final = counter(
    "not_stored_chunks", "chunks", "Refused by a lower tier, or failed to be written.", "tier", start=[LOWER]
)
NOT_LOADED: Final = counter(
    "not_loaded_chunks", "chunks", "Missing, damaged or late when fetched.", "tier", start=[LOWER]
)
CORRUPT: Final = counter("corrupt_chunks", "chunks", "Failed their check, on each worker.", "tier", start=[LOWER])
TIER_FAILURES: Final = counter(
    "tier_failures", "jobs", "Of a lower tier, failed or late, on each worker.", "tier", start=[LOWER]
)
SUSPENSIONS: Final = counter(
    "suspensions", "times", "Access to a tier was suspended, on each worker.", "tier", start=[LOWER]
)
FAILURES: Final = counter(
    "failures",
    "times",
    "A load or store failed or was late; a connector was turned off; a chunk promised to another engine was not kept.",
    "kind",
    start=_FAILED,
)
DEFERRED_LOOKUPS: Final = counter(
    "deferred_lookups", "requests", "Waited for a tier's answer or another request's load."
)
DEFERRED_STORES: Final = counter("deferred_stores", "times", "Stores waited for room, counted in each step.")
LOAD_TOKENS: Final = counter("load_tokens", "tokens", "Loaded to the device.")
PREFILL_TOKENS: Final = counter(
    "prefill_tokens", "tokens", "Of prompts, computed in steps that mostly compute prompts."
)
PREFILL_SECONDS: Final = counter("prefill_seconds", "seconds", "How long these steps took.")
TTFT: Final = histogram(
    "time_to_first_token_seconds",
    "From arrival; hit: half of the prompt or more was restored; device: it was found, mostly on the device; else miss.",
    "cache",
    start=["hit", "device", "miss"],
    bounds_s=_TTFT_S,
)
WAIT: Final = histogram("wait_seconds", "How long requests waited for a tier's answer or another request's load.")
REUSE_GAP: Final = histogram("reuse_gap_seconds", "Time between two uses of a chunk; sampled.", bounds_s=AGES_S)
LOAD: Final = histogram(
    "load_seconds", "A load to the device, from its plan until all workers reported it.", "tier", start=["host"]
)
STORE: Final = histogram("store_seconds", "A store from the device, from its start to its end.", "tier", start=["host"])
FETCH: Final = histogram("fetch_seconds", "A job that fetches chunks from a lower tier.", "tier", start=[LOWER])
WRITE: Final = histogram("write_seconds", "A job that writes chunks to a lower tier.", "tier", start=[LOWER])
LOOK_UP: Final = histogram("look_up_seconds", "A lower tier's answer which chunks it has.", "tier", start=[LOWER])
LIFETIME: Final = histogram(
    "lifetime_seconds", "How long chunks stayed; sampled.", "tier", start=["host"], bounds_s=AGES_S
)
VERIFIED: Final = counter(
    "verified_chunks",
    "chunks",
    "Computed although a tier kept them, and compared with what it kept; close: equal within rounding.",
    "outcome",
    "tier",
    start=[(outcome, tier) for outcome in ("equal", "close", "different") for tier in _TIERS],
)
DISTANCE: Final = histogram(
    "verified_distance",
    "Of chunks that were not equal, the largest difference in a layer, divided by its largest number.",
    bounds_s=tuple(10.0**power for power in range(-7, 1)),
    unit="ratio",
)
_OUTAGE: Final = ("tier", "what", "reason")
OUTAGE_SINCE: Final = gauge(
    "outage_since_timestamp_seconds",
    "seconds since 1970",
    "Start of an outage; 0 or missing when it is over.",
    *_OUTAGE,
)
OUTAGE_RETRY: Final = gauge(
    "outage_retry_timestamp_seconds",
    "seconds since 1970",
    "When it is tried again; missing if only a restart helps.",
    *_OUTAGE,
)
OTHER: Final = counter(
    "connector",
    "its own",
    "Other counts; stored again: because a request hit it on the device and host memory lacked it.",
    "counter",
    start=_OTHERS,
)
OTHER_LEVELS: Final = gauge("connector_level", "its own", "Other current values, such as stuck copies.", "counter")
LOADS_IN_STEP: Final = OTHER.of("loads_in_step")
STORED_AGAIN: Final = OTHER.of("stored_again_chunks")
READY_CHUNKS: Final = OTHER_LEVELS.of("num_ready_chunks")
PINNED_CHUNKS: Final = OTHER_LEVELS.of("num_pinned_chunks")
STUCK_COPIES: Final = OTHER_LEVELS.of("num_stuck_copies")

ASKED: Final = counter("asked_tokens", "tokens", "Of admitted prompts, by each connector.", is_exported=False)
FOUND_ON_DEVICE: Final = counter("device_hit_tokens", "tokens", "Of these, found on the device.", is_exported=False)
PLANNED: Final = counter(
    "planned_copies", "copies", "From host memory (load) and to it (store).", "direction", is_exported=False
)
PLANNED_BLOCKS: Final = counter("planned_blocks", "blocks", "Of these copies.", "direction", is_exported=False)
COPIED_BLOCKS: Final = counter(
    "copied_blocks", "blocks", "Copied in time, on each worker.", "direction", is_exported=False
)
COPY_SECONDS: Final = counter(
    "copy_seconds", "seconds", "That this took, without waiting.", "direction", is_exported=False
)

FAMILIES: Final = tuple(_declared.values())
"""All families of connectors, but not those of third parties."""
_OURS: Final = frozenset(FAMILIES)
