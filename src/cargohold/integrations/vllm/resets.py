"""Follows resets of vLLM's prefix cache: nothing that is kept may be found until it is known of which weights it is.

A program that changes a model's weights in place has vLLM reset its prefix cache, because the KV of other weights is worthless.
It easily forgets that more KV is kept below: vLLM resets connectors only on demand, and does not tell them of other resets.
And it resets *before* the weights come: with ``follow_weights="check"``, workers look at what they hold when the next step
begins.

::

    open ── reset ──> closed ── all workers hold what they held ─────────────────────────> open
                        │
                        ├── some hold something else ──> moving to these weights' KV ──> open
                        └── one cannot tell ──> dropping ──────────────────────────────> open
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Final

from cargohold.protocol import ConnectorGuard

logger = logging.getLogger(__name__)

CHECK: Final = "check"
DROP: Final = "drop"
IGNORE: Final = "ignore"


class CacheResets:
    """Resets the connector after vLLM has reset its prefix cache, unless the weights are the same. Wraps the pool's own reset.

    Args:
        guard: the connector.
        pool: vLLM's block pool. A reset is noticed by the new index of blocks that it gives the pool.
        num_workers: number of workers that tell what they hold.
        policy: ``CHECK``, ``DROP``, or ``IGNORE`` unless it is a reset on demand; see ``AdapterSettings.follow_weights``.
        is_paused: whether vLLM is paused. A reset on demand then is one of a pause, of sleep or of a change of weights; else it
            is somebody's wish that what is kept be dropped.
    """

    def __init__(
        self,
        guard: ConnectorGuard,
        pool: Any,
        *,
        num_workers: int = 1,
        policy: str = DROP,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._guard = guard
        self._pool = pool
        self._policy = policy
        self._num_workers = num_workers
        self._is_paused = is_paused
        self._index = pool.cached_block_hash_to_block
        self._is_due = False
        # The weights whose KV requests are to find from now on, while the connector has not moved to it.
        self._moves_to: str | None = None
        # The number of the last look at the weights, whether workers were asked for it, and what they have answered by rank.
        self._look = 0
        self._is_looking = False
        self._asked = 0
        self._is_wanted = False
        self._is_empty = False  # all was dropped on demand before this look, and nothing is stored until it has ended
        self._first: dict[int, str] = {}
        self._held: dict[int, str] = {}
        self._seen: dict[int, str] = {}
        self._reset_pool = pool.reset_prefix_cache
        pool.reset_prefix_cache = self._reset_pool_now

    def is_due(self) -> bool:
        """Whether nothing that is kept may be found, or stored: it is to be dropped, or not known to be true.

        Looks for a reset of vLLM's prefix cache, and tries to reset the connector, which refuses while it is in use.
        """
        index = self._pool.cached_block_hash_to_block
        if index is not self._index:
            self._index = index
            self._close()
        if self._is_due:
            self._is_due = not self._guard.reset_cache()
        if self._moves_to is not None and not self._is_due and self._guard.use_weights(self._moves_to):
            self._moves_to = None
        return self._is_due or self._is_looking or self._moves_to is not None

    def reset(self) -> bool:
        """Drop what is kept, or look at the weights if vLLM is paused. It may be in use: then it is dropped later.

        Either way nothing of it is found from now on, so the answer is always ``True``: a program that changes weights does
        not ask twice.
        """
        self._index = self._pool.cached_block_hash_to_block
        if self._policy != DROP and self._is_paused():
            self._close()
        else:
            self._is_due = not self._guard.reset_cache()
            if self._policy == CHECK:
                # What is kept from now on is of the weights of now: these are to be known, too.
                self._held = {}
                self._close()
                self._is_empty = True
        return True

    def is_unsure(self) -> bool:
        """Whether a request must wait, because it is not known yet what the model holds. Called when vLLM asks for one."""
        self._is_wanted = self._is_looking
        return self._is_looking

    def take_look(self, *, computes: bool) -> int:
        """Return the number of the look that workers are to take in a step that computes something or not; 0 for none.

        They look when vLLM computes or admits requests again: then the weights are there that it had reset its cache for.
        """
        if self._asked == self._look or not (computes or self._is_wanted):
            return 0
        if self._is_paused():
            return 0
        self._asked = self._look
        return self._look

    def note_weights(self, rank: int, seen: Mapping[int, str]) -> None:
        """Learn what a worker holds: by the number of the look, a fingerprint, or nothing if it cannot tell.

        The first look is the one that it took when it had loaded the model.
        """
        for look, fingerprint in seen.items():
            if not look:
                self._first[rank] = self._held[rank] = fingerprint
            elif look == self._look:
                self._seen[rank] = fingerprint
        if len(self._seen) == self._num_workers:
            self._decide()
            self._held, self._seen = self._seen, {}

    def _close(self) -> None:
        """Let nothing be found until it is known what the model holds."""
        if self._policy == CHECK:
            self._begin_look()
            self._is_looking = True
        elif self._policy == DROP:
            logger.warning(
                "vLLM's prefix cache was reset: what Cargohold keeps is dropped, too, for the weights may have changed; with "
                "follow_weights=check, workers look whether they have"
            )
            self._is_due = True

    def _begin_look(self) -> None:
        self._look += 1
        self._is_wanted, self._is_empty, self._seen = False, False, {}

    def _decide(self) -> None:
        self._is_looking = False
        if self._seen == self._held and all(self._seen.values()):
            logger.info("vLLM's prefix cache was reset, and the weights are the same: what Cargohold keeps stays")
            return
        blind = next((rank for rank, fingerprint in sorted(self._seen.items()) if not fingerprint), None)
        if blind is None:
            if not self._is_empty:
                logger.info(
                    "vLLM's prefix cache was reset, and the weights are others: "
                    "what Cargohold keeps is found when its own return"
                )
            self._moves_to = "" if self._seen == self._first else _digest(self._seen)
        elif not self._is_empty:
            why = f"worker {blind} cannot tell which weights it holds"
            logger.warning("vLLM's prefix cache was reset, and %s: what Cargohold keeps is dropped", why)
            self._is_due, self._moves_to = True, None

    def _reset_pool_now(self) -> bool:
        """Reset vLLM's pool, which refuses while blocks are in use: if only stores use any, they let go first, and are void."""
        held, pool = self._guard.held_references(), self._pool
        num_held = sum(pool.blocks[block_id].ref_cnt == count for block_id, count in held.items())
        if num_held and num_held == pool.num_gpu_blocks - pool.get_num_free_blocks() - 1:  # one is the null block
            self._guard.give_up_stores()
        is_reset: bool = self._reset_pool()
        return is_reset


def _digest(seen: Mapping[int, str]) -> str:
    """Return a name of what all workers hold."""
    return sha256(repr(sorted(seen.items())).encode()).hexdigest()


def is_paused(pool: Any) -> bool:
    """Whether the scheduler that has this block pool is paused, as for sleep or a change of weights; ``False`` if it cannot be.

    vLLM tells a connector's scheduler side neither of a pause nor of its scheduler, so that is looked for: at resets only.
    """
    scheduler_class = getattr(sys.modules.get("vllm.v1.core.sched.interface"), "SchedulerInterface", None)
    if scheduler_class is None or not hasattr(scheduler_class, "pause_state"):
        return False
    schedulers = (one for one in gc.get_objects() if issubclass(type(one), scheduler_class))
    own = next((one for one in schedulers if one.kv_cache_manager.block_pool is pool), None)
    return own is not None and bool(own.pause_state.name != "UNPAUSED")
