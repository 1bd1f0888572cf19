"""Which chunks a hit needs, and which of them have to be brought up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from cargohold.blocks import ABSENT
from cargohold.connector.offloading.requests import RequestState
from cargohold.offload.keys import ChunkKeys
from cargohold.offload.manager.base import OffloadKey, OffloadManager
from cargohold.offload.tiering import Chain, LowerTiers

_UNREAD = 255


def needed_keys(state: RequestState, num_computed_tokens: int, num_hit_tokens: int) -> list[OffloadKey]:
    """The chunks that are read when the tokens between the computed ones and the end of the hit are loaded."""
    return [
        key for keys in state.keys for key in _slice(keys, _needed(state, keys, num_computed_tokens, num_hit_tokens))
    ]


def chains_to_promote(
    state: RequestState, host: OffloadManager, lower: LowerTiers, num_computed_tokens: int, num_hit_tokens: int
) -> list[Chain]:
    """Those that host memory lacks, in pieces of one prefix and one tier."""
    return [
        chain
        for keys in state.keys
        for chain in _chains(keys, _needed(state, keys, num_computed_tokens, num_hit_tokens), host, lower)
    ]


def sources_per_token(
    state: RequestState, sources: Mapping[OffloadKey, int], num_computed_tokens: int, num_hit_tokens: int
) -> bytes:
    """The tier that each token to be loaded came from: 0 for host memory. The slowest counts where groups differ.

    Leading tokens that no group reads any more, because windows have moved on, count like the first that is read.

    Args:
        sources: tier of each chunk that was brought up, from 0: here it is 1.
    """
    # What no group reads has a mark of its own.
    marks = bytearray([_UNREAD]) * (num_hit_tokens - num_computed_tokens)
    spans = sorted(
        (sources.get(keys.keys[index], -1), index * keys.chunk_tokens - num_computed_tokens, keys.chunk_tokens)
        for keys in state.keys
        for index in _needed(state, keys, num_computed_tokens, num_hit_tokens)
    )
    for tier, start, length in spans:
        first = max(0, start)
        marks[first : start + length] = bytes([tier + 1]) * (start + length - first)
    num_unread = len(marks) - len(marks.lstrip(bytes([_UNREAD])))
    marks[:num_unread] = bytes(marks[num_unread : num_unread + 1] or b"\0") * num_unread
    return bytes(marks)


def _needed(state: RequestState, keys: ChunkKeys, num_computed_tokens: int, num_hit_tokens: int) -> range:
    """Those of one group: a window does not look back to the start. See ``cargohold.blocks.longest_hit``."""
    next_query = min(num_hit_tokens, state.request.num_tokens - 1)
    first_token = max(num_computed_tokens, keys.group.num_skipped_tokens(next_query))
    end = num_hit_tokens // keys.chunk_tokens
    return range(min(first_token // keys.chunk_tokens, end), end)


def _slice(keys: ChunkKeys, needed: range) -> list[OffloadKey]:
    return keys.keys[needed.start : needed.stop]


def _chains(keys: ChunkKeys, needed: range, host: OffloadManager, lower: LowerTiers) -> Iterator[Chain]:
    own = _slice(keys, needed)
    absent = [at for at, state in enumerate(host.lookup(own)) if state == ABSENT]
    tiers = lower.tiers_of([own[at] for at in absent])
    # Neighbours in the same tier: their places count up as fast as their ranks.
    places = zip(absent, tiers, strict=True)
    for (tier, _), group in groupby(enumerate(places), lambda item: (item[1][1], item[1][0] - item[0])):
        if tier < 0:
            continue
        run = [place for _, (place, _) in group]
        before = needed.start + run[0] - 1
        yield Chain(tier, own[run[0] : run[-1] + 1], keys.keys[before] if before >= 0 else None)
