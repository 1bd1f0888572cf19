"""Options of the offloading connector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cargohold.cache.policies import DEFAULT_POLICY, find_policy
from cargohold.cache.shares import MAX_SHARES, Limits
from cargohold.connector.kernel.guest import find_guest
from cargohold.errors import ConfigError
from cargohold.option_values import find_factory, is_int, is_number, is_positive_int, is_positive_number, parse_bytes
from cargohold.protocol import AttentionKind, KVCacheLayout
from cargohold.tiers import TierConfig

RESTORE_IF_FASTER = "if_faster"
RESTORE_ALWAYS = "always"
HINTS_OFF = "off"
HINTS_RETAIN = "retain"
HINTS_ALL = "all"
MAX_SHUTDOWN_S = 20.0
"""Maximum of ``shutdown_timeout_s``. Engines kill workers that have not stopped by themselves: the embedded one after 30 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HintConfig:
    """What hints may do. Checked when created; raises ``ConfigError``, which names the option.

    Attributes:
        allow: which hints are carried out: ``all`` of them; ``retain``, that is ``retain``, ``demote`` and ``release``, which
            take little from others; or none (``off``).
        allow_of: the same for single tenants, by tenant.
        pin_fraction: part of a tier's chunks that leases may cover; a tenant with a name may have half of that.
        retain_fraction: part of a tier's chunks whose priority may be raised; a tenant with a name may have half of that.
        max_ttl_s: seconds that a hint may last at most.
    """

    allow: str = HINTS_ALL
    allow_of: Mapping[str, str] = field(default_factory=dict)
    pin_fraction: float = 0.25
    retain_fraction: float = 0.5
    max_ttl_s: float = 3600.0

    def __post_init__(self) -> None:
        choices = (HINTS_ALL, HINTS_RETAIN, HINTS_OFF)
        for key, value in (("allow", self.allow), *((f"allow_of[{name}]", of) for name, of in self.allow_of.items())):
            if value not in choices:
                raise ConfigError(key, value, f"it must be one of {', '.join(choices)}")
        for key in ("pin_fraction", "retain_fraction"):
            part = getattr(self, key)
            if not is_number(part) or not 0 <= part <= 1:
                raise ConfigError(key, part, "it must be a number from 0 to 1")
        if not is_positive_number(self.max_ttl_s):
            raise ConfigError("max_ttl_s", self.max_ttl_s, "it must be a number of seconds above 0")

    def allowed_to(self, tenant: str | None) -> str:
        """Return which hints of a tenant are carried out."""
        return self.allow if tenant is None else self.allow_of.get(tenant, self.allow)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota:
    """How much of host memory a tenant may have. Checked when created; raises ``ConfigError``, which names the option.

    Sizes are bytes (``2GiB``, or a number) or a part of the tier (``10%``).

    Attributes:
        tenant: the tenant: the name that a server gives it, or else the salt of its requests.
        reserved: what no other tenant can take from it.
        soft: above this, its own chunks are evicted before those of others; ``None`` for no such limit.
        hard: it never has more than this; ``None`` for no such limit.
        label: what metrics call it; by default its place among the quotas, such as ``tenant 1``. A salt is no label: whoever
            knows it can find out what is cached under it.
    """

    tenant: str
    reserved: int | str = 0
    soft: int | str | None = None
    hard: int | str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if not self.tenant:
            raise ConfigError("tenant", self.tenant, "it must be the name of a tenant")
        if self.label is not None and not (self.label and self.label.isprintable()):
            raise ConfigError("label", self.label, "it must be printable text")
        self.limits(100, 1)

    def limits(self, capacity: int, chunk_bytes: int) -> Limits:
        """Return the limits in chunks, for a tier of ``capacity`` chunks of ``chunk_bytes``."""

        def chunks(key: str, size: int | str) -> int:
            if isinstance(size, str) and size.strip().endswith("%"):
                try:
                    part = float(size.strip().removesuffix("%"))
                except ValueError:
                    part = -1.0
                if not 0 <= part <= 100:  # per cent
                    raise ConfigError(key, size, "it must be from 0% to 100%, or a size such as 2GiB")
                return int(capacity * part / 100)
            return 0 if size == 0 else parse_bytes(key, size) // chunk_bytes

        reserved = chunks("reserved", self.reserved)
        soft = None if self.soft is None else chunks("soft", self.soft)
        hard = None if self.hard is None else chunks("hard", self.hard)
        return Limits(reserved, soft, hard)


def limits_in_chunks(quotas: Sequence[TenantQuota], capacity: int, chunk_bytes: int) -> dict[str, Limits]:
    """Return the limits of all tenants in chunks. Raises ``ConfigError`` if they do not fit together."""
    limits = {quota.tenant: quota.limits(capacity, chunk_bytes) for quota in quotas}
    if sum(of.reserved for of in limits.values()) > capacity:
        raise ConfigError("quotas", sorted(limits), f"more is reserved than the tier's {capacity} chunks")
    for tenant, of in limits.items():
        if of.hard is not None and of.hard < max(1, of.reserved):
            raise ConfigError("hard", of.hard, f"{tenant} needs one chunk at least, and what is reserved for it")
    return limits


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOptions:
    """Options of host memory and the tiers below it, whenever chunks are copied there.

    Attributes:
        host_bytes: host memory for KV, over all workers: a number, or a size such as ``2GiB``. A hard limit.
        policy: name of the eviction policy for host memory; see ``cargohold.cache.policies.find_policy``.
        max_inflight_fraction: fraction of the device pool that stores in flight may hold; above it, new chunks wait.
        transfer_timeout_s: a transfer that has not started after this time is given up: a load becomes a miss.
        job_timeout_s: nobody waits longer for a transfer to end on all workers, nor than half of the engine's
            ``load_timeout_s``; its blocks and slots stay out of service until it ends.
        tiers: the tiers below host memory, the fastest first. They keep chunks that host memory has no room for, and chunks
            in them outlive the process.
        restore: whether chunks are brought up from lower tiers only ``if_faster`` than computing them, judged by the recent
            times of both, or ``always``.
        restore_timeout_s: maximum time that a request waits for lower tiers; chunks that have not come by then are computed.
        shutdown_timeout_s: maximum time to finish writes to lower tiers when the engine stops; chunks whose writes have not
            ended by then are not there after a restart.
        read_only: whether nothing is stored: for engines that only use what others have stored in tiers that they share.
        hints: what hints may do.
        manager: what decides which chunks host memory holds, if it is your own: ``MODULE:FACTORY``, called with the number of
            chunks and ``record_events``; it makes a ``cargohold.cache.OffloadManager``. Then there is no ``policy``.
        transfer: what copies between device and host memory on a worker, if it is your own: ``MODULE:FACTORY``, called with the
            arguments of ``cargohold.transfer.cpu.make_transfer_worker``; it makes a ``cargohold.transfer.TransferWorker``.
        guests: features of your own that hear what the connector does, as ``MODULE:CLASS``; see
            ``cargohold.connector.kernel.guest.Guest``.
    """

    host_bytes: int | str
    policy: str = DEFAULT_POLICY
    max_inflight_fraction: float = 0.5
    transfer_timeout_s: float = 30.0
    job_timeout_s: float = 120.0
    tiers: Sequence[TierConfig] = ()
    restore: str = RESTORE_IF_FASTER
    restore_timeout_s: float = 5.0
    shutdown_timeout_s: float = 3.0
    read_only: bool = False
    hints: HintConfig = HintConfig()
    manager: str | None = None
    transfer: str | None = None
    guests: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Refuse invalid options. An override calls ``HostOptions.__post_init__(self)`` first: ``super()`` fails with slots."""
        parse_bytes("host_bytes", self.host_bytes)
        find_policy(self.policy)
        fraction = self.max_inflight_fraction
        self._require(
            "max_inflight_fraction", is_positive_number(fraction) and fraction <= 1, "a number above 0 and at most 1"
        )
        self._require("transfer_timeout_s", is_positive_number(self.transfer_timeout_s), "a number of seconds above 0")
        self._require(
            "job_timeout_s",
            is_positive_number(self.job_timeout_s) and self.job_timeout_s > self.transfer_timeout_s,
            f"a number of seconds above transfer_timeout_s, which is {self.transfer_timeout_s:g}",
        )
        is_list = isinstance(self.tiers, list | tuple)
        self._require(
            "tiers",
            is_list and all(isinstance(tier, TierConfig) for tier in self.tiers),
            "a list of DiskTierConfig, SharedTierConfig, or what else derives from TierConfig",
        )
        choices = (RESTORE_IF_FASTER, RESTORE_ALWAYS)
        self._require("restore", self.restore in choices, f"one of {', '.join(choices)}")
        self._require("restore_timeout_s", is_positive_number(self.restore_timeout_s), "a number of seconds above 0")
        self._require(
            "shutdown_timeout_s",
            is_number(self.shutdown_timeout_s) and 0 <= self.shutdown_timeout_s <= MAX_SHUTDOWN_S,
            f"a number of seconds from 0 to {MAX_SHUTDOWN_S:g}",
        )
        self._require("read_only", isinstance(self.read_only, bool), "True or False")
        self._require("hints", isinstance(self.hints, HintConfig), "a HintConfig")
        for key in ("manager", "transfer"):
            if getattr(self, key) is not None:
                find_factory(key, getattr(self, key))
        self._require("guests", isinstance(self.guests, list | tuple), "a list of MODULE:CLASS")
        for guest in self.guests:
            find_guest(guest)

    @property
    def num_host_bytes(self) -> int:
        """``host_bytes`` as a number."""
        return parse_bytes("host_bytes", self.host_bytes)

    def _require(self, key: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(key, getattr(self, key), f"it must be {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig(HostOptions):
    """Options for keeping KV in host memory as it is computed.

    Checked when created; raises ``ConfigError``, which names the option. Most options are in ``HostOptions``.

    Attributes:
        blocks_per_chunk: number of blocks offloaded as one unit. Larger chunks cost less bookkeeping and hit less often.
        store_generated: whether KV of generated tokens is kept too; otherwise only that of prompts.
        store_within_steps: while many requests generate, chunks that they complete are stored together, at most so many steps
            later; 0 for at once.
        quotas: how much of host memory single tenants may have.
    """

    blocks_per_chunk: int = 1
    store_generated: bool = True
    store_within_steps: int = 8
    quotas: Sequence[TenantQuota] = ()

    def __post_init__(self) -> None:
        HostOptions.__post_init__(self)
        self._require("blocks_per_chunk", is_positive_int(self.blocks_per_chunk), "an integer from 1")
        self._require("store_generated", isinstance(self.store_generated, bool), "True or False")
        within = self.store_within_steps
        self._require("store_within_steps", is_int(within) and within >= 0, "an integer from 0")
        is_list = isinstance(self.quotas, list | tuple)
        self._require(
            "quotas",
            is_list and all(isinstance(quota, TenantQuota) for quota in self.quotas),
            "a list of TenantQuota",
        )
        self._require("quotas", not (self.quotas and self.manager), "empty: a manager of your own keeps no quotas")
        names = [quota.tenant for quota in self.quotas]
        self._require(
            "quotas", len(set(names)) == len(names) < MAX_SHARES, f"one for each of {MAX_SHARES - 1} tenants at most"
        )

    def check_chunks_can_be_filled(self, layout: KVCacheLayout, max_model_len: int) -> None:
        """Check that there can be a request long enough for one chunk.

        Args:
            layout: the paged KV.
            max_model_len: tokens of the longest sequence.

        Raises:
            ConfigError: no request can ever fill a chunk, so nothing would be kept.
        """
        limits = [layout.num_blocks - 1 for group in layout.groups if group.kind is AttentionKind.FULL]
        # The KV of the last token is not computed: there is none behind it that would look at it.
        num_tokens = max_model_len - 1
        groups = [group for group in layout.groups if group.kind is not AttentionKind.RECURRENT]
        limits += [num_tokens // group.block_tokens for group in groups]
        most = max(1, min(limits, default=self.blocks_per_chunk))
        if self.blocks_per_chunk > most:
            expected = f"no request can have so many full blocks, so nothing would ever be kept; use at most {most}"
            raise ConfigError("blocks_per_chunk", self.blocks_per_chunk, expected)
