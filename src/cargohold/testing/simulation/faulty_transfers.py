"""Faults of copies, and checksums that notice some of them: wrappers around the transfer port."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from random import Random
from zlib import crc32

from cargohold.protocol import TransferOutcome
from cargohold.testing.simulation.faults import Fault, FaultSource
from cargohold.testing.simulation.fingerprints import GARBAGE_BYTE
from cargohold.testing.simulation.transfers import ByteRows
from cargohold.transfer import CopyJob, CopyResult, Direction, TransferWorker


class TransferWrapper(TransferWorker):
    """A transfer worker that passes all calls on to another one.

    Args:
        inner: the other one.
    """

    def __init__(self, inner: TransferWorker) -> None:
        self._inner = inner

    def submit(self, job: CopyJob) -> None:
        """Pass on."""
        self._inner.submit(job)

    def poll(self) -> list[CopyResult]:
        """Pass on."""
        return self._inner.poll()

    def finish_stores(self) -> None:
        """Pass on."""
        self._inner.finish_stores()

    def shutdown(self) -> None:
        """Pass on."""
        self._inner.shutdown()


class ChecksummedTransfers(TransferWrapper):
    """Compares the bytes of loads with what was stored. A load with a difference fails, and names the blocks that differ.

    Args:
        inner: carries out copies.
        region: the paged KV, as bytes.
        rows: the tier's memory.
        sums: checksum of each row; it lives as long as the tier.
    """

    def __init__(self, inner: TransferWorker, region: ByteRows, rows: ByteRows, sums: dict[int, int]) -> None:
        super().__init__(inner)
        self._region = region
        self._rows = rows
        self._sums = sums

    def poll(self) -> list[CopyResult]:
        """Copies that ended. Loads that brought other bytes than were stored have failed."""
        results = self._inner.poll()
        return [self._checked(result) for result in results] if results else results

    def _checked(self, result: CopyResult) -> CopyResult:
        if result.outcome is not TransferOutcome.DONE:
            return result
        job = result.job
        if job.direction is Direction.STORE:
            self._sums.update((row, crc32(self._rows[row])) for row in job.rows)
            return result
        bad = frozenset(
            block_id
            for block_id, row in zip(job.block_ids, job.rows, strict=True)
            if crc32(self._region[block_id]) != self._sums.get(row)
        )
        return replace(result, outcome=TransferOutcome.FAILED, failed_block_ids=bad) if bad else result


class FaultyTransfers(TransferWrapper):
    """Makes copies fail, stores torn, and reports of copies late, lost or doubled; damages bytes before loads.

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

    def submit(self, job: CopyJob) -> None:
        """Pass on; before a load, a byte that it will read may be damaged."""
        if job.rows and job.direction is Direction.LOAD and self._source.strikes(Fault.CORRUPT):
            self._rows[self._source.random.choice(job.rows)] ^= 1
        self._inner.submit(job)

    def poll(self) -> list[CopyResult]:
        """Results to be reported now: some are failed, held back, lost or repeated."""
        results = self._inner.poll()
        told = [told for result in results for told in self._distorted(result)] if results else results
        now = self._source.clock()
        while self._delayed and self._delayed[0][0] <= now:
            told.append(heappop(self._delayed)[2])
        return told

    def next_event(self) -> float:
        """Virtual time of the next report that is held back; infinity if there is none."""
        return self._delayed[0][0] if self._delayed else float("inf")

    def _distorted(self, result: CopyResult) -> list[CopyResult]:
        source = self._source
        # A copy that was abandoned has moved nothing: all of its blocks are bad, so it must not name some.
        if result.outcome is not TransferOutcome.ABANDONED and (source.strikes(Fault.FAILED) or self._is_gone()):
            result = self._failed(result)
        elif (
            result.job.direction is Direction.STORE
            and result.outcome is TransferOutcome.DONE
            and source.strikes(Fault.TORN)
        ):
            scribble(self._rows, some(result.job.rows, source.random))
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
