"""Messages between the two sides of a connector, which ride on the engine's own, and KV events.

KV events: changes of what a medium holds, as a stream that a follower (a router, for instance) can read.

An index that a follower builds from all events of a medium, in order, equals what the medium holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal, Protocol, Self, TypeAlias, runtime_checkable

from cargohold.protocol.request import Adapter, ExtraKey
from cargohold.protocol.stats import Stats


class TransferOutcome(IntEnum):
    """How a job ended. Ordered from best to worst: over several workers the worst counts."""

    DONE = 0
    """Every byte is where it belongs."""
    ABANDONED = 1
    """Given up before it did harm: cancelled, or too late. The source is as it was; the destination is worthless."""
    FAILED = 2
    """Something broke: an I/O error, a checksum. The destination is worthless, and the source may be."""


@runtime_checkable
class ConnectorMetadata(Protocol):
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
class WorkerMetadata(Protocol):
    """A connector's message from a worker to the scheduler side, opaque to the engine.

    Its fields follow the rule of ``ConnectorMetadata``.
    """

    def aggregate(self, other: Self) -> Self:
        """Merge another worker's metadata of the same step into a new object; neither input is changed.

        The aggregator calls it pairwise in rank order: ``meta[0].aggregate(meta[1]).aggregate(meta[2])``.
        """
        ...


@dataclass(frozen=True, slots=True)
class EmptyMetadata:
    """The metadata of a connector that has nothing to say."""

    def aggregate(self, other: EmptyMetadata) -> EmptyMetadata:
        """Return ``self``: two empty messages merge into an empty one."""
        return self


@dataclass(frozen=True, slots=True)
class FinishedTransfers:
    """The transfers that ended on one worker since the previous call of ``get_finished``.

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


NOTHING_ENDED = FinishedTransfers()
"""No transfer has ended: the report of most steps. Never mutated."""


@dataclass(frozen=True, slots=True)
class KVConnectorOutput:
    """The report of one worker's connector after a step or, once aggregated, of all workers.

    Attributes:
        finished: transfers that ended; once aggregated, those that all expected workers have reported.
        invalid_block_ids: blocks whose load failed. For an asynchronous load they are reported no later than its
            ``finished_recving``. If the step computed with one of them, nothing that was stored from this step may ever be
            found.
        worker_meta: the connector's own message, opaque; merged over workers with ``aggregate``.
        stats: counters, added up over workers.
    """

    finished: FinishedTransfers = NOTHING_ENDED
    invalid_block_ids: frozenset[int] = frozenset()
    worker_meta: WorkerMetadata | None = None
    stats: Stats = field(default_factory=dict)

    def is_empty(self) -> bool:
        """True if it says nothing, so that ``update_connector_output`` need not be called."""
        return self is NOTHING_TO_REPORT or self == NOTHING_TO_REPORT


NOTHING_TO_REPORT = KVConnectorOutput()
"""The empty output, as after most steps. Never mutated."""


@dataclass(frozen=True, slots=True)
class KVConnectorSchedulerOutput:
    """The requests of a connector's scheduler side to the scheduler after a step.

    Attributes:
        lock_block_ids: blocks to take a reference on. Repeated ids add up.
        unlock_block_ids: blocks to give a reference back on; freed in the order given, so the first is evicted first.
    """

    lock_block_ids: tuple[int, ...] = ()
    unlock_block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Why a request hit or missed: the answer to "why was this prompt slow?".

    Attributes:
        restored_tokens: tokens loaded, by the tier they came from.
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
