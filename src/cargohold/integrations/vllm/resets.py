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
# The connector's own name of the weights that the model was loaded with.
_AS_LOADED: Final = ""


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
        # An epoch begins with every reset and call; weights stay the same within one. Workers are asked once for each.
        self._epoch = 0
        self._asked = 0
        self._is_looking = False  # nobody has told yet what the weights of this epoch are
        self._is_wanted = False
        self._is_empty = False  # all was dropped on demand, and nothing is stored until the look after it has ended
        self._cause = _RESET
        # What workers hold, by rank: what they have loaded, and what they have told so far of epochs since the last reset.
        self._first: dict[int, str] = {}
        self._told: dict[int, dict[int, str]] = {}
        # The weights whose KV the connector keeps, or that of the steps since the last reset, which the device may have still;
        # and the epochs in which steps have computed with weights that are not known yet.
        self._held: str | None = _AS_LOADED
        self._on_device: set[str | None] = set()
        self._unknown: set[int] = set()
        self._is_mixed = False

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
        self._notice_reset()
        if not self._is_mixed:
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
                self._held = None
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
        if computes:
            self._note_computed()
        is_urgent = self._cause == _CALL and bool(self._on_device or self._unknown)
        if self._asked == self._epoch or self._is_paused() or not (computes or self._is_wanted or is_urgent):
            return 0
        self._asked, self._told[self._epoch] = self._epoch, {}
        return self._epoch

    def note_weights(self, rank: int, seen: Mapping[int, str]) -> None:
        """Learn what a worker holds: by the number of the look, a fingerprint, or nothing if it cannot tell.

        The first look is the one that it took when it had loaded the model.
        """
        for epoch, fingerprint in seen.items():
            if not epoch:
                self._first[rank] = fingerprint
            elif (told := self._told.get(epoch)) is not None:
                told[rank] = fingerprint
                if len(told) == self._num_workers:
                    self._learn(epoch, self._told.pop(epoch))

    def _notice_reset(self) -> bool:
        """Whether vLLM's prefix cache was reset since this was asked last."""
        index = self._pool.cached_block_hash_to_block
        if index is self._index:
            return False
        self._index, self._is_mixed = index, False
        for of_the_device in (self._told, self._on_device, self._unknown):
            of_the_device.clear()
        return True

    def _note_computed(self) -> None:
        if self._is_looking:
            self._unknown.add(self._epoch)
        else:
            self._on_device.add(self._held)

    def _close(self, cause: str = _RESET) -> None:
        """Let nothing be found until it is known what the model holds."""
        self._cause = cause
        if self._policy == CHECK:
            self._epoch += 1
            self._is_looking, self._is_wanted = True, False
        elif self._policy == DROP:
            logger.warning(
                "%s: what Cargohold keeps is dropped, for the weights may have changed; with follow_weights=check, workers "
                "look whether they have",
                cause,
            )
            self._is_due = True

    def _learn(self, epoch: int, told: Mapping[int, str]) -> None:
        """Learn with which weights the steps of an epoch compute."""
        weights = _AS_LOADED if told == self._first else sha256(repr(sorted(told.items())).encode()).hexdigest()
        if epoch in self._unknown:
            self._unknown.discard(epoch)
            self._on_device.add(weights)
        if epoch == self._epoch:
            blind = next((rank for rank, fingerprint in sorted(told.items()) if not fingerprint), None)
            self._decide(weights, blind)

    def _decide(self, weights: str, blind: int | None) -> None:
        was_empty, self._is_empty, self._is_looking = self._is_empty, False, False
        if blind is not None:
            if not was_empty:
                self._is_due, self._moves_to = True, None
                why = f"worker {blind} cannot tell which weights it holds"
                logger.warning("%s, and %s: what Cargohold keeps is dropped", self._cause, why)
        elif self._unknown or not self._on_device <= {weights}:
            logger.warning(
                "%s, and the weights are others, or were: vLLM's prefix cache may have KV of both, so nothing is found or "
                "stored until it is reset",
                self._cause,
            )
            self._is_mixed = True
            self._guard.give_up_transfers()  # of requests that have ended since, too
            return  # what is kept is of what was held before
        elif weights == self._held:
            logger.info("%s, and the weights are the same: what Cargohold keeps stays", self._cause)
        else:
            if not was_empty:
                what = "what Cargohold keeps is found when its own return"
                logger.info("%s, and the weights are others: %s", self._cause, what)
            self._moves_to = weights
        self._held = weights


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
