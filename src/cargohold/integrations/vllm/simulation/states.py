"""Recurrent state as vLLM's workers keep it with ``--mamba-cache-mode align``.

A request has one state at a time, in the block of the last token that its step computes. When a step ends in another block
than the one before, the state is copied there first, and what it was copied from stays as it is. So blocks that a step passes
over hold no state, and a block is a state at a boundary only if a step has ended there::

    blocks of 4                  0     1     2     3
    prompt of 15, a step to 12   null  null  12
    a step to 15                             12 -> 15        copied, then advanced in place
    one more token                           12    16        full: it can be found from now on
    one more                                       16 -> 17  in block 4
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cargohold.engine.core.step import ScheduledTokens
from cargohold.simulation.chains import end_of
from cargohold.simulation.states import StateBlocks


@dataclass(frozen=True, slots=True)
class StateMove:
    """A state that is copied before a step.

    Attributes:
        share: the request's share of the step.
        source: the place in its table where the state is.
        destination: the place where the step goes on.
    """

    share: ScheduledTokens
    source: int
    destination: int


class RunningStates:
    """The places of running requests' states in their block tables, as vLLM's workers remember them.

    Args:
        block_tokens: tokens per block of all recurrent groups.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._places: dict[str, int] = {}

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended or lost their blocks."""
        for request_id in request_ids:
            self._places.pop(request_id, None)

    def moves(self, shares: Sequence[ScheduledTokens]) -> list[StateMove]:
        """The copies to make before a step. Notes that the states are then in the blocks where the step goes on."""
        moves = []
        for share in shares:
            # A request that was not running before has found its state in the prefix cache, or has loaded it.
            found_at = (share.num_computed_tokens - 1) // self._block_tokens
            source = self._places.get(share.request_id, found_at)
            destination = place_of_state(share, self._block_tokens)
            self._places[share.request_id] = destination
            if source not in (-1, destination):
                moves.append(StateMove(share, source, destination))
        return moves


class AlignedStateBlocks(StateBlocks):
    """The blocks of one recurrent group, of which each step reads and writes one."""

    def copy(self, moves: Sequence[StateMove]) -> None:
        """Copy states, all at once."""
        pairs = [(self._table(move.share)[move.source], self._table(move.share)[move.destination]) for move in moves]
        sources = {source for source, _ in pairs}
        assert sources.isdisjoint(destination for _, destination in pairs), "a state is overwritten while it is copied"
        for source, destination in pairs:
            self._copies.check_read([source], "a state's copy")
            self._copies.check_write([destination], "a state's copy")
            self._blocks[destination][:] = self._blocks[source]

    def _source(self, share: ScheduledTokens) -> int:
        return place_of_state(share, self._group.block_tokens)

    def _places(self, share: ScheduledTokens) -> Iterable[tuple[int, int]]:
        return [(end_of(share), place_of_state(share, self._group.block_tokens))]


def place_of_state(share: ScheduledTokens, block_tokens: int) -> int:
    """The place in a request's table of the block whose state a step advances."""
    return (end_of(share) - 1) // block_tokens
