"""Pools of fixed-size blocks, the hashes that name their contents, and how much of a prefix can be reused."""

from cargohold.blocks.pool import BlockPool, KVCacheBlock
from cargohold.blocks.prefix import (
    ABSENT,
    DIGEST_BYTES,
    NOT_YET,
    READY,
    GroupUnits,
    PrefixHit,
    UnitStates,
    extend_hashes,
    hash_block,
    longest_hit,
    root_hash,
)

__all__ = [
    "ABSENT",
    "DIGEST_BYTES",
    "NOT_YET",
    "READY",
    "BlockPool",
    "GroupUnits",
    "KVCacheBlock",
    "PrefixHit",
    "UnitStates",
    "extend_hashes",
    "hash_block",
    "longest_hit",
    "root_hash",
]
