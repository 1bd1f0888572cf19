"""Loads of vLLM's requests: how long one was deferred, whether there is room for it, and what became of it.

Room for loads: no two loaded requests may wait for each other's blocks for ever.

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

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cargohold.deadlines import Patience
from cargohold.integrations.vllm.pool_view import BlockTables
from cargohold.integrations.vllm.records import RequestRecord
from cargohold.protocol import NULL_BLOCK_ID, AttentionKind, BlockIds, Clock, KVCacheGroup, KVConnectorOutput


class Deferrals:
    """Measures how long each request has waited for the connector's answer, and for nothing else.

    vLLM asks again only when it has a place for the request, which may be minutes later. So the time between two steps counts
    only for requests about which vLLM asked again at its end; and each has a patience of its own.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asked: dict[RequestRecord, None] = {}
        self._last_step = clock()

    def note(self, record: RequestRecord) -> bool:
        """Note that a request was answered "ask again". Returns whether that was the first time."""
        is_first = record.patience is None
        if is_first:
            record.patience, record.deferred_s = Patience(self._clock), None
        self._asked[record] = None
        return is_first

    def note_step(self, limit_s: float) -> str | None:
        """Count the time since the last step. Returns a request that has waited longer than ``limit_s``, if there is one."""
        asked, self._asked = self._asked, {}
        before, self._last_step = self._last_step, self._clock()
        late = None
        for record in asked:
            if record.patience is None:
                continue  # it has its answer, or needs none any more
            is_first = record.deferred_s is None
            record.deferred_s = 0.0 if record.deferred_s is None else record.deferred_s + self._last_step - before
            overdue = record.request_id if record.deferred_s > limit_s else None
            if not is_first and record.patience.has_run_out(overdue, limit_s):
                late = late or record.request_id
        return late


# --- room for loads ---------------------------------------------------------------------------------------------------

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
        has_tails: whether loads may end inside a block: vLLM keeps a copy of the state there, and does not count its block.
    """

    def __init__(
        self,
        pool: Any,
        groups: Sequence[KVCacheGroup],
        tables: BlockTables,
        max_in_flight_tokens: int,
        *,
        has_tails: bool = False,
    ) -> None:
        self._pool = pool
        self._groups = groups
        self._tables = tables
        self._max_in_flight_tokens = max_in_flight_tokens
        self._has_tails = has_tails
        self._counts_too_little = has_tails or any(group.kind in _FORGETTING for group in groups)

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
            return min(all_blocks + self._has_tails, _MAX_STATES)
        if group.window_tokens is None:
            return all_blocks
        return min(all_blocks, -(-(group.window_tokens + self._max_in_flight_tokens) // group.block_tokens) + 1)


# --- loads in flight --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Load:
    """A load in flight.

    Attributes:
        since: when it began.
        num_tokens: prompt tokens that were not counted as computed because they are loaded. 0 once they are not loaded after
            all, and for a request that was admitted before, whose prompt is counted already.
        ends_in_step: whether it is over when the workers' step is: the connector called it synchronous.
    """

    since: float
    num_tokens: int
    ends_in_step: bool


@dataclass(slots=True)
class LoadNews:
    """What to send to the workers about loads with the next step; see ``StepMessage``."""

    loads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    synchronous: list[str] = field(default_factory=list)


class LoadsInFlight:
    """The loads in flight, and the requests that wait for them.

    Args:
        groups: the KV-cache groups that are served.
        clock: monotonic time in seconds.
    """

    def __init__(self, groups: Sequence[KVCacheGroup], clock: Clock) -> None:
        self._groups = groups
        self._clock = clock
        # Requests that were given blocks for a load, and those of them that have run or ended in the last step.
        self._parked: list[RequestRecord] = []
        # The oldest first. A load ends by itself, also if its request has ended before.
        self._in_flight: dict[str, _Load] = {}
        self._news = LoadNews()

    def __len__(self) -> int:
        return len(self._in_flight)

    def begin(self, record: RequestRecord, tables: BlockIds, tokens: range, num_counted: int) -> None:
        """Note a load.

        Args:
            record: the request.
            tables: its block tables.
            tokens: the tokens that are loaded.
            num_counted: those of them that would have been counted as computed.
        """
        request_id = record.request_id
        filled = tuple(
            block_id
            for group, table in zip(self._groups, tables, strict=True)
            for block_id in table[tokens.start // group.block_tokens : -(-tokens.stop // group.block_tokens)]
            if block_id != NULL_BLOCK_ID
        )
        self._in_flight[request_id] = _Load(self._clock(), num_counted, record.ends_in_step)
        self._parked.append(record)
        record.is_parked = True
        self._news.loads[request_id] = filled
        if record.ends_in_step:
            record.ends_in_step = False
            self._news.synchronous.append(request_id)

    def note_running(self, request_ids: Container[str]) -> None:
        """Note which requests run in a step."""
        if self._parked:
            for record in self._parked:
                record.is_parked = record.is_parked and record.request_id not in request_ids
            self._parked = [record for record in self._parked if record.is_parked]

    def end(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """Note the loads that ended; return the output as the connector expects it, to which synchronous loads need no end."""
        ended = output.finished_recving
        if not ended:
            return output  # in most steps
        loads = {request_id: self._in_flight.pop(request_id, None) for request_id in ended}
        own = frozenset(request_id for request_id, load in loads.items() if load is None or not load.ends_in_step)
        if len(own) == len(ended):
            return output
        return replace(output, finished_recving=own)

    def count_failed(self, request_ids: Iterable[str]) -> int:
        """Return how many prompt tokens are not loaded after all, and were not counted before."""
        num_tokens = 0
        for request_id in request_ids:
            load = self._in_flight.get(request_id)
            if load is not None:
                num_tokens += load.num_tokens
                load.num_tokens = 0
        return num_tokens

    def late(self, timeout_s: float) -> str | None:
        """Return the request whose load takes longest, if it takes longer than ``timeout_s``."""
        oldest = next(iter(self._in_flight.items()), None)
        return oldest[0] if oldest is not None and self._clock() - oldest[1].since > timeout_s else None

    def take_news(self) -> LoadNews:
        """Return what was not sent to the workers."""
        news, self._news = self._news, LoadNews()
        return news

    def clear(self) -> None:
        """Forget the loads in flight: all workers have stopped."""
        self._in_flight.clear()
