"""Follows resets of vLLM's prefix cache."""

from __future__ import annotations

import logging
from typing import Any

from cargohold.protocol import ConnectorGuard

logger = logging.getLogger(__name__)


class CacheResets:
    """Drops what the connector keeps when vLLM has emptied its prefix cache, and lets nothing be found until that is done.

    Whoever changes a model's weights in place has vLLM reset its prefix cache, as the KV of other weights is worthless; that
    there is more of it below is easily forgotten, for vLLM resets connectors only on demand, and tells them nothing else.

    Args:
        guard: the connector.
        pool: vLLM's block pool; a reset gives it a new index of blocks.
        follows: whether the connector is reset with vLLM's prefix cache, or only on demand.
    """

    def __init__(self, guard: ConnectorGuard, pool: Any, *, follows: bool) -> None:
        self._guard = guard
        self._pool = pool
        self._follows = follows
        self._index = pool.cached_block_hash_to_block
        self._is_due = False

    def is_due(self) -> bool:
        """Whether what is kept may not be found, because it is to be dropped and was in use so far. Mutates the connector."""
        index = self._pool.cached_block_hash_to_block
        if index is not self._index:
            self._index = index
            if self._follows:
                logger.warning(
                    "vLLM's prefix cache was reset: what Cargohold keeps is dropped, too, because the weights may have changed; "
                    "if they have not, follow_resets=false keeps it"
                )
                self._is_due = True
        if self._is_due:
            self._is_due = not self._guard.reset_cache()
        return self._is_due

    def reset(self) -> bool:
        """Drop what is kept; ``False`` if it is in use: then it is dropped later, and not found until then."""
        self._index = self._pool.cached_block_hash_to_block
        self._is_due = not self._guard.reset_cache()
        return not self._is_due
