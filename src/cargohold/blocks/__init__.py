"""Pools of fixed-size blocks, the hashes that name their contents, and how much of a prefix can be reused."""

from cargohold.blocks.hashing import DIGEST_BYTES, extend_hashes, hash_block, root_hash
from cargohold.blocks.pool import BlockPool, KVCacheBlock
from cargohold.blocks.prefix_hit import ABSENT, NOT_YET, READY, GroupUnits, PrefixHit, UnitStates, longest_hit

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
