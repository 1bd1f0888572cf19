"""Oracle: an index that follows the KV events equals what the media hold."""

from __future__ import annotations

from collections import Counter

from cargohold.blocks import READY, extend_hashes, root_hash
from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.offload.keys import offload_key
from cargohold.protocol import MEDIUM_DEVICE, MEDIUM_HOST, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from cargohold.simulation.faulty_manager import FaultyManager
from cargohold.simulation.inside import live_sides, offloading_sides
from cargohold.simulation.oracles.base import Oracle
from cargohold.simulation.replica import Replica

Index = dict[str, Counter[tuple[bytes, int]]]
"""Per medium, how often each prefix of a group is held. Several tiers may share the name of a medium."""


class EventOracle(Oracle):
    """Follows the events after every step, and compares the resulting index with what the media hold.

    Args:
        engine: the replica; it must emit events.
        index: what the media held before; mutated.
        knows_tiers: whether ``index`` is right about the tiers at the start, and the oracle can look into all of them. A
            connector that was turned off takes back what it announced itself; the contents of its tier are then not known.
        outlived: whether host memory may be that of an earlier engine, whose chunks are not announced again.
    """

    name = "events"

    def __init__(self, engine: Replica, index: Index, *, knows_tiers: bool = True, outlived: bool = False) -> None:
        self._engine = engine
        self._index = index
        self._knows_tiers = knows_tiers
        self._may_hold_more: set[str] = {MEDIUM_HOST} if outlived and not knows_tiers else set()
        index[MEDIUM_DEVICE] = Counter()
        self._were_empty = not index.setdefault(MEDIUM_HOST, Counter())

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Follow the step's events."""
        for event in self._engine.scheduler.take_events():
            self._follow(event)

    def inspect(self) -> None:
        """Compare with the device pool, and with the tiers unless one was turned off that held something before."""
        for event in self._engine.scheduler.take_events():
            self._follow(event)
        cached = self._engine.cached_prefixes()
        self.require(self._index[MEDIUM_DEVICE].keys() == cached, "the events of the device pool do not add up to it")
        if self.knows_tiers or (self._knows_tiers and self._were_empty):
            self._compare_tiers()

    def at_end(self) -> None:
        """Compare once more."""
        self.inspect()

    @property
    def knows_tiers(self) -> bool:
        """Whether the index is still right about all tiers: it was at the start, and no connector was turned off."""
        sides = offloading_sides(self._engine.scheduler.connector)
        return self._knows_tiers and all(guard.broken is None for _, guards in sides for guard in guards)

    def _compare_tiers(self) -> None:
        # A connector that is turned off has taken back what it announced, because nothing can load its chunks any more.
        managers = [side.manager for side in live_sides(self._engine.scheduler.connector)]
        inner = [manager.inner if isinstance(manager, FaultyManager) else manager for manager in managers]
        announced = self._index[MEDIUM_HOST]
        for (block_hash, group), count in announced.items():
            key = offload_key(block_hash, group)
            num_holders = sum(manager.lookup([key])[0] == READY for manager in inner)
            self.require(num_holders == count, f"{count} tier(s) announced {key.hex()[:8]}, {num_holders} hold it")
        num_ready = sum(manager.num_ready for manager in inner)
        self.require(announced.total() == num_ready, f"{announced.total()} chunks announced, {num_ready} held")

    def _follow(self, event: KVEvent) -> None:
        held = self._index.setdefault(event.medium, Counter())
        match event:
            case AllBlocksCleared():
                held.clear()
            case BlockRemoved():
                for block_hash in event.block_hashes:
                    prefix = (block_hash, event.group)
                    if not held[prefix] and event.medium in self._may_hold_more:
                        continue
                    self.require(held[prefix] > 0, f"{block_hash.hex()[:8]} was removed, and never stored")
                    held[prefix] -= 1
                    if not held[prefix]:
                        del held[prefix]
            case BlockStored():
                held.update((block_hash, event.group) for block_hash in event.block_hashes)
                if event.medium == MEDIUM_DEVICE and self._engine.dedupes_blocks:
                    self.require(
                        max(held[h, event.group] for h in event.block_hashes) == 1, "stored twice on the device"
                    )
                self._check_hash(event)

    def _check_hash(self, event: BlockStored) -> None:
        """Check that tokens, parent and salt give the block's hash, if the event has tokens."""
        if not event.token_ids:
            return
        parent = event.parent_block_hash
        if parent is None:
            salt = next(iter(event.extra_keys[0]), None)
            assert salt is None or isinstance(salt, str), "simulated requests have neither media nor embeddings"
            parent = root_hash(salt=salt)
        hashes: list[bytes] = []
        extend_hashes(hashes, event.token_ids, self._engine.layout.hash_block_tokens, parent)
        self.require(hashes[-1:] == list(event.block_hashes), "tokens, parent and salt do not give the hash")
