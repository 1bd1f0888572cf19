"""Wrappers that fail: around the two sides of a connector, around the transfer port, and around the manager port."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from random import Random
from typing import Any, Final

from cargohold.blocks import ABSENT, NOT_YET
from cargohold.cache import ForwardingManager, OffloadKey, OffloadManager, SlotReservation, StoreOffer
from cargohold.lab.simulation.faults import Fault, FaultSource
from cargohold.lab.simulation.fingerprints import GARBAGE_BYTE
from cargohold.lab.simulation.transfers import ByteRows
from cargohold.protocol import (
    ClassFactory,
    ForwardingScheduler,
    ForwardingWorker,
    KVConnectorFactory,
    KVConnectorScheduler,
    KVConnectorTransferResults,
    KVConnectorWorker,
    SchedulerEnvironment,
    TransferOutcome,
    WorkerEnvironment,
)
from cargohold.protocol.hooks import Hook
from cargohold.transfer import CopyResult, Direction, ForwardingTransfers, TransferWorker
from cargohold.transfer.port import have_succeeded


class SimulatedMishapError(Exception):
    """The exception that a faulty connector raises."""


_START_AND_END: Final = frozenset({"bind_scheduler_context", "get_finished_count", "register_kv_caches", "shutdown"})
"""Hooks that are not called in steps. A connector that raises there is refused at start, or has ended anyhow."""


def _maybe_raise(source: FaultSource, hook: Hook, where: str) -> None:
    """Raise if that fault strikes: before and after every hook that steps call."""
    if hook.name not in _START_AND_END and source.strikes(Fault.RAISES):
        raise SimulatedMishapError(where)


class FaultyScheduler(ForwardingScheduler):
    """A scheduler side that raises now and then.

    Args:
        inner: the connector.
        source: decides when a fault strikes.
    """

    def __init__(self, inner: KVConnectorScheduler, source: FaultSource) -> None:
        super().__init__(inner)
        self._source = source

    def dispatch(self, hook: Hook, args: tuple[Any, ...]) -> Any:
        _maybe_raise(self._source, hook, "in the scheduler")
        answer = super().dispatch(hook, args)
        _maybe_raise(self._source, hook, "in the scheduler")
        return answer


class FaultyWorker(ForwardingWorker):
    """A worker side that raises now and then, or reports ended transfers some steps late.

    Args:
        inner: the connector.
        source: decides when a fault strikes.
    """

    def __init__(self, inner: KVConnectorWorker, source: FaultSource) -> None:
        super().__init__(inner)
        self._source = source
        self._held_back = KVConnectorTransferResults()
        self._steps_late = 0

    def dispatch(self, hook: Hook, args: tuple[Any, ...]) -> Any:
        _maybe_raise(self._source, hook, "on a worker")
        answer = super().dispatch(hook, args)
        if hook.name == "get_transfer_results":
            answer = self._reported(answer)
        _maybe_raise(self._source, hook, "on a worker")
        return answer

    def _reported(self, ended: KVConnectorTransferResults) -> KVConnectorTransferResults:
        """What is reported now; if this worker is late, all that has ended is held back for some steps."""
        finished = merged(self._held_back, ended)
        if self._steps_late == 0 and self._source.strikes(Fault.LATE_WORKER):
            self._steps_late = self._source.random.randint(1, 4)
        if self._steps_late:
            self._steps_late -= 1
            # The report that this very step has failed cannot wait.
            self._held_back = replace(finished, step_failed=False)
            return KVConnectorTransferResults(step_failed=finished.step_failed)
        self._held_back = KVConnectorTransferResults()
        return finished


def merged(earlier: KVConnectorTransferResults, later: KVConnectorTransferResults) -> KVConnectorTransferResults:
    """Merge two reports of a worker, the earlier one first."""
    if earlier == KVConnectorTransferResults():
        return later
    return replace(
        later,
        finished_sending=earlier.finished_sending | later.finished_sending,
        finished_recving=earlier.finished_recving | later.finished_recving,
        failed_recving=earlier.failed_recving | later.failed_recving,
        jobs={**earlier.jobs, **later.jobs},
        step_failed=earlier.step_failed or later.step_failed,
    )


def faulty_factory(factory: KVConnectorFactory, source: FaultSource) -> KVConnectorFactory:
    """Makes faulty sides of another factory's connectors; those to which nothing may happen are not wrapped."""

    def scheduler_side(environment: SchedulerEnvironment) -> KVConnectorScheduler:
        inner = factory.make_scheduler_side(environment)
        return FaultyScheduler(inner, source) if source.is_possible([Fault.RAISES]) else inner

    def worker_side(environment: WorkerEnvironment) -> KVConnectorWorker:
        inner = factory.make_worker_side(environment)
        return FaultyWorker(inner, source) if source.is_possible([Fault.RAISES, Fault.LATE_WORKER]) else inner

    return ClassFactory(scheduler_side, worker_side)


class FaultyTransfers(ForwardingTransfers):
    """Makes copies fail, and reports of them late, lost or doubled.

    Args:
        inner: carries out copies.
        region: the paged KV, as bytes.
        rows: the tier's memory.
        source: decides when a fault strikes.
        is_gone: whether the tier is away.
    """

    def __init__(
        self,
        inner: TransferWorker,
        region: ByteRows,
        rows: ByteRows,
        source: FaultSource,
        is_gone: Callable[[], bool],
    ) -> None:
        super().__init__(inner)
        self._region = region
        self._rows = rows
        self._source = source
        self._is_gone = is_gone
        # Time of the report, a number that keeps equal times in order, and the result.
        self._delayed: list[tuple[float, int, CopyResult]] = []
        self._num_delayed = 0
        self._lost: list[CopyResult] = []
        self._reported: list[CopyResult] = []

    def finish_loads(self) -> bool:
        """Pass on; what fails has failed before the step computes with it, even if that is reported later, or never."""
        have_arrived = self.inner.finish_loads()
        ended = [self._damaged(result) for result in self.inner.poll()]
        self._reported += [reported for result in ended for reported in self._delivered(result)]
        return have_arrived and have_succeeded(ended)

    def poll(self) -> list[CopyResult]:
        """Results to be reported now: some are failed, held back, lost or repeated."""
        reported, self._reported = self._reported, []
        for result in self.inner.poll():
            reported += self._delivered(self._damaged(result))
        now = self._source.clock()
        while self._delayed and self._delayed[0][0] <= now:
            reported.append(heappop(self._delayed)[2])
        return reported

    def next_event(self) -> float:
        """Virtual time of the next report that is held back; infinity if there is none."""
        return self._delayed[0][0] if self._delayed else float("inf")

    def _damaged(self, result: CopyResult) -> CopyResult:
        """Make some copies fail."""
        source = self._source
        # A copy that was abandoned has moved nothing: all of its blocks are bad, so it must not name some.
        if result.outcome is not TransferOutcome.ABANDONED and (source.strikes(Fault.FAILED) or self._is_gone()):
            return self._failed(result)
        return result

    def _delivered(self, result: CopyResult) -> list[CopyResult]:
        """What is reported of a result now."""
        source = self._source
        if source.strikes(Fault.LOST):
            self._lost.append(result)
            return []
        if source.strikes(Fault.DUPLICATED):
            self._delay(result)
            return [result]
        if source.strikes(Fault.LATE):
            self._delay(result)
            return []
        return [result]

    def _failed(self, result: CopyResult) -> CopyResult:
        """Turn a result into a failure, and write garbage over some of the copy's rows or blocks."""
        job, random = result.job, self._source.random
        if job.direction is Direction.STORE:
            scribble(self._rows, some(job.rows, random))
            return replace(result, outcome=TransferOutcome.FAILED)
        bad = some(job.block_ids, random)
        scribble(self._region, bad)
        # The copy may or may not know which blocks are bad.
        named = {*bad, *result.failed_block_ids} if random.random() < 0.7 else ()
        return replace(result, outcome=TransferOutcome.FAILED, failed_block_ids=frozenset(named))

    def _delay(self, result: CopyResult) -> None:
        self._num_delayed += 1
        delay_s = self._source.random.choice((0.01, 0.05, 0.3, 1.0))
        heappush(self._delayed, (self._source.clock() + delay_s, self._num_delayed, result))


def some(ids: Sequence[int], random: Random) -> list[int]:
    """At least one of ``ids``, if there are any: a job may have nothing to move, where all blocks of a hit are null."""
    return random.sample(ids, random.randint(1, len(ids))) if ids else []


def scribble(memory: ByteRows, ids: Sequence[int]) -> None:
    """Fill blocks or rows with garbage."""
    memory[list(ids)] = GARBAGE_BYTE


_ABSENT = bytes([ABSENT])
MAX_WAIT_S = 0.5
"""Most seconds until a look-up is decided. Shorter than engines wait for a connector."""


class FaultyManager(ForwardingManager):
    """A manager that is full, away, or slow to answer now and then.

    Args:
        inner: the manager.
        source: decides when a fault strikes.
        is_gone: whether the tier is away.
    """

    def __init__(self, inner: OffloadManager, source: FaultSource, is_gone: Callable[[], bool]) -> None:
        super().__init__(inner)
        self._source = source
        self._is_gone = is_gone
        # By key, the time from which on its answer is known. Entries are never removed.
        self._known_at: dict[OffloadKey, float] = {}
        self._next_known = float("inf")
        self._was_gone = False
        self._num_changes = 0

    @property
    def generation(self) -> int:
        """The inner manager's generation, plus one for every change of answers here."""
        self._notice_time()
        return self.inner.generation + self._num_changes

    def lookup(self, keys: Sequence[OffloadKey]) -> bytes:
        """Pass on; some answers are "not yet" at first, and while the tier is away, nothing is there."""
        if self._is_gone():
            return _ABSENT * len(keys)
        return self._undecided(keys, self.inner.lookup(keys))

    def lookup_run(self, keys: Sequence[OffloadKey]) -> bytes:
        """Like ``lookup``, up to the first absent key."""
        if self._is_gone():
            return b""
        if Fault.UNDECIDED not in self._source.rates:
            return self.inner.lookup_run(keys)
        states = self.lookup(keys)
        absent_at = states.find(_ABSENT)
        return states if absent_at < 0 else states[:absent_at]

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> SlotReservation:
        """Pass on some of the offers, and defer the others."""
        struck = [bool(offer.keys) and (self._is_gone() or self._source.strikes(Fault.FULL)) for offer in offers]
        taken = [offer for offer, is_busy in zip(offers, struck, strict=True) if not is_busy]
        handle = self.inner.prepare_stores(taken)
        busy = [key for offer, is_busy in zip(offers, struck, strict=True) if is_busy for key in offer.keys]
        if busy:
            again = [key for key in busy if key not in handle.keys]
            handle.deferred = list(dict.fromkeys([*handle.deferred, *again]))
        return handle

    def _undecided(self, keys: Sequence[OffloadKey], states: bytes) -> bytes:
        """The states, with "not yet" for keys whose answer is not known yet. For a new key, draw when it will be."""
        if Fault.UNDECIDED not in self._source.rates:
            return states
        now, answers = self._source.clock(), bytearray(states)
        for at, key in enumerate(keys):
            known_at = self._known_at.get(key)
            if known_at is None:
                wait_s = self._source.random.random() * MAX_WAIT_S if self._source.strikes(Fault.UNDECIDED) else 0.0
                known_at = self._known_at[key] = now + wait_s
            if known_at > now:
                answers[at] = NOT_YET
                self._next_known = min(self._next_known, known_at)
        return bytes(answers)

    def _notice_time(self) -> None:
        """Count changes of answers that come from the passage of time alone."""
        is_gone = self._is_gone()
        now = self._source.clock()
        if is_gone is not self._was_gone or self._next_known <= now:
            self._was_gone = is_gone
            self._next_known = min((at for at in self._known_at.values() if at > now), default=float("inf"))
            self._num_changes += 1
