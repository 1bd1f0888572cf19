"""Time series: what connectors count, under the names, labels and units that Prometheus reads; the same in every engine.

``docs/operating.md`` has the table for people; a test compares it with what is exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from cargohold.protocol import (
    AGES_MS,
    SEPARATOR,
    WAITS_MS,
    HintEnd,
    HintStatus,
    Outage,
    Stats,
    is_level,
    labelled,
    last_name,
    level_changes,
    times_part,
)


class Kind(Enum):
    """Kinds of time series, as Prometheus calls them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """Time series of one name.

    Attributes:
        name: the name; Prometheus appends ``_total`` to the names of counters.
        kind: what kind they are.
        help: what they say.
        labels: names of the labels that tell them apart.
        start: values of the labels that are known before anything has happened; ``LOWER`` in them stands for each lower tier.
        bounds_s: of a histogram, the upper bounds of its buckets, in seconds.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    start: tuple[tuple[str, ...], ...] = ()
    bounds_s: tuple[float, ...] = ()


class Series(NamedTuple):
    """One time series: its family, and the values of its labels."""

    family: Family
    values: tuple[str, ...] = ()


LOWER: Final = "<lower>"
_Start: TypeAlias = Iterable[str | tuple[str, ...]]


def counter(name: str, text: str, *labels: str, start: _Start = ()) -> Family:
    """A family of counters. Those of a single label may name its values in ``start`` as they are."""
    return Family(f"cargohold_{name}", Kind.COUNTER, text, labels, _known(labels, start))


def gauge(name: str, text: str, *labels: str, start: _Start = ()) -> Family:
    """A family of levels; see ``counter``."""
    return Family(f"cargohold_{name}", Kind.GAUGE, text, labels, _known(labels, start))


def _times(name: str, text: str, *labels: str, start: _Start = (), bounds_ms: Iterable[int] = WAITS_MS) -> Family:
    bounds_s = tuple(bound / 1000 for bound in bounds_ms)
    return Family(f"cargohold_{name}_seconds", Kind.HISTOGRAM, text, labels, _known(labels, start), bounds_s)


def _known(labels: tuple[str, ...], start: _Start) -> tuple[tuple[str, ...], ...]:
    if not labels:
        return ((),)
    return tuple((values,) if isinstance(values, str) else values for values in start)


_ALL: Final = ("host", LOWER)
"""The tiers below the device."""
_WAYS: Final = [(tier, way) for tier in _ALL for way in ("in", "out")]
_OUTCOMES: Final = sorted({one.value for one in (*HintStatus, *HintEnd)})

PROMPT: Final = counter(
    "prompt_tokens",
    "Prompt tokens by where their KV was found; computed: nowhere; bypassed: the request does not use the cache.",
    "tier",
    start=("device", *_ALL, "computed", "bypassed"),
)
CAPACITY: Final = gauge("tier_capacity_bytes", "Bytes of KV that a tier may hold.", "tier")
READY: Final = gauge("tier_ready_bytes", "Bytes of KV in a tier that can be found again.", "tier")
PINNED: Final = gauge("tier_pinned_bytes", "Bytes of KV that hints keep from being evicted.", "tier")
IN_USE: Final = gauge("tier_in_use_bytes", "Bytes of KV that copies in flight and requests hold.", "tier")
CAPACITY_TOKENS: Final = gauge("tier_capacity_tokens", "The same in tokens, of all layers.", "tier")
READY_TOKENS: Final = gauge("tier_ready_tokens", "The same in tokens, of all layers.", "tier")
PINNED_TOKENS: Final = gauge("tier_pinned_tokens", "The same in tokens, of all layers.", "tier")
IN_USE_TOKENS: Final = gauge("tier_in_use_tokens", "The same in tokens, of all layers.", "tier")
OF_TENANT: Final = gauge("tenant_bytes", "Bytes of KV in a tier, by tenants that have a quota.", "tier", "tenant")
OF_TENANT_TOKENS: Final = gauge("tenant_tokens", "The same in tokens, of all layers.", "tier", "tenant")
QUOTA: Final = gauge("tenant_quota_bytes", "Reserved bytes, soft and hard limit.", "tier", "tenant", "limit")
QUOTA_TOKENS: Final = gauge("tenant_quota_tokens", "The same in tokens.", "tier", "tenant", "limit")
HINTS: Final = counter(
    "hints", "Outcomes of hints, and how those that were carried out ended.", "outcome", start=_OUTCOMES
)
MOVED: Final = counter(
    "moved_bytes",
    "Bytes copied into a tier and out of it, over all workers.",
    *("tier", "direction"),
    start=_WAYS,
)
STORED: Final = counter("stored_chunks", "Chunks that entered a tier.", "tier", start=_ALL)
REMOVED: Final = counter(
    "removed_chunks", "Chunks that left host memory: evicted, damaged, or dropped.", "tier", start=["host"]
)
NOT_STORED: Final = counter(
    "not_stored_chunks", "Chunks that a tier refused, or whose write failed.", "tier", start=[LOWER]
)
NOT_LOADED: Final = counter(
    "not_loaded_chunks", "Chunks that were gone, damaged or late when fetched.", "tier", start=[LOWER]
)
CORRUPT: Final = counter(
    "corrupt_chunks", "Chunks that failed their check; counted by each worker.", "tier", start=[LOWER]
)
TIER_FAILURES: Final = counter(
    "tier_failures", "Jobs of a tier that failed or were late, on each worker.", "tier", start=[LOWER]
)
SUSPENSIONS: Final = counter(
    "suspensions", "Times that a tier's access was suspended, on each worker.", "tier", start=[LOWER]
)
FAILURES: Final = counter(
    "failures", "What failed or was given up, by kind.", "kind", start=("load", "store", "connector_off", "promise")
)
DEFERRED_LOOKUPS: Final = counter(
    "deferred_lookups", "Requests that waited for a tier's answer, or for another request's load of the same."
)
DEFERRED_STORES: Final = counter("deferred_stores", "Times that stores waited for room, counted in each step.")
LOAD_TOKENS: Final = counter("load_tokens", "Tokens that loads to the device brought.")
PREFILL_TOKENS: Final = counter("prefill_tokens", "Prompt tokens computed in steps that mostly compute prompts.")
PREFILL_SECONDS: Final = counter("prefill_seconds", "Seconds that these steps took.")
TTFT_MS: Final = (10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 300_000)
"""Upper bounds, in milliseconds, of the buckets for times to the first token."""
TTFT: Final = _times(
    "time_to_first_token",
    "From arrival to the first token. hit: half of the prompt or more was restored; device: found, mostly on the device.",
    "cache",
    start=("hit", "device", "miss"),
    bounds_ms=TTFT_MS,
)
WAIT: Final = _times("wait", "How long requests waited for a tier's answer or another request's load.")
GAP: Final = _times("reuse_gap", "Time between two uses of the same chunk; sampled.", bounds_ms=AGES_MS)
TIMES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "load": _times("load", "How long loads from host memory to the device took.", "tier", start=["host"]),
        "store": _times("store", "How long stores from the device to host memory took.", "tier", start=["host"]),
        "fetch": _times("fetch", "How long jobs took that fetch chunks from a lower tier.", "tier", start=[LOWER]),
        "write": _times("write", "How long jobs took that write chunks to a lower tier.", "tier", start=[LOWER]),
        "look_up": _times("look_up", "How long a lower tier took to say which chunks it has.", "tier", start=[LOWER]),
        "lifetime": _times(
            "lifetime", "How long chunks stayed in a tier; sampled.", "tier", start=["host"], bounds_ms=AGES_MS
        ),
    }
)
"""Histograms by the end of the names of their counters, which begin with a tier's."""
OUTAGE_SINCE: Final = gauge(
    "outage_since_timestamp_seconds",
    "Since when something is out of use, in seconds since 1970; 0 if it is in use again.",
    "tier",
    "what",
    "reason",
)
OUTAGE_RETRY: Final = gauge(
    "outage_retry_timestamp_seconds",
    "When that is tried again, in seconds since 1970; 0 if it is in use again. None if only a restart helps.",
    "tier",
    "what",
    "reason",
)
OTHER: Final = counter(
    "connector",
    "Everything else that connectors and tiers count, by its own name.",
    "counter",
    start=("loads_in_step", "stored_again_chunks", f"{LOWER}_loaded_chunks", f"{LOWER}_off"),
)
OTHER_LEVELS: Final = gauge("connector_level", "What else there is now, by its own name.", "counter")

FAMILIES: Final = (
    *(PROMPT, CAPACITY, READY, PINNED, IN_USE, CAPACITY_TOKENS, READY_TOKENS, PINNED_TOKENS, IN_USE_TOKENS),
    *(OF_TENANT, OF_TENANT_TOKENS, QUOTA, QUOTA_TOKENS, HINTS, MOVED, STORED, REMOVED),
    *(NOT_STORED, NOT_LOADED, CORRUPT, TIER_FAILURES, SUSPENSIONS, FAILURES, DEFERRED_LOOKUPS, DEFERRED_STORES),
    *(LOAD_TOKENS, PREFILL_TOKENS, PREFILL_SECONDS, TTFT, WAIT, GAP, *TIMES.values(), OUTAGE_SINCE, OUTAGE_RETRY),
    *(OTHER, OTHER_LEVELS),
)
"""All families that connectors fill."""

NAMED: Final[Mapping[str, Series]] = MappingProxyType(
    {
        "device_tokens": Series(PROMPT, ("device",)),
        "computed_tokens": Series(PROMPT, ("computed",)),
        "bypassed_tokens": Series(PROMPT, ("bypassed",)),
        "host_loaded_bytes": Series(MOVED, ("host", "out")),
        "host_stored_bytes": Series(MOVED, ("host", "in")),
        "stored_chunks": Series(STORED, ("host",)),
        "removed_chunks": Series(REMOVED, ("host",)),
        "loads_failed": Series(FAILURES, ("load",)),
        "stores_failed": Series(FAILURES, ("store",)),
        "connectors_off": Series(FAILURES, ("connector_off",)),
        "promises_broken": Series(FAILURES, ("promise",)),
        "deferred_lookups": Series(DEFERRED_LOOKUPS),
        "stores_deferred": Series(DEFERRED_STORES),
        "load_tokens": Series(LOAD_TOKENS),
        "prefill_tokens": Series(PREFILL_TOKENS),
        "prefill_s": Series(PREFILL_SECONDS),
    }
)
"""Time series by the name of the connectors' counter."""


def from_the_start(lower: Iterable[str]) -> Iterator[Series]:
    """Yield what is shown as 0 before anything has happened: rates are told only of what was there before.

    Args:
        lower: names of the tiers below host memory.
    """
    names = tuple(lower)
    for family in FAMILIES:
        for values in family.start:
            is_of_each = any(LOWER in value for value in values)
            for tier in names if is_of_each else ("",):
                yield Series(family, tuple(value.replace(LOWER, tier) for value in values))


_ENDS: Final[Mapping[str, tuple[Family, tuple[str, ...]]]] = MappingProxyType(
    {
        "_hit_tokens": (PROMPT, ()),
        "_stored_bytes": (MOVED, ("in",)),
        "_loaded_bytes": (MOVED, ("out",)),
        "_not_stored_chunks": (NOT_STORED, ()),
        "_not_loaded_chunks": (NOT_LOADED, ()),
        "_stored_chunks": (STORED, ()),
        "_corrupt_chunks": (CORRUPT, ()),
        "_failures": (TIER_FAILURES, ()),
        "_suspensions": (SUSPENSIONS, ()),
        "_capacity_bytes": (CAPACITY, ()),
        "_pinned_bytes": (PINNED, ()),
        "_in_use_bytes": (IN_USE, ()),
        "_tenant_bytes": (OF_TENANT, ()),
        "_quota_bytes": (QUOTA, ()),
        "_bytes": (READY, ()),
        "_capacity_tokens": (CAPACITY_TOKENS, ()),
        "_pinned_tokens": (PINNED_TOKENS, ()),
        "_in_use_tokens": (IN_USE_TOKENS, ()),
        "_tenant_tokens": (OF_TENANT_TOKENS, ()),
        "_quota_tokens": (QUOTA_TOKENS, ()),
        "_tokens": (READY_TOKENS, ()),
    }
)
"""Families by the end of the names of their counters, which begin with a tier's; and the values of further labels."""
_OUTAGES: Final = MappingProxyType({"num_outage_since": OUTAGE_SINCE, "num_outage_retry": OUTAGE_RETRY})
_NOT_OF_TIERS: Final = frozenset({"stored_again"})
"""What stands in front of such an end, and is no tier."""


def series_of(counter: str) -> Series:
    """Return the time series that a counter belongs to; of a histogram's counter, that of the histogram.

    Args:
        counter: its name, as in the result of ``for_operators``.
    """
    if counter in NAMED:
        return NAMED[counter]
    full_name, *labels = counter.split(SEPARATOR)
    if full_name in _OUTAGES:
        return Series(_OUTAGES[full_name], tuple(labels))
    if full_name.startswith("hints_"):
        return Series(HINTS, (full_name.removeprefix("hints_"),))
    part = times_part(counter)
    if part is not None:
        return _series_of_times(part.name)
    name = full_name.removeprefix("num_")
    kind = Kind.GAUGE if is_level(counter) else Kind.COUNTER
    for end, (family, values) in _ENDS.items():
        tier = name.removesuffix(end)
        if tier != name and family.kind is kind and tier not in _NOT_OF_TIERS:
            return Series(family, (tier, *values, *labels))
    return Series(OTHER_LEVELS if is_level(counter) else OTHER, (counter,))


def _series_of_times(name: str) -> Series:
    for family in (WAIT, GAP):
        if family.name == f"cargohold_{name}_seconds":
            return Series(family)
    if name.endswith("_ttft"):
        return Series(TTFT, (name.removesuffix("_ttft"),))
    for end, family in TIMES.items():
        if name.endswith(f"_{end}"):
            return Series(family, (name.removesuffix(f"_{end}"),))
    return Series(OTHER, (name,))


_MAX_REASONS: Final = 16
_MAX_REASON_CHARS: Final = 200


def cache_label(num_restored_tokens: int, num_device_tokens: int, num_prompt_tokens: int) -> str:
    """What a prompt counts as in ``TTFT``. Every chat finds its template's start: less than half is a miss.

    What the device still had is told apart from what was restored: the engine finds that without any connector.
    """
    if 2 * num_restored_tokens >= num_prompt_tokens:
        return "hit"
    return "device" if 2 * (num_restored_tokens + num_device_tokens) >= num_prompt_tokens else "miss"


# --- connectors' counters as operators want them ----------------------------------------------------------------------

_NOT_SHOWN: Final = frozenset(
    {
        # Counted by each connector, so that several connectors would count a request several times.
        *("asked_tokens", "device_hit_tokens"),
        # Told by other counters.
        *("loads", "stores", "loaded_blocks", "stored_blocks", "load_s", "store_s"),
    }
)


def for_operators(stats: Stats, block_bytes: float, token_bytes: float, num_replicas: int = 1) -> dict[str, float]:
    """Return connectors' counters added up over connectors, in bytes instead of blocks; levels in bytes also in tokens.

    Args:
        stats: counters. Those of one of several connectors have its name and a dot in front.
        block_bytes: bytes of one block on one worker. Where workers differ, their mean: all of them copy the same blocks.
        token_bytes: bytes of one token's KV in a tier, for all workers.
        num_replicas: number of times that the workers' devices hold these bytes.
    """
    total: dict[str, float] = {}
    for full_name, value in stats.items():
        name = last_name(full_name)
        total[name] = total.get(name, 0) + value
    for blocks, name in (("load_blocks", "host_loaded_bytes"), ("store_blocks", "host_stored_bytes")):
        total[name] = total.pop(blocks, 0) * block_bytes
    shown: dict[str, float] = {}
    for name, value in total.items():
        if name not in _NOT_SHOWN:
            shown[name] = value
            of_what, separator, labels = name.partition(SEPARATOR)
            if of_what.endswith("_bytes") and is_level(name):
                num_tokens = value / token_bytes / (num_replicas if of_what.startswith("num_device_") else 1)
                shown[f"{of_what.removesuffix('_bytes')}_tokens{separator}{labels}"] = num_tokens
    return shown


class OutageLevels:
    """Tells of outages as levels, for engines whose metrics take nothing but numbers with names.

    Args:
        epoch: seconds since 1970 at which the engine's clock was 0.
    """

    def __init__(self, epoch: float) -> None:
        self._epoch = epoch
        self._levels: Stats = {}
        self._reasons: set[str] = set()

    def take_changes(self, outages: Sequence[Outage]) -> Stats:
        """Return how the levels have changed since the last call."""
        if not outages and not self._levels:
            return {}  # nearly always
        before, self._levels = self._levels, dict(self._told(outages))
        return level_changes(before, self._levels)

    def _told(self, outages: Sequence[Outage]) -> Iterator[tuple[str, float]]:
        for outage in outages:
            told = outage.since_1970(self._epoch)
            labels = outage.tier, outage.what, self._reason(outage.reason)
            yield labelled("num_outage_since", *labels), told.since
            if told.retry_at is not None:
                yield labelled("num_outage_retry", *labels), told.retry_at

    def _reason(self, reason: str) -> str:
        """A reason that fits into a label. Each makes a time series, and stores put ids of requests into theirs."""
        reason = reason[:_MAX_REASON_CHARS]
        if len(self._reasons) < _MAX_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else "another reason; the log has it"
