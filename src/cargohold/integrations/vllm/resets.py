"""Resets of vLLM's prefix cache: nothing that is kept is found until every worker has looked which weights it holds.

A program that changes weights in place resets that cache, because the KV of other weights is worthless. vLLM resets *before*
the weights come, so workers look when vLLM computes, or admits a request, for the first time after the reset. They do so after
the start, too: of an empty cache, a program that brings weights at once needs no reset.

::

    open ── reset ──> closed ── all workers hold what they held ──────────────> open
                        ├────── some hold something else ──> its KV apart ────> open
                        └────── one cannot tell ──> dropped ──────────────────> open
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

from cargohold.protocol import ConnectorGuard

logger = logging.getLogger(__name__)

# The connector's own name of the weights that the model was loaded with.
_AS_LOADED: Final = ""


class CacheResets:
    """Keeps the connector's KV apart by weights, across resets of vLLM's prefix cache.

    Args:
        guard: the connector.
        pool: vLLM's block pool. A reset is noticed by the new index of blocks that it gives the pool.
        num_workers: number of workers that report what they hold.
        may_sleep: whether vLLM may sleep. It then resets connectors before it does, as for a wish to drop what they keep.
        has_tiers: whether something may be kept already at the start.
    """

    def __init__(
        self,
        guard: ConnectorGuard,
        pool: Any,
        *,
        num_workers: int = 1,
        may_sleep: bool = False,
        has_tiers: bool = False,
    ) -> None:
        self._guard = guard
        self._pool = pool
        self._num_workers = num_workers
        self._may_sleep = may_sleep
        self._index = pool.cached_block_hash_to_block
        self._is_due = False
        # The weights whose KV requests are to find from now on, while the connector has not moved to it.
        self._moves_to: str | None = None
        # Looks are numbered: weights may have changed since an earlier one. Number 0 is taken when the model is loaded.
        self._look = 1
        self._asked = 0
        self._is_looking = True
        self._is_wanted = False
        self._is_open = (
            not has_tiers
        )  # at the start, chunks are kept before the first look has ended, and may be of others
        self._is_empty = False  # all was dropped on demand, and nothing is stored until the look after it has ended
        # What workers hold, by rank: what they have loaded, and their answers to the latest look.
        self._first: dict[int, str] = {}
        self._answers: dict[int, str] = {}
        self._held = _AS_LOADED

    def is_due(self) -> bool:
        """Whether nothing that is kept may be found, or stored: it is to be dropped, or not known to be true.

        Looks for a reset of vLLM's prefix cache, and tries to reset the connector, which refuses while it is in use.
        """
        self._notice_reset()
        if self._is_due:
            self._is_due = not self._guard.reset_cache()
        if self._moves_to is not None and not self._is_due and self._guard.use_weights(self._moves_to):
            self._moves_to = None
        return self._is_due or self._is_closed or self._moves_to is not None

    def reset(self) -> bool:
        """Drop what is kept, or only look at the weights if vLLM may be about to sleep: it has reset its own cache then.

        What is in use is dropped later. It is not found from now on, so the answer is always ``True``.
        """
        if not self._notice_reset() or not self._may_sleep:
            self._is_due, self._is_empty = not self._guard.reset_cache(), True
            self._close()  # what is kept from now on is of the weights of now: these are to be known, too
        return True

    def is_unsure(self) -> bool:
        """Whether a request must wait, because it is not known yet what the model holds. Called when vLLM asks for one."""
        self._is_wanted = self._is_closed
        return self._is_closed

    def take_look(self, *, computes: bool) -> int:
        """Return the number of the look that workers are to take in a step that computes something or not; 0 for none."""
        if self._asked == self._look or not (computes or self._is_wanted):
            return 0
        self._asked = self._look
        return self._look

    def note_weights(self, rank: int, seen: Mapping[int, str]) -> None:
        """Note what a worker holds: by the number of the look, a fingerprint, or nothing if it cannot tell."""
        if 0 in seen:
            self._first[rank] = seen[0]
        if self._is_looking and self._look in seen:
            self._answers[rank] = seen[self._look]
            if len(self._answers) == self._num_workers:
                self._is_looking = False
                self._decide()

    @property
    def _is_closed(self) -> bool:
        return self._is_looking and not self._is_open

    def _notice_reset(self) -> bool:
        """Whether vLLM's prefix cache was reset since this was asked last."""
        index = self._pool.cached_block_hash_to_block
        if index is self._index:
            return False
        self._index = index
        self._guard.give_up_transfers()  # it has freed blocks of running requests, which stores may still be reading
        self._close()
        return True

    def _close(self) -> None:
        """Let nothing be found until it is known what the model holds."""
        self._look += 1
        self._is_looking, self._is_wanted, self._is_open = True, False, False
        self._answers.clear()

    def _decide(self) -> None:
        """Keep, set aside or drop what is kept: all workers have answered."""
        answers, is_first = self._answers, self._look == 1
        was_open, was_empty, self._is_open, self._is_empty = self._is_open, self._is_empty, False, False
        weights = _AS_LOADED if answers == self._first else sha256(repr(sorted(answers.items())).encode()).hexdigest()
        blind = next((rank for rank, fingerprint in sorted(answers.items()) if not fingerprint), None)
        is_same, self._held = weights == self._held, weights
        if is_first and (is_same or blind is not None):
            return
        if was_empty:
            outcome = "all chunks are dropped, as requested"
        elif blind is not None:
            outcome = f"worker {blind} cannot identify its weights: all chunks are dropped"
            self._is_due = True
        elif is_same:
            outcome = "the weights are the same: all chunks stay valid"
        else:
            outcome = "the weights have changed: the chunks of the old ones are set aside until they return"
            self._is_due = self._is_due or was_open
        if not is_same:
            self._moves_to = None if blind is not None else weights
        logger.info("%s, and %s", "the model was loaded" if is_first else "vLLM's prefix cache was reset", outcome)
