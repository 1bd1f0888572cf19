"""What connectors tell of themselves: counters, levels, and times in histograms, as plain numbers that add up; what they keep.

Whatever a connector counts is a mapping of names to increments. It is summed over steps, workers and connectors without being
understood, and it crosses process boundaries as it is. So a histogram is a set of counters, too: for each bucket with something
in it, the number of values and their sum::

    host_load_le_50ms        3       three loads took more than 20 ms, and at most 50 ms
    host_load_sum_le_50ms    0.104   seconds, of these three together
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

Stats: TypeAlias = Mapping[str, float]
"""Counters by name, for one step: increments, not totals, so that they can be summed over steps and workers.

A counter whose name begins with ``num_`` is a *level*: its sum says how much there is now, so its increments may be negative.
Levels come from scheduler sides; when a connector is turned off, its guard sets its levels back to 0.

Behind the name there may be values of labels, each after a ``SEPARATOR``, such as the name of a tenant.
"""

SEPARATOR: Final = "\t"
"""Stands before each label of a counter; no label contains it."""

_NUM_NAMES: Final = 4096
"""Names of counters whose parts are remembered: the same few are taken apart in every step."""


def labelled(counter: str, *labels: str) -> str:
    """Return the name of a counter with values of labels behind it."""
    return SEPARATOR.join([counter, *(" ".join(label.split()) for label in labels)])


@lru_cache(maxsize=_NUM_NAMES)
def last_name(counter: str) -> str:
    """Return a counter's name without the dotted connector names in front of it."""
    if "." not in counter:
        return counter
    name, separator, labels = counter.partition(SEPARATOR)
    return name.rpartition(".")[2] + separator + labels


@lru_cache(maxsize=_NUM_NAMES)
def is_level(counter: str) -> bool:
    """Whether a counter is a level (see ``Stats``); its name may have connector names in front."""
    return last_name(counter).startswith("num_")


def add_stats(left: Stats, right: Stats) -> Stats:
    """Return the sum of two sets of counters. Neither is changed; the result may be ``left`` itself."""
    if not right:
        return left
    total = dict(left)
    for name, value in right.items():
        total[name] = total.get(name, 0) + value
    return total


def level_changes(before: Stats, now: Stats) -> Stats:
    """Return by how much levels have changed, new ones from 0: all such reports of a connector sum up to the level."""
    gone = {name: -level for name, level in before.items() if level and name not in now}
    changed = {name: level - before.get(name, 0) for name, level in now.items() if level != before.get(name)}
    return {**gone, **changed}


# --- times in histograms ----------------------------------------------------------------------------------------------

WAITS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 30_000)
"""Upper bounds, in milliseconds, of the buckets for what a request waits for."""
AGES_MS: Final = tuple(
    1000 * seconds for seconds in (1, 10, 60, 300, 900, 3600, 3 * 3600, 12 * 3600, 86_400, 7 * 86_400)
)
"""Upper bounds, in milliseconds, of the buckets for how long KV is kept, or not asked for."""

_PART: Final = re.compile(r"(?P<name>.+?)(?P<sum>_sum)?_le_(?P<end>\d+ms|inf)")


class Times:
    """A histogram of times.

    Args:
        name: its name, in front of those of its counters.
        bounds_ms: upper bounds of its buckets in milliseconds, ascending. A last one without a bound is added.
    """

    def __init__(self, name: str, bounds_ms: Sequence[int] = WAITS_MS) -> None:
        self._bounds_s = [bound / 1000 for bound in bounds_ms]
        ends = [*(f"le_{bound}ms" for bound in bounds_ms), "le_inf"]
        self._counters = [(f"{name}_{end}", f"{name}_sum_{end}") for end in ends]

    def note(self, seconds: float, stats: Counter[str]) -> None:
        """Count a time in ``stats``."""
        number, total = self._counters[bisect_left(self._bounds_s, seconds)]
        stats[number] += 1
        stats[total] += seconds  # type: ignore[assignment]  # a Counter counts whatever can be added


class TimesPart(NamedTuple):
    """What one counter of a histogram says.

    Attributes:
        name: the histogram's name.
        bound_s: upper bound of the bucket in seconds, which may be infinite.
        sum_counter: the counter of the sum of the values in the same bucket, in seconds; ``None`` if this is that counter, and
            not the number of the values.
    """

    name: str
    bound_s: float
    sum_counter: str | None


def times_part(counter: str) -> TimesPart | None:
    """Return what a counter says of a histogram; ``None`` if it belongs to none."""
    found = _PART.fullmatch(counter) if "_le_" in counter else None
    if found is None:
        return None
    name, is_sum, end = found["name"], found["sum"] is not None, found["end"]
    bound_s = float("inf") if end == "inf" else int(end.removesuffix("ms")) / 1000
    return TimesPart(name, bound_s, None if is_sum else f"{name}_sum_le_{end}")


# --- what took how long for whom --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Episode:
    """Something that a connector did for requests, once it is over; for traces.

    Attributes:
        what: ``look_up``, ``wait``, ``prefetch``, ``load`` or ``store``.
        request_ids: the requests, some of which may have ended.
        began_at, ended_at: times of the engine's clock, in seconds.
        facts: numbers and words about it, by name.
    """

    what: str
    request_ids: Collection[str]
    began_at: float
    ended_at: float
    facts: Mapping[str, int | str] = field(default_factory=dict)


# --- what is out of use -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outage:
    """Something that a connector does not use now, because it has failed.

    Attributes:
        tier: the tier, or the connector's own name if all of it is off.
        what: what is out of use, such as ``loads and writes``.
        reason: why, in one line.
        since: since when, in seconds of the engine's clock.
        retry_at: when it is tried again, in seconds of the engine's clock; a time that has passed means with the next request.
            ``None`` if only a restart helps.
    """

    tier: str
    what: str
    reason: str
    since: float
    retry_at: float | None = None

    def since_1970(self, epoch: float) -> Outage:
        """Return it with its times in seconds since 1970; ``epoch`` is the time at which the engine's clock was 0."""
        retry_at = None if self.retry_at is None else self.retry_at + epoch
        return Outage(self.tier, self.what, self.reason, self.since + epoch, retry_at)


@dataclass(frozen=True, slots=True)
class Pin:
    """A lease in force.

    Attributes:
        lease: the name that its client has given it; ``None`` if it has none.
        tenant: who has it.
        num_chunks: number of chunks that it covers, in the tier or still to come.
        num_tokens: number of leading tokens whose chunks it covers.
        left_s: seconds until it ends, unless a request renews it.
    """

    lease: str | None
    tenant: str | None
    num_chunks: int
    num_tokens: int
    left_s: float


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What a tenant has in a tier.

    Attributes:
        tenant: the tenant.
        num_chunks: number of its chunks.
        num_bytes: their size, over all workers.
    """

    tenant: str
    num_chunks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """The prefix of requests that have ended, as far as it is in a tier. Never its text.

    Attributes:
        tenant: whose requests they were.
        num_tokens: number of leading tokens that can be loaded now.
        num_uses: number of requests that have begun with it, or have grown to it.
        idle_s: seconds since the last of them ended.
    """

    tenant: str | None
    num_tokens: int
    num_uses: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class TierContents:
    """What people may want to know of one tier.

    Attributes:
        tier: its name.
        pins: all leases in force.
        max_pinned_chunks: number of chunks that leases may cover.
        max_pinned_chunks_each: how many of them a tenant with a name may have.
        tenants: what each tenant has that is counted by itself, and ``others``; empty if nobody is.
        prefixes: a limited number of prefixes that requests have left there.
    """

    tier: str
    pins: Sequence[Pin] = ()
    max_pinned_chunks: int = 0
    max_pinned_chunks_each: int = 0
    tenants: Sequence[TenantUse] = ()
    prefixes: Sequence[KeptPrefix] = ()
