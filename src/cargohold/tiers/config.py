"""Options of the tiers below host memory. Checked when created; they raise ``ConfigError``, which names the option.

What opens a tier is in ``opening``: it imports the tiers, which import their options.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from os import PathLike, fspath
from pathlib import Path
from typing import ClassVar, Final, Self

from cargohold.cache.policies import find_policy
from cargohold.errors import ConfigError
from cargohold.option_values import MAX_TIMEOUT_S, format_bytes, is_number, is_positive_int, is_timeout, parse_bytes
from cargohold.protocol import Locality
from cargohold.tiers import places
from cargohold.tiers.chunk_format import HEADER_BYTES, ChunkCodec
from cargohold.tiers.encryption import TAG_BYTES
from cargohold.tiers.places import REDIS_SCHEMES
from cargohold.tiers.port import Tier

KEY_SOURCE: Final = re.compile(r"(file|env):[^\0\n]+")
REPLICA_DIRECTORY: Final = "replica-{}"
"""Subdirectory, by replica number, in which all engine replicas but the first keep their chunks."""
PARALLEL_PROBES: Final = 32
"""Number of objects that a worker asks an object store for at the same time."""
MAX_THREADS: Final = 256
"""Maximum of ``num_threads``: each thread has memory for a chunk."""
MAX_ENCRYPTED_BYTES: Final = 2**31 - 1 - TAG_BYTES
"""Bytes that the package for encryption can take at once, with the tag."""
MAX_DISK_BYTES: Final = 0x7FFF_F000
"""Bytes that Linux reads or writes at once."""
MAX_VALUE_BYTES: Final = {
    **dict.fromkeys(REDIS_SCHEMES, 512 * 1024**2),
    "s3": 5 * 1024**3,
    "az": 5000 * 1024**2,
}
"""Bytes that a store takes as one value, by scheme: what servers allow unless told otherwise. Other stores have no limit."""


class Admission(Enum):
    """Which chunks are written to a tier."""

    ALL = "all"
    """Every chunk that host memory keeps."""
    REUSED = "reused"
    """Chunks that are used a second time, so that one-shot prompts do not wear a disk."""


class WriteMode(Enum):
    """When a chunk is written to a tier."""

    THROUGH = "through"
    """As soon as host memory has the chunk, so that it survives the process."""
    BACK = "back"
    """When host memory fills up, the chunks unused for longest first: fewer writes, but more is lost when the process ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig(ABC):
    """Options that all tiers have, as a base class; it also opens the tier.

    For a tier of your own, derive a frozen dataclass with further fields. It must be picklable, because workers open the tier.

    Attributes:
        kind: name of this kind of tier for users, in counters, reports and messages; a second tier of a kind gets a number.
        has_index: the same as its ``Tier.has_index``.
        is_listed: whether its tiers implement ``Tier.list_chunks`` and ``Tier.take_losses``. Then an engine knows all of their
            chunks, those of an earlier engine included, and asks them nothing.
        locality: ``LOCAL`` if only this machine has it, ``REMOTE`` if others share it. KV events carry it, so that routers do
            not send requests to one machine for chunks that all have. ``None`` leaves it open.
        admission: which chunks are written: ``all``, or only ``reused`` ones, so that one-shot prompts do not wear a disk.
        write: when chunks are written: ``through`` (at once), or ``back`` (when host memory fills up).
        encryption_key: ``file:PATH`` or ``env:NAME`` to encrypt with AES-256-GCM; ``None`` to leave chunks readable.
        num_threads: number of threads per worker, so of requests to the medium at the same time.
    """

    kind: ClassVar[str]
    has_index: ClassVar[bool] = False
    is_listed: ClassVar[bool] = False
    locality: ClassVar[Locality | None] = None

    admission: str = "all"
    write: str = "through"
    encryption_key: str | None = None
    num_threads: int = 8

    def __post_init__(self) -> None:
        """Refuse invalid options. An override calls ``TierConfig.__post_init__(self)`` first: ``super()`` fails with slots."""
        for key, value, kind in (("admission", self.admission, Admission), ("write", self.write, WriteMode)):
            _require_one_of(key, value, [member.value for member in kind])
        _require_key_source(self.encryption_key)
        _require_threads(self.num_threads)

    @abstractmethod
    def open(self, codec: ChunkCodec, chunk_bytes: int, num_shards: int) -> Tier:
        """Open one worker's shard of the tier.

        Raises ``ConfigError`` if these options cannot work. A medium that does not answer yet is no error: it may come later.

        Args:
            codec: makes and checks headers; its ``namespace.id`` keeps chunks of other models and workers apart.
            chunk_bytes: bytes of the largest chunk of this worker.
            num_shards: number of workers that share the limits in these options.
        """

    def require_packages(self) -> None:  # noqa: B027  # most need none
        """Raise ``ConfigError`` if a package for this tier is not installed. Touches no medium; works on any machine."""

    def require_place(self) -> None:  # noqa: B027  # most name no place on a machine
        """Raise ``ConfigError`` if this machine has no place where the tier could be. Changes nothing, and asks no server."""

    def check(self, chunk_bytes: int, num_shards: int) -> None:
        """Raise ``ConfigError`` for what ``open`` would refuse with these arguments, before anything is loaded.

        By default, refuses chunks that are too large to be encrypted, if there is a key.
        """
        del num_shards
        _require_encryptable(self.encryption_key, chunk_bytes)

    def of_replica(self, replica: int) -> Self:
        """Return the options for engine replica ``replica``, from 0. By default the same, so that replicas share the tier."""
        del replica
        return self

    def with_share(self, share: float) -> Self:
        """Return the options for a tier that gets this part of the limits, and others the rest. By default the same."""
        del share
        return self

    def describe(self) -> str:
        """Return where chunks go, for people, without secrets."""
        return self.kind

    @property
    def num_max_bytes(self) -> int | None:
        """Maximum number of bytes that the tier may take, over all workers; ``None`` if the medium sets the limit.

        KV events announce no more chunks than fit.
        """
        return None

    @property
    def num_daily_bytes(self) -> int | None:
        """Maximum number of bytes written per day, over all workers; ``None`` for no limit."""
        return None

    @property
    def num_asked_at_once(self) -> int | None:
        """Number of chunks for which the medium answers in one round trip, where each question has its price.

        A request then asks for so many chunks of its prompt first, and for more only if these are there. ``None`` to ask for
        all of them at once.
        """
        return None


def tier_names(tiers: Iterable[TierConfig]) -> list[str]:
    """Return the names of one connector's tiers: their kinds, a second one of a kind with a number."""
    seen: Counter[str] = Counter()
    names = []
    for tier in tiers:
        seen[tier.kind] += 1
        names.append(tier.kind if seen[tier.kind] == 1 else f"{tier.kind}{seen[tier.kind]}")
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions(TierConfig):
    """Options for keeping chunks in files of a local directory, which outlive the process: those of ``DiskTierConfig``.

    Options that all tiers have are in ``TierConfig``.

    Attributes:
        directory: the directory; created if it does not exist. Several models and workers may share it, each with a
            subdirectory of its own.
        max_bytes: maximum size of everything in the directory, over all workers: a number, or a size such as ``200GiB``. A
            hard limit. Chunks that other models left are deleted before chunks of the running one.
        reserve_bytes: free space of the file system that is never taken.
        policy: name of the eviction policy; see ``cargohold.cache.policies.find_policy``.
        max_daily_bytes: maximum size of what is written per day, over all workers; ``None`` for no limit.
        direct_io: whether to bypass the page cache if the file system allows it. The cache would cost memory that host memory
            could use.
        lock_wait_s: maximum time to wait at the start for another process that still uses the same subdirectory, such as one
            that is just ending.
        share: part of ``max_bytes`` that one tier in the directory may take; see ``with_share``.
    """

    kind = "disk"
    has_index = True
    is_listed = True
    locality = "LOCAL"

    directory: str | PathLike[str]
    max_bytes: int | str
    reserve_bytes: int | str = "1GiB"
    policy: str = "lru"
    max_daily_bytes: int | str | None = None
    direct_io: bool = True
    lock_wait_s: float = 3.0
    share: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        TierConfig.__post_init__(self)
        if not _is_path(self.directory):
            raise ConfigError("directory", self.directory, "it must be the path of a directory")
        find_policy(self.policy)
        if not isinstance(self.direct_io, bool):
            raise ConfigError("direct_io", self.direct_io, "it must be True or False")
        if self.max_daily_bytes is not None:
            parse_bytes("max_daily_bytes", self.max_daily_bytes)
        if not is_number(self.lock_wait_s) or self.lock_wait_s < 0:
            raise ConfigError("lock_wait_s", self.lock_wait_s, "it must be a number of seconds from 0")
        parse_bytes("max_bytes", self.max_bytes)
        if not _is_zero(self.reserve_bytes):
            parse_bytes("reserve_bytes", self.reserve_bytes)

    def of_replica(self, replica: int) -> Self:
        """See ``TierConfig``. Each replica needs its own directory: the first has this one, each other one a subdirectory."""
        if replica == 0:
            return self
        return replace(self, directory=Path(self.directory) / REPLICA_DIRECTORY.format(replica))

    def with_share(self, share: float) -> Self:
        """See ``TierConfig``. The directory is one for all of them."""
        assert 0 < share <= 1
        of_tier = replace(self)
        object.__setattr__(of_tier, "share", share)
        return of_tier

    def describe(self) -> str:
        """Return the directory, its limit and its eviction policy, for people."""
        return f"{self.directory}, {format_bytes(self.num_max_bytes)} at most, evicted by {self.policy}"

    @property
    def num_max_bytes(self) -> int:
        """``max_bytes`` as a number."""
        return parse_bytes("max_bytes", self.max_bytes)

    @property
    def num_daily_bytes(self) -> int | None:
        """``max_daily_bytes`` as a number."""
        return None if self.max_daily_bytes is None else parse_bytes("max_daily_bytes", self.max_daily_bytes)

    @property
    def num_reserve_bytes(self) -> int:
        """``reserve_bytes`` as a number."""
        return 0 if _is_zero(self.reserve_bytes) else parse_bytes("reserve_bytes", self.reserve_bytes)

    def require_sizes(self, chunk_bytes: int, num_shards: int) -> None:
        """Raise ``ConfigError`` if no chunk of this size can ever be written, or only the first one."""
        TierConfig.check(self, chunk_bytes, num_shards)
        _require_chunk_below("directory", str(self.directory), chunk_bytes, MAX_DISK_BYTES)
        if self.num_daily_bytes is not None:
            _require_chunk_within(
                "max_daily_bytes", self.max_daily_bytes, self.num_daily_bytes, num_shards * chunk_bytes
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions(TierConfig):
    """Options for keeping chunks in a store that several engines share: those of ``SharedTierConfig``.

    Options that all tiers have are in ``TierConfig``.

    Attributes:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``, ``file:///absolute/directory``
            or ``redis://host:port/db`` (also ``rediss``, ``valkey``, ``valkeys``, ``unix``). Credentials come from the
            environment, as the store's own tools read them.
        max_bytes: for object stores and directories, the maximum size of all chunks of Cargohold there, of all models and
            workers; the oldest are deleted first. ``None`` leaves the size to the store. One engine alone never exceeds it;
            see ``StoreBudget``.
        request_timeout_s: maximum time that one request to the store takes.
        ttl_s: for Redis only, the age in seconds at which chunks are deleted; ``None`` for never.
    """

    kind = "shared"
    locality = "REMOTE"

    url: str
    max_bytes: int | str | None = None
    request_timeout_s: float = 10.0
    ttl_s: int | None = None

    def __post_init__(self) -> None:
        TierConfig.__post_init__(self)
        places.require_place(self.url)
        if not is_timeout(self.request_timeout_s):
            expected = f"it must be a number of seconds above 0, at most {MAX_TIMEOUT_S}"
            raise ConfigError("request_timeout_s", self.request_timeout_s, expected)
        if self.ttl_s is not None and not is_positive_int(self.ttl_s):
            raise ConfigError("ttl_s", self.ttl_s, "it must be a whole number of seconds from 1, or nothing")
        if self.ttl_s is not None and self.scheme not in REDIS_SCHEMES:
            raise ConfigError(
                "ttl_s", self.ttl_s, f"only {', '.join(REDIS_SCHEMES)} can do that; buckets have life-cycle rules"
            )
        if self.max_bytes is not None:
            parse_bytes("max_bytes", self.max_bytes)
            if self.scheme in REDIS_SCHEMES:
                raise ConfigError("max_bytes", self.max_bytes, "here the server keeps the limit: set its maxmemory")

    def __repr__(self) -> str:
        """The options without user and password, because options end up in logs."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)} | {"url": self.shown_url}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def describe(self) -> str:
        """Return the URL and the limit, for people."""
        limit = "" if self.num_max_bytes is None else f", {format_bytes(self.num_max_bytes)} at most"
        return f"{self.shown_url}{limit}"

    @property
    def num_max_bytes(self) -> int | None:
        """``max_bytes`` as a number."""
        return None if self.max_bytes is None else parse_bytes("max_bytes", self.max_bytes)

    @property
    def num_asked_at_once(self) -> int | None:
        """See ``TierConfig``. A server takes any number of questions in one round trip, an object store one per request."""
        return None if self.scheme in REDIS_SCHEMES else PARALLEL_PROBES

    @property
    def scheme(self) -> str:
        """The URL's scheme, which says what kind of store it is."""
        return places.scheme_of(self.url)

    @property
    def directory(self) -> Path | None:
        """The directory that the URL names; ``None`` if it names a server."""
        return places.directory_of(self.url)

    @property
    def shown_url(self) -> str:
        """The URL without user and password, for messages."""
        return places.without_secrets(self.url)

    def require_sizes(self, chunk_bytes: int, num_shards: int) -> None:
        """Raise ``ConfigError`` if no chunk of this size can ever be written."""
        TierConfig.check(self, chunk_bytes, num_shards)
        value_bytes = HEADER_BYTES + chunk_bytes
        if self.scheme in MAX_VALUE_BYTES:
            _require_chunk_below("url", self.shown_url, value_bytes, MAX_VALUE_BYTES[self.scheme])
        if self.num_max_bytes is not None:
            # Each worker's part of one chunk, and what each worker leaves to the others: see StoreBudget.
            need = (2 * num_shards - 1) * value_bytes
            _require_chunk_within("max_bytes", self.max_bytes, self.num_max_bytes, need)


def _require_one_of(key: str, value: object, values: list[str]) -> None:
    if value not in values:
        raise ConfigError(key, value, f"it must be one of {', '.join(values)}")


def _require_key_source(source: object) -> None:
    """Check the form of ``encryption_key``. The key is read only when the tier is opened.

    The error does not show the value: it may be the secret itself.
    """
    if source is not None and not (isinstance(source, str) and KEY_SOURCE.fullmatch(source)):
        raise ConfigError("encryption_key", "(not shown)", "it must be file:PATH or env:NAME, never the key itself")


def _require_threads(num_threads: object) -> None:
    if not is_positive_int(num_threads) or num_threads > MAX_THREADS:
        raise ConfigError("num_threads", num_threads, f"it must be a whole number from 1 to {MAX_THREADS}")


def _require_encryptable(source: str | None, chunk_bytes: int) -> None:
    if source is not None:
        _require_chunk_below("encryption_key", source, chunk_bytes, MAX_ENCRYPTED_BYTES)


def _require_chunk_below(key: str, value: object, chunk_bytes: int, max_bytes: int) -> None:
    """Raise ``ConfigError`` for an option because of which a worker's chunk may have only ``max_bytes``."""
    if chunk_bytes > max_bytes:
        reason = f"a chunk of one worker has {chunk_bytes} bytes here, and {max_bytes} are the most"
        raise ConfigError(key, value, f"{reason}; put fewer blocks into a chunk (blocks_per_chunk)")


def _require_chunk_within(key: str, value: object, max_bytes: int, need: int) -> None:
    """Raise ``ConfigError`` for a limit that has no room for one chunk, which needs ``need`` bytes over all workers."""
    if max_bytes < need:
        raise ConfigError(key, value, f"one chunk of all workers needs {format_bytes(need)}")


def _is_path(value: object) -> bool:
    return isinstance(value, str | PathLike) and bool(fspath(value)) and "\0" not in str(fspath(value))


def _is_zero(value: object) -> bool:
    return is_number(value) and value == 0
