"""Scheduler side: translates vLLM's calls into those of the contract, and contains the connector."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from reprlib import repr as shown  # a client may send values of any size
from typing import Any, Final

from cargohold.connector.metrics import OutageLevels, for_operators
from cargohold.deadlines import Patience
from cargohold.errors import ContractError, RequestError, SparingLog
from cargohold.integrations.vllm import compat
from cargohold.integrations.vllm.adapters import Adapters
from cargohold.integrations.vllm.groups import Groups
from cargohold.integrations.vllm.loads import Deferrals, LoadRoom, LoadsInFlight
from cargohold.integrations.vllm.metrics import FirstTokens
from cargohold.integrations.vllm.pool_view import BlockTables, NotedTables, PoolContext, block_ids
from cargohold.integrations.vllm.records import RequestRecord, why_all_computed
from cargohold.integrations.vllm.request_view import ScheduledStep, SeenRequest, turn_end_of
from cargohold.integrations.vllm.resets import CacheResets
from cargohold.integrations.vllm.worker import StepMessage, WorkerMessage
from cargohold.protocol import (
    FRONT_KEY,
    HINTS_KEY,
    AttentionKind,
    CacheReport,
    ConnectorGuard,
    HintOutcome,
    KVCacheLayout,
    KVConnectorScheduler,
    KVEvent,
    OutputAggregator,
    Stats,
    Tally,
    ToolTokens,
    hints_in,
    level_changes,
    metrics,
    parse_hints,
)

logger = logging.getLogger(__name__)

STATS_EVERY_S: Final = 0.1
"""How often vLLM gets counters while there are requests; when the last one has ended, at once."""

_NAMED: Final = (
    "its client has named a picture or sound (uuid), which is then not hashed: the name holds for this process alone, so what "
    "comes behind it is kept in host memory, and not in lower tiers"
)
_PAUSED: Final = ("RUNNING", "PREEMPTED")
_REMOTE_PREFILL: Final = "do_remote_prefill"
"""Key that vLLM's connectors between prefill and decode engines answer. vLLM's engine ends if two connectors answer the same
key, and our decode engines need none: they look up every prompt."""


@dataclass(frozen=True, slots=True)
class SideOptions:
    """Options of the scheduler side.

    Attributes:
        load_timeout_s: a connector that keeps a request waiting for longer is turned off.
        groups: the KV-cache groups.
        tier_token_bytes: bytes of one token's KV in a tier, for all workers.
        may_sleep: whether vLLM may sleep (``--enable-sleep-mode``).
        has_tiers: whether there are tiers below host memory.
        dropped_tokens: tokens that vLLM finds on the device and computes again all the same; see ``layout.dropped_tokens``. A
            load of no more tokens than these would bring back, at every hit, the very tokens that vLLM has just dropped.
        loads: whether anything is loaded; see ``layout.may_load``.
        by_priority: whether vLLM admits requests by priority (``--scheduling-policy``), and not as they come.
        tool_tokens: the tokens with which the model calls tools.
        marks_shared_prefixes: whether to mark where other requests go on, at the end of a load or of what they share: there
            vLLM ends a step, and its prefix cache keeps windows and states.
        levels: levels that are reported once.
        max_adapters: number of adapters with which one step may compute.
        max_model_len: length of the longest prompt.
    """

    load_timeout_s: float
    groups: Groups
    tier_token_bytes: float
    may_sleep: bool = False
    has_tiers: bool = False
    dropped_tokens: int = 0
    loads: bool = True
    by_priority: bool = False
    tool_tokens: ToolTokens = ToolTokens({})  # noqa: RUF009  # it is never changed
    marks_shared_prefixes: bool = False
    levels: Stats = field(default_factory=dict)
    max_adapters: int = 1
    max_model_len: int = sys.maxsize


class SchedulerSide:
    """The adapter's scheduler side: runs the connector of one engine replica, contained in a guard.

    Args:
        inner: the connector.
        layout: the paged KV.
        pool: vLLM's block pool.
        tables: the requests' block tables.
        room: decides whether there is room for a load.
        clock: monotonic time in seconds.
        options: see ``SideOptions``.
    """

    def __init__(
        self,
        inner: KVConnectorScheduler,
        layout: KVCacheLayout,
        pool: Any,
        tables: BlockTables,
        room: LoadRoom,
        *,
        clock: Callable[[], float],
        options: SideOptions,
    ) -> None:
        self.guard = ConnectorGuard(inner, layout.num_blocks, len(layout.groups), clock=clock)
        self.layout = layout
        self._tables = tables
        self._room = room
        self._clock = clock
        self._options = options
        self._timeout_s = options.load_timeout_s
        self._resets = CacheResets(
            self.guard,
            pool,
            num_workers=layout.world_size,
            may_sleep=options.may_sleep,
            has_tiers=options.has_tiers,
        )
        self._loads = LoadsInFlight(layout.groups, clock)
        self._groups = options.groups
        self._adapters = Adapters(pool, layout.world_size, options.max_adapters)
        self._context = PoolContext(pool, self._groups, tables, self._waiting_requests, self._adapters.blocks.keys_of)
        self._aggregator = OutputAggregator(layout.world_size, self.guard.get_finished_count(), self.guard.name)
        # Requests that the connector knows, by id, and all others.
        self._requests: dict[str, RequestRecord] = {}
        self._others: dict[str, RequestRecord] = {}
        if isinstance(tables, NotedTables):
            tables.records = self._requests
        self._deferrals = Deferrals(clock)
        self._patience = Patience(clock)
        # Since when nothing was computed although there are requests and stuck copies hold blocks.
        self._starved_since: float | None = None
        self._first_tokens = FirstTokens(clock)
        # Requests that ended since the last step, and whose blocks the connector keeps.
        self._sends: list[str] = []
        self._stopped_ranks: set[int] = set()
        self._has_seen_request = self._has_said_named = False
        # Whether vLLM's prefix cache may find prefixes that end inside a block of attention, which it copies then.
        full = [group.block_tokens for group in layout.groups if group.kind is AttentionKind.FULL]
        has_states = any(group.kind is AttentionKind.RECURRENT for group in layout.groups)
        self._copies_inside = has_states and max(full, default=0) > layout.hash_block_tokens
        self._stats = Tally(
            {
                metrics.TIER_CAPACITY.of("device"): (layout.num_blocks - 1) * layout.block_bytes * layout.world_size,
                **options.levels,
            }
        )
        self._levels: Stats = {}
        self._stats_due_at = 0.0
        self._outages = OutageLevels(time.time() - clock())
        self._refusals = SparingLog(logger)  # clients decide how many there are
        self.guard.bind_scheduler_context(self._context)

    # --- requests come and go -----------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Tell the connector of a new request. One that it refuses, or that may change its own past, is served without it."""
        if not self._has_seen_request:
            self._has_seen_request = True
            missing = compat.missing_from_request(request)
            if missing:
                self.guard.break_off("; ".join(missing))
        seen = self._adapters.seen(request)
        record = RequestRecord(seen)
        wishes = getattr(request, "kv_transfer_params", None)
        if getattr(request, "resumable", False):
            record.bypass("a session that may change its own past is served without offloading")
        elif self.guard.broken is not None:
            record.note(str(self.guard.broken))
        elif wishes is not None and not isinstance(wishes, Mapping):
            # vLLM passes on whatever a client has put into kv_transfer_params.
            record.bypass("kv_transfer_params must be an object")
            line = "request %s: kv_transfer_params=%s must be an object; it is served without offloading"
            self._refusals.warning(line, request.request_id, shown(wishes))
        elif why_not := self._adapters.why_not(seen):
            record.bypass(why_not)
        elif self._is_taken(record):
            self._requests[request.request_id] = record
            self._take_wishes(record, wishes or {})
            return
        self._others[request.request_id] = record

    def _is_taken(self, record: RequestRecord) -> bool:
        """Whether the connector takes a request, which it learns of here."""
        if self._options.has_tiers and self._adapters.is_named(record.seen):
            record.note(_NAMED)
            if not self._has_said_named:
                self._has_said_named = True
                logger.info("request %s: %s", record.request_id, _NAMED)
        try:
            self.guard.on_new_request(record.seen)
        except RequestError as error:
            self._refusals.warning("%s; it is served without offloading", error)
            record.bypass(error.reason)
            return False
        return True

    def _other(self, request: Any) -> RequestRecord:
        """Return the record of a request that the connector does not know."""
        record = self._others.get(request.request_id)
        if record is None:
            record = self._others[request.request_id] = RequestRecord(SeenRequest(request))
        return record

    def _take_wishes(self, record: RequestRecord, wishes: Mapping[str, Any]) -> None:
        """Carry out the hints that a request brings: its client's, which the response answers, and a front's."""
        given = getattr(record.own, "kv_hints", None)  # from 0.32 on
        given = hints_in(wishes) if given is None else given
        if given is not None:
            record.outcomes = self._take_hints(record.seen, given)
        if FRONT_KEY in wishes:
            for outcome in self._take_hints(record.seen, wishes[FRONT_KEY]):
                record.note(str(outcome))

    def _take_hints(self, seen: SeenRequest, given: object) -> list[HintOutcome]:
        """Give a request's hints to the connector. Returns the outcomes."""
        hints, rejected = parse_hints(given, self._options.max_model_len)
        own = [hint for hint in hints if not hint.token_ids]
        outcomes = [*rejected, *self.guard.on_hints(seen, own)]
        for hint in hints:
            if hint.token_ids:
                outcomes += self.guard.on_hints(seen.prefix(list(hint.token_ids)), [hint.without_tokens()])
        for outcome in outcomes:
            self._stats[metrics.HINTS.of(outcome.status.value)] += 1
        return outcomes

    def request_finished(self, request: Any, tables: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Note that a request ended; see ``KVConnectorScheduler.request_finished``."""
        known = self._requests.pop(request.request_id, None)
        record = known or self._others.pop(request.request_id, None)
        if record is None:
            return False, None
        record.is_parked = False
        self._first_tokens.note_ended(record, self._stats)
        if known is None:
            return False, dict(record.explanation(CacheReport())) or None
        record.seen.turn_end = turn_end_of(request, self._options.tool_tokens)
        if self._adapters.why_not(record.seen) or self._resets.is_due():
            # Nothing of it is stored any more: its weights are unknown.
            tables = tuple([] for _ in tables)
        keeps_blocks, params = self.guard.request_finished(record.seen, self._groups.select(tables))
        if keeps_blocks:
            self._sends.append(request.request_id)
        answer = dict(params or {})
        answer.pop(_REMOTE_PREFILL, None)
        if record.outcomes:
            answer[HINTS_KEY] = [asdict(outcome) for outcome in record.outcomes]
        answer |= record.explanation(self.guard.explain(request.request_id))
        return keeps_blocks, answer or None

    # --- one step -----------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded, for vLLM always asynchronously.

        vLLM can tell the requests whose asynchronous load failed in any model, those of a synchronous one only in some, and has
        no synchronous loads of whole prompts. So synchronous loads of a connector are asynchronous ones of one step.
        """
        record = self._requests.get(request.request_id)
        is_early = self._copies_inside and self._is_filled_now(request, num_computed_tokens)
        if record is None or is_early:
            (record or self._other(request)).num_computed = num_computed_tokens
            return None if is_early else 0, False
        seen = record.seen
        record.num_computed, record.ends_in_step = num_computed_tokens, False
        if not self._may_ask_about(record):
            record.patience = None
            return 0, False
        if self._resets.is_unsure() or self._adapters.is_unsure(seen):
            num_tokens, is_async = None, False  # until workers have looked which weights they hold, in the next step
        else:
            num_tokens, is_async = self.guard.get_num_new_matched_tokens(seen, num_computed_tokens)
        if num_tokens is None:
            self._stats[metrics.DEFERRED_LOOKUPS.of()] += self._deferrals.note(record)
            return None, False
        record.patience = None
        if self._options.marks_shared_prefixes:
            # vLLM has set it again, to where it would keep them for its own prefix cache.
            end = self.guard.get_shared_prefix_end(seen) - self._options.dropped_tokens
            setattr(request, compat.SHARED_PREFIX_END, max(end, getattr(request, compat.SHARED_PREFIX_END)))
        is_full_hit = num_computed_tokens + num_tokens == request.num_tokens
        # Of a full hit vLLM drops the last token, too, because it must be computed, and with it the block that ends with it.
        if num_tokens <= self._options.dropped_tokens * (1 + is_full_hit):
            if num_tokens:
                record.note(
                    f"{num_tokens} tokens more were found and not loaded: to draft, vLLM computes a hit's last block again"
                )
            return 0, False
        if num_tokens and not self._room.admits(num_computed_tokens + num_tokens, self._holding_for_loads(record)):
            record.note("its load waited until requests loaded before it had the blocks that they need")
            return None, False  # ask again: for as long as vLLM keeps the parked requests waiting, without a deadline
        record.ends_in_step = num_tokens > 0 and not is_async
        return num_tokens, num_tokens > 0

    def _is_filled_now(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether a prefix may end inside a block that another request fills in this very step.

        vLLM would copy the block before the step, and compute with what it held then. One step later, it copies what is there.
        """
        at, hashes = num_computed_tokens // self.layout.hash_block_tokens, request.block_hashes
        for record in self._requests.values() if at < len(hashes) else ():
            own = record.own
            if own.status.name != "RUNNING" or at >= len(own.block_hashes) or own.block_hashes[at] != hashes[at]:
                continue
            for group, table in zip(self._groups.by_number, self._tables.blocks(own.request_id), strict=True):
                if group is not None and group.kind is AttentionKind.FULL:
                    number = num_computed_tokens // group.block_tokens
                    is_new = own.num_computed_tokens < (number + 1) * group.block_tokens
                    if is_new and number < len(table) and table[number].block_hash is not None:
                        return True
        return False

    def _holding_for_loads(self, asking: RequestRecord) -> Iterator[SeenRequest]:
        """Requests other than ``asking`` that hold blocks for a load, also those of whose blocks vLLM tells later."""
        for request_id, record in self._requests.items():
            is_holding = record.is_parked or (record.num_computed is not None and not record.is_admitted)
            if is_holding and record is not asking and any(self._tables.blocks(request_id)):
                yield record.seen

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks allocated for a request, those to be loaded included; count where its prompt comes from."""
        known = self._requests.get(request.request_id)
        record = known or self._other(request)
        record.blocks = blocks.blocks
        is_first = not record.is_admitted
        if is_first and record.num_computed is not None:
            self._count_prompt(record, num_external_tokens)
        if known is None:
            return
        tables = block_ids(self._groups.select(blocks.blocks))
        if num_external_tokens:
            assert record.num_computed is not None  # vLLM loads what it has asked for
            tokens = range(record.num_computed, record.num_computed + num_external_tokens)
            self._loads.begin(record, tables, tokens, num_external_tokens if is_first else 0)
            if self._options.marks_shared_prefixes and not self.guard.get_shared_prefix_end(record.seen):
                setattr(request, compat.SHARED_PREFIX_END, tokens.stop)
        self.guard.update_state_after_alloc(record.seen, tables, num_external_tokens)

    def _count_prompt(self, record: RequestRecord, num_external_tokens: int) -> None:
        """Count where a prompt comes from that is admitted for the first time."""
        record.is_admitted = True
        num_computed = _found_on_device(record, num_external_tokens)
        num_left = record.own.num_tokens - num_computed - num_external_tokens
        self._stats[metrics.PROMPT.of("device")] += num_computed
        self._stats[metrics.PROMPT.of("bypassed" if record.is_bypass else "computed")] += num_left
        if not record.is_bypass:
            self._first_tokens.note_admitted(record, num_computed, num_external_tokens)

    def build_connector_meta(self, output: Any) -> StepMessage:
        """This step's message to the workers."""
        self._first_tokens.look(self._stats)
        self._check_deadlines()
        self._check_room(is_idle=not output.num_scheduled_tokens)
        # While a reset is due, the connector sees no requests and no free blocks, so that it stores nothing: the reset would
        # drop it, and if every step stored something, the connector would always be in use and never be reset.
        is_reset_due = self._resets.is_due()
        self._context.shows_free_blocks = not is_reset_due
        self._loads.note_running(output.num_scheduled_tokens)
        requests = {} if is_reset_due else self._adapters.offloaded(self._requests)
        inner = self.guard.build_connector_meta(
            ScheduledStep(output, requests, self.layout, self._tables, self._groups)
        )
        new = self._loads.take_news()
        sends, self._sends = self._sends, []
        stop = self.guard.stop_workers() or self.guard.is_stopping
        look = self._resets.take_look(computes=bool(output.num_scheduled_tokens))
        adapters = self._adapters.take_looks()
        return StepMessage(inner, new.loads, tuple(sends), tuple(new.synchronous), stop, look, adapters)

    def update_connector_output(self, message: WorkerMessage | None, *, step_failed: bool) -> None:
        """Take the ranks' reports of a step.

        Args:
            message: the reports; ``None`` if no rank had anything to report.
            step_failed: whether the step may have computed with blocks that a connector, this or another, failed to load.
        """
        if message is None and not step_failed:
            return
        reports = {} if message is None else message.reports
        ranks = range(self.layout.world_size)
        for rank, report in sorted(reports.items()):
            self._note_failed(report.failed_loads)
            if report.error is not None:
                self.guard.break_off(report.error)
            if report.stopped:
                self._stopped_ranks.add(rank)
            self._resets.note_weights(rank, report.weights)
            step_failed |= self._adapters.note(
                rank, report.adapters
            )  # its stores copy what other weights have computed
        try:
            output = self._aggregator.aggregate([reports[rank].output if rank in reports else None for rank in ranks])
        except ContractError as error:
            self.guard.break_off(error.rule, error)
            return
        if step_failed:
            output = replace(output, step_failed=True)
        self._stats.add(output.kv_connector_stats)
        output = self._loads.end(output)
        if not output.is_empty():
            self.guard.update_connector_output(output)
        if self.guard.is_winding_up and self._stopped_ranks.issuperset(ranks):
            self._release()

    def end_step(self) -> None:
        """Apply the connector's locks and unlocks; after a step's output, and after ``update_connector_output`` if it came."""
        report = self.guard.report_to_scheduler()
        if report is not None:
            self._context.touch_ids(report.block_ids_to_lock)
            self._context.free_ids(report.block_ids_to_unlock)

    def has_pending_work(self) -> bool:
        """Whether steps are needed even if there is nothing to compute.

        vLLM asks only while it schedules no request, so those that run are paused, and before it sleeps it resets its cache.
        """
        if self._options.may_sleep and self._requests:
            names = [name for name, record in self._requests.items() if record.own.status.name in _PAUSED]
            if names:
                self.guard.on_pause(names)
        return bool(self._loads) or self.guard.has_pending_work()

    def has_pending_block_frees(self) -> bool:
        """Whether blocks will become free soon without a preemption."""
        return self.guard.expects_blocks and self._context.would_free(self.guard.held_references())

    # --- on demand ----------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[KVEvent]:
        """KV events since the last call."""
        return self.guard.take_events()

    def reset_cache(self) -> bool:
        """Drop everything kept, or only look whether it is still true; see ``CacheResets.reset``."""
        return self._resets.reset()

    def take_stats(self, block_bytes: float) -> Stats:
        """Counters of both sides since the last report, as operators want them; ``block_bytes`` is a worker's mean.

        While there are requests, they are reported every ``STATS_EVERY_S``: vLLM asks in every step, which is too often.
        """
        now = self._clock()
        if now < self._stats_due_at and self._requests:
            return {}
        self._stats_due_at = now + STATS_EVERY_S
        stats, self._stats = self._stats, Tally()
        stats.add(self.guard.get_kv_connector_stats())
        stats.add(self._take_levels())
        shown = for_operators(stats, block_bytes, self._options.tier_token_bytes, self.layout.token_bytes)
        shown.add(self._outages.take_changes(self.guard.get_outages()))
        return {series: value for series, value in shown.items() if value}

    def _take_levels(self) -> Stats:
        """Return how much more, or less, vLLM's prefix cache holds than when this was asked last."""
        device_bytes = self._context.num_cached_blocks * self.layout.block_bytes * self.layout.world_size
        before, self._levels = self._levels, {metrics.TIER_READY.of("device"): device_bytes}
        return level_changes(before, self._levels)

    def shutdown(self) -> None:
        """Let go of everything."""
        self.guard.shutdown()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _may_ask_about(self, record: RequestRecord) -> bool:
        """Whether the connector is to be asked about a request; if not, the request's notes say why."""
        if (why_not := why_all_computed(record.own)) is not None:
            record.bypass(why_not)
            return False
        if not self._options.loads:
            why_not = "with kv_role=kv_producer and overlapping steps, nothing is loaded"
        elif why := self._adapters.why_not(record.seen):
            why_not = why
        elif record.has_failed:
            why_not = "its load has failed, and is not tried again"
        elif self._resets.is_due() and not self._resets.is_unsure():
            why_not = "what is kept is being dropped or set aside, because the weights may have changed"
        if why_not is not None:
            record.note(f"nothing was looked up: {why_not}")
        return why_not is None

    def _waiting_requests(self) -> Iterable[SeenRequest]:
        """Waiting requests in the order of vLLM's queues, which it hides: those that hold blocks, as for a load, come first."""
        waiting = [one for one in self._requests.values() if not one.own.status.name.startswith("RUNNING")]
        if self._options.by_priority:
            waiting.sort(key=lambda record: record.own)  # vLLM's requests compare by priority, then by arrival
        else:
            waiting.sort(key=lambda record: record.own.status.name != "PREEMPTED")
        waiting.sort(key=lambda record: not (record.is_parked or record.own.num_computed_tokens))
        return [record.seen for record in waiting]

    def _note_failed(self, request_ids: Collection[str]) -> None:
        """Note requests whose load failed on a rank. They stay parked: the requests after them run only after them."""
        for request_id in request_ids:
            if (record := self._requests.get(request_id)) is not None:
                record.has_failed = True
        if request_ids:
            # Tokens that are not loaded after all.
            self._stats[metrics.PROMPT.of("computed")] += self._loads.count_failed(request_ids)

    def _check_deadlines(self) -> None:
        late = self._loads.late(self._timeout_s)
        if self._patience.has_run_out(late, self._timeout_s):
            self.guard.break_off(f"did not end the load of request {late} within {self._timeout_s:g} s")
        undecided = self._deferrals.note_step(self._timeout_s)
        if undecided is not None:
            self.guard.break_off(f"did not decide on request {undecided} within {self._timeout_s:g} s")

    def _check_room(self, *, is_idle: bool) -> None:
        """Turn the connector off if no request fits next to the blocks of its stuck copies."""
        if not (is_idle and self._requests and self.guard.num_stuck_references()):
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = self._clock()
        elif self._clock() - self._starved_since > self._timeout_s:
            waiting = f"kept {len(self._requests)} request(s) waiting for {self._timeout_s:g} s"
            self.guard.break_off(f"{waiting}: copies that do not end hold the blocks that they need")

    def _release(self) -> None:
        """Give back all references of the connector. All workers have stopped: nothing reads or writes its blocks any more."""
        unlocks = self.guard.release().block_ids_to_unlock
        self._context.free_ids(unlocks)
        self._loads.clear()


def _found_on_device(record: RequestRecord, num_external_tokens: int) -> int:
    """Return how many tokens of a request vLLM has found on the device.

    If nothing is loaded after them, these may be more than it has asked with: where prefixes may end inside a block, it asks
    with whole blocks (``--prefix-match-unit``).
    """
    asked_with = record.num_computed or 0
    found = getattr(getattr(record.own, "prefill_stats", None), "num_local_cached_tokens", 0)
    return asked_with if num_external_tokens else max(asked_with, int(found))
