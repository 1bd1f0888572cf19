"""What the scheduler side knows of a tier before it starts, and what it tells the workers."""

from __future__ import annotations

from dataclasses import dataclass

from cargohold.offload.manager.base import OffloadKey
from cargohold.offload.tier.config import Admission, WriteMode
from cargohold.offload.tier.jobs import JobKind
from cargohold.protocol import Locality


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """How a tier is to be used.

    Attributes:
        name: what users call it.
        admission: which chunks are written to it.
        write_mode: when.
        max_daily_chunks: how many are written in a day at most; ``None`` for no limit.
        has_index: whether it knows by itself what it holds: being asked says nothing of its medium, and being told of the use
            of chunks that host memory gives back makes its policy keep them.
        locality: whose it is; see ``TierConfig``.
        max_inflight_chunks: chunks that are being written at the same time; each keeps its slot in host memory meanwhile.
        max_asked_chunks: chunks that workers are asked for, told of the use of, or loading at the same time.
    """

    name: str
    admission: Admission = Admission.ALL
    write_mode: WriteMode = WriteMode.THROUGH
    max_daily_chunks: int | None = None
    has_index: bool = True
    locality: Locality | None = None
    max_inflight_chunks: int = 64
    max_asked_chunks: int = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class TieringConfig:
    """What all tiers have in common.

    Attributes:
        num_workers: workers that each have a shard of every chunk.
        restore_timeout_s: how long a request waits for lower tiers at most.
        store_timeout_s: how long writing a batch of chunks may take.
        record_events: whether events are wanted.
    """

    num_workers: int = 1
    restore_timeout_s: float = 5.0
    store_timeout_s: float = 30.0
    record_events: bool = False


@dataclass(frozen=True, slots=True)
class TierCommand:
    """A job for every worker's queue of one tier.

    Attributes:
        job_id: the job.
        tier: which tier, from 0, the fastest.
        kind: what to do.
        keys: which chunks in any order.
        slots: loads and stores: where they are in host memory, parallel to ``keys``.
        parents: stores: the chunk before each in its prefix, if there is one, parallel to ``keys``.
        timeout_s: give up after this time.
    """

    job_id: int
    tier: int
    kind: JobKind
    keys: tuple[OffloadKey, ...]
    slots: tuple[int, ...]
    parents: tuple[OffloadKey | None, ...]
    timeout_s: float
