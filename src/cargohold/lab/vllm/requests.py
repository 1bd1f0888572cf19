"""Requests as vLLM has them, and next to each the request as its client knows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any, Final

from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus as VllmStatus

from cargohold.engine.core.request import FinishReason, Request, RequestStatus
from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.integrations.vllm import compat
from cargohold.lab.simulation.fingerprints import tokens_alone
from cargohold.lab.simulation.replica import VOCAB_SIZE, root_of_salt
from cargohold.protocol import (
    EXPLAIN,
    MEDIUM_DEVICE,
    MEDIUM_HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheReport,
    ConnectorGuard,
    KVCacheGroup,
    KVEvent,
    NullConnectorScheduler,
)

_HASH: Final = "sha256"
NO_HASHES: Final = 1 << 30
"""Tokens per block hash of our own requests: vLLM hashes its own."""
_NOTHING_RESTORED: Final = CacheReport()
_BEYOND: Final = 4
"""Tokens known beyond the end of an answer: vLLM may compute further steps before it notices the end."""


class RequestBook:
    """Makes vLLM's requests, and keeps for each one a request of our own, which has what its client knows.

    Args:
        own: our requests so far by id, with what their clients have received.
        hash_tokens: tokens per block hash of vLLM's.
        tell: called with every update that a client gets.

    Attributes:
        failed_loads: ids of requests of which a load has failed.
        adapter_of: gives vLLM's description of the adapter that a salt stands for; ``None`` for none.
    """

    def __init__(self, own: Mapping[str, Request], hash_tokens: int, tell: Callable[[RequestUpdate], None]) -> None:
        self._own = own
        self._tell = tell
        self._hasher = get_request_block_hasher(hash_tokens, hash_function())
        self._live: dict[str, Any] = {}
        self._tokens: dict[str, list[int]] = {}
        self._num_loaded: dict[str, int] = {}
        self.failed_loads: set[str] = set()
        self.adapter_of: Callable[[str | None], Any] = lambda _: None

    def tokens(self, request_id: str) -> Sequence[int]:
        """Prompt and answer of a request: the model's answers are known beforehand."""
        return self._tokens[request_id]

    def root(self, request_id: str) -> int:
        """The number that the request's chain of fingerprints starts from."""
        return root_of_salt(self._own[request_id].salt)

    def make(self, own: Request) -> Any:
        """VLLM's request for one of ours."""
        max_tokens, salt = own.sampling.max_tokens, own.salt
        answer = tokens_alone(own.all_token_ids, max_tokens + _BEYOND, VOCAB_SIZE, root_of_salt(salt))
        self._tokens[own.request_id] = [*own.all_token_ids, *answer]
        adapter = self.adapter_of(salt)
        request = VllmRequest(
            request_id=own.request_id,
            prompt_token_ids=list(own.all_token_ids),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                stop_token_ids=sorted(own.stop_token_ids),
                extra_args={"kv_transfer_params": {**(own.kv_transfer_params or {}), EXPLAIN: True}},
            ),
            pooling_params=None,
            arrival_time=own.times.arrived,
            cache_salt=salt if adapter is None else None,
            lora_request=adapter,
            priority=own.priority,
            block_hasher=self._hasher,
        )
        self._live[own.request_id] = request
        return request

    def take(self, news: Any) -> None:
        """Take one of vLLM's outputs: new tokens of a request, or its end, or both."""
        request = self._own[news.request_id]
        if news.prefill_stats is not None:
            request.num_first_device_tokens = news.prefill_stats.num_local_cached_tokens
            self._num_loaded[news.request_id] = news.prefill_stats.num_external_cached_tokens
        if news.new_token_ids:
            request.all_token_ids += news.new_token_ids
            self._tell(RequestUpdate(request, tuple(news.new_token_ids)))
        if news.finish_reason is not None:
            # Others' connectors explain nothing.
            explanation = (news.kv_transfer_params or {}).get(EXPLAIN, {})
            loaded = {MEDIUM_HOST: self._num_loaded.pop(news.request_id, 0)}
            report = CacheReport(explanation.get("restored_tokens", loaded))
            self.end(news.request_id, FinishReason(str(news.finish_reason)), report)

    def end(self, request_id: str, reason: FinishReason, report: CacheReport = _NOTHING_RESTORED) -> None:
        """Note that a request has ended, and tell its client."""
        request = self._own[request_id]
        if reason is FinishReason.ERROR and request_id in self.failed_loads:
            request.error = "its load failed"
        request.finish_reason = reason
        request.status = RequestStatus.FINISHED
        request.num_preemptions = self._live.pop(request_id).num_preemptions
        self._tell(RequestUpdate(request, cache_report=report))

    def follow_status(self) -> None:
        """Note which requests are loading, for timelines that people read."""
        for request_id, request in self._live.items():
            is_loading = request.status is VllmStatus.WAITING_FOR_REMOTE_KVS
            self._own[request_id].status = RequestStatus.LOADING if is_loading else RequestStatus.WAITING


@cache
def hash_function() -> Any:
    """The function that vLLM hashes blocks with in the simulation."""
    function = get_hash_fn_by_name(_HASH)
    init_none_hash(function)
    return function


ENDS: Final = ("finished_sending", "finished_recving", "failed_recving")
"""What vLLM's reports and ours call the requests whose transfers have ended."""


def ends_in(report: Any) -> dict[str, Any]:
    """The requests in a report of vLLM's, where an empty set may be ``None``."""
    return {name: frozenset(getattr(report, name) or ()) for name in ENDS}


# --- KV events as vLLM publishes them ---------------------------------------------------------------------------------


def from_vllm(event: Any, medium: str) -> KVEvent:
    """One event as a follower would read it.

    Tokens are left out: vLLM's hashes are its own business.

    Args:
        event: vLLM's event.
        medium: the medium of an event that does not name its own.
    """
    match event:
        case compat.BlockStored():
            num_tokens = event.block_size * len(event.block_hashes)
            assert event.medium == MEDIUM_DEVICE or len(event.token_ids) == num_tokens, "an event without its tokens"
            return BlockStored(
                block_hashes=tuple(event.block_hashes),
                parent_block_hash=event.parent_block_hash,
                token_ids=(),
                block_tokens=event.block_size,
                group=event.group_idx,
                medium=event.medium,
            )
        case compat.BlockRemoved():
            return BlockRemoved(tuple(event.block_hashes), event.group_idx, event.medium)
        case compat.AllBlocksCleared():
            return AllBlocksCleared(medium)
        case _:
            raise TypeError(f"vLLM publishes {event!r}")


def watch(source: Any, follow: Callable[[Any], None]) -> None:
    """Let ``follow`` hear of all events that vLLM takes from ``source``."""
    take = source.take_events

    def take_and_follow() -> list[Any]:
        events = list(take() or ())
        for event in events:
            follow(event)
        return events

    source.take_events = take_and_follow


# --- views of vLLM's scheduler and block pool with the interface that the simulation's oracles need -------------------


class PoolView:
    """vLLM's block pool. Blocks are given out by ``allocate`` alone, so that oracles can watch it.

    Args:
        pool: vLLM's own.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._get_new_blocks = pool.get_new_blocks
        # ``_allocate`` looks up ``allocate`` at each call: oracles replace that by functions of their own.
        pool.get_new_blocks = self._allocate

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
        return len(self._pool.blocks)

    @property
    def num_usable_blocks(self) -> int:
        """Without the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())

    @property
    def num_cached_prefixes(self) -> int:
        return len(self._pool.cached_block_hash_to_block)

    def get_block(self, block_id: int) -> Any:
        return self._pool.blocks[block_id]

    def allocate(self, num_blocks: int) -> Any:
        """Allocate blocks; returns vLLM's block objects."""
        return self._get_new_blocks(num_blocks)

    def _allocate(self, num_blocks: int) -> Any:
        return self.allocate(num_blocks)

    def check(self) -> None:
        """Every block is free or held, and the free queue has just the free ones. Raises ``AssertionError``."""
        free = [block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()]
        unheld = {block.block_id for block in self._pool.blocks if block.ref_cnt == 0 and not block.is_null}
        assert len(free) == self.num_free_blocks, f"{len(free)} blocks queue to be used, {self.num_free_blocks} counted"
        assert len(set(free)) == len(free), "a block is in the free queue twice"
        assert set(free) == unheld, f"blocks {sorted(set(free) ^ unheld)} are in the free queue or unheld, not both"


class CacheView:
    """vLLM's KV-cache manager.

    Args:
        scheduler: vLLM's own.
        pool: its block pool.
        tells_holds: whether the connector tells which blocks it holds, for which vLLM's interface has no word.
    """

    def __init__(self, scheduler: Any, pool: PoolView, *, tells_holds: bool) -> None:
        self._scheduler = scheduler
        self.pool = pool
        self._tells_holds = tells_holds

    def reference_counts(self) -> Counter[int]:
        """References that requests hold by block id, including those that vLLM gives back when a step in flight has ended.

        Where what the connector holds is not reported, that is counted, too.
        """
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        tables = [table for manager in managers for table in manager.req_to_blocks.values()]
        tables += [blocks for _, blocks in self._scheduler.deferred_frees]
        counts = Counter(block.block_id for table in tables for block in table if not block.is_null)
        blocks = () if self._tells_holds else self._scheduler.kv_cache_manager.block_pool.blocks
        return counts | Counter({block.block_id: block.ref_cnt for block in blocks if not block.is_null})

    def check(self) -> None:
        """Verify that no block is lost. Raises ``AssertionError``."""
        self.pool.check()


@dataclass(frozen=True, slots=True)
class VllmReset:
    """How vLLM's caches are reset.

    Attributes:
        mode: how vLLM is paused for it (``/pause``, ``/sleep``); ``None`` if it is not.
        waits: whether that waits until nothing is in flight, as it does where the engine core has a process of its own.
        is_of_running: whether running requests start over (``reset_running_requests``); else it is refused while there are any.
        is_of_connector: whether the connector is to be reset, too (``reset_external``).
    """

    mode: str | None = None
    waits: bool = False
    is_of_running: bool = False
    is_of_connector: bool = False

    @classmethod
    def draw(cls, random: Random) -> VllmReset:
        """Draw one. A pause resets everything."""
        mode = random.choice((None, None, None, "abort", "keep", "wait"))
        waits, is_of_running, is_of_connector = (random.random() < 0.5 for _ in range(3))
        return cls(
            mode, mode == "wait" or bool(mode and waits), bool(mode or is_of_running), bool(mode or is_of_connector)
        )

    @property
    def pause_state(self) -> PauseState:
        """What vLLM's scheduler does meanwhile."""
        states = {None: PauseState.UNPAUSED, "keep": PauseState.PAUSED_ALL}
        return states.get(self.mode, PauseState.PAUSED_NEW)


class SchedulerView:
    """vLLM's scheduler, as runs and oracles see our own: its steps aside, what they use of it.

    Args:
        scheduler: vLLM's own.
        groups: the KV-cache groups.
        is_busy: whether steps are in flight.
        guard: contains our connector, of which more can be seen than of others'; ``None`` with these.

    Attributes:
        connector: the guard; with connectors of others, one around nothing.
        reset: how caches are reset next.
    """

    def __init__(
        self,
        scheduler: Any,
        groups: tuple[KVCacheGroup, ...],
        is_busy: Callable[[], bool],
        guard: ConnectorGuard | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._is_busy = is_busy
        self._is_ours = guard is not None
        pool = PoolView(scheduler.kv_cache_manager.block_pool)
        self.connector = guard or ConnectorGuard(NullConnectorScheduler(), pool.num_blocks)
        self.kv = CacheView(scheduler, pool, tells_holds=self._is_ours)
        self._events: list[KVEvent] = []
        self.reset = VllmReset(is_of_connector=not self._is_ours)
        self._sources = [scheduler.kv_cache_manager, scheduler.connector][: 1 + self._is_ours]
        for source, medium in zip(self._sources, (MEDIUM_DEVICE, MEDIUM_HOST), strict=False):
            watch(source, partial(self._note, medium))

    def has_work(self) -> bool:
        """Whether vLLM's engine would go on stepping."""
        return self._is_busy() or bool(self._scheduler.has_requests())

    def waiting_requests(self) -> Iterable[Any]:
        return [*self._scheduler.kv_holding_waiting, *self._scheduler.waiting]

    def reset_cache(self) -> bool:
        """Reset vLLM's prefix cache as was announced; whether it could be."""
        if self.has_work() and self.reset.waits:
            return False
        try:
            return bool(self._scheduler.reset_prefix_cache(self.reset.is_of_running, self.reset.is_of_connector))
        except RuntimeError:  # copies use blocks although no request runs
            return False

    def announce_reset(self, reset: VllmReset) -> None:
        """Pause if the reset is one of a pause."""
        self.reset = reset
        self._scheduler.set_pause_state(reset.pause_state)

    def resume(self) -> None:
        """Go on after a reset."""
        self.announce_reset(VllmReset())

    def take_events(self) -> list[KVEvent]:
        """Events that vLLM published since the last call, and those that it is about to publish."""
        for source in self._sources:
            source.take_events()
        events, self._events = self._events, []
        return events

    def check_settled(self) -> None:
        """Verify that nothing is left behind. Raises ``AssertionError`` naming what is."""
        assert not self.has_work(), "work is pending"
        scheduler, pool = self._scheduler, self.kv.pool
        assert not scheduler.requests, f"vLLM still knows {sorted(scheduler.requests)}"
        assert not (scheduler.running or scheduler.waiting or scheduler.kv_holding_waiting)
        self.kv.check()
        num_used, num_stuck = pool.num_usable_blocks - pool.num_free_blocks, len(self.connector.held_references())
        assert num_used == num_stuck, f"{num_used} device blocks are referenced, {num_stuck} of them for stuck copies"

    def _note(self, medium: str, event: Any) -> None:
        self._events.append(from_vllm(event, medium))
