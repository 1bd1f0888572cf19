"""Fixed-size blocks: a pool of them, the hashes that name their contents, and how much of a prefix can be reused."""

from cargohold.blocks.pool import BlockPool, KVCacheBlock
from cargohold.blocks.prefix import (
    ABSENT,
    NOT_YET,
    READY,
    GroupUnits,
    PrefixHit,
    UnitStates,
    extend_hashes,
    longest_hit,
    root_hash,
)

__all__ = [
    "ABSENT",
    "NOT_YET",
    "READY",
    "BlockPool",
    "GroupUnits",
    "KVCacheBlock",
    "PrefixHit",
    "UnitStates",
    "extend_hashes",
    "longest_hit",
    "root_hash",
]
