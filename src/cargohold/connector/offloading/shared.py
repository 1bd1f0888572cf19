"""State that the parts of the scheduler side share."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cargohold.cache.keys import ChunkKeys, split_key
from cargohold.cache.manager import ChunksStored, ManagerEvent, OffloadKey, OffloadManager
from cargohold.connector.offloading.config import OffloadConfig
from cargohold.connector.offloading.hints import Hints
from cargohold.connector.offloading.jobs import BlockHolder, JobTable
from cargohold.protocol import (
    BlockRemoved,
    BlockStored,
    KVCacheLayout,
    KVEvent,
    Locality,
    RequestView,
    SchedulerContext,
)
from cargohold.rate_limited_log import SparingLog
from cargohold.tiers.scheduler_side import Promises


class EventSource(Protocol):
    """A manager, or anything else that knows which chunks a tier holds."""

    def take_events(self) -> Sequence[ManagerEvent]:
        """Return the events of chunks that became ready or were removed since the last call, in order."""
        ...


class TierEvents:
    """Translates a manager's events into KV events.

    A manager knows only keys. A chunk's tokens, parent and extra keys are remembered here from the moment its store begins
    until it is announced. The same chunk may come and go several times between two calls of ``take``, so the manager's events
    are translated before a store begins or fails.

    Args:
        source: the manager whose events are translated; it must record them.
        medium: name of the medium.
        chunk_tokens: tokens per chunk, per group.
        locality: whether the medium is local or shared; ``None`` if its name implies it.
    """

    def __init__(
        self, source: EventSource, medium: str, chunk_tokens: Sequence[int], locality: Locality | None = None
    ) -> None:
        self._source = source
        self._translated: list[KVEvent] = []
        self._medium = medium
        self._locality = locality
        self._chunk_tokens = chunk_tokens
        # Chunks that are being stored, each with the event that will announce it.
        self._pending: dict[OffloadKey, BlockStored] = {}

    def note_store(self, request: RequestView, keys: ChunkKeys, stored: Sequence[OffloadKey], first_chunk: int) -> None:
        """Remember the contents of chunks whose store begins.

        Args:
            request: the request whose chunks they are.
            keys: its keys in the group.
            stored: the chunks being stored, in prefix order.
            first_chunk: number of the chunk at which to begin to search for them: at or before the first of them.
        """
        self._translate()
        size = keys.chunk_tokens
        at = first_chunk
        for key in stored:
            while keys.keys[at] != key:
                at += 1
            start, end = at * size, (at + 1) * size
            self._pending[key] = BlockStored(
                block_hashes=(split_key(key)[0],),
                parent_block_hash=split_key(keys.keys[at - 1])[0] if at else None,
                # Token ids may be numpy integers, which no publisher can encode.
                token_ids=tuple(map(int, request.all_token_ids[start:end])),
                block_tokens=size,
                group=keys.group.index,
                medium=self._medium,
                adapter=request.adapter,
                extra_keys=(request.extra_keys(start, end),),
                locality=self._locality,
            )

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks whose store has failed."""
        self._translate()
        for key in keys:
            self._pending.pop(key, None)

    def take(self) -> list[KVEvent]:
        """Return the KV events since the last call, in order."""
        self._translate()
        events, self._translated = self._translated, []
        return events

    def _translate(self) -> None:
        for event in self._source.take_events():
            self._translated += (
                self._stored(event.keys) if isinstance(event, ChunksStored) else self._removed(event.keys)
            )

    def _stored(self, keys: Sequence[OffloadKey]) -> Iterator[BlockStored]:
        for key in keys:
            block_hash, group = split_key(key)
            size = self._chunk_tokens[group]
            unknown = BlockStored((block_hash,), None, (), size, group, self._medium, locality=self._locality)
            yield self._pending.pop(key, unknown)

    def _removed(self, keys: Sequence[OffloadKey]) -> Iterator[BlockRemoved]:
        # One event per group: a tier whose loads are suspended withdraws all its chunks at once.
        of_group: dict[int, list[bytes]] = {}
        for key in keys:
            block_hash, group = split_key(key)
            of_group.setdefault(group, []).append(block_hash)
        for group, hashes in of_group.items():
            yield BlockRemoved(tuple(hashes), group, self._medium, self._locality)


# --- state that the parts of the scheduler side share -----------------------------------------------------------------

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
        events: KV events of the tier; ``None`` if nobody listens.
        keeps_partial_loads: whether requests use the blocks that a failed load has filled before its first bad block.
        context: the engine's block pool; ``None`` if the engine gives none.
        promises: chunks promised to other engines; ``None`` if there are no lower tiers.
        stats: counters since they were last taken.
        failures: log of transfers that failed.
        hints: leases and priorities; falsy while there are none.
        max_store_blocks: maximum number of device blocks that stores in flight may hold; at least those of one chunk.
    """

    config: OffloadConfig
    layout: KVCacheLayout
    manager: OffloadManager
    tier: str
    holder: BlockHolder
    jobs: JobTable
    events: TierEvents | None = None
    keeps_partial_loads: bool = True
    context: SchedulerContext | None = None
    promises: Promises | None = None
    stats: Counter[str] = field(default_factory=Counter)
    failures: SparingLog = field(default_factory=lambda: SparingLog(logger))
    max_store_blocks: int = field(init=False)
    hints: Hints = field(init=False)

    def __post_init__(self) -> None:
        fraction = self.config.max_inflight_fraction
        self.max_store_blocks = max(self.config.blocks_per_chunk, int(self.layout.num_blocks * fraction))

    def num_storable_blocks(self) -> int:
        """Return how many more device blocks stores may hold now."""
        return max(0, self.max_store_blocks - self.jobs.num_store_blocks)

    def num_storable_chunks(self) -> int:
        """Return how many more chunks stores may hold now, by their device blocks."""
        return self.num_storable_blocks() // self.config.blocks_per_chunk
