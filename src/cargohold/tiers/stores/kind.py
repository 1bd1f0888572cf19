"""The kind of tier that keeps chunks in a store that several engines share: its options, and what opens it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from cargohold.errors import ConfigError
from cargohold.option_values import format_bytes, is_positive_int, parse_bytes
from cargohold.options import SIZE, checked, must, one_of
from cargohold.tiers import places
from cargohold.tiers.chunk_format import HEADER_BYTES
from cargohold.tiers.config import (
    NAMES_ELSEWHERE,
    Opening,
    TierConfig,
    UsedDirectory,
    require_chunk_below,
    require_chunk_within,
)
from cargohold.tiers.inventory import Inventory
from cargohold.tiers.packing import is_possible
from cargohold.tiers.places import MOONCAKE, PARALLEL_PROBES, REDIS_SCHEMES, is_url, place_of
from cargohold.tiers.port import Tier

MAX_VALUE_BYTES: Final = {
    **dict.fromkeys(REDIS_SCHEMES, 512 * 1024**2),
    "s3": 5 * 1024**3,
    "az": 5000 * 1024**2,
}
"""Bytes that a store takes as one value, by scheme: what servers allow by default. Other stores have no limit."""
_URL: Final = checked(lambda _, url: places.require_place(url))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTierConfig(TierConfig):
    """Options for keeping chunks in a store that several engines share.

    Attributes:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``, ``file:///absolute/directory``
            or ``redis://host:port/db`` (also ``rediss``, ``valkey``, ``valkeys``, ``unix``), or ``mooncake://master:port``.
            Credentials come from the environment, as the store's own tools read them.
        max_bytes: for object stores and directories, the maximum size of all chunks of Cargohold there, of all models and
            workers; the oldest are deleted first. ``None`` leaves the size to the store. One engine alone never exceeds it.
        ttl_s: for Redis and Valkey only, the age in seconds at which the server deletes chunks; ``None`` for never.
        lend_bytes: for Mooncake only, memory of this machine that the engine lends to the cluster, over all of its workers.
        protocol: for Mooncake only, ``tcp`` or ``rdma``; ``None`` for what ``MOONCAKE_PROTOCOL`` says, or ``tcp``.
        devices: for Mooncake only, names of RDMA devices, with commas between; ``None`` for ``MOONCAKE_DEVICE``, or all.
    """

    names_elsewhere: ClassVar[Mapping[str, str]] = NAMES_ELSEWHERE
    kind = "shared"
    locality = "REMOTE"

    url: Annotated[str, _URL]
    max_bytes: Annotated[int | str | None, SIZE] = None
    ttl_s: Annotated[int | None, must(is_positive_int, "a whole number of seconds from 1, or nothing")] = None
    lend_bytes: Annotated[int | str | None, SIZE] = None
    protocol: Annotated[str | None, one_of("tcp", "rdma")] = None
    devices: str | None = None

    def __post_init__(self) -> None:
        TierConfig.__post_init__(self)
        module = _module(self.url)
        if self.ttl_s is not None and module != "redis":
            raise ConfigError(
                "ttl_s", self.ttl_s, f"only {', '.join(REDIS_SCHEMES)} can do that; buckets have life-cycle rules"
            )
        if self.max_bytes is not None and module != "objects":
            limit = "set its maxmemory" if module == "redis" else "it is the memory that machines lend"
            raise ConfigError("max_bytes", self.max_bytes, f"here the server keeps the limit: {limit}")
        for name in ("lend_bytes", "protocol", "devices"):
            if getattr(self, name) is not None and module != MOONCAKE:
                raise ConfigError(name, getattr(self, name), f"only {MOONCAKE}:// has it")

    def __repr__(self) -> str:
        """The options without user and password, because options end up in logs."""
        shown = {each.name: getattr(self, each.name) for each in fields(self)} | {"url": self.shown_url}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def describe(self) -> str:
        """Return the URL and the limit, for people."""
        limit = "" if self.num_max_bytes is None else f", {format_bytes(self.num_max_bytes)} at most"
        return f"{self.shown_url}{limit}"

    @property
    def num_max_bytes(self) -> int | None:
        return None if self.max_bytes is None else parse_bytes("max_bytes", self.max_bytes)

    @property
    def packs(self) -> bool:
        return self.pack == "exponent" or (
            self.pack == "auto" and self.directory is None and _module(self.url) == "objects" and is_possible()
        )

    @property
    def num_asked_at_once(self) -> int | None:
        """See ``TierConfig``. A server takes any number of questions in one round trip, an object store one per request."""
        return PARALLEL_PROBES if _module(self.url) == "objects" else None

    @property
    def used_directory(self) -> UsedDirectory | None:
        """See ``TierConfig``."""
        return None if self.directory is None else UsedDirectory(self.directory, "url", is_own=False)

    @property
    def directory(self) -> Path | None:
        """The directory that the URL names; ``None`` if it names a server."""
        return places.directory_of(self.url)

    @property
    def shown_url(self) -> str:
        """The URL without user and password, for messages."""
        return places.without_secrets(self.url)

    def require_sizes(self, chunk_bytes: int, num_shards: int) -> None:
        TierConfig.require_sizes(self, chunk_bytes, num_shards)
        value_bytes = HEADER_BYTES + chunk_bytes
        if (scheme := places.scheme_of(self.url)) in MAX_VALUE_BYTES:
            require_chunk_below("url", self.shown_url, value_bytes, MAX_VALUE_BYTES[scheme])
        if self.num_max_bytes is not None:
            # Each worker's part of one chunk, and what each worker leaves to the others: see StoreBudget.
            need = (2 * num_shards - 1) * value_bytes
            require_chunk_within("max_bytes", self.max_bytes, self.num_max_bytes, need)

    def open(self, opening: Opening) -> Tier:
        """See ``TierConfig``. Refuses missing or wrong credentials, a bucket that is not there, and a missing package."""
        tier: Tier
        match _module(self.url):
            case "redis":
                tier = _store(self.url).RedisTier(self.url, self.ttl_s, opening)
            case "mooncake":
                lent = 0 if self.lend_bytes is None else parse_bytes("lend_bytes", self.lend_bytes)
                network = {"protocol": self.protocol, "devices": self.devices}
                tier = _store(self.url).MooncakeTier(self.url, network, opening, self.num_threads, lent)
            case _:
                tier = _store(self.url).ObjectTier(self.url, self.num_max_bytes, opening)
        return tier

    def require_packages(self) -> None:
        """See ``TierConfig``. Each kind of store needs a package."""
        _store(self.url)

    def require_place(self) -> None:
        """Refuse a directory that cannot be made or written to, and a URL of which no client can be made on this machine."""
        try:
            if self.directory is None:
                _inventory(self.url)
            else:
                place_of(self.directory)
        except OSError as error:
            raise ConfigError("url", self.shown_url, f"the store cannot be used: {error}") from error

    @classmethod
    def inventory_of(cls, place: str) -> Inventory | None:
        """See ``TierConfig``. A store is named by its URL."""
        if not is_url(place):
            return None
        try:
            places.require_place(place)
            _require_there(place)
            return _inventory(place)
        except ConfigError as error:
            # The user gave a PLACE, not the option url.
            raise ConfigError("PLACE", error.value, error.expected) from error


def _module(url: str) -> str:
    """Return the name of the module for a store, which is also that of the extra that it needs."""
    scheme = places.scheme_of(url)
    return "redis" if scheme in REDIS_SCHEMES else MOONCAKE if scheme == MOONCAKE else "objects"


def _store(url: str) -> Any:
    """Import the module for a store. Raises ``ConfigError``, which says how to install the package that it needs."""
    try:
        return import_module(f"cargohold.tiers.stores.{_module(url)}")
    except ImportError as error:
        reason = f"{places.scheme_of(url)} needs an extra: pip install 'cargohold[{_module(url)}]'"
        raise ConfigError("url", places.without_secrets(url), reason) from error


def _inventory(url: str) -> Inventory:
    """Make the inventory of a store, with a client, which asks the store nothing. Raises ``ConfigError`` if that fails."""
    inventory: Inventory = _store(url).open_inventory(url)
    return inventory


def _require_there(url: str) -> None:
    """Raise ``ConfigError`` for a directory that does not exist, which a client would create."""
    directory = places.directory_of(url)
    if directory is not None and not directory.is_dir():
        raise ConfigError("url", url, "there is no such directory")
