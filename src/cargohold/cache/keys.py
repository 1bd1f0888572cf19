"""Offload keys: the names of chunks."""

from __future__ import annotations

from collections.abc import Sequence

from cargohold.cache.manager import OffloadKey
from cargohold.protocol import KVCacheGroup

_GROUP_BYTES = 4


def offload_key(block_hash: bytes, group: int) -> OffloadKey:
    """Return the key of the chunk whose last block has ``block_hash``, in KV-cache group ``group``."""
    return block_hash + group.to_bytes(_GROUP_BYTES, "little")


def split_key(key: OffloadKey) -> tuple[bytes, int]:
    """Return the block hash and the group of a key."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "little")


class ChunkKeys:
    """One request's offload keys in one KV-cache group, one per full chunk, from its start.

    Args:
        group: the group.
        blocks_per_chunk: blocks of the group that make a chunk.
        hash_block_tokens: tokens per block hash.
    """

    def __init__(self, group: KVCacheGroup, blocks_per_chunk: int, hash_block_tokens: int) -> None:
        self.group = group
        self.chunk_tokens = group.block_tokens * blocks_per_chunk
        self.keys: list[OffloadKey] = []
        self._hashes_per_chunk = self.chunk_tokens // hash_block_tokens
        self._hashes_per_block = group.block_tokens // hash_block_tokens
        self._suffix = offload_key(b"", group.index)

    def extend(self, block_hashes: Sequence[bytes]) -> None:
        """Add the keys of chunks that became full. ``block_hashes`` are all block hashes of the request."""
        per_chunk = self._hashes_per_chunk
        first = (len(self.keys) + 1) * per_chunk - 1
        if first < len(block_hashes):
            suffix = self._suffix
            self.keys += [block_hash + suffix for block_hash in block_hashes[first::per_chunk]]

    def inner_hashes(self, block_hashes: Sequence[bytes], at: int) -> tuple[bytes, ...]:
        """Return the hashes of the engine blocks of chunk number ``at`` but the last, whose hash is in the chunk's key."""
        start, per_block = at * self._hashes_per_chunk, self._hashes_per_block
        return tuple(block_hashes[start + per_block - 1 : start + self._hashes_per_chunk - 1 : per_block])
