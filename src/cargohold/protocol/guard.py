"""Containment: a connector that misbehaves is turned off, and whoever called it goes on.

``ConnectorGuard`` stands between a caller (an engine, or a connector composed of others) and one scheduler side. It passes
every call on; if the connector raises or answers what the contract forbids, the guard logs one line with the connector's name
and the rule it broke, and from then on answers like a connector that keeps nothing.

References that the connector held when it broke are kept until its workers have stopped, for a copy may still read those
blocks; then the caller releases them with ``release_held_blocks``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from cargohold.errors import BlockNotHeldError, ContractError, RequestError
from cargohold.protocol.connector import KVConnectorScheduler
from cargohold.protocol.context import KVCacheBlockView, SchedulerContext
from cargohold.protocol.events import KVEvent
from cargohold.protocol.kv_cache import BlockIds
from cargohold.protocol.messages import (
    CacheReport,
    ConnectorMetadata,
    EmptyMetadata,
    KVConnectorOutput,
    KVConnectorSchedulerOutput,
    Stats,
)
from cargohold.protocol.request import RequestView, StepView

logger = logging.getLogger(__name__)

T = TypeVar("T")


class HeldBlocks:
    """A scheduler context that remembers which references one connector took, so that it can give back only its own."""

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context
        self._held: Counter[int] = Counter()

    @property
    def num_references(self) -> int:
        """References the connector holds."""
        return self._held.total()

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """See ``SchedulerContext``."""
        return self._context.get_block(block_id)

    def touch(self, blocks: Iterable[KVCacheBlockView]) -> None:
        """See ``SchedulerContext``."""
        blocks = list(blocks)
        self._context.touch(blocks)
        self._held.update(block.block_id for block in blocks)

    def free_blocks(self, blocks: Iterable[KVCacheBlockView]) -> None:
        """See ``SchedulerContext``; raises ``BlockNotHeldError`` for references that this connector does not hold."""
        blocks = list(blocks)
        given_back = Counter(block.block_id for block in blocks)
        for block_id, count in given_back.items():
            if count > self._held[block_id]:
                raise BlockNotHeldError(block_id, self._held[block_id], count)
        self._context.free_blocks(blocks)
        for block_id, count in given_back.items():
            self._held[block_id] -= count
            if not self._held[block_id]:
                del self._held[block_id]

    def iter_free_blocks(self, after: KVCacheBlockView | None = None) -> Iterator[KVCacheBlockView]:
        """See ``SchedulerContext``."""
        return self._context.iter_free_blocks(after)

    def get_request_blocks(self, request_id: str) -> tuple[Sequence[KVCacheBlockView], ...]:
        """See ``SchedulerContext``."""
        return self._context.get_request_blocks(request_id)

    def waiting_requests(self) -> Iterable[RequestView]:
        """See ``SchedulerContext``."""
        return self._context.waiting_requests()

    def lock(self, block_ids: Sequence[int]) -> None:
        """Take a reference on each block id. Raises like ``touch``, or ``IndexError`` for an id that does not exist."""
        self.touch([self._context.get_block(block_id) for block_id in block_ids])

    def unlock(self, block_ids: Sequence[int]) -> None:
        """Give a reference back on each block id. Raises like ``free_blocks``."""
        self.free_blocks([self._context.get_block(block_id) for block_id in block_ids])

    def release(self) -> None:
        """Give everything back."""
        self.unlock(list(self._held.elements()))


class ConnectorGuard(KVConnectorScheduler):
    """One scheduler side, contained.

    Args:
        inner: the connector.
        context: the block pool on which its locks are applied.
        binds_context: whether the connector may use the pool itself.
    """

    def __init__(self, inner: KVConnectorScheduler, context: SchedulerContext, *, binds_context: bool = True) -> None:
        self._inner = inner
        self._held = HeldBlocks(context)
        self.name = inner.name
        self.broken: ContractError | None = None
        if binds_context:
            self.bind_scheduler_context(self._held)

    @property
    def num_held_references(self) -> int:
        """References on blocks that the connector holds, through ``touch`` or locks."""
        return self._held.num_references

    def break_off(self, rule: str, cause: Exception | None = None) -> None:
        """Turn the connector off because it broke ``rule``. Only the first time counts."""
        if self.broken is None:
            self.broken = ContractError(self.name, rule)
            self.broken.__cause__ = cause
            logger.error(
                "connector %s is turned off: %s; requests are served without it", self.name, rule, exc_info=cause
            )

    def release_held_blocks(self) -> None:
        """Give back every reference the connector holds. Only once its workers have stopped."""
        self._held.release()

    def apply_report(self) -> None:
        """Ask for locks and unlocks and apply them."""
        report = self.report_to_scheduler()
        if report is not None:
            self._call("report_to_scheduler", None, self._apply, report)

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        """Pass on."""
        self._call("bind_scheduler_context", None, self._inner.bind_scheduler_context, context)

    def on_new_request(self, request: RequestView) -> None:
        """Pass on; a ``RequestError`` goes through, for it is the request's fault."""
        refusal = self._call("on_new_request", None, self._refusal_of, request)
        if refusal is not None:
            raise refusal

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Pass on; the answer must be ``None`` or leave the request's length."""
        nothing: tuple[int | None, bool] = (0, False)
        return self._call("get_num_new_matched_tokens", nothing, self._matched, request, num_computed_tokens)

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        """Pass on."""
        self._call(
            "update_state_after_alloc", None, self._inner.update_state_after_alloc, request, blocks, num_external_tokens
        )

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        """Pass on."""
        nothing: ConnectorMetadata = EmptyMetadata()
        return self._call("build_connector_meta", nothing, self._inner.build_connector_meta, step)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Pass on."""
        self._call("update_connector_output", None, self._inner.update_connector_output, output)

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:
        """Pass on. An engine calls ``apply_report`` instead, which also applies it."""
        return self._call("report_to_scheduler", None, self._inner.report_to_scheduler)

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        """Pass on."""
        nothing: tuple[bool, Mapping[str, Any] | None] = (False, None)
        return self._call("request_finished", nothing, self._finished, request, block_ids)

    def explain(self, request_id: str) -> CacheReport:
        """Pass on; once broken, the report says so."""
        report = self._call("explain", CacheReport(), self._inner.explain, request_id)
        return report if self.broken is None else CacheReport(report.restored_tokens, (*report.notes, str(self.broken)))

    def take_events(self) -> Iterable[KVEvent]:
        """Pass on."""
        return self._call("take_events", (), lambda: tuple(self._inner.take_events()))

    def has_pending_work(self) -> bool:
        """Pass on; also while references are held."""
        return self._call("has_pending_work", False, self._inner.has_pending_work) or self.num_held_references > 0

    def reset_cache(self) -> bool:
        """Pass on; a connector that is turned off cannot."""
        return self._call("reset_cache", False, self._inner.reset_cache)

    def get_stats(self) -> Stats:
        """Pass on."""
        return self._call("get_stats", {}, self._inner.get_stats)

    def get_finished_count(self) -> int | None:
        """Pass on."""
        return self._call("get_finished_count", None, self._inner.get_finished_count)

    def shutdown(self) -> None:
        """Pass on, even when turned off: it may hold memory or files."""
        try:
            self._inner.shutdown()
        except Exception as error:  # noqa: BLE001  # a third party's code: its failure must not stop the engine from stopping
            self.break_off(f"shutdown raised {error!r}", error)

    def _refusal_of(self, request: RequestView) -> RequestError | None:
        try:
            self._inner.on_new_request(request)
        except RequestError as error:
            return error
        return None

    def _matched(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens, is_async = self._inner.get_num_new_matched_tokens(request, num_computed_tokens)
        num_left = request.num_tokens - num_computed_tokens
        if num_tokens is not None and not 0 <= num_tokens <= num_left:
            raise ContractError(
                self.name, f"promised {num_tokens} tokens for request {request.request_id}, which has {num_left} left"
            )
        return num_tokens, bool(is_async and num_tokens)

    def _finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        keeps_blocks, params = self._inner.request_finished(request, block_ids)
        return bool(keeps_blocks), params

    def _apply(self, report: KVConnectorSchedulerOutput) -> None:
        self._held.lock(report.lock_block_ids)
        self._held.unlock(report.unlock_block_ids)

    def _call(self, method: str, otherwise: T, call: Callable[..., T], *args: object) -> T:
        if self.broken is not None:
            return otherwise
        try:
            return call(*args)
        except ContractError as error:
            self.break_off(error.rule, error)
        except Exception as error:  # noqa: BLE001  # a third party's code: whatever it raises must not stop the engine
            self.break_off(f"{method} raised {error!r}", error)
        return otherwise
