"""A tier's limits as a queue, and how it is doing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum

from cargohold.errors import ConfigError
from cargohold.offload.tier.base import LoadOutcome, StoreOutcome
from cargohold.offload.tier.breaker import BreakerConfig
from cargohold.offload.tier.jobs import Answer
from cargohold.offload.tier.ledger import Piece


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Limits of a queue.

    Attributes:
        num_threads: requests to the medium at the same time; each has staging memory for one chunk.
        max_urgent_chunks: chunks of probes and loads that may be queued or under way.
        max_store_chunks: chunks of stores and removals that may.
        max_thread_deaths: threads that are replaced; the one after them turns the tier off.
        finish_s: how long what is being written may take to end when the queue is shut down.
        breaker: when to leave the medium alone.
    """

    num_threads: int = 4
    max_urgent_chunks: int = 65536
    max_store_chunks: int = 1024
    max_thread_deaths: int = 8
    finish_s: float = 0.0
    breaker: BreakerConfig = field(default_factory=BreakerConfig)

    def __post_init__(self) -> None:
        for name in ("num_threads", "max_urgent_chunks", "max_store_chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least 1")


class TierState(Enum):
    """Whether a queue takes jobs."""

    ON = "on"
    TRYING = "trying"
    """One job at a time, to find out whether the medium is back."""
    RESTING = "resting"
    """The breaker is open."""
    OFF = "off"
    """For good: shut down, or its threads kept dying."""


@dataclass(frozen=True, slots=True)
class TierHealth:
    """How a tier is doing. Counts are totals since the start.

    Attributes:
        state: whether it takes jobs.
        num_jobs: jobs that have not ended.
        num_refused: jobs not taken.
        num_failed: jobs that failed or were late, and chunks that failed to be stored in jobs that went on.
        num_corrupt: chunks that failed their check.
        num_thread_deaths: threads that died.
        loaded_bytes: bytes that loads brought.
        load_s: seconds that threads spent on them; ``loaded_bytes / load_s`` is the bandwidth of one thread.
        stored_bytes: bytes that stores wrote.
        store_s: seconds that threads spent on them.
        last_failure: why the last of them failed, in one line.
    """

    state: TierState
    num_jobs: int
    num_refused: int
    num_failed: int
    num_corrupt: int
    num_thread_deaths: int
    loaded_bytes: int
    load_s: float
    stored_bytes: int
    store_s: float
    last_failure: str


@dataclass(slots=True)
class Totals:
    """What a queue has done. Not thread-safe: its owner holds a lock. The fields are those of ``TierHealth``."""

    num_refused: int = 0
    num_failed: int = 0
    num_corrupt: int = 0
    num_thread_deaths: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    stored_bytes: int = 0
    store_s: float = 0.0
    last_failure: str = ""

    def count(self, piece: Piece, answers: Sequence[Answer], duration_s: float) -> None:
        """A piece was carried out."""
        self.num_corrupt += sum(answer is LoadOutcome.CORRUPT for answer in answers)
        if answers == [LoadOutcome.LOADED]:
            self.loaded_bytes += len(piece.live.job.buffers[piece.first])
            self.load_s += duration_s
        elif answers == [StoreOutcome.STORED]:
            self.stored_bytes += len(piece.live.job.buffers[piece.first])
            self.store_s += duration_s

    def note_failure(self, reason: str) -> None:
        """A job failed, or was late; or a chunk of one that goes on."""
        self.num_failed += 1
        self.last_failure = reason

    def snapshot(self, state: TierState, num_jobs: int) -> TierHealth:
        """The totals as they are now."""
        return TierHealth(state=state, num_jobs=num_jobs, **asdict(self))
