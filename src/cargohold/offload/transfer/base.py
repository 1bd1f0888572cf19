"""The transfer port: a worker's copies between its paged KV and a tier."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    """Blocks to copy.

    Attributes:
        job_id: unique among the jobs of a connector, never used again.
        direction: which way.
        block_ids: blocks on the device.
        rows: the tier's block-sized rows, parallel to ``block_ids``.
        timeout_s: a job that has not started after this time is abandoned, where that can be done.
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
        outcome: how.
        failed_block_ids: of a failed load, the blocks that hold garbage; empty if all of them do.
        duration_s: from submission to end.
    """

    job: CopyJob
    outcome: TransferOutcome
    failed_block_ids: frozenset[int]
    duration_s: float


class TransferWorker(ABC):
    """Copies in the background.

    Owned by one thread, which submits and polls. Every submitted job is returned by ``poll`` exactly once, whatever happens to
    the thread, stream or device that carries it out.
    """

    @abstractmethod
    def submit(self, job: CopyJob) -> None:
        """Start a job, as soon as what came before allows. Loads go before stores. Returns at once.

        The blocks and rows of a job must not be written by anyone else until it has ended.
        """

    @abstractmethod
    def poll(self) -> list[CopyResult]:
        """The jobs that ended since the last call, in the order in which they did."""

    @abstractmethod
    def finish_stores(self) -> None:
        """Let nothing that is computed from now on overwrite what a store reads. May wait for the stores."""

    @abstractmethod
    def shutdown(self) -> None:
        """Let running jobs end, abandon those not started, and release everything. ``poll`` still returns their results."""
