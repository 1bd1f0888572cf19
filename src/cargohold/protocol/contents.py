"""What a connector tells people of what it keeps: whose it is, what leases hold, and which prefixes are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
