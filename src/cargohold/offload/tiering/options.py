"""Options of lower tiers on the scheduler side."""

from __future__ import annotations

from dataclasses import dataclass

from cargohold.offload.tier.config import Admission, WriteMode
from cargohold.protocol import Locality


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """How a tier is to be used.

    Attributes:
        name: the tier's name for users.
        admission: which chunks are written to it.
        write_mode: when they are written.
        max_chunks: maximum number of chunks that it can hold; ``None`` if that is not known.
        max_daily_chunks: maximum number of chunks written per day; ``None`` for no limit.
        has_index: whether the tier keeps an index of its chunks. Then it answers probes without asking its medium, and its
            policy must be told of the use of chunks that host memory gives back, or it would evict them.
        locality: whether it is local or shared; see ``TierConfig``.
        max_inflight_chunks: maximum number of chunks being written at the same time; each keeps its slot in host memory.
        max_asked_chunks: maximum number of chunks in probes, touches and loads in flight at the same time.
        num_asked_at_once: number of chunks for which it answers in one round trip; ``None`` for any number. See
            ``TierConfig.num_asked_at_once``.
    """

    name: str
    admission: Admission = Admission.ALL
    write_mode: WriteMode = WriteMode.THROUGH
    max_chunks: int | None = None
    max_daily_chunks: int | None = None
    has_index: bool = True
    locality: Locality | None = None
    max_inflight_chunks: int = 64
    max_asked_chunks: int = 65536
    num_asked_at_once: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TieringConfig:
    """Options that all lower tiers have in common.

    Attributes:
        num_workers: number of workers; each has a shard of every chunk.
        restore_timeout_s: maximum time that a request waits for lower tiers.
        store_timeout_s: maximum time for writing a batch of chunks.
        record_events: whether to record events for ``take_events``.
    """

    num_workers: int = 1
    restore_timeout_s: float = 5.0
    store_timeout_s: float = 30.0
    record_events: bool = False
