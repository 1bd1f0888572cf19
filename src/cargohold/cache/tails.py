"""Tails: chunks of prefixes that end inside a block.

Where an engine hashes prefixes at more places than blocks end, and keeps what a prompt leaves at its last such place, a tier
keeps it, too: per group, a block of which only the first tokens count::

    blocks of 16, a hash per 4 tokens    |...............|...............|..........~~~~~|
                                          chunk 0         chunk 1         tail of 42: 40 tokens, and whatever follows

The key of a tail is the hash of exactly these tokens and all before them. So it is the key of no whole chunk, and of no tail of
another length. After its end nothing is promised: in a block of attention, the request may have written on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cargohold.blocks import ABSENT, READY
from cargohold.cache.manager import ChunkKeys, OffloadKey
from cargohold.protocol import AttentionKind


def longest_tail(
    keys: Sequence[ChunkKeys],
    num_found_tokens: int,
    limit_tokens: int,
    look_up: Callable[[Sequence[OffloadKey]], bytes],
) -> int:
    """Return the length of the longest prefix that ends inside a block and can be used; 0 if there is none.

    It needs a tail of every group, and of full attention all whole chunks before it.

    Args:
        keys: the request's keys, per group, all of chunks of one block of the same size.
        num_found_tokens: number of leading tokens that are there in whole chunks; only longer prefixes count.
        limit_tokens: maximum length.
        look_up: returns a state per key.
    """
    # A state tells most: only prompts' last ones are kept inside a block.
    of_groups = sorted(keys, key=lambda of: of.group.kind is AttentionKind.FULL)
    unit, size = of_groups[0].hash_tokens, of_groups[0].chunk_tokens
    limit = min(limit_tokens, of_groups[0].num_hashed_tokens) // unit * unit
    first, last = num_found_tokens // size, limit // size
    for of in of_groups:
        if of.group.kind is AttentionKind.FULL:
            last = first + (look_up(of.keys[first:last]) + bytes([ABSENT])).index(ABSENT)
    for at in range(last, first - 1, -1):
        ends = list(range(min((at + 1) * size - unit, limit), max(at * size, num_found_tokens), -unit))
        for of in of_groups:
            states = look_up([of.tail(end) for end in ends])
            ends = [end for end, state in zip(ends, states, strict=True) if state == READY]
        if ends:
            return ends[0]
    return 0
