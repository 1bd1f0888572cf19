"""Options of the tiers below host memory.

What opens a tier is in ``opening``: it imports the tiers, which import their options.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Self

from cargohold.cache.policies.registry import POLICY
from cargohold.errors import ConfigError
from cargohold.option_values import format_bytes, is_number, is_positive_int, parse_bytes
from cargohold.options import SHORT_TIME, SIZE, Options, checked, must, one_of
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


def _require_key_source(key: str, source: Any) -> None:
    """Check the form of ``encryption_key``. The key is read only when the tier is opened.

    The error does not show the value: it may be the secret itself.
    """
    if not (isinstance(source, str) and KEY_SOURCE.fullmatch(source)):
        raise ConfigError(key, "(not shown)", "it must be file:PATH or env:NAME, never the key itself")


def _is_path(value: object) -> bool:
    return isinstance(value, str | PathLike) and bool(fspath(value)) and "\0" not in str(fspath(value))


def _is_from_0(value: object) -> bool:
    return is_number(value) and value >= 0


def _is_zero(value: object) -> bool:
    return is_number(value) and value == 0


_THREADS: Final = must(
    lambda value: is_positive_int(value) and value <= MAX_THREADS, f"a whole number from 1 to {MAX_THREADS}"
)
_URL: Final = checked(lambda _, url: places.require_place(url))
_SIZE_OR_0: Final = checked(lambda key, value: None if _is_zero(value) else parse_bytes(key, value))

NAMES_ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "backpressure": "nothing to set: a tier that cannot keep up gets fewer chunks",
        "dir": "directory of kind=disk",
        "enable_kv_events": "nothing to set: there are events for all tiers if vLLM publishes events",
        "io_threads": "num_threads",
        "locality": "nothing to set: a disk is LOCAL and a shared store REMOTE",
        "module_path": "the first half of kind=MODULE:CLASS",
        "n_read_threads": "num_threads, which read and write",
        "n_write_threads": "num_threads, which read and write",
        "path": "directory of kind=disk, or, if engines share it, url=file:///mnt/kv of kind=shared",
        "prefix": "the end of url, such as s3://bucket/prefix",
        "root_dir": "directory of kind=disk, or, if engines share it, url=file:///mnt/kv of kind=shared",
        "store_config": "url of kind=shared, such as s3://bucket/prefix; credentials come from the environment",
        "type": "kind, one of disk, shared, or MODULE:CLASS",
    }
)
"""What vLLM's tiers call their options, and what to write here: ``here that is ...``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig(Options):
    """Options that all tiers have, as a base class; it also opens the tier.

    For a tier of your own, derive a frozen dataclass with further fields. It must be picklable, because workers open the tier.

    Attributes:
        kind: name of this kind of tier for users, in counters, reports and messages; a second tier of a kind gets a number.
        has_index: the same as its ``Tier.has_index``.
        is_listed: whether its tiers implement ``Tier.list_chunks`` and ``Tier.take_losses``. Then an engine knows all of their
            chunks, those of an earlier engine included, and asks them nothing.
        locality: ``LOCAL`` if only this machine has it, ``REMOTE`` if others share it. KV events carry it, so that routers do
            not send requests to one machine for chunks that all have. ``None`` leaves it open.
        admission: which chunks are written: ``all``; or ``reused``, from the second use on, so that prompts that never return
            do not wear a disk.
        write: when chunks are written: ``through``, as soon as host memory has them, so that they survive the process; or
            ``back``, when three quarters of host memory are not written yet, those unused for longest first.
        encryption_key: ``file:PATH`` or ``env:NAME`` to encrypt with AES-256-GCM; ``None`` to leave chunks readable.
        num_threads: requests to the medium at the same time, per worker; at most 256.
    """

    kind: ClassVar[str]
    has_index: ClassVar[bool] = False
    is_listed: ClassVar[bool] = False
    locality: ClassVar[Locality | None] = None

    admission: Annotated[str, one_of(*(member.value for member in Admission))] = "all"
    write: Annotated[str, one_of(*(member.value for member in WriteMode))] = "through"
    encryption_key: Annotated[str | None, checked(_require_key_source)] = None
    num_threads: Annotated[int, _THREADS] = 8

    def __post_init__(self) -> None:
        """Refuse options that do not fit together. An override calls ``TierConfig.__post_init__(self)`` first."""

    @abstractmethod
    def open(self, codec: ChunkCodec, chunk_bytes: int, num_shards: int) -> Tier:
        """Open one worker's shard of the tier.

        Raises ``ConfigError`` if these options cannot work. A medium that does not answer yet is no error: it may come later.

        Args:
            codec: makes and checks headers; its ``namespace.id`` keeps chunks of other models and workers apart.
            chunk_bytes: bytes of the largest chunk of this worker.
            num_shards: number of workers that share the limits in these options.
        """

    def require_packages(self) -> None:  # most need none
        """Raise ``ConfigError`` if a package for this tier is not installed. Touches no medium; works on any machine."""

    def require_place(self) -> None:  # most name no place on a machine
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
        directory: where; made if it does not exist. ``~`` is the user's home. Several models and workers may share it, each
            with a subdirectory of its own.
        max_bytes: maximum size of everything in the directory, over all workers. A hard limit; each data-parallel replica has
            its own. Chunks that other models left are deleted before chunks of the running one.
        reserve_bytes: free space of the file system that is never taken.
        policy: what is evicted: one of ``arc``, ``fifo``, ``lru``, ``reuse-index``, or ``MODULE:CLASS`` for your own.
        max_daily_bytes: the most written in a day, over all workers, without headers and padding; ``None`` for no limit. It
            accrues evenly, and is kept for an hour. Each start may write what accrues in a minute, or a chunk.
        direct_io: whether to bypass the page cache, whose memory host memory could use, where the file system can.
        lock_wait_s: maximum time to wait at the start for another process that still uses the same subdirectory, such as one
            that is just ending.
        share: part of ``max_bytes`` that one tier in the directory may take; see ``with_share``.
    """

    names_elsewhere: ClassVar[Mapping[str, str]] = NAMES_ELSEWHERE
    kind = "disk"
    has_index = True
    is_listed = True
    locality = "LOCAL"

    directory: Annotated[str | PathLike[str], must(_is_path, "the path of a directory")]
    max_bytes: Annotated[int | str, SIZE]
    reserve_bytes: Annotated[int | str, _SIZE_OR_0] = "1GiB"
    policy: Annotated[str, POLICY] = "lru"
    max_daily_bytes: Annotated[int | str | None, SIZE] = None
    direct_io: bool = True
    lock_wait_s: Annotated[float, must(_is_from_0, "a number of seconds from 0")] = 3.0
    share: float = field(default=1.0, init=False)

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
            workers; the oldest are deleted first. ``None`` leaves the size to the store. One engine alone never exceeds it.
        request_timeout_s: maximum time of one request to the store, to the last byte of its answer.
        ttl_s: for Redis and Valkey only, the age in seconds at which the server deletes chunks; ``None`` for never.
    """

    names_elsewhere: ClassVar[Mapping[str, str]] = NAMES_ELSEWHERE
    kind = "shared"
    locality = "REMOTE"

    url: Annotated[str, _URL]
    max_bytes: Annotated[int | str | None, SIZE] = None
    request_timeout_s: Annotated[float, SHORT_TIME] = 10.0
    ttl_s: Annotated[int | None, must(is_positive_int, "a whole number of seconds from 1, or nothing")] = None

    def __post_init__(self) -> None:
        TierConfig.__post_init__(self)
        is_redis = self.scheme in REDIS_SCHEMES
        if self.ttl_s is not None and not is_redis:
            raise ConfigError(
                "ttl_s", self.ttl_s, f"only {', '.join(REDIS_SCHEMES)} can do that; buckets have life-cycle rules"
            )
        if self.max_bytes is not None and is_redis:
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
