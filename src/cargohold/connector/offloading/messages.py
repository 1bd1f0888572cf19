"""What the scheduler side tells the workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill blocks of a request from the tier.

    Attributes:
        job_id: the job.
        request_id: who waits for it.
        block_ids: destinations.
        rows: block-sized rows of the tier, parallel to ``block_ids``.
        timeout_s: give up if it has not started after this time.
    """

    job_id: int
    request_id: str
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Copy blocks to the tier, once the step's forward pass is over.

    Attributes:
        job_id: the job.
        block_ids: sources; held until the job has ended on all workers.
        rows: block-sized rows of the tier, parallel to ``block_ids``.
        timeout_s: give up if it has not started after this time.
    """

    job_id: int
    block_ids: tuple[int, ...]
    rows: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class OffloadingMetadata:
    """One step's jobs.

    Attributes:
        loads: to start at once.
        stores: to start after the forward pass.
        finish_stores: let all stores end before this step overwrites blocks: their sources could not be held.
        release: ended requests whose blocks no store reads any more; workers pass it on as ``finished_sending``.
    """

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    finish_stores: bool = False
    release: tuple[str, ...] = ()
