"""State that the parts of one connector's scheduler side share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from cargohold.cache.manager import ChunkKeys, OffloadKey, OffloadManager, chunk_keys
from cargohold.connector.kernel.config import KernelConfig
from cargohold.connector.kernel.device import DeviceChunks
from cargohold.connector.kernel.guest import Below, Checker, Consumer, Guests
from cargohold.connector.kernel.jobs import BlockHolder, JobTable, TouchHolder
from cargohold.deadlines import START
from cargohold.errors import SparingLog
from cargohold.pace import StepPace
from cargohold.protocol import AttentionKind, Clock, KVCacheLayout, SchedulerContext, Series, Tally

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Shared:
    """State that the parts of one connector's scheduler side share.

    Attributes:
        config: options.
        layout: the engine's paged KV.
        manager: the manager of the tier.
        tier: the tier's name in reports.
        holder: keeps blocks from being reused while they are copied.
        jobs: transfers in flight.
        clock: monotonic time in seconds.
        guests: the features.
        below: where chunks come from that host memory lacks.
        consumer: what waits for all chunks of a request.
        checker: what compares chunks that are computed again.
        keeps_partial_loads: whether requests use the blocks that a failed load has filled before its first bad block.
        prefix_caching: whether the engine knows what the blocks of ended requests hold.
        keeps_ended: whether chunks can be stored after their request has ended: its blocks stay, and what they hold is known.
        caches_all: whether its prefix cache keeps the blocks of all groups; otherwise those of full attention alone.
        context: the engine's block pool; ``None`` if the engine gives none.
        namespace: number of the namespace in which chunks have their keys now.
        stats: counters since they were last taken.
        failures: log of transfers that failed.
        device: which chunks the device pool holds, where it is part of the cache.
        pace: how fast the engine computes.
        block_s: seconds that a worker has lately taken to ``load`` a block, and to ``store`` one.
        start_s: seconds after which a copy is given up that has not started.
    """

    config: KernelConfig
    layout: KVCacheLayout
    manager: OffloadManager
    tier: str
    holder: BlockHolder
    jobs: JobTable
    clock: Clock
    pace: StepPace
    keeps_partial_loads: bool = True
    prefix_caching: bool = True
    caches_all: bool = True
    context: SchedulerContext | None = None
    device: DeviceChunks | None = None
    block_s: dict[str, float] = field(default_factory=dict)
    namespace: int = 0
    stats: Tally = field(default_factory=Tally)
    failures: SparingLog = field(default_factory=lambda: SparingLog(logger))
    keeps_ended: bool = False
    start_s: float = field(init=False)
    guests: Guests = field(default_factory=Guests)
    below: Below = field(default_factory=Below)
    consumer: Consumer = field(default_factory=Consumer)
    checker: Checker = field(default_factory=Checker)

    def __post_init__(self) -> None:
        self.start_s = START.seconds(self.config.transfer_timeout_s)

    @property
    def tiers(self) -> Sequence[str]:
        """Names of the tiers: that of host memory, and of what lies below."""
        return (self.tier, *self.below.tiers)

    def use_context(self, context: SchedulerContext) -> None:
        """Keep the engine's block pool; from now on hold blocks by touching them."""
        self.context, self.holder = context, TouchHolder(context)
        keeps_blocks = all(group.kind is AttentionKind.FULL for group in self.layout.groups)
        self.keeps_ended = keeps_blocks and self.prefix_caching

    def note_on_device(self, keys: Sequence[OffloadKey], block_ids: Sequence[int]) -> None:
        """Note which blocks of the device pool hold chunks, or will when the step is over: it must be part of the cache.

        The tier may have some of them, too: what was loaded, or came from below when it was being computed.
        """
        assert self.device is not None
        self.manager.note_lost(self.device.note(keys, block_ids))
        self.manager.note_copies(keys)

    def new_keys(self) -> tuple[ChunkKeys, ...]:
        """Return keys per group, of no chunks yet."""
        return chunk_keys(self.layout, self.config.blocks_per_chunk, self.namespace)

    def count(self, series: Series, amount: float) -> None:
        """Add to a time series."""
        self.stats[series] += amount
