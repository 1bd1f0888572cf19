"""Options of disk tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, ClassVar, Final, Self

from cargohold.cache.policies.registry import POLICY
from cargohold.option_values import format_bytes, is_number, parse_bytes, parse_path
from cargohold.options import SIZE, checked, must
from cargohold.tiers.config import (
    NAMES_ELSEWHERE,
    TierConfig,
    UsedDirectory,
    require_chunk_below,
    require_chunk_within,
)

REPLICA_DIRECTORY: Final = "replica-{}"
"""Subdirectory, by replica number, in which all engine replicas but the first keep their chunks."""
MAX_DISK_BYTES: Final = 0x7FFF_F000
"""Bytes that Linux reads or writes at once."""


def _is_path(value: object) -> bool:
    return isinstance(value, str | PathLike) and bool(fspath(value)) and "\0" not in str(fspath(value))


def _is_zero(value: object) -> bool:
    return is_number(value) and value == 0


_SIZE_OR_0: Final = checked(lambda key, value: None if _is_zero(value) else parse_bytes(key, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions(TierConfig):
    """Options for keeping chunks in files of a local directory, which outlive the process: those of ``DiskTierConfig``.

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
        share: part of ``max_bytes`` that one tier in the directory may take; see ``with_share``.
        chunk_sizes: bytes of a chunk of each group on one worker; empty if all are alike. See ``with_sizes``.
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
    share: float = field(default=1.0, init=False)
    chunk_sizes: tuple[int, ...] = field(default=(), init=False)

    def of_replica(self, replica: int) -> Self:
        """See ``TierConfig``. Each replica needs its own directory: the first has this one, each other one a subdirectory."""
        if replica == 0:
            return self
        return replace(self, directory=Path(self.directory) / REPLICA_DIRECTORY.format(replica))

    def with_share(self, share: float) -> Self:
        """See ``TierConfig``. The directory is one for all of them."""
        assert 0 < share <= 1
        return self._with("share", share)

    def with_sizes(self, chunk_sizes: Sequence[int]) -> Self:
        """See ``TierConfig``. Slots are such that little of them stays empty."""
        return self._with("chunk_sizes", tuple(chunk_sizes))

    def _with(self, name: str, value: object) -> Self:
        changed = replace(self)
        for kept in ("share", "chunk_sizes"):
            object.__setattr__(changed, kept, getattr(self, kept))
        object.__setattr__(changed, name, value)
        return changed

    def describe(self) -> str:
        """Return the directory, its limit and its eviction policy, for people."""
        return f"{self.directory}, {format_bytes(self.num_max_bytes)} at most, evicted by {self.policy}"

    @property
    def used_directory(self) -> UsedDirectory:
        """See ``TierConfig``. All that is below it counts."""
        return UsedDirectory(parse_path("directory", self.directory), "directory", is_own=True)

    @property
    def num_max_bytes(self) -> int:
        return parse_bytes("max_bytes", self.max_bytes)

    @property
    def num_daily_bytes(self) -> int | None:
        return None if self.max_daily_bytes is None else parse_bytes("max_daily_bytes", self.max_daily_bytes)

    @property
    def num_reserve_bytes(self) -> int:
        return 0 if _is_zero(self.reserve_bytes) else parse_bytes("reserve_bytes", self.reserve_bytes)

    def require_sizes(self, chunk_bytes: int, num_shards: int) -> None:
        TierConfig.require_sizes(self, chunk_bytes, num_shards)
        require_chunk_below("directory", str(self.directory), chunk_bytes, MAX_DISK_BYTES)
        if self.num_daily_bytes is not None:
            require_chunk_within(
                "max_daily_bytes", self.max_daily_bytes, self.num_daily_bytes, num_shards * chunk_bytes
            )
