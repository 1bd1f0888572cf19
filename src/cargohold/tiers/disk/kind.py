"""The kind of tier that keeps chunks in files of a local directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cargohold.option_values import parse_path
from cargohold.tiers.chunk_format import HEADER_BYTES, ChunkCodec
from cargohold.tiers.disk.files import USE_BYTES
from cargohold.tiers.disk.inventory import DiskInventory
from cargohold.tiers.disk.options import DiskOptions
from cargohold.tiers.disk.shard import check_place, require_place
from cargohold.tiers.disk.slots import SlotPlan
from cargohold.tiers.disk.tier import DiskTier
from cargohold.tiers.places import is_url
from cargohold.tiers.port import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTierConfig(DiskOptions):
    """A disk tier's options, which are in ``DiskOptions``, and what opens it."""

    def open(self, codec: ChunkCodec, chunk_bytes: int, num_shards: int) -> Tier:
        """See ``TierConfig``. Refuses an unwritable directory, one in use, and a budget above the disk or below one chunk."""
        return DiskTier(self, codec, chunk_bytes, num_shards)

    def require_place(self) -> None:
        """Refuse a directory that cannot be made or written to, and a budget above the file system."""
        require_place(self)

    def check(self, chunk_bytes: int, num_shards: int) -> None:
        """Refuse a directory that cannot be used, and an impossible budget."""
        check_place(self, chunk_bytes, num_shards)

    def bytes_taken(self, chunk_sizes: Sequence[int], details_bytes: int) -> Sequence[int]:
        """See ``TierConfig``. Headers, the room for details, and what stays empty of slots are a part of it."""
        plan = SlotPlan.of(chunk_sizes)
        of_slot = plan.slot_bytes + HEADER_BYTES + plan.details_room(details_bytes) + USE_BYTES
        return [plan.count_for(size) * of_slot for size in chunk_sizes]

    @classmethod
    def inventory_of(cls, place: str) -> DiskInventory | None:
        """See ``TierConfig``. A directory is named by its path."""
        return None if is_url(place) else DiskInventory(parse_path("PLACE", place).absolute())
