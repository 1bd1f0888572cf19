"""Options of stores that several engines share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, ClassVar, Final, Self

from cargohold.deadlines import DEFAULTS, REQUEST, TRANSFER
from cargohold.errors import ConfigError
from cargohold.option_values import MAX_TIMEOUT_S, format_bytes, is_positive_int, parse_bytes
from cargohold.options import SIZE, checked, must
from cargohold.tiers import places
from cargohold.tiers.chunk_format import HEADER_BYTES
from cargohold.tiers.config import (
    NAMES_ELSEWHERE,
    TierConfig,
    UsedDirectory,
    require_chunk_below,
    require_chunk_within,
)
from cargohold.tiers.places import REDIS_SCHEMES

PARALLEL_PROBES: Final = 32
"""Number of objects that a worker asks an object store for at the same time."""
MAX_VALUE_BYTES: Final = {
    **dict.fromkeys(REDIS_SCHEMES, 512 * 1024**2),
    "s3": 5 * 1024**3,
    "az": 5000 * 1024**2,
}
"""Bytes that a store takes as one value, by scheme: what servers allow unless told otherwise. Other stores have no limit."""
_URL: Final = checked(lambda _, url: places.require_place(url))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOptions(TierConfig):
    """Options for keeping chunks in a store that several engines share: those of ``SharedTierConfig``.

    Attributes:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``, ``file:///absolute/directory``
            or ``redis://host:port/db`` (also ``rediss``, ``valkey``, ``valkeys``, ``unix``). Credentials come from the
            environment, as the store's own tools read them.
        max_bytes: for object stores and directories, the maximum size of all chunks of Cargohold there, of all models and
            workers; the oldest are deleted first. ``None`` leaves the size to the store. One engine alone never exceeds it.
        ttl_s: for Redis and Valkey only, the age in seconds at which the server deletes chunks; ``None`` for never.
    """

    names_elsewhere: ClassVar[Mapping[str, str]] = NAMES_ELSEWHERE
    kind = "shared"
    locality = "REMOTE"

    url: Annotated[str, _URL]
    max_bytes: Annotated[int | str | None, SIZE] = None
    ttl_s: Annotated[int | None, must(is_positive_int, "a whole number of seconds from 1, or nothing")] = None
    request_s: float = field(default=REQUEST.seconds(DEFAULTS[TRANSFER]), init=False)

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
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.init} | {"url": self.shown_url}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def with_times(self, transfer_timeout_s: float) -> Self:
        """See ``TierConfig``. One request may take a part of that."""
        timed = replace(self)
        object.__setattr__(timed, "request_s", min(REQUEST.seconds(transfer_timeout_s), MAX_TIMEOUT_S))
        return timed

    def describe(self) -> str:
        """Return the URL and the limit, for people."""
        limit = "" if self.num_max_bytes is None else f", {format_bytes(self.num_max_bytes)} at most"
        return f"{self.shown_url}{limit}"

    @property
    def num_max_bytes(self) -> int | None:
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
        if self.scheme in MAX_VALUE_BYTES:
            require_chunk_below("url", self.shown_url, value_bytes, MAX_VALUE_BYTES[self.scheme])
        if self.num_max_bytes is not None:
            # Each worker's part of one chunk, and what each worker leaves to the others: see StoreBudget.
            need = (2 * num_shards - 1) * value_bytes
            require_chunk_within("max_bytes", self.max_bytes, self.num_max_bytes, need)
