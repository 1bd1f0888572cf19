"""The limits of a tier's queue, and its state and counters."""

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
        num_threads: number of threads, so of requests to the medium at the same time; each has staging memory for one chunk.
        max_urgent_chunks: maximum number of chunks in probes, touches and loads that are queued or under way.
        max_store_chunks: maximum number of chunks in stores and removals that are queued or under way.
        max_thread_deaths: number of dead threads that are replaced; the next death turns the tier off.
        finish_s: maximum time for stores and removals to end when the queue is shut down.
        breaker: when the tier rests.
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
    """It takes all jobs."""
    TRYING = "trying"
    """It takes look-ups, loads or writes one at a time, to try whether the medium works again."""
    RESTING = "resting"
    """It takes no look-ups, no loads or no writes, because their breaker is open."""
    OFF = "off"
    """It takes no job any more: it was shut down, or its threads kept dying."""


@dataclass(frozen=True, slots=True)
class TierHealth:
    """A tier's state and counters. Counters are totals since the start.

    Attributes:
        state: whether it takes jobs.
        num_jobs: number of jobs that have not ended.
        num_refused: number of jobs that were not taken.
        num_failed: number of jobs that failed or were late, plus chunks that failed to be stored in jobs that went on.
        num_corrupt: number of chunks that failed their check.
        num_thread_deaths: number of threads that died.
        loaded_bytes: bytes that loads have read.
        load_s: seconds that threads spent on these loads; ``loaded_bytes / load_s`` is the bandwidth of one thread.
        stored_bytes: bytes that stores have written.
        store_s: seconds that threads spent on these stores.
        last_failure: reason of the last failure, in one line.
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
    """The counters of a queue; the fields are those of ``TierHealth``. Not thread-safe: its owner holds a lock."""

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
        """Count a piece that was carried out, and the seconds that it took."""
        self.num_corrupt += sum(answer is LoadOutcome.CORRUPT for answer in answers)
        if answers == [LoadOutcome.LOADED]:
            self.loaded_bytes += len(piece.live.job.buffers[piece.first])
            self.load_s += duration_s
        elif answers == [StoreOutcome.STORED]:
            self.stored_bytes += len(piece.live.job.buffers[piece.first])
            self.store_s += duration_s

    def note_failure(self, reason: str) -> None:
        """Count a job that failed or was late, or a chunk that failed in a job that goes on."""
        self.num_failed += 1
        self.last_failure = reason

    def snapshot(self, state: TierState, num_jobs: int) -> TierHealth:
        """Return the totals as they are now."""
        return TierHealth(state=state, num_jobs=num_jobs, **asdict(self))
