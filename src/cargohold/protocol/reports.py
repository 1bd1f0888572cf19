"""What connectors report besides numbers: what took how long for which request, what is out of use, and what they keep."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

# --- how long each thing took ------------------------------------------------------------------------------------------


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
        tenant: its owner.
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
        tenants: what each tenant has that is counted by itself, and ``others``; empty if none is.
        prefixes: a limited number of prefixes that requests have left there.
    """

    tier: str
    pins: Sequence[Pin] = ()
    max_pinned_chunks: int = 0
    max_pinned_chunks_each: int = 0
    tenants: Sequence[TenantUse] = ()
    prefixes: Sequence[KeptPrefix] = ()
