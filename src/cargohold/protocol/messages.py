"""Messages between the two sides of a connector, which ride on the engine's own; those of all workers merged; KV events.

KV events: changes of what a medium holds, as a stream that a follower (a router, for instance) can read.

An index that a follower builds from all events of a medium, in order, equals what the medium holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Final, Generic, Literal, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

from cargohold.errors import ContractError
from cargohold.protocol.engine_view import Adapter, ExtraKey
from cargohold.protocol.metrics import Stats, add_stats


class TransferOutcome(IntEnum):
    """How a job ended. Ordered from best to worst: over several workers the worst counts."""

    DONE = 0
    """Every byte is where it belongs."""
    ABANDONED = 1
    """Given up before it did harm: cancelled, or too late. The source is as it was; the destination is worthless."""
    FAILED = 2
    """Something broke: an I/O error, a checksum. The destination is worthless, and the source may be."""


@runtime_checkable
class KVConnectorMetadata(Protocol):
    """A connector's message from its scheduler side to its workers, one per step.

    The engine carries it without looking inside. A connector's metadata is a frozen dataclass whose fields are numbers,
    strings, bytes, enums, and tuples, frozensets, dicts or such dataclasses of these, fully annotated: then every executor
    can carry it to another process without running code that the bytes choose.
    """


@dataclass(frozen=True, slots=True)
class UndeliveredMetadata:
    """Replaces metadata that could not be carried to a worker. The worker then stops its connector.

    Attributes:
        reason: why the metadata could not be carried.
    """

    reason: str


@runtime_checkable
class KVConnectorWorkerMetadata(Protocol):
    """A connector's message from a worker to the scheduler side, opaque to the engine.

    Its fields follow the rule of ``KVConnectorMetadata``.
    """

    def aggregate(self, other: Self) -> Self:
        """Merge another worker's metadata of the same step into a new object; neither input is changed.

        The aggregator calls it pairwise in rank order: ``meta[0].aggregate(meta[1]).aggregate(meta[2])``.
        """


@dataclass(frozen=True, slots=True)
class EmptyMetadata:
    """The metadata of a connector that has nothing to say."""

    def aggregate(self, other: EmptyMetadata) -> EmptyMetadata:
        """Return ``self``: two empty messages merge into an empty one."""
        return self


@dataclass(frozen=True, slots=True)
class KVConnectorTransferResults:
    """The transfers that ended on one worker since the previous call of ``get_transfer_results``.

    Attributes:
        finished_sending: requests for which ``request_finished`` returned ``True`` and whose blocks this worker no longer
            reads.
        finished_recving: requests whose asynchronous load has ended, failed ones included.
        failed_recving: the requests in ``finished_recving`` whose load failed as a whole: none of its blocks may be used.
        jobs: jobs that ended, and how. Job ids are the connector's own.
        expected_finished_count: number of workers that must report each id from now on, if this worker raises it; else 0.
        step_failed: this step's forward pass may have read KV that had not been loaded: the requests that computed in it
            start over, and nothing that was stored from it may ever be found. The engine says so as well of a step whose
            numbers are not finite for a request; then the other requests go on.
        spoiled_requests: if a step failed for these requests alone: their ids. Empty if it may have failed for all. Only the
            engine says that.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    failed_recving: frozenset[str] = frozenset()
    jobs: Mapping[int, TransferOutcome] = field(default_factory=dict)
    expected_finished_count: int = 0
    step_failed: bool = False
    spoiled_requests: frozenset[str] = frozenset()


NOTHING_ENDED = KVConnectorTransferResults()
"""No transfer has ended: the report of most steps. Never mutated."""


@dataclass(frozen=True, slots=True)
class KVConnectorOutput(KVConnectorTransferResults):
    """The report of one worker's connector after a step or, once aggregated, of all workers.

    Of the transfers that ended, it has once aggregated those that all expected workers have reported.

    Attributes:
        invalid_block_ids: blocks whose load failed. For an asynchronous load they are reported no later than its
            ``finished_recving``. If the step computed with one of them, nothing that was stored from this step may ever be
            found.
        kv_connector_worker_meta: the connector's own message, opaque; merged over workers with ``aggregate``.
        kv_connector_stats: values by time series, added up over workers.
    """

    invalid_block_ids: frozenset[int] = frozenset()
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None = None
    kv_connector_stats: Stats = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        results: KVConnectorTransferResults,
        invalid_block_ids: frozenset[int],
        worker_meta: KVConnectorWorkerMetadata | None,
        stats: Stats,
    ) -> Self:
        """Make the report of one worker from its connector's answers."""
        ended = {name.name: getattr(results, name.name) for name in fields(KVConnectorTransferResults)}
        return cls(
            **ended,
            invalid_block_ids=invalid_block_ids,
            kv_connector_worker_meta=worker_meta,
            kv_connector_stats=stats,
        )

    def is_empty(self) -> bool:
        """True if it says nothing, so that ``update_connector_output`` need not be called."""
        return self is NOTHING_TO_REPORT or self == NOTHING_TO_REPORT


NOTHING_TO_REPORT = KVConnectorOutput()
"""The empty output, as after most steps. Never mutated."""


@dataclass(frozen=True, slots=True)
class KVConnectorSchedulerOutput:
    """The requests of a connector's scheduler side to the scheduler after a step.

    Attributes:
        block_ids_to_lock: blocks to take a reference on. Repeated ids add up.
        block_ids_to_unlock: blocks to give a reference back on; freed in the order given, so the first is evicted first.
    """

    block_ids_to_lock: tuple[int, ...] = ()
    block_ids_to_unlock: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Why a request hit or missed: the answer to "why was this prompt slow?".

    Attributes:
        restored_tokens: tokens loaded, by the tier they came from. A token that was loaded twice counts once.
        notes: what was decided for the request and why, in order, as sentences.
    """

    restored_tokens: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


# --- KV events --------------------------------------------------------------------------------------------------------

MEDIUM_DEVICE = "GPU"
"""The engine's own paged cache. This is its usual name in events, even if the engine runs on a CPU."""
MEDIUM_HOST = "CPU"
"""Host memory."""
MEDIUM_STORAGE = "STORAGE"
"""Disk and shared stores."""

Locality: TypeAlias = Literal["LOCAL", "REMOTE"]
"""Whether a medium belongs to the engine's machine, or is shared with engines on other machines."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks became available for reuse, consecutive in one prefix.

    Attributes:
        block_hashes: one per block, in prefix order.
        parent_block_hash: hash of the block before the first; ``None`` at the start of a prompt, or when not known.
        token_ids: the blocks' tokens, concatenated; empty when not known.
        block_tokens: tokens per block.
        group: index of the KV-cache group.
        medium: the medium that holds them, such as ``MEDIUM_HOST``.
        adapter: adapter with which the KV was computed; ``None`` if there was none, or when not known.
        extra_keys: per block, what its hash covers besides tokens (see ``RequestView.extra_keys``); empty when not known.
        locality: whether the medium is local or shared; ``None`` if the medium's name implies it.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_tokens: int
    group: int
    medium: str
    adapter: Adapter | None = None
    extra_keys: tuple[tuple[ExtraKey, ...], ...] = ()
    locality: Locality | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks are no longer available.

    Attributes:
        block_hashes: one per block, in the order of removal.
        group: index of the KV-cache group.
        medium: the medium that held them.
        locality: as in the ``BlockStored`` event.
    """

    block_hashes: tuple[bytes, ...]
    group: int
    medium: str
    locality: Locality | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """A medium holds no blocks any more.

    Attributes:
        medium: the medium.
    """

    medium: str


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


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
        if self._world_size == 1 and not present[0][1].expected_finished_count:
            return self._of_only_worker(present[0][1])
        for rank, output in present:
            self._count(rank, output)
        received = self._recving.take_complete(self._expected)
        worker_meta: KVConnectorWorkerMetadata | None = None
        stats: Stats = {}
        for _, output in present:
            if output.kv_connector_worker_meta is not None:
                worker_meta = self._merged(worker_meta, output.kv_connector_worker_meta)
            stats = add_stats(stats, output.kv_connector_stats)
        return KVConnectorOutput(
            finished_sending=frozenset(self._sending.take_complete(self._expected)),
            finished_recving=frozenset(received),
            failed_recving=frozenset(
                request_id for request_id, outcome in received.items() if outcome is not TransferOutcome.DONE
            ),
            jobs=self._jobs.take_complete(self._expected),
            step_failed=any(output.step_failed for _, output in present),
            invalid_block_ids=frozenset[int]().union(*[output.invalid_block_ids for _, output in present]),
            kv_connector_worker_meta=worker_meta,
            kv_connector_stats=stats,
        )

    def _of_only_worker(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """Return the output of the only worker: what it reports is complete, and there is nothing to merge."""
        self._check_failed(0, output)
        return output

    def _merged(
        self, left: KVConnectorWorkerMetadata | None, right: KVConnectorWorkerMetadata
    ) -> KVConnectorWorkerMetadata:
        if left is None:
            return right
        try:
            return left.aggregate(right)
        except Exception as error:  # a third party's code: whatever it raises must not stop the engine
            raise ContractError(self._connector, f"aggregate raised {error!r}") from error

    def _count(self, rank: int, finished: KVConnectorTransferResults) -> None:
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

    def _check_failed(self, rank: int, finished: KVConnectorTransferResults) -> None:
        stray = finished.failed_recving - finished.finished_recving
        if stray:
            raise ContractError(self._connector, f"worker {rank} reported {min(stray)!r} as failed but not as finished")

    def _checked_expectation(self, count: int) -> int:
        if not 1 <= count <= self._world_size:
            raise ContractError(
                self._connector, f"expects {count} reports per transfer; there are {self._world_size} worker(s)"
            )
        return count
