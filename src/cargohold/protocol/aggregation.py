"""Merging all workers' outputs into one. Completions are counted here, so that executors and connectors need not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from cargohold.errors import ContractError
from cargohold.protocol.messages import (
    NOTHING_TO_REPORT,
    FinishedTransfers,
    KVConnectorOutput,
    TransferOutcome,
    WorkerMetadata,
)
from cargohold.protocol.stats import Stats, add_stats

Id = TypeVar("Id", str, int)


MAX_REMEMBERED: Final = 16_384
"""Maximum number of complete ids that are remembered because some workers have not reported them, and may never do so."""


@dataclass(slots=True)
class _Transfer:
    """One transfer under an id: the workers that have reported its end, and the worst outcome so far."""

    ranks: set[int] = field(default_factory=set)
    worst: TransferOutcome = TransferOutcome.DONE
    is_complete: bool = False


class _Count(Generic[Id]):
    """The ids that some workers have reported and others have not.

    Each worker reports the transfers under one id in their order, so each of its reports is of the first that it has not
    reported. A complete transfer is remembered until all workers have reported it: a late report must not count for the next
    transfer under the same id.

    Args:
        what: what the ids are ends of, for errors.
        world_size: number of workers.
    """

    def __init__(self, what: str, world_size: int) -> None:
        self._what = what
        self._world_size = world_size
        # Per id in the order of transfers: complete ones, then at most one that is not.
        self._transfers: dict[Id, list[_Transfer]] = {}
        self._pending: dict[Id, _Transfer] = {}

    @property
    def num_incomplete(self) -> int:
        """Number of ids that too few workers have reported."""
        return len(self._pending)

    def report(self, rank: int, ident: Id, outcome: TransferOutcome, connector: str) -> None:
        """Note that ``rank`` reported ``ident``. Raises ``ContractError`` if it already had."""
        transfers = self._transfers.setdefault(ident, [])
        transfer = next((transfer for transfer in transfers if rank not in transfer.ranks), None)
        if transfer is None:
            if ident in self._pending:
                raise ContractError(connector, f"worker {rank} reported {self._what} {ident!r} twice")
            transfer = self._pending[ident] = _Transfer()
            transfers.append(transfer)
        transfer.ranks.add(rank)
        transfer.worst = max(outcome, transfer.worst)
        if transfer.is_complete:
            self._forget_reported(ident)

    def take_complete(self, expected: int) -> dict[Id, TransferOutcome]:
        """Return the ids that at least ``expected`` workers have now reported, each once and with its worst outcome."""
        if not self._pending:
            return {}
        complete = {ident: transfer for ident, transfer in self._pending.items() if len(transfer.ranks) >= expected}
        for ident, transfer in complete.items():
            transfer.is_complete = True
            del self._pending[ident]
            self._forget_reported(ident)
        self._forget_oldest()
        return {ident: transfer.worst for ident, transfer in complete.items()}

    def _forget_reported(self, ident: Id) -> None:
        """Forget complete transfers that all workers have reported."""
        left = [
            transfer
            for transfer in self._transfers[ident]
            if not (transfer.is_complete and len(transfer.ranks) == self._world_size)
        ]
        if left:
            self._transfers[ident] = left
        else:
            del self._transfers[ident]

    def _forget_oldest(self) -> None:
        while len(self._transfers) - len(self._pending) > MAX_REMEMBERED:
            oldest = next(ident for ident in self._transfers if ident not in self._pending)
            del self._transfers[oldest]


class OutputAggregator:
    """Merges the outputs of all workers, step by step.

    An id (request sent, request received, job) is passed on exactly once, in the step in which the last expected report
    arrives, and as failed if any of these workers failed it. Reports that come later are ignored. Invalid blocks are united;
    metadata and stats are aggregated pairwise in rank order. State lives between steps: workers may report the same id several
    steps apart.

    Args:
        world_size: number of workers.
        expected_finished_count: number of workers whose reports complete an id; all if ``None``. A worker may raise it.
        connector: the connector's name, for errors.
    """

    def __init__(
        self, world_size: int, expected_finished_count: int | None = None, connector: str = "connector"
    ) -> None:
        self._world_size = world_size
        self._connector = connector
        self._expected = self._checked_expectation(
            world_size if expected_finished_count is None else expected_finished_count
        )
        self._sending = _Count[str]("finished sending of request", world_size)
        self._recving = _Count[str]("finished receiving of request", world_size)
        self._jobs = _Count[int]("end of job", world_size)

    @property
    def num_incomplete(self) -> int:
        """Number of ids that some workers have reported, but too few."""
        return sum(count.num_incomplete for count in (self._sending, self._recving, self._jobs))

    def aggregate(self, outputs: Sequence[KVConnectorOutput | None]) -> KVConnectorOutput:
        """Merge one step's outputs, indexed by rank; ``None`` where a worker had nothing to say.

        Raises:
            ContractError: a worker reported an id twice, or raised the expectation beyond the number of workers; or the
                workers' metadata cannot be merged.
        """
        present = [
            (rank, output) for rank, output in enumerate(outputs) if output is not None and not output.is_empty()
        ]
        if not present:
            return NOTHING_TO_REPORT  # most steps: nothing can become complete without a report
        if self._world_size == 1 and not present[0][1].finished.expected_finished_count:
            return self._of_only_worker(present[0][1])
        for rank, output in present:
            self._count(rank, output.finished)
        received = self._recving.take_complete(self._expected)
        worker_meta: WorkerMetadata | None = None
        stats: Stats = {}
        for _, output in present:
            if output.worker_meta is not None:
                worker_meta = self._merged(worker_meta, output.worker_meta)
            stats = add_stats(stats, output.stats)
        return KVConnectorOutput(
            finished=FinishedTransfers(
                finished_sending=frozenset(self._sending.take_complete(self._expected)),
                finished_recving=frozenset(received),
                failed_recving=frozenset(
                    request_id for request_id, outcome in received.items() if outcome is not TransferOutcome.DONE
                ),
                jobs=self._jobs.take_complete(self._expected),
                step_failed=any(output.finished.step_failed for _, output in present),
            ),
            invalid_block_ids=_union(output.invalid_block_ids for _, output in present),
            worker_meta=worker_meta,
            stats=stats,
        )

    def _of_only_worker(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """Return the output of the only worker: what it reports is complete, and there is nothing to merge."""
        self._check_failed(0, output.finished)
        return output

    def _merged(self, left: WorkerMetadata | None, right: WorkerMetadata) -> WorkerMetadata:
        if left is None:
            return right
        try:
            return left.aggregate(right)
        except Exception as error:  # a third party's code: whatever it raises must not stop the engine
            raise ContractError(self._connector, f"aggregate raised {error!r}") from error

    def _count(self, rank: int, finished: FinishedTransfers) -> None:
        if finished.expected_finished_count:
            self._expected = max(self._expected, self._checked_expectation(finished.expected_finished_count))
        for request_id in finished.finished_sending:
            self._sending.report(rank, request_id, TransferOutcome.DONE, self._connector)
        for request_id in finished.finished_recving:
            failed = request_id in finished.failed_recving
            outcome = TransferOutcome.FAILED if failed else TransferOutcome.DONE
            self._recving.report(rank, request_id, outcome, self._connector)
        self._check_failed(rank, finished)
        for job_id, outcome in finished.jobs.items():
            self._jobs.report(rank, job_id, outcome, self._connector)

    def _check_failed(self, rank: int, finished: FinishedTransfers) -> None:
        stray = finished.failed_recving - finished.finished_recving
        if stray:
            raise ContractError(self._connector, f"worker {rank} reported {min(stray)!r} as failed but not as finished")

    def _checked_expectation(self, count: int) -> int:
        if not 1 <= count <= self._world_size:
            raise ContractError(
                self._connector, f"expects {count} reports per transfer; there are {self._world_size} worker(s)"
            )
        return count


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*sets)
