"""Follows resets of vLLM's prefix cache: nothing that is kept may be found until it is known of which weights it is.

A program that changes a model's weights in place has vLLM reset its prefix cache, because the KV of other weights is worthless.
It easily forgets that more KV is kept below: vLLM resets connectors only on demand, and does not tell them of other resets.
And it resets *before* the weights come: with ``follow_weights="check"``, workers look at what they hold when the next step
begins. They look also when somebody has let all of them do something (``collective_rpc``), which may be to change weights.

::

    open ── reset, call ──> closed ── all workers hold what they held ────────────────────────> open
                              │
                              ├── some hold something else ──> moving to these weights' KV ──> open
                              │         └── and the device may have KV of both ──> closed until the next reset
                              └── one cannot tell ──> dropping ──────────────────────────────> open
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain
from typing import Any, Final

from cargohold.protocol import ConnectorGuard

logger = logging.getLogger(__name__)

CHECK: Final = "check"
KEEP: Final = "keep"
DROP: Final = "drop"
IGNORE: Final = "ignore"

_RESET: Final = "vLLM's prefix cache was reset"
_CALL: Final = "workers were called (collective_rpc)"


class CacheResets:
    """Resets the connector after vLLM has reset its prefix cache, unless the weights are the same.

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
        self._cause = _RESET
        # Whether a step has computed since the last reset. A call then may leave KV of two kinds of weights on the device: that
        # is so if other weights are seen in the look after it, and until the next reset.
        self._has_computed = False
        self._may_mix = False
        self._is_mixed = False
        # Whether one more call has come before the answers; and whether a step has computed since the last call without a look,
        # so that with a further call nobody can tell any more with which weights.
        self._is_called_again = False
        self._is_unseen = False
        self._is_lost = False
        self._first: dict[int, str] = {}
        self._held: dict[int, str] = {}
        self._seen: dict[int, str] = {}

    def is_due(self) -> bool:
        """Whether nothing that is kept may be found, or stored: it is to be dropped, or not known to be true.

        Looks for a reset of vLLM's prefix cache, and tries to reset the connector, which refuses while it is in use.
        """
        if self._notice_reset():
            self._close()
        if self._is_due:
            self._is_due = not self._guard.reset_cache()
        if self._moves_to is not None and not self._is_due and self._guard.use_weights(self._moves_to):
            self._moves_to = None
        return self._is_due or self._is_looking or self._is_mixed or self._moves_to is not None

    def note_call(self) -> None:
        """Learn that somebody lets all workers do something now: it may be to change weights, before a reset or after it."""
        was_reset = self._notice_reset()
        self._is_lost |= self._is_unseen
        self._is_unseen = False
        if self._is_looking and self._asked == self._look and not was_reset:
            self._is_called_again = True  # the step that was asked may compute with what this call changes
        elif not self._is_mixed:
            self._may_mix |= self._has_computed
            self._close(_CALL)

    def reset(self) -> bool:
        """Drop what is kept, or look at the weights if vLLM is paused. It may be in use: then it is dropped later.

        Either way nothing of it is found from now on, so the answer is always ``True``: a program that changes weights does
        not ask twice.
        """
        self._notice_reset()
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
        is_wanted = computes or self._is_wanted or self._may_mix
        self._has_computed |= computes
        if self._asked != self._look and is_wanted and not self._is_paused():
            self._asked, self._is_unseen = self._look, False
            return self._look
        self._is_unseen |= computes and (self._asked != self._look or self._is_called_again)
        return 0

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
            if not self._is_mixed:  # what is kept is of what was held before
                self._held = self._seen
            self._seen = {}
            if self._is_called_again and not self._is_mixed:
                self._is_called_again, self._may_mix = False, self._has_computed
                self._close(_CALL)

    def _notice_reset(self) -> bool:
        """Whether vLLM's prefix cache was reset since this was asked last."""
        index = self._pool.cached_block_hash_to_block
        if index is self._index:
            return False
        self._index = index
        self._has_computed = self._may_mix = self._is_mixed = False
        self._is_called_again = self._is_unseen = self._is_lost = False
        return True

    def _close(self, cause: str = _RESET) -> None:
        """Let nothing be found until it is known what the model holds."""
        self._cause = cause
        if self._policy == CHECK:
            self._begin_look()
            self._is_looking = True
        elif self._policy == DROP:
            logger.warning(
                "%s: what Cargohold keeps is dropped, for the weights may have changed; with follow_weights=check, workers "
                "look whether they have",
                cause,
            )
            self._is_due = True

    def _begin_look(self) -> None:
        self._look += 1
        self._is_wanted, self._is_empty, self._seen = False, False, {}

    def _decide(self) -> None:
        may_mix, self._may_mix, self._is_looking = self._may_mix or self._is_lost, False, False
        if self._seen == self._held and all(self._seen.values()) and not self._is_lost:
            logger.info("%s, and the weights are the same: what Cargohold keeps stays", self._cause)
            return
        blind = next((rank for rank, fingerprint in sorted(self._seen.items()) if not fingerprint), None)
        if blind is not None:
            if not self._is_empty:
                why = f"worker {blind} cannot tell which weights it holds"
                logger.warning("%s, and %s: what Cargohold keeps is dropped", self._cause, why)
                self._is_due, self._moves_to = True, None
        elif may_mix:
            logger.warning(
                "%s, and the weights are others, or were: vLLM's prefix cache may have KV of both, so nothing is found or "
                "stored until it is reset",
                self._cause,
            )
            self._is_mixed = True
            self._guard.give_up_transfers()  # of requests that have ended since, too
        else:
            if not self._is_empty:
                what = "what Cargohold keeps is found when its own return"
                logger.info("%s, and the weights are others: %s", self._cause, what)
            self._moves_to = "" if self._seen == self._first else _digest(self._seen)


def _digest(seen: Mapping[int, str]) -> str:
    """Return a name of what all workers hold."""
    return sha256(repr(sorted(seen.items())).encode()).hexdigest()


# --- vLLM's own reset -------------------------------------------------------------------------------------------------


class PoolResets:
    """Lets vLLM reset its prefix cache while copies run. Wraps the pool's own reset, which refuses while a block is in use.

    ::

        blocks in use by                          a reset
        ----------------------------------------  ------------------------------------------------------
        stores                                    frees them: what is copied from them is void
        requests that wait for a load, or have    frees them: these requests are computed as new ones
          not run since
        loads                                     leaves them in use, without a name, until the copies have
        steps in flight, of preempted requests    ended: nobody can find or be given them meanwhile
        anybody else                              is refused, and changes nothing

    Args:
        guard: the connector.
        pool: vLLM's block pool.
        scheduler: vLLM's scheduler; ``None`` if it is not known.
        loads: returns the requests that wait for a load or have not run since, by id, with the blocks that one in flight fills.
        on_void: hears of those whose blocks were freed.
    """

    def __init__(
        self,
        guard: ConnectorGuard,
        pool: Any,
        scheduler: Any,
        loads: Callable[[], Mapping[str, Collection[int]]],
        on_void: Callable[[Collection[str]], None],
    ) -> None:
        self._guard = guard
        self._pool = pool
        self._scheduler = scheduler
        self._loads = loads
        self._on_void = on_void
        self._reset = pool.reset_prefix_cache
        pool.reset_prefix_cache = self.reset

    def reset(self) -> bool:
        """Reset the pool; whether it was not refused."""
        num_used = self._pool.num_gpu_blocks - self._pool.get_num_free_blocks() - 1  # one is the null block
        if not num_used:
            return bool(self._reset())
        scheduler, held = self._scheduler, self._guard.held_references()
        waiting = [] if scheduler is None else self._waiting(scheduler, held)
        if num_used != self._num_known(scheduler, held, waiting):
            return bool(self._reset())
        for request in waiting:
            _start_over(scheduler, request)
        self._on_void([request.request_id for request in waiting])
        self._guard.give_up_transfers()
        with self._all_counted_as_free():
            return bool(self._reset())

    def _waiting(self, scheduler: Any, held: Counter[int]) -> list[Any]:
        """Return the requests that wait for a load or have not run since, ended ones included, if their blocks can be freed."""
        loads = self._loads()
        if not held.keys() >= set(chain.from_iterable(loads.values())):
            return []  # a connector leaves it to the requests to hold what is being filled
        requests = (scheduler.requests.get(request_id) for request_id in loads)
        return [request for request in requests if request is not None and request.status.name != "RUNNING"]

    def _num_known(self, scheduler: Any, held: Counter[int], waiting: Collection[Any]) -> int:
        """Return the number of blocks that nobody uses but the connector, these requests, and steps in flight."""
        tables = [
            table for request in waiting for table in scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        ]
        tables += [blocks for _, blocks in getattr(scheduler, "deferred_frees", ())]
        known = held + Counter(block.block_id for table in tables for block in table if not block.is_null)
        return sum(self._pool.blocks[block_id].ref_cnt == count for block_id, count in known.items())

    @contextmanager
    def _all_counted_as_free(self) -> Iterator[None]:
        own = vars(self._pool)
        before = own.get("get_num_free_blocks")
        own["get_num_free_blocks"] = lambda: self._pool.num_gpu_blocks - 1
        try:
            yield
        finally:
            del own["get_num_free_blocks"]
            if before is not None:
                own["get_num_free_blocks"] = before


def _start_over(scheduler: Any, request: Any) -> None:
    """Free the blocks of a request that does not run. If it waits for a load, it goes on waiting until that is reported.

    vLLM frees a request's blocks again when it hears that its load has failed, or has ended after an abort: then it has none.
    """
    scheduler.kv_cache_manager.free(request)
    request.num_computed_tokens = 0
    getattr(scheduler, "_inflight_prefills", set()).discard(request)  # else its next load must find room for both
