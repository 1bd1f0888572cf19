"""Options that all tiers below host memory have. The kinds of tiers are listed in ``kinds``."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Self

from cargohold.deadlines import DEFAULTS, REQUEST, TRANSFER
from cargohold.errors import ConfigError
from cargohold.option_values import format_bytes, is_positive_int, too_small
from cargohold.options import Options, checked, must, one_of
from cargohold.protocol import Locality
from cargohold.tiers.chunk_format import ChunkCodec
from cargohold.tiers.encryption import TAG_BYTES
from cargohold.tiers.inventory import Inventory
from cargohold.tiers.port import Tier

REQUEST_S: Final = REQUEST.seconds(DEFAULTS[TRANSFER])
"""Maximum time of one request to a server, in seconds, unless an engine's options ask for another."""
KEY_SOURCE: Final = re.compile(r"(file|env):[^\0\n]+")
MAX_THREADS: Final = 256
"""Maximum of ``num_threads``: each thread has memory for a chunk."""
MAX_ENCRYPTED_BYTES: Final = 2**31 - 1 - TAG_BYTES
"""Bytes that the package for encryption can take at once, with the tag."""


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


_THREADS: Final = must(
    lambda value: is_positive_int(value) and value <= MAX_THREADS, f"a whole number from 1 to {MAX_THREADS}"
)

NAMES_ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "backpressure": "nothing to set: a tier that cannot keep up gets fewer chunks",
        "dir": "directory of kind=disk",
        "enable_kv_events": "nothing to set: there are events for all tiers if vLLM publishes events",
        "io_threads": "num_threads",
        "lock_wait_s": "nothing to set: a start waits 20 s for another process with the same files to end",
        "locality": "nothing to set: a disk is LOCAL and a shared store REMOTE",
        "module_path": "the first half of kind=MODULE:CLASS",
        "n_read_threads": "num_threads, which read and write",
        "n_write_threads": "num_threads, which read and write",
        "path": "directory of kind=disk, or, if engines share it, url=file:///mnt/kv of kind=shared",
        "prefix": "the end of url, such as s3://bucket/prefix",
        "request_timeout_s": "nothing to set: a third of the connector's transfer_timeout_s, which may be set",
        "root_dir": "directory of kind=disk, or, if engines share it, url=file:///mnt/kv of kind=shared",
        "store_config": "url of kind=shared, such as s3://bucket/prefix; credentials come from the environment",
        "type": "kind, one of disk, shared, or MODULE:CLASS",
    }
)
"""What vLLM's tiers call their options, and what to write here: ``here that is ...``."""


@dataclass(frozen=True, slots=True)
class UsedDirectory:
    """A directory on this machine that a tier writes to.

    Attributes:
        path: where.
        option: name of the option that names it.
        is_own: whether all that is below it counts for the tier's limit, so that no other tier can use it.
    """

    path: Path
    option: str
    is_own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a worker knows when it opens its shard of a tier, besides the tier's options.

    Attributes:
        codec: makes and checks headers; its ``namespace.id`` keeps chunks of other models and workers apart.
        chunk_sizes: bytes of a chunk of each group on this worker.
        num_shards: number of workers that share the limits in the options.
        share: part of these limits that the tier gets, if others with the same options get the rest.
        request_s: maximum time of one request to a server, to the last byte of its answer.
        number_types: of each group, the type of the numbers in its chunks. The codec has them if it is to pack chunks.
    """

    codec: ChunkCodec
    chunk_sizes: Sequence[int]
    num_shards: int = 1
    share: float = 1.0
    request_s: float = REQUEST_S
    number_types: Sequence[str] = ()

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the largest chunk."""
        return max(self.chunk_sizes)


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
        pack: ``exponent`` to keep chunks in fewer bytes, losslessly: 0.7 of bfloat16; ``none`` to keep them as they are;
            ``auto`` to pack in buckets, where room and traffic cost money, if the package for it is installed. Other tiers then
            keep them as they are, because most deliver faster than a processor unpacks.
    """

    kind: ClassVar[str]
    has_index: ClassVar[bool] = False
    is_listed: ClassVar[bool] = False
    locality: ClassVar[Locality | None] = None

    admission: Annotated[str, one_of(*(member.value for member in Admission))] = "all"
    write: Annotated[str, one_of(*(member.value for member in WriteMode))] = "through"
    encryption_key: Annotated[str | None, checked(_require_key_source)] = None
    num_threads: Annotated[int, _THREADS] = 8
    pack: Annotated[str, one_of("auto", "none", "exponent")] = "auto"

    def __post_init__(self) -> None:
        """Refuse options that do not fit together. An override calls ``TierConfig.__post_init__(self)`` first."""

    @abstractmethod
    def open(self, opening: Opening) -> Tier:
        """Open one worker's shard of the tier.

        Raises ``ConfigError`` if these options cannot work. A medium that does not answer yet is no error: it may come later.
        """

    def require_packages(self) -> None:  # most need none
        """Raise ``ConfigError`` if a package for this tier is not installed. Touches no medium; works on any machine."""

    def require_place(self) -> None:  # most name no place on a machine
        """Raise ``ConfigError`` if this machine has no place where the tier could be. Changes nothing, and asks no server."""

    def require_sizes(self, chunk_bytes: int, num_shards: int) -> None:
        """Raise ``ConfigError`` if no chunk of this size can ever be written by one of ``num_shards`` workers.

        By default, refuses chunks that are too large to be encrypted, if there is a key.
        """
        del num_shards
        if self.encryption_key is not None:
            require_chunk_below("encryption_key", self.encryption_key, chunk_bytes, MAX_ENCRYPTED_BYTES)

    def require_unused(self, namespace_ids: Callable[[], Iterable[str]] | None = None) -> None:  # most are for many
        """Raise ``ConfigError`` if another process has one of these namespaces to itself and does not end in time.

        ``namespace_ids`` may take long, and is called only if any process uses the place. Where they are not known yet, those
        count that are used by processes of an engine that was started with the same options (``process.ENGINE``).
        """

    @classmethod
    def inventory_of(cls, place: str) -> Inventory | None:
        """Open the inventory of a place that a user names for ``cargohold cache``; ``None`` if it is none of this kind.

        Raises:
            ConfigError: it is of this kind, but cannot be used.
        """
        del place
        return None

    @property
    def used_directory(self) -> UsedDirectory | None:
        """The directory on this machine that the tier writes to; ``None`` if there is none, or others may write there too."""
        return None

    def of_replica(self, replica: int) -> Self:
        """Return the options for engine replica ``replica``, from 0. By default the same, so that replicas share the tier."""
        del replica
        return self

    @property
    def packs(self) -> bool:
        """Whether chunks are to be packed."""
        return self.pack == "exponent"

    def bytes_taken(
        self, chunk_sizes: Sequence[int], number_types: Sequence[str], details_bytes: int
    ) -> Sequence[int] | None:
        """Return the bytes that a chunk of each group takes on one worker; ``None``, the default, if that is not known.

        Of packed ones, about.

        Args:
            chunk_sizes: bytes of their payloads.
            number_types: types of their numbers.
            details_bytes: most bytes that a chunk's details may take, of which a tier may keep room for all.
        """
        del chunk_sizes, number_types, details_bytes
        return None

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


def require_chunk_below(key: str, value: object, chunk_bytes: int, max_bytes: int) -> None:
    """Raise ``ConfigError`` for an option because of which a worker's chunk may have only ``max_bytes``."""
    if chunk_bytes > max_bytes:
        reason = f"a chunk of one worker has {chunk_bytes} bytes here, and {max_bytes} are the most"
        raise ConfigError(key, value, f"{reason}; put fewer blocks into a chunk (blocks_per_chunk)")


def require_chunk_within(key: str, value: object, max_bytes: int, need: int) -> None:
    """Raise ``ConfigError`` for a limit that has no room for one chunk, which needs ``need`` bytes over all workers."""
    if max_bytes < need:
        raise too_small(key, value, f"one chunk of all workers needs {format_bytes(need)}")
