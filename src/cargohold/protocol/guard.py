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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, TypeVar

from cargohold.errors import BlockNotHeldError, ContractError, NullBlockError
from cargohold.protocol.checks import (
    AnnouncedBlocks,
    checked_events,
)
from cargohold.protocol.connector import KVConnectorScheduler
from cargohold.protocol.engine_view import (
    NULL_BLOCK_ID,
    RequestView,
    SchedulerContext,
)
from cargohold.protocol.hints import Hint, HintOutcome
from cargohold.protocol.hooks import Hook, HookDispatcher
from cargohold.protocol.messages import (
    EmptyMetadata,
    KVConnectorMetadata,
    KVConnectorSchedulerOutput,
    KVEvent,
)
from cargohold.protocol.metrics import FAILURES, Kind, Series, Stats, Tally
from cargohold.protocol.reports import Outage

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TURNED_OFF: Final = FAILURES.of("connector_off")
_NO_METADATA: KVConnectorMetadata = EmptyMetadata()

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


class BlockLedger:
    """Counts the references that one connector holds on each block, so that it can give back only its own.

    Nearly always a connector holds one reference on a block, and takes and gives back hundreds at once: hence sets.
    """

    def __init__(self) -> None:
        self._held: set[int] = set()
        # References beyond the first, of blocks in ``_held``.
        self._more: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._held) + self._more.total()

    def __bool__(self) -> bool:
        return bool(self._held)

    def counts(self) -> Counter[int]:
        """Return the number of references held, per block id, as a copy."""
        return Counter(self._held) + self._more

    def take(self, block_ids: Sequence[int]) -> None:
        """Count one more reference for each of ``block_ids``."""
        taken = set(block_ids)
        if len(taken) == len(block_ids) and taken.isdisjoint(self._held):
            self._held |= taken
            return
        for block_id in block_ids:
            if block_id in self._held:
                self._more[block_id] += 1
            else:
                self._held.add(block_id)

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Count one reference less for each of ``block_ids``.

        Raises ``BlockNotHeldError``, and changes nothing, unless the connector holds all of them.
        """
        given = set(block_ids)
        if len(given) == len(block_ids) and given <= self._held and given.isdisjoint(self._more):
            self._held -= given
            return
        counts = Counter(block_ids)
        for block_id, count in counts.items():
            held = (block_id in self._held) + self._more[block_id]
            if count > held:
                raise BlockNotHeldError(block_id, held, count)
        for block_id in block_ids:
            if self._more[block_id]:
                self._more[block_id] -= 1
            else:
                self._held.remove(block_id)
        self._more = +self._more

    def give_back_all(self) -> tuple[int, ...]:
        """Set all counts to 0; return the block ids, each repeated once per reference that was held."""
        held = tuple(self.counts().elements())
        self._held, self._more = set(), Counter()
        return held


class GuardedContext:
    """A scheduler context through which a connector can give back only references that it took itself."""

    def __init__(self, context: SchedulerContext, ledger: BlockLedger) -> None:
        self.inner = context
        self._ledger = ledger
        # What only reads is asked hundreds of times in a step.
        self.next_victims, self.contents, self.prefixes_of = context.next_victims, context.contents, context.prefixes_of
        self.get_request_blocks, self.waiting_requests = context.get_request_blocks, context.waiting_requests

    def touch_ids(self, block_ids: Sequence[int]) -> None:
        """See ``SchedulerContext``."""
        self.inner.touch_ids(block_ids)
        self._ledger.take(block_ids)

    def free_ids(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        """See ``SchedulerContext``. Raises ``BlockNotHeldError`` for references that this connector does not hold."""
        self._ledger.give_back(block_ids)
        try:
            self.inner.free_ids(block_ids, evict_first=evict_first)
        except BaseException:
            self._ledger.take(block_ids)  # nothing was freed
            raise


class ConnectorGuard(HookDispatcher):
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
        self.inner = inner
        self._clock = clock
        self._broken_at = 0.0
        self._num_blocks = num_blocks
        self._num_groups = num_groups
        self._context: SchedulerContext | None = None
        self._touched = BlockLedger()
        self._locked = BlockLedger()
        self._announced = AnnouncedBlocks()
        self._levels = Tally()
        self._is_off_counted = False
        self.name = inner.name
        self.worker_metadata_type = inner.worker_metadata_type
        self.broken: ContractError | None = None
        self._workers = _Workers.RUNNING
        # What is noted of answers while it is on, and what is answered from that when it is off, by hook.
        self._keep: Mapping[str, Callable[[Any], Any]] = {
            "report_to_scheduler": self._keep_locks,
            "take_events": self._keep_announced,
            "get_kv_connector_stats": self._keep_levels,
        }
        self._withdraw: Mapping[str, Callable[[ContractError], Any]] = {
            "take_events": self._withdraw_announced,
            "get_kv_connector_stats": self._withdraw_levels,
            "get_outages": self._outage,
        }

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
        """Whether the connector's workers are stopping, and its blocks are not released yet."""
        return self._workers is _Workers.STOPPING

    def stop_workers(self) -> bool:
        """Return whether the caller must tell the workers to stop, now; from then on they count as stopping."""
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
        return KVConnectorSchedulerOutput(block_ids_to_unlock=self._locked.give_back_all())

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        """Pass the context on, wrapped so that the connector can give back only references that it took."""
        self._context = context
        super().bind_scheduler_context(GuardedContext(context, self._touched))

    def on_hints(self, request: RequestView, hints: Sequence[Hint]) -> Sequence[HintOutcome]:
        """Pass the call on, if there is any hint."""
        return super().on_hints(request, hints) if hints else ()

    def has_pending_work(self) -> bool:
        """Pass the call on; also true while the connector expects to give references back, or its workers have to stop."""
        return (
            super().has_pending_work()
            or self.expects_blocks
            or self.is_winding_up  # maybe for how it has just answered
        )

    @property
    def expects_blocks(self) -> bool:
        """Whether the connector holds references on blocks, and not only for copies that may never end."""
        num_held = self.num_held_references
        return num_held > 0 and (self.broken is not None or num_held > self.num_stuck_references())

    def shutdown(self) -> None:
        """Pass the call on, even when the connector is off: it may hold memory or files."""
        try:
            self.inner.shutdown()
        except NOT_CONTAINED:
            raise
        except BaseException as error:  # noqa: BLE001  # a third party's code: its failure must not keep the engine alive
            self.break_off(f"shutdown raised {describe_raised(error)}", error)

    # --- inside -------------------------------------------------------------------------------------------------------

    def dispatch(self, hook: Hook, args: tuple[Any, ...]) -> Any:
        """Return the connector's answer, checked; what the table of hooks says once the connector is off."""
        if self.broken is None:
            try:
                answer = hook.check(getattr(self.inner, hook.name)(*args), *args)
                keep = self._keep.get(hook.name)
                return answer if keep is None else keep(answer)
            except hook.passes:
                raise
            except ContractError as error:
                self.break_off(error.rule, error)
            except NOT_CONTAINED:
                raise
            except BaseException as error:  # noqa: BLE001  # a third party's code: whatever it raises must not stop the engine
                self.break_off(f"{hook.name} raised {describe_raised(error)}", error)
        assert self.broken is not None, "it was off, or is now"
        withdraw = self._withdraw.get(hook.name)
        return hook.off(self.broken, *args) if withdraw is None else withdraw(self.broken)

    def _keep_locks(self, report: KVConnectorSchedulerOutput | None) -> KVConnectorSchedulerOutput | None:
        """Note locks, which must name blocks that exist, and unlocks, which must name blocks that it has locked."""
        if report is None:
            return None
        for block_id in report.block_ids_to_lock:
            if block_id == NULL_BLOCK_ID:
                raise NullBlockError("lock")
            if not 0 < block_id < self._num_blocks:
                raise ContractError(self.name, f"locked block {block_id}, which does not exist")
        self._locked.take(report.block_ids_to_lock)
        try:
            self._locked.give_back(report.block_ids_to_unlock)
        except BlockNotHeldError:
            self._locked.give_back(report.block_ids_to_lock)
            raise
        return report

    def _keep_levels(self, stats: Stats) -> Stats:
        """Note levels, to set them back to 0 when it is off: its chunks cannot be found then."""
        for series, value in stats.items():
            if series.family.kind is Kind.GAUGE:
                self._levels[series] += value
        return stats

    def _withdraw_levels(self, _: ContractError) -> Stats:
        levels, self._levels = self._levels, Tally()
        count: dict[Series, float] = {} if self._is_off_counted else {_TURNED_OFF: 1}
        self._is_off_counted = True
        return {**count, **{series: -level for series, level in levels.items() if level}}

    def _keep_announced(self, events: Iterable[KVEvent]) -> Sequence[KVEvent]:
        """Note what it announces, to take that back when it is off: it cannot be loaded then."""
        checked = checked_events(events, self._num_groups)
        if checked:
            self._announced.follow(checked)
        return checked

    def _withdraw_announced(self, _: ContractError) -> Sequence[KVEvent]:
        return self._announced.withdraw()

    def _outage(self, broken: ContractError) -> Sequence[Outage]:
        return (Outage(self.name, "everything", broken.rule, self._broken_at),)
