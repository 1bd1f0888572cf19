"""The kind of tier that keeps chunks in files of a local directory: its options, and what opens it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, ClassVar, Final, Self

from cargohold.cache.policies.registry import POLICY
from cargohold.errors import ConfigError
from cargohold.option_values import format_bytes, is_number, parse_bytes, parse_path, parse_room
from cargohold.options import SIZE, checked, must
from cargohold.tiers.chunk_format import HEADER_BYTES
from cargohold.tiers.config import (
    NAMES_ELSEWHERE,
    Opening,
    TierConfig,
    UsedDirectory,
    require_chunk_below,
    require_chunk_within,
)
from cargohold.tiers.disk.files import USE_BYTES, Geometry
from cargohold.tiers.disk.inventory import DiskInventory
from cargohold.tiers.disk.root import REPLICA_DIRECTORY
from cargohold.tiers.disk.shard import ShardBudget, require_place, require_room, require_unused
from cargohold.tiers.disk.slots import SlotPlan
from cargohold.tiers.disk.tier import DiskTier
from cargohold.tiers.memory import padded
from cargohold.tiers.packing import packed_sizes
from cargohold.tiers.places import is_url
from cargohold.tiers.port import Tier

MAX_DISK_BYTES: Final = 0x7FFF_F000
"""Bytes that Linux reads or writes at once."""


def _is_path(value: object) -> bool:
    return isinstance(value, str | PathLike) and bool(fspath(value)) and "\0" not in str(fspath(value))


def _is_zero(value: object) -> bool:
    return is_number(value) and value == 0


_SIZE_OR_0: Final = checked(lambda key, value: None if _is_zero(value) else parse_room(key, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTierConfig(TierConfig):
    """Options for keeping chunks in files of a local directory, which outlive the process.

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

    def of_replica(self, replica: int) -> Self:
        """See ``TierConfig``. Each replica needs its own directory: the first has this one, each other one a subdirectory."""
        if replica == 0:
            return self
        return replace(self, directory=Path(self.directory) / REPLICA_DIRECTORY.format(replica))

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
        require_room(self._budget(num_shards), Geometry(padded(chunk_bytes), slots_per_segment=1))
        if self.num_daily_bytes is not None:
            require_chunk_within(
                "max_daily_bytes", self.max_daily_bytes, self.num_daily_bytes, num_shards * chunk_bytes
            )

    def open(self, opening: Opening) -> Tier:
        """See ``TierConfig``. Refuses an unwritable directory, one in use, and a budget above the disk or below one chunk."""
        return DiskTier(self._budget(opening.num_shards, opening.share), opening, self.policy, direct_io=self.direct_io)

    def require_place(self) -> None:
        """Refuse a directory that cannot be made or written to, and a budget above the file system."""
        require_place(self._budget(1))

    def require_unused(self, namespace_ids: Callable[[], Iterable[str]] | None = None) -> None:
        require_unused(self._budget(1), namespace_ids)

    def bytes_taken(self, chunk_sizes: Sequence[int], number_types: Sequence[str], details_bytes: int) -> Sequence[int]:
        """See ``TierConfig``. Headers, the room for details, and what stays empty of slots are a part of it."""
        plan = SlotPlan.of_packed(chunk_sizes, number_types) if self.packs else SlotPlan.of(chunk_sizes)
        of_slot = plan.slot_bytes + HEADER_BYTES + plan.details_room(details_bytes) + USE_BYTES
        expected = packed_sizes(chunk_sizes, number_types) if self.packs else chunk_sizes
        return [plan.count_for(size) * of_slot for size in expected]

    def _budget(self, num_shards: int, share: float = 1.0) -> ShardBudget:
        root, total = parse_path("directory", self.directory).absolute(), self.num_max_bytes
        if root == Path(root.anchor):
            raise ConfigError("directory", str(root), "it must be a directory of its own: all that is in it counts")
        return ShardBudget(root, total, int(total * share) // num_shards, self.num_reserve_bytes)

    @classmethod
    def inventory_of(cls, place: str) -> DiskInventory | None:
        """See ``TierConfig``. A directory is named by its path."""
        return None if is_url(place) else DiskInventory(parse_path("PLACE", place).absolute())
