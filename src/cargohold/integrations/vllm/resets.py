"""Follows resets of vLLM's prefix cache."""

from __future__ import annotations

import logging
from typing import Any

from cargohold.protocol import ConnectorGuard

logger = logging.getLogger(__name__)


class CacheResets:
    """Resets the connector after vLLM has reset its prefix cache. Until that is done, nothing that is kept may be found.

    A program that changes a model's weights in place has vLLM reset its prefix cache, because the KV of other weights is
    worthless. It easily forgets that more KV is kept below: vLLM resets connectors only on demand, and does not tell them of
    other resets.

    Args:
        guard: the connector.
        pool: vLLM's block pool. A reset is noticed by the new index of blocks that it gives the pool.
        follows: whether the connector is reset with vLLM's prefix cache, or only on demand.
    """

    def __init__(self, guard: ConnectorGuard, pool: Any, *, follows: bool) -> None:
        self._guard = guard
        self._pool = pool
        self._follows = follows
        self._index = pool.cached_block_hash_to_block
        self._is_due = False

    def is_due(self) -> bool:
        """Whether a reset of the connector is still due, so that nothing it keeps may be found.

        Looks for a reset of vLLM's prefix cache, and tries to reset the connector, which refuses while it is in use.
        """
        index = self._pool.cached_block_hash_to_block
        if index is not self._index:
            self._index = index
            if self._follows:
                logger.warning(
                    "vLLM's prefix cache was reset: what Cargohold keeps is dropped, too: the weights may have changed; "
                    "if they have not, follow_resets=false keeps it"
                )
                self._is_due = True
        if self._is_due:
            self._is_due = not self._guard.reset_cache()
        return self._is_due

    def reset(self) -> bool:
        """Drop what is kept; ``False`` if it is in use: it is then dropped later, and not found until then."""
        self._index = self._pool.cached_block_hash_to_block
        self._is_due = not self._guard.reset_cache()
        return not self._is_due
