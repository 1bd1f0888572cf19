"""Recurrent state in place of keys and values: a block holds one state, which stands for a whole prefix.

A state has the fingerprint of the prefix that it stands for, length included, all over its block::

    blocks of 4, after 10 tokens    | 4 4 4 4 | 8 8 8 8 | 10 10 10 10 |

The last state is advanced in place as its request goes on, and its former value is lost. So if a forward pass continues from a
block that was stored too late, loaded from the place before, or advanced by another request, that is found at once;
fingerprints of single tokens would still be in such a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cargohold.engine.core.step import ScheduledTokens
from cargohold.protocol import NULL_BLOCK_ID, KVCacheGroup
from cargohold.simulation.chains import FINGERPRINT_BYTES, GARBAGE, PrefixChains, WrongTokenError, end_of
from cargohold.simulation.copies import CopiesInFlight


class StateBlocks:
    """The blocks of one recurrent group.

    In each block that a step reaches, it leaves the state at the block's end, or at the end of the step if that is earlier.

    Args:
        group: the group.
        blocks: per block, the bytes that hold its state.
        chains: fingerprints of the requests' prefixes.
        salt: makes the fingerprints of this group and worker different from others.
        copies: the worker's copies in flight.
    """

    def __init__(
        self,
        group: KVCacheGroup,
        blocks: Sequence[memoryview],
        chains: PrefixChains,
        salt: int,
        copies: CopiesInFlight,
    ) -> None:
        self._group = group
        self._blocks = blocks
        self._chains = chains
        self._salt = salt
        self._copies = copies

    def read(self, share: ScheduledTokens) -> WrongTokenError | None:
        """Read the state before the tokens that are to be written. Returns an error if it is wrong."""
        if not share.write_from:
            return None
        block_id = self._table(share)[self._source(share)]
        self._copies.check_read([block_id], share.request_id)
        return self._difference(share, block_id, share.write_from)

    def write(self, share: ScheduledTokens, *, is_garbage: bool) -> None:
        """Write the states that the step comes to, or garbage if the request has read something wrong."""
        table = self._table(share)
        for num_tokens, at in self._places(share):
            if table[at] == NULL_BLOCK_ID:
                raise WrongTokenError(
                    f"request {share.request_id} writes a state of group {self._group.index} to the null block"
                )
            self._copies.check_write([table[at]], share.request_id)
            state = GARBAGE * self._group.block_tokens if is_garbage else self._state(share, num_tokens)
            self._blocks[table[at]][:] = state

    def compare(self, share: ScheduledTokens) -> WrongTokenError | None:
        """Check that the states that were written are still there. Returns an error if they are not."""
        table = self._table(share)
        differences = (self._difference(share, table[at], num_tokens) for num_tokens, at in self._places(share))
        return next((error for error in differences if error is not None), None)

    def _source(self, share: ScheduledTokens) -> int:
        """The place in the table where the state before the written tokens is."""
        return (share.write_from - 1) // self._group.block_tokens

    def _places(self, share: ScheduledTokens) -> Iterable[tuple[int, int]]:
        """The states that the step leaves: the number of tokens that each stands for, and its place in the table."""
        end, block_tokens = end_of(share), self._group.block_tokens
        if share.write_from == end:
            return ()  # the last token was hit: its logits come from the state that has it
        places = range(share.write_from // block_tokens, -(-end // block_tokens))
        return [(min(end, (at + 1) * block_tokens), at) for at in places]

    def _table(self, share: ScheduledTokens) -> Sequence[int]:
        return share.block_ids[self._group.index]

    def _state(self, share: ScheduledTokens, num_tokens: int) -> bytes:
        coded = self._chains.coded(share.request_id, num_tokens, self._salt)
        state = coded[(num_tokens - 1) * FINGERPRINT_BYTES : num_tokens * FINGERPRINT_BYTES]
        return bytes(state) * self._group.block_tokens

    def _difference(self, share: ScheduledTokens, block_id: int, num_tokens: int) -> WrongTokenError | None:
        if self._blocks[block_id] == self._state(share, num_tokens):
            return None
        return WrongTokenError(
            f"request {share.request_id}, group {self._group.index}: block {block_id} does not hold the state behind "
            f"{num_tokens} tokens (of {end_of(share)})"
        )
