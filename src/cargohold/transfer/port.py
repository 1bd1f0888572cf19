"""The transfer port: a worker's copies between its paged KV and a tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from cargohold.protocol import TransferOutcome


class Direction(Enum):
    """Which way a job copies."""

    LOAD = "load"
    """Tier to device."""
    STORE = "store"
    """Device to tier."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """A job that copies blocks.

    Attributes:
        job_id: unique among the jobs of a connector, never used again.
        direction: which way it copies.
        block_ids: blocks on the device.
        rows: the tier's block-sized rows, parallel to ``block_ids``.
        timeout_s: the job is abandoned if it has not started after this time, if the implementation can do that.
    """

    job_id: int
    direction: Direction
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CopyResult:
    """How a job ended.

    Attributes:
        job: the job.
        outcome: how it ended.
        failed_block_ids: for a failed load, the blocks that hold garbage; empty if all of them do.
        duration_s: seconds that the copying took, without any wait.
    """

    job: CopyJob
    outcome: TransferOutcome
    failed_block_ids: frozenset[int]
    duration_s: float


class TransferWorker(ABC):
    """Copies blocks in the background.

    One thread owns it, which submits and polls. Every submitted job is returned by ``poll`` exactly once, whatever happens to
    the thread, stream or device that carries it out.
    """

    @abstractmethod
    def submit(self, job: CopyJob) -> None:
        """Queue a job, and return at once. It starts when earlier jobs allow; loads go before stores.

        Nobody else may write to the blocks and rows of a job until it has ended.
        """

    @abstractmethod
    def poll(self) -> list[CopyResult]:
        """Return the jobs that ended since the last call, in the order of their ends. May copy for a few milliseconds."""

    @abstractmethod
    def finish_loads(self) -> bool:
        """Make computations from now on read what the loads submitted so far bring. May wait for the loads, but not for ever.

        Returns:
            Whether they will. If not, loads have failed, or are still under way; ``poll`` returns them when they have ended.
        """

    @abstractmethod
    def finish_stores(self) -> None:
        """Make sure that computations from now on do not overwrite blocks that a store reads. May wait for the stores."""

    @abstractmethod
    def shutdown(self) -> None:
        """Let running jobs end, abandon those not started, and release everything. ``poll`` still returns their results."""


def have_succeeded(results: Iterable[CopyResult]) -> bool:
    """Whether all loads among these have succeeded."""
    loads = (result for result in results if result.job.direction is Direction.LOAD)
    return all(load.outcome is TransferOutcome.DONE for load in loads)


# --- runs of neighbouring blocks and rows -----------------------------------------------------------------------------


def consecutive_runs(block_ids: Sequence[int], rows: Sequence[int], max_length: int) -> Iterator[tuple[int, int, int]]:
    """Cut parallel sequences into runs in which both count up by one, so that each run is one copy.

    Yields:
        First block, first row, and length; at most ``max_length`` long.
    """
    start = 0
    for at in range(1, len(block_ids) + 1):
        if (
            at == len(block_ids)
            or at - start == max_length
            or block_ids[at] != block_ids[at - 1] + 1
            or rows[at] != rows[at - 1] + 1
        ):
            yield block_ids[start], rows[start], at - start
            start = at
