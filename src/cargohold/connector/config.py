"""Options of the offloading connector: the kernel's, and those of its guests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, cast

from cargohold.cache.policies import DEFAULT_POLICY
from cargohold.cache.policies.registry import POLICY_NAMES
from cargohold.cache.shares import MAX_SHARES, Limits
from cargohold.connector.kernel.config import KernelConfig
from cargohold.connector.kernel.guest import Guest, GuestView
from cargohold.errors import ConfigError
from cargohold.option_values import import_named, is_number, parse_bytes, parse_room
from cargohold.options import FRACTION, INT_FROM_1, SECONDS, SIZE, Options, checked, declared, list_of, must, one_of
from cargohold.tiers import TierConfig
from cargohold.tiers.kinds import TIERS

EAGER: Final = "eager"
EXCLUSIVE: Final = "exclusive"
LAZY: Final = "lazy"
RESTORE_IF_FASTER = "if_faster"
RESTORE_ALWAYS = "always"
HINTS_OFF = "off"
HINTS_RETAIN = "retain"
HINTS_ALL = "all"

_ALLOW: Final = one_of(HINTS_ALL, HINTS_RETAIN, HINTS_OFF)


def _allow_each(key: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(key, value, "it must be an object with tenants")
    for tenant, allowed in value.items():
        _ALLOW(f"{key}[{tenant}]", allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class HintConfig(Options):
    """What hints may do.

    Attributes:
        allow: which hints are carried out: ``all`` of them; ``retain``, that is ``retain``, ``demote`` and ``release``, which
            take little from others; or none (``off``).
        allow_of: the same for single tenants, by tenant.
        pin_fraction: part of a tier's chunks that leases may cover; a tenant with a name may have half of that.
        retain_fraction: part of a tier's chunks whose priority may be raised; a tenant with a name may have half of that.
        max_ttl_s: seconds that a hint may last at most.
    """

    allow: Annotated[str, _ALLOW] = HINTS_ALL
    allow_of: Annotated[Mapping[str, str], checked(_allow_each)] = field(default_factory=dict)
    pin_fraction: Annotated[float, FRACTION] = 0.25
    retain_fraction: Annotated[float, FRACTION] = 0.5
    max_ttl_s: Annotated[float, SECONDS] = 3600.0

    def allowed_to(self, tenant: str | None) -> str:
        """Return which hints of a tenant are carried out."""
        return self.allow if tenant is None else self.allow_of.get(tenant, self.allow)


def _share(key: str, size: int | str, capacity: int = 100, chunk_bytes: int = 1) -> int:
    """Return a size, or a part such as ``10%``, in chunks of a tier with ``capacity`` chunks."""
    if isinstance(size, str) and _is_part(size):
        try:
            part = float(size.strip().removesuffix("%"))
        except ValueError:
            part = -1.0
        if not 0 <= part <= 100:  # per cent
            raise ConfigError(key, size, "it must be from 0% to 100%, or a size such as 2GiB")
        return int(capacity * part / 100)
    return 0 if size == 0 else parse_room(key, size) // chunk_bytes


_NAME: Final = must(lambda name: isinstance(name, str) and bool(name), "the name of a tenant")
_LABEL: Final = must(lambda label: isinstance(label, str) and label.isprintable() and bool(label), "printable text")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota(Options):
    """How much of host memory a tenant may have.

    Sizes are bytes (``2GiB``, or a number) or a part of the tier (``10%``).

    Attributes:
        tenant: the name that a server gives it, or else the salt of its requests.
        reserved: what no other tenant can take from it. What it does not use is for others until it does.
        soft: above this, its own chunks are evicted before those of others; ``None`` for no such limit.
        hard: it never has more than this; ``None`` for no such limit.
        label: what metrics call it; by default its place among the quotas, such as ``tenant 1``. A salt is no label: anyone
            who knows it can find out what is cached under it.
    """

    tenant: Annotated[str, _NAME]
    reserved: Annotated[int | str, checked(_share)] = 0
    soft: Annotated[int | str | None, checked(_share)] = None
    hard: Annotated[int | str | None, checked(_share)] = None
    label: Annotated[str | None, _LABEL] = None

    def __post_init__(self) -> None:
        if self.hard is not None:
            for name, lower in (("reserved", self.reserved), ("soft", self.soft)):
                if (
                    lower is not None
                    and _is_part(lower) == _is_part(self.hard)
                    and _share(name, lower) > _share("hard", self.hard)
                ):
                    raise ConfigError(name, lower, f"for {self.shown} it must be at most hard, which is {self.hard}")

    @property
    def shown(self) -> str:
        """The tenant for people."""
        return self.label or self.tenant

    def limits(self, capacity: int, chunk_bytes: int) -> Limits:
        """Return the limits in chunks, for a tier of ``capacity`` chunks of ``chunk_bytes``."""
        return Limits(
            _share("reserved", self.reserved, capacity, chunk_bytes),
            None if self.soft is None else _share("soft", self.soft, capacity, chunk_bytes),
            None if self.hard is None else _share("hard", self.hard, capacity, chunk_bytes),
        )


def limits_in_chunks(quotas: Sequence[TenantQuota], capacity: int, chunk_bytes: int) -> dict[str, Limits]:
    """Return the limits of all tenants in chunks. Raises ``ConfigError`` if they do not fit together."""
    limits = {quota.tenant: quota.limits(capacity, chunk_bytes) for quota in quotas}
    if sum(of.reserved for of in limits.values()) > capacity:
        names = sorted(quota.shown for quota in quotas)
        raise ConfigError("quotas", names, f"more is reserved than the tier's {capacity} chunks")
    for quota in quotas:
        of = limits[quota.tenant]
        if of.hard is not None and of.hard < max(1, of.reserved):
            raise ConfigError(
                "hard", quota.hard, f"{quota.shown} needs one chunk at least, and what is reserved for it"
            )
    return limits


def check_parts(quotas: Sequence[TenantQuota]) -> None:
    """Raise ``ConfigError`` if more than all of a tier is reserved, whatever its size."""
    reserving = {quota.shown: quota.reserved for quota in quotas if _is_part(quota.reserved)}
    if sum(_share("reserved", part, 10_000) for part in reserving.values()) > 10_000:
        raise ConfigError("reserved", reserving, "together, tenants can have 100% at most")


def _is_part(size: int | str) -> bool:
    return isinstance(size, str) and size.strip().endswith("%")


LOAD_TIMEOUT: Final = "nothing to set: twice what a copy may take, which is 30 s longer than transfer_timeout_s"
"""What became of an option of engines."""
_DISK: Final = '{"kind": "disk", "directory": "/nvme/kv", "max_bytes": "200GiB"}'

_NAMES_ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        # vLLM's OffloadingConnector and SimpleCPUOffloadConnector
        "backpressure": "nothing to set: a tier that cannot keep up gets fewer chunks",
        "block_size": "blocks_per_chunk, which counts blocks of the device pool, not tokens",
        "cache_policy_module_path": "the first half of policy=MODULE:CLASS",
        "canonical_layout": "nothing to set: each split of a model finds its own chunks",
        "cpu_bytes_to_use": "host_bytes, for all workers together: a number of bytes, or a size such as 8GiB",
        "cpu_bytes_to_use_per_rank": "host_bytes, for all workers together: a number of bytes, or a size such as 8GiB",
        "disk_buffer_slots": "nothing to set: each of a disk tier's num_threads has its own buffer",
        "disk_capacity_bytes": f"max_bytes of a disk tier: tiers=[{_DISK}]",
        "disk_path": f"directory of a disk tier: tiers=[{_DISK}]",
        "follow_resets": "nothing to set: workers fingerprint their weights",
        "follow_weights": "nothing to set: workers fingerprint their weights",
        "eviction_policy": f"policy, one of {POLICY_NAMES}",
        "kv_offload_backend": f"a disk tier below host memory: tiers=[{_DISK}]",
        "kv_offloading_size": "host_bytes: a number of bytes, or a size such as 8GiB, not a number of GiB",
        "lazy_offload": "mode=lazy",
        "max_tracker_size": "nothing to set: a policy limits what it remembers of absent chunks",
        "num_cpu_blocks": "host_bytes: a number of bytes, or a size such as 8GiB, not a number of blocks",
        "offload_prompt_only": "store_generated, inverted: by default, answers are kept too",
        "secondary_tiers": f"tiers, with other options: tiers=[{_DISK}]",
        "self_describing_kv_events": "nothing to set: events about chunks that the device computed carry their tokens",
        "shared_storage_path": 'url of a shared tier: tiers=[{"kind": "shared", "url": "file:///mnt/kv"}]',
        "spec_module_path": "the first half of connector=MODULE:FACTORY",
        "spec_name": "the second half of connector=MODULE:FACTORY for a connector of your own; leave it out for ours",
        "store_threshold": "admission=reused of a tier, for a threshold of 2; in host memory, the policy decides what stays",
        "use_page_cache": "direct_io of a disk tier, inverted",
        # LMCache, whose names may also stand after "lmcache."
        "cache_policy": f"policy, one of {POLICY_NAMES}",
        "chunk_size": "blocks_per_chunk, which counts blocks of the device pool, not tokens",
        "local_cpu": "host_bytes; host memory is always used",
        "local_disk": f"directory of a disk tier: tiers=[{_DISK}]",
        "max_local_cpu_size": "host_bytes, for all workers together: a number of bytes, or a size such as 8GiB, not GB",
        "max_local_disk_size": f"max_bytes of a disk tier, a number of bytes or a size, not GB: tiers=[{_DISK}]",
        "remote_url": 'url of a shared tier: tiers=[{"kind": "shared", "url": "redis://host:6379/0"}]',
        "save_decode_cache": "store_generated",
        # options that are gone
        "job_timeout_s": "nothing to set: a copy may take 30 s longer than transfer_timeout_s, which may be set",
        "load_timeout_s": LOAD_TIMEOUT,
        # KVBM's environment variables, in small letters and without "DYN_KVBM_"
        "cpu_cache_gb": "host_bytes: a number of bytes, or a size such as 8GiB, not a number of GB",
        "cpu_cache_override_num_blocks": "host_bytes: a number of bytes, or a size such as 8GiB, not a number of blocks",
        "disable_disk_offload_filter": "admission of a disk tier: all, which is the default, or reused",
        "disk_cache_dir": f"directory of a disk tier: tiers=[{_DISK}]",
        "disk_cache_gb": f"max_bytes of a disk tier, a number of bytes or a size, not GB: tiers=[{_DISK}]",
        "disk_cache_override_num_blocks": f"max_bytes of a disk tier, not a number of blocks: tiers=[{_DISK}]",
        "object_bucket": 'url of a shared tier: tiers=[{"kind": "shared", "url": "s3://bucket/prefix"}]',
    }
)
"""What options of vLLM's own connectors, of LMCache and of KVBM are called here: ``here that is ...``."""


def find_guest(name: object, key: str = "guests") -> Callable[[GuestView], Guest]:
    """Return the class of the guest that an option names, as ``MODULE:CLASS``; the module is imported.

    Raises:
        ConfigError: there is no such class, or it is no guest's.
    """
    expected = "it must be MODULE:CLASS, a class derived from cargohold.connector.kernel.guest.Guest"
    if not isinstance(name, str) or ":" not in name:
        raise ConfigError(key, name, expected)
    found = import_named(key, name)
    if not isinstance(found, type) or not issubclass(found, Guest):
        raise ConfigError(key, name, expected)
    return cast("Callable[[GuestView], Guest]", found)


_NOT_IN: Final[Mapping[str, Sequence[str]]] = {EXCLUSIVE: (), EAGER: ("lookahead_blocks",), LAZY: ("blocks_per_chunk",)}
"""The modes, and options that make no sense in each."""
_MODE: Final = must(
    lambda mode: isinstance(mode, str) and mode in _NOT_IN,
    f"one of {', '.join(_NOT_IN)}; or, in JSON, multi for several connectors",
)
VERIFY_OFF: Final = "off"
VERIFY_FREE: Final = "free"
_VERIFY: Final = must(
    lambda value: value in (VERIFY_OFF, VERIFY_FREE) or (is_number(value) and 0 < value <= 1),
    f"{VERIFY_OFF}, {VERIFY_FREE}, or the part of requests that compute what could be restored, such as 0.001",
)
_GUESTS: Final = list_of(checked(lambda key, name: find_guest(name, key)))


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig(KernelConfig):
    """Options for keeping KV in host memory.

    Attributes:
        mode: what host memory keeps. ``exclusive``: what the device pool does not, so that both are one cache; while there is
            room, also what the device computes. ``eager``: all that the device computes. ``lazy``: what the device is about to
            evict, and nothing before.
        policy: which chunks are evicted: one of ``arc``, ``fifo``, ``lru``, ``reuse-index``, or ``MODULE:CLASS`` for your own.
        tiers: the tiers below host memory, the fastest first. They keep chunks that host memory has no room for, and chunks
            in them outlive the process.
        restore: whether chunks are brought up from lower tiers only ``if_faster`` than computing them, judged by the recent
            times of both, or ``always``.
        hints: what hints may do.
        quotas: how much of host memory single tenants may have.
        verify: whether chunks that are computed although they are kept are compared with what is kept: ``off``; ``free``, those
            that steps compute anyway; or also those of a part of the requests, such as ``0.001``, which compute what could be
            restored. For it, a 64th of host memory is spare, if that is a chunk.
        verify_bytes_per_s: maximum number of bytes that are compared per second, over all workers, and that are spare for it.
        lookahead_blocks: number of blocks ahead of eviction that are kept stored. By default none where a step can wait for
            copies of what is evicted for it, or else as many as steps evict; in mode ``lazy`` twice what a step can allocate.
        guests: your own features that are notified of what the connector does, as ``MODULE:CLASS``; see
            ``cargohold.connector.kernel.guest.Guest``.
    """

    names_elsewhere: ClassVar[Mapping[str, str]] = _NAMES_ELSEWHERE

    mode: Annotated[str, _MODE] = EXCLUSIVE
    tiers: Annotated[Sequence[TierConfig], TIERS] = ()
    restore: Annotated[str, one_of(RESTORE_IF_FASTER, RESTORE_ALWAYS)] = RESTORE_IF_FASTER
    hints: HintConfig = HintConfig()
    quotas: Sequence[TenantQuota] = ()
    verify: Annotated[float | str, _VERIFY] = VERIFY_FREE
    verify_bytes_per_s: Annotated[int | str, SIZE] = "16MiB"
    lookahead_blocks: Annotated[int | None, INT_FROM_1] = None
    guests: Annotated[Sequence[str], _GUESTS] = ()

    def __post_init__(self) -> None:
        KernelConfig.__post_init__(self)
        for name in _NOT_IN[self.mode]:
            if getattr(self, name) != declared(OffloadConfig)[name].default:
                raise ConfigError(name, getattr(self, name), f"that is no option of mode={self.mode}")
        if self.manager and self.policy != DEFAULT_POLICY:
            raise ConfigError("policy", self.policy, "your own manager has its own eviction: remove this option")
        names = [quota.tenant for quota in self.quotas]
        if names and self.manager:
            raise ConfigError("quotas", self.quotas, "it must be empty: your own manager has no quotas")
        if len(set(names)) < len(names) or len(names) >= MAX_SHARES:
            raise ConfigError("quotas", self.quotas, f"it must be one for each of {MAX_SHARES - 1} tenants at most")
        check_parts(self.quotas)

    @property
    def verified_share(self) -> float | None:
        """Part of the requests that compute what could be restored; ``None`` if nothing is verified."""
        if isinstance(self.verify, str):
            return 0.0 if self.verify == VERIFY_FREE else None
        return self.verify

    @property
    def num_verify_bytes_per_s(self) -> int:
        """``verify_bytes_per_s`` as a number."""
        return parse_bytes("verify_bytes_per_s", self.verify_bytes_per_s)
