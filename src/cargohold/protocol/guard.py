"""Containment on the scheduler side: a connector that misbehaves is turned off, and its caller goes on.

``ConnectorGuard`` stands between a caller (an engine, or a connector composed of others) and one scheduler side. It passes
every call on. If the connector raises or answers what the contract forbids, the guard logs one line with the connector's name
and the rule it broke, and from then on answers like a connector that keeps nothing.

References that the connector held when it broke are kept until its workers have stopped, because a copy may still read those
blocks. So the caller tells the workers to stop in its next step (``stop_workers``), and gives the references back when they
have (``release``)::

    on --break_off()--> RUNNING --stop_workers()--> STOPPING --release()--> STOPPED

Contained is whatever a connector raises, also what is no ``Exception``: libraries in other languages raise their own panics
so. Passed on is what asks the program to end (``NOT_CONTAINED``).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Final, TypeVar

from cargohold.errors import BlockNotHeldError, ContractError, NullBlockError, RequestError
from cargohold.protocol.checks import (
    AnnouncedBlocks,
    BlockLedger,
    checked_contents,
    checked_events,
    checked_hint_events,
    checked_locks,
    checked_number,
    checked_outages,
    checked_outcomes,
    checked_params,
    checked_report,
    checked_stats,
)
from cargohold.protocol.connector import KVConnectorScheduler
from cargohold.protocol.engine_view import (
    NULL_BLOCK_ID,
    BlockIds,
    KVCacheBlockView,
    RequestView,
    SchedulerContext,
    StepView,
)
from cargohold.protocol.hints import Hint, HintEvent, HintOutcome, answers_to
from cargohold.protocol.messages import (
    CacheReport,
    ConnectorMetadata,
    EmptyMetadata,
    KVConnectorOutput,
    KVConnectorSchedulerOutput,
    KVEvent,
)
from cargohold.protocol.stats import Outage, Stats, TierContents, is_level

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NO_METADATA: ConnectorMetadata = EmptyMetadata()

NOT_CONTAINED: Final = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What a guard passes on: it is not the connector's failure, even if it is raised while the connector runs."""


def describe_raised(error: BaseException) -> str:
    """Return the exception as code, or the name of its type if it cannot describe itself."""
    try:
        return repr(error)
    except NOT_CONTAINED:
        raise
    except BaseException:  # noqa: BLE001  # a third party's code: whatever its description raises must not stop the engine
        return type(error).__name__


class _Workers(Enum):
    """Where the workers of a connector are that was turned off."""

    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


class GuardedContext:
    """A scheduler context through which a connector can give back only references that it took itself."""

    def __init__(self, context: SchedulerContext, ledger: BlockLedger) -> None:
        self._context = context
        self._ledger = ledger

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """See ``SchedulerContext``."""
        return self._context.get_block(block_id)

    def touch_ids(self, block_ids: Sequence[int]) -> None:
        """See ``SchedulerContext``."""
        self._context.touch_ids(block_ids)
        self._ledger.take(block_ids)

    def free_ids(self, block_ids: Sequence[int]) -> None:
        """See ``SchedulerContext``. Raises ``BlockNotHeldError`` for references that this connector does not hold."""
        self._ledger.give_back(block_ids)
        try:
            self._context.free_ids(block_ids)
        except BaseException:
            self._ledger.take(block_ids)  # nothing was freed
            raise

    def touch(self, blocks: Iterable[KVCacheBlockView]) -> None:
        """See ``SchedulerContext``."""
        blocks = list(blocks)
        self._context.touch(blocks)
        self._ledger.take([block.block_id for block in blocks])

    def free_blocks(self, blocks: Iterable[KVCacheBlockView], *, evict_first: bool = False) -> None:
        """See ``SchedulerContext``. Raises ``BlockNotHeldError`` for references that this connector does not hold."""
        blocks = list(blocks)
        block_ids = [block.block_id for block in blocks]
        self._ledger.give_back(block_ids)
        try:
            self._context.free_blocks(blocks, evict_first=evict_first)
        except BaseException:
            self._ledger.take(block_ids)  # nothing was freed
            raise

    def iter_free_blocks(self, after: KVCacheBlockView | None = None) -> Iterator[KVCacheBlockView]:
        """See ``SchedulerContext``."""
        return self._context.iter_free_blocks(after)

    def get_request_blocks(self, request_id: str) -> tuple[Sequence[KVCacheBlockView], ...]:
        """See ``SchedulerContext``."""
        return self._context.get_request_blocks(request_id)

    def waiting_requests(self) -> Iterable[RequestView]:
        """See ``SchedulerContext``."""
        return self._context.waiting_requests()


class ConnectorGuard(KVConnectorScheduler):
    """Wraps one scheduler side: passes calls on, checks the answers, and turns the connector off when it misbehaves.

    Args:
        inner: the connector.
        num_blocks: blocks in the device pool, the null block included; locks must name existing blocks.
        num_groups: number of KV-cache groups; events must name an existing group. ``None`` leaves groups unchecked.
        clock: the engine's clock, for since when the connector is off.

    Attributes:
        broken: why the connector was turned off; ``None`` while it is on.
    """

    def __init__(
        self,
        inner: KVConnectorScheduler,
        num_blocks: int,
        num_groups: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._broken_at = 0.0
        self._num_blocks = num_blocks
        self._num_groups = num_groups
        self._context: SchedulerContext | None = None
        self._touched = BlockLedger()
        self._locked = BlockLedger()
        self._announced = AnnouncedBlocks()
        self._levels: defaultdict[str, float] = defaultdict(float)
        self._is_off_counted = False
        self.name = inner.name
        self.worker_metadata_type = inner.worker_metadata_type
        self.broken: ContractError | None = None
        self._workers = _Workers.RUNNING

    @property
    def inner(self) -> KVConnectorScheduler:
        """The connector."""
        return self._inner

    @property
    def num_held_references(self) -> int:
        """Number of references on blocks that the connector holds, through ``touch`` or locks."""
        return len(self._touched) + len(self._locked)

    def held_references(self) -> Counter[int]:
        """Return the number of references that the connector holds, per block id."""
        return self._touched.counts() + self._locked.counts()

    def break_off(self, rule: str, cause: BaseException | None = None) -> None:
        """Turn the connector off because it broke ``rule``, and log that. Does nothing if it is off already."""
        if self.broken is None:
            self.broken, self._broken_at = ContractError(self.name, rule), self._clock()
            self.broken.__cause__ = cause
            logger.error(
                "connector %s is turned off: %s; requests are served without it", self.name, rule, exc_info=cause
            )

    @property
    def is_winding_up(self) -> bool:
        """Whether the connector was turned off, and its blocks are not released yet."""
        return self.broken is not None and self._workers is not _Workers.STOPPED

    @property
    def is_stopping(self) -> bool:
        """Whether the connector's workers were told to stop, and its blocks are not released yet."""
        return self._workers is _Workers.STOPPING

    def stop_workers(self) -> bool:
        """Return whether the caller must tell the workers to stop, now; from then on they count as told."""
        if self.broken is None or self._workers is not _Workers.RUNNING:
            return False
        self._workers = _Workers.STOPPING
        return True

    def release(self) -> KVConnectorSchedulerOutput:
        """Free the blocks that the connector has touched; return those that it has locked, for the caller to unlock.

        Call it only once the connector's workers have stopped.
        """
        self._workers = _Workers.STOPPED
        touched = self._touched.give_back_all()
        if self._context is not None:
            self._context.free_ids(touched)
        return KVConnectorSchedulerOutput(unlock_block_ids=self._locked.give_back_all())

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        """Pass the context on, wrapped so that the connector can give back only references that it took."""
        self._context = context
        guarded = GuardedContext(context, self._touched)
        self._call("bind_scheduler_context", None, self._inner.bind_scheduler_context, guarded)

    def on_new_request(self, request: RequestView) -> None:
        """Pass the call on. A ``RequestError`` reaches the caller: it is the request's fault, not the connector's."""
        refusal = self._call("on_new_request", None, self._refusal_of, request)
        if refusal is not None:
            raise refusal

    def on_hints(self, request: RequestView, hints: Sequence[Hint]) -> Sequence[HintOutcome]:
        """Pass the call on; there must be one outcome for each hint. Once the connector is off, it rejects all of them."""
        nothing: Sequence[HintOutcome] = ()
        outcomes = self._call("on_hints", nothing, self._hinted, request, hints) if hints else nothing
        return outcomes if self.broken is None else answers_to(hints, reason=f"the connector {self.name} is off")

    def take_hint_events(self) -> Iterable[HintEvent]:
        """Pass the call on."""
        nothing: Iterable[HintEvent] = ()
        return self._call("take_hint_events", nothing, self._hint_events)

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Pass the call on; the number of tokens must be ``None``, or at most those that the request has left."""
        nothing: tuple[int | None, bool] = (0, False)
        return self._call("get_num_new_matched_tokens", nothing, self._matched, request, num_computed_tokens)

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        """Pass the call on."""
        self._call(
            "update_state_after_alloc", None, self._inner.update_state_after_alloc, request, blocks, num_external_tokens
        )

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        """Pass the call on."""
        return self._call("build_connector_meta", _NO_METADATA, self._inner.build_connector_meta, step)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Pass the call on."""
        self._call("update_connector_output", None, self._inner.update_connector_output, output)

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:
        """Pass the call on; locks must name blocks that exist, unlocks must name blocks that this connector has locked."""
        nothing: KVConnectorSchedulerOutput | None = None
        return self._call("report_to_scheduler", nothing, self._report)

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        """Pass the call on."""
        nothing: tuple[bool, Mapping[str, Any] | None] = (False, None)
        return self._call("request_finished", nothing, self._finished, request, block_ids)

    def explain(self, request_id: str) -> CacheReport:
        """Pass the call on; once the connector is off, add a note that says why."""
        report = self._call("explain", CacheReport(), self._explained, request_id)
        return report if self.broken is None else CacheReport(report.restored_tokens, (*report.notes, str(self.broken)))

    def take_events(self) -> Iterable[KVEvent]:
        """Pass the call on; once the connector is off, withdraw all blocks that it announced: nobody can load them."""
        nothing: Sequence[KVEvent] = ()
        events = self._call("take_events", nothing, self._events)
        return events if self.broken is None else self._announced.withdraw()

    def has_pending_work(self) -> bool:
        """Pass the call on; also true while the connector expects to give references back, or its workers have to stop."""
        return (
            bool(self._call("has_pending_work", False, self._inner.has_pending_work))
            or self.expects_blocks
            or self.is_winding_up  # maybe for how it has just answered
        )

    @property
    def expects_blocks(self) -> bool:
        """Whether the connector holds references on blocks, and not only for copies that may never end."""
        num_held = self.num_held_references
        return num_held > 0 and (self.broken is not None or num_held > self.num_stuck_references())

    def num_stuck_references(self) -> int:
        """Pass the call on; 0 once the connector is off, because its references are given back when its workers stop."""
        return self._call("num_stuck_references", 0, self._stuck_references)

    def reset_cache(self) -> bool:
        """Pass the call on; ``True`` once the connector is off, because none of its chunks can be found."""
        return bool(self._call("reset_cache", True, self._inner.reset_cache))

    def get_stats(self) -> Stats:
        """Pass the call on; once the connector is off, count that and set its levels back to 0: its chunks cannot be found."""
        nothing: Stats = {}
        stats = self._call("get_stats", nothing, self._stats)
        if self.broken is None or self._is_off_counted:
            return stats
        self._is_off_counted = True
        return {"connectors_off": 1, **{counter: -level for counter, level in self._levels.items() if level}}

    def get_outages(self) -> Sequence[Outage]:
        """Pass the call on; once the connector is off, that is what is out of use."""
        nothing: Sequence[Outage] = ()
        outages = self._call("get_outages", nothing, self._outages)
        if self.broken is None:
            return outages
        return (Outage(self.name, "everything", self.broken.rule, self._broken_at),)

    def get_contents(self) -> Sequence[TierContents]:
        """Pass the call on; nothing once the connector is off, because none of its chunks can be found."""
        nothing: Sequence[TierContents] = ()
        return self._call("get_contents", nothing, self._contents)

    def get_finished_count(self) -> int | None:
        """Pass the call on."""
        return self._call("get_finished_count", None, self._finished_count)

    def shutdown(self) -> None:
        """Pass the call on, even when the connector is off: it may hold memory or files."""
        try:
            self._inner.shutdown()
        except NOT_CONTAINED:
            raise
        except BaseException as error:  # noqa: BLE001  # a third party's code: its failure must not stop the engine from stopping
            self.break_off(f"shutdown raised {describe_raised(error)}", error)

    def _refusal_of(self, request: RequestView) -> RequestError | None:
        try:
            self._inner.on_new_request(request)
        except RequestError as error:
            return error
        return None

    def _hinted(self, request: RequestView, hints: Sequence[Hint]) -> Sequence[HintOutcome]:
        return checked_outcomes(self._inner.on_hints(request, hints), hints)

    def _hint_events(self) -> Iterable[HintEvent]:
        return checked_hint_events(self._inner.take_hint_events())

    def _matched(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        promised, is_async = self._inner.get_num_new_matched_tokens(request, num_computed_tokens)
        num_tokens = checked_number(promised, "tokens")
        num_left = request.num_tokens - num_computed_tokens
        if num_tokens is not None and not 0 <= num_tokens <= num_left:
            raise ContractError(
                self.name, f"promised {num_tokens} tokens for request {request.request_id}, which has {num_left} left"
            )
        return num_tokens, bool(is_async and num_tokens)

    def _finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        keeps_blocks, params = self._inner.request_finished(request, block_ids)
        return bool(keeps_blocks), checked_params(params)

    def _explained(self, request_id: str) -> CacheReport:
        return checked_report(self._inner.explain(request_id))

    def _finished_count(self) -> int | None:
        return checked_number(self._inner.get_finished_count(), "reports")

    def _stuck_references(self) -> int:
        return checked_number(self._inner.num_stuck_references(), "references") or 0

    def _report(self) -> KVConnectorSchedulerOutput | None:
        report = self._inner.report_to_scheduler()
        if report is None:
            return None
        report = checked_locks(report)
        for block_id in report.lock_block_ids:
            if block_id == NULL_BLOCK_ID:
                raise NullBlockError("lock")
            if not 0 < block_id < self._num_blocks:
                raise ContractError(self.name, f"locked block {block_id}, which does not exist")
        self._locked.take(report.lock_block_ids)
        try:
            self._locked.give_back(report.unlock_block_ids)
        except BlockNotHeldError:
            self._locked.give_back(report.lock_block_ids)
            raise
        return report

    def _stats(self) -> Stats:
        stats = checked_stats(self._inner.get_stats())
        for counter, value in stats.items():
            if is_level(counter):
                self._levels[counter] += value
        return stats

    def _outages(self) -> Sequence[Outage]:
        return checked_outages(self._inner.get_outages())

    def _contents(self) -> Sequence[TierContents]:
        return checked_contents(self._inner.get_contents())

    def _events(self) -> Sequence[KVEvent]:
        events = checked_events(self._inner.take_events(), self._num_groups)
        if events:
            self._announced.follow(events)
        return events

    def _call(self, method: str, otherwise: T, call: Callable[..., T], *args: object) -> T:
        if self.broken is not None:
            return otherwise
        try:
            return call(*args)
        except ContractError as error:
            self.break_off(error.rule, error)
        except NOT_CONTAINED:
            raise
        except BaseException as error:  # noqa: BLE001  # a third party's code: whatever it raises must not stop the engine
            self.break_off(f"{method} raised {describe_raised(error)}", error)
        return otherwise
