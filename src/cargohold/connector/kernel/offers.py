"""Which chunks a step offers for storing, where it has completed more than stores may hold.

Some groups keep all blocks of a request: their chunks can be offered in a later step as well. Of windows and states, the engine
frees blocks as the request goes on, and a later request needs all groups at the position where it goes on: an incomplete set of
windows serves no hit. So of these groups the latest chunks go first, across all of them; then come the other groups, from their
first chunk that is missing. What is there already, or on its way, is not copied, so it counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from cargohold.blocks import READY
from cargohold.cache.manager import ChunkKeys, OffloadKey, OffloadManager, StoreOffer
from cargohold.connector.kernel.guest import Part
from cargohold.connector.kernel.loads import BlocksToStore, blocks_to_store
from cargohold.connector.kernel.requests import RequestState
from cargohold.protocol import AttentionKind


class Unstored(NamedTuple):
    """Chunks of one request in one group that are complete and were not offered yet.

    Attributes:
        state: the request.
        group: index of the group.
        table: block ids of the request in the group; null where the KV is gone.
        first: number of the first of them.
        end: number of the chunk to stop before.
        is_urgent: whether they are offered whatever stores may hold.
    """

    state: RequestState
    group: int
    table: Sequence[int]
    first: int
    end: int
    is_urgent: bool = False

    @property
    def keys(self) -> ChunkKeys:
        """The request's chunks in the group."""
        return self.state.keys[self.group]

    @property
    def keeps_blocks(self) -> bool:
        """Whether the engine keeps their blocks as long as the request runs."""
        return self.keys.group.kind is AttentionKind.FULL


@dataclass(slots=True)
class Offer:
    """Chunks of one request in one group that are offered to the manager for storing.

    Attributes:
        of: what it is a part of.
        first: number of the first chunk that is offered.
        rest: number of the chunk to go on with: all before it are offered now, or were before.
        blocks: the chunks that can be stored, in prefix order, and their blocks.
        keys: the offload key of each of these chunks.
    """

    of: Unstored
    first: int
    rest: int
    blocks: BlocksToStore
    keys: Sequence[OffloadKey]

    @property
    def state(self) -> RequestState:
        """The request."""
        return self.of.state

    @property
    def group(self) -> int:
        """Index of the group."""
        return self.of.group

    def part(self, keys: Sequence[OffloadKey]) -> Part:
        """Return some of these chunks in the form in which guests are told of them."""
        return Part(self.state, self.group, keys, self.first)

    def for_manager(self, level: int) -> StoreOffer:
        """Return the offer in the form that managers take, at a level."""
        index = self.blocks.chunks[0] if self.keys else 0
        parent = self.state.keys[self.group].keys[index - 1] if index else None
        return StoreOffer(self.keys, parent, self.state.tenant, level)

    def num_again(self, keys: AbstractSet[OffloadKey]) -> int:
        """Return how many of these chunks were not computed for the request, because they were on the device."""
        num_hit = self.state.hit_tokens // self.state.keys[self.group].chunk_tokens
        if self.first >= num_hit:
            return 0
        return sum(key in keys for chunk, key in zip(self.blocks.chunks, self.keys, strict=True) if chunk < num_hit)

    def next_chunk(self, deferred: AbstractSet[OffloadKey]) -> int:
        """Return the number of the chunk to offer next: ``rest``, or the first that is in ``deferred`` before it."""
        if deferred:
            for chunk, key in zip(self.blocks.chunks, self.keys, strict=True):
                if key in deferred:
                    return min(chunk, self.rest)
        return self.rest


class Chooser:
    """Chooses what to offer.

    Args:
        manager: tells what is there.
        blocks_per_chunk: blocks per chunk.
        is_coming: tells whether a chunk is being stored.
    """

    def __init__(self, manager: OffloadManager, blocks_per_chunk: int, is_coming: Callable[[OffloadKey], bool]) -> None:
        self._manager = manager
        self._blocks_per_chunk = blocks_per_chunk
        self._is_coming = is_coming

    def choose(self, unstored: Sequence[Unstored], num_allowed: int) -> list[Offer]:
        """Return what to offer of each now, which may be nothing, if so many chunks may be stored."""
        if sum([each.end - each.first for each in unstored]) <= num_allowed:
            return [self._offer(each, each.first, each.end, each.end) for each in unstored]  # nearly always
        offers = [self._offer(each, each.first, each.end, each.end) for each in unstored if each.is_urgent]
        num_left = max(0, num_allowed - sum([each.end - each.first for each in unstored if each.is_urgent]))
        others = [each for each in unstored if not each.is_urgent]
        if not num_left:
            return [*offers, *(self._offer(each, each.first, each.first, each.first) for each in others)]
        latest, num_chosen = self._latest([each for each in others if not each.keeps_blocks], num_left)
        offers += latest
        num_left -= num_chosen
        for each in others:
            if each.keeps_blocks:
                first = self._first_missing(each)
                end = min(each.end, first + num_left)
                offers.append(self._offer(each, first, end, end))
                num_left -= end - first
        return offers

    def _latest(self, unstored: Sequence[Unstored], num_allowed: int) -> tuple[list[Offer], int]:
        """Offer the latest chunks that are missing of all these; return how many these are, too."""
        missing = sorted(
            ((each.end - chunk) * each.keys.chunk_tokens, at, chunk)
            for at, each in enumerate(unstored)
            for chunk in self._missing(each)
        )
        first_of = {at: chunk for _, at, chunk in missing[:num_allowed]}
        rest_of = {at: chunk for _, at, chunk in missing[num_allowed:]}
        offers = [
            self._offer(each, first_of.get(at, each.end), each.end, rest_of.get(at, each.end))
            for at, each in enumerate(unstored)
        ]
        return offers, len(missing[:num_allowed])

    def _missing(self, each: Unstored) -> list[int]:
        """Return the numbers of the chunks that can be stored, are not there, and are not on their way."""
        chunks = blocks_to_store(each.keys.group, each.table, self._blocks_per_chunk, each.first, each.end).chunks
        keys = [each.keys.keys[chunk] for chunk in chunks]
        found = zip(chunks, keys, self._manager.lookup(keys), strict=True)
        return [chunk for chunk, key, state in found if state != READY and not self._is_coming(key)]

    def _first_missing(self, each: Unstored) -> int:
        """Return the number of the first chunk that is not there, and not on its way."""
        keys = each.keys.keys
        first = each.first + len(self._manager.lookup_run(keys[each.first : each.end]))
        while first < each.end and self._is_coming(keys[first]):
            first += 1
        return first

    def _offer(self, of: Unstored, first: int, end: int, rest: int) -> Offer:
        """Return the offer of those chunks in ``[first, end)`` that can be stored."""
        blocks = blocks_to_store(of.keys.group, of.table, self._blocks_per_chunk, first, end)
        whole = of.keys.keys[first:end]
        keys = whole if len(blocks.chunks) == len(whole) else [of.keys.keys[chunk] for chunk in blocks.chunks]
        return Offer(of, first, rest, blocks, keys)
