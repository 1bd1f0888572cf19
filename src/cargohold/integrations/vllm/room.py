"""Room for loads: no two loaded requests may wait for each other's blocks for ever.

A request that was given blocks for a load keeps them until it has run, for vLLM preempts only running requests. So vLLM admits
another load only if the blocks that earlier loaded requests still need stay free. Where a group forgets the past, as with a
window, vLLM counts too few: from the most blocks that a request holds at a time it subtracts the length of the request's
table, forgotten blocks included::

    window of 16, blocks of 4, load of 64 tokens, 128 in all      at most 8 blocks at a time, 4 of them held
    table   |  |  |  |  |  |  |  |  |  |  |  |  |##|##|##|##|     16 long: 8 - 16 < 0, so nothing is reserved

Two such requests can then fill the pool, and neither of them has room for its next tokens. Here, the blocks that requests
really hold are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cargohold.integrations.vllm.blocks import BlockTables
from cargohold.protocol import AttentionKind, KVCacheGroup

_FORGETTING = (AttentionKind.SLIDING_WINDOW, AttentionKind.CHUNKED_LOCAL)
_MAX_STATES = 3
"""Recurrent states that a request holds at a time: the one that a step advances, the one that it was copied from, and one of a
step before that is still in flight."""


class LoadRoom:
    """Decides whether the pool has room for another load.

    Args:
        pool: vLLM's block pool.
        groups: the KV-cache groups.
        tables: the requests' block tables.
        max_in_flight_tokens: most tokens that vLLM schedules before it frees the blocks that these tokens move out of a window.
    """

    def __init__(
        self, pool: Any, groups: Sequence[KVCacheGroup], tables: BlockTables, max_in_flight_tokens: int
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._tables = tables
        self._max_in_flight_tokens = max_in_flight_tokens
        self._counts_too_little = any(group.kind in _FORGETTING for group in groups)

    def admits(self, num_tokens: int, parked: Iterable[Any]) -> bool:
        """Whether a load can have its blocks without any of ``parked`` being short of them.

        Args:
            num_tokens: tokens that will be on the device after the load.
            parked: requests that were given blocks for a load, and have not run since.
        """
        if not self._counts_too_little:
            return True
        needed = [self._num_needed(request) for request in parked]
        if not needed:
            return True
        taken = sum(
            -(-num_tokens // group.block_tokens) - group.num_skipped_tokens(num_tokens) // group.block_tokens
            for group in self._groups
        )
        return taken + sum(needed) <= int(self._pool.get_num_free_blocks())

    def _num_needed(self, request: Any) -> int:
        """Blocks that a parked request will need beyond those it holds."""
        tables = self._tables.blocks(request.request_id)
        return sum(
            max(self._max_held(group, request.num_tokens) - sum(not block.is_null for block in table), 0)
            for group, table in zip(self._groups, tables, strict=True)
        )

    def _max_held(self, group: KVCacheGroup, num_tokens: int) -> int:
        """Blocks that a request holds at most at a time until its prompt is computed."""
        all_blocks = -(-num_tokens // group.block_tokens)
        if group.kind is AttentionKind.RECURRENT:
            return min(all_blocks, _MAX_STATES)
        if group.window_tokens is None:
            return all_blocks
        return min(all_blocks, -(-(group.window_tokens + self._max_in_flight_tokens) // group.block_tokens) + 1)
