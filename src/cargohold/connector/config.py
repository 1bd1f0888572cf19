"""Options of the offloading connector: the kernel's, and those of its guests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cargohold.cache.shares import MAX_SHARES, Limits
from cargohold.connector.kernel.config import KernelConfig
from cargohold.connector.kernel.guest import find_guest
from cargohold.errors import ConfigError
from cargohold.option_values import is_number, is_positive_number, parse_bytes
from cargohold.tiers import TierConfig

RESTORE_IF_FASTER = "if_faster"
RESTORE_ALWAYS = "always"
HINTS_OFF = "off"
HINTS_RETAIN = "retain"
HINTS_ALL = "all"


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
class HostOptions(KernelConfig):
    """The kernel's options and those of the guests that every connector of ours has.

    Attributes:
        tiers: the tiers below host memory, the fastest first. They keep chunks that host memory has no room for, and chunks
            in them outlive the process.
        restore: whether chunks are brought up from lower tiers only ``if_faster`` than computing them, judged by the recent
            times of both, or ``always``.
        hints: what hints may do.
        guests: features of your own that hear what the connector does, as ``MODULE:CLASS``; see
            ``cargohold.connector.kernel.guest.Guest``.
    """

    tiers: Sequence[TierConfig] = ()
    restore: str = RESTORE_IF_FASTER
    hints: HintConfig = HintConfig()
    guests: Sequence[str] = ()

    def __post_init__(self) -> None:
        KernelConfig.__post_init__(self)
        is_list = isinstance(self.tiers, list | tuple)
        self._require(
            "tiers",
            is_list and all(isinstance(tier, TierConfig) for tier in self.tiers),
            "a list of DiskTierConfig, SharedTierConfig, or what else derives from TierConfig",
        )
        choices = (RESTORE_IF_FASTER, RESTORE_ALWAYS)
        self._require("restore", self.restore in choices, f"one of {', '.join(choices)}")
        self._require("hints", isinstance(self.hints, HintConfig), "a HintConfig")
        self._require("guests", isinstance(self.guests, list | tuple), "a list of MODULE:CLASS")
        for guest in self.guests:
            find_guest(guest)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig(HostOptions):
    """Options for keeping KV in host memory as it is computed.

    Checked when created; raises ``ConfigError``, which names the option. Most options are in ``KernelConfig``.

    Attributes:
        quotas: how much of host memory single tenants may have.
    """

    quotas: Sequence[TenantQuota] = ()

    def __post_init__(self) -> None:
        HostOptions.__post_init__(self)
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
