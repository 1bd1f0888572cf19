"""Oracles of the device pool's blocks: none leaks, is counted twice, or is reused while a copy uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cargohold.blocks import READY, extend_hashes, root_hash
from cargohold.cache.keys import offload_key
from cargohold.connector.offloading.jobs import Load, Store
from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.protocol import (
    MEDIUM_DEVICE,
    MEDIUM_HOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheBlockView,
    KVEvent,
)
from cargohold.testing.simulation.faulty import FaultyManager
from cargohold.testing.simulation.oracles.base import Oracle
from cargohold.testing.simulation.replica import Replica, guards_of, live_sides, offloading_sides


class PoolOracle(Oracle):
    """Checks that references on blocks are exactly those that requests and connectors hold.

    Args:
        engine: the replica.
    """

    name = "pool"

    def __init__(self, engine: Replica) -> None:
        self._engine = engine

    def inspect(self) -> None:
        """Count all references."""
        scheduler = self._engine.scheduler
        scheduler.kv.check()
        held = scheduler.connector.held_references()
        expected = scheduler.kv.reference_counts() + held
        pool = scheduler.kv.pool
        for block_id in range(1, pool.num_blocks):
            count = pool.get_block(block_id).ref_cnt
            self.require(
                count == expected[block_id],
                f"block {block_id} has {count} reference(s); requests and connectors hold {expected[block_id]}",
            )
        if scheduler.connector.broken is None:
            self._check_held(held)

    def at_end(self) -> None:
        """Every block is free."""
        self._engine.scheduler.check_settled()

    def _check_held(self, held: Counter[int]) -> None:
        """Check that each offloading connector holds exactly the blocks that its jobs in flight copy."""
        for side, guards in offloading_sides(self._engine.scheduler.connector):
            if any(guard.broken is not None for guard in guards):
                continue
            jobs: list[Load | Store] = [*side.jobs.loads(), *side.jobs.stores()]
            copied = Counter(block_id for job in jobs for block_id in job.block_ids)
            own = guards[-1].held_references()
            self.require(
                own == (copied if side.holds_outlive_requests else Counter()),
                f"connector {side.name} holds {dict(own)}; its jobs copy {dict(copied)}",
            )
            self.require(own <= held, f"connector {side.name} holds references that the engine knows nothing of")


class CopyOracle(Oracle):
    """Checks that no block that a copy reads or writes is free, or is given out again.

    Conflicts of copies with forward passes are found elsewhere: ``FingerprintRunner`` checks every access.

    Args:
        engine: the replica; from now on, every allocation of its pool is watched.
        holds: whether copies hold their blocks. Where they cannot, workers end copies before a step overwrites a block.
    """

    name = "copies"

    def __init__(self, engine: Replica, *, holds: bool) -> None:
        self._copies = engine.copies
        self._pool = engine.scheduler.kv.pool
        self._holds = holds
        self._connector = engine.scheduler.connector
        self._guards = guards_of(engine.scheduler.connector)
        self._num_broken = 0
        self._is_stopping = False
        if holds:
            self._allocate = self._pool.allocate
            vars(self._pool)["allocate"] = self._allocate_watched

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Blocks being copied are not free."""
        if not self._holds:
            return
        # Locks that a connector asked for just before it was turned off are lost. Its workers end all copies at the beginning
        # of the next step, before anything is overwritten; so nothing is checked until then.
        num_broken = len([guard for guard in self._guards if guard.broken is not None])
        self._is_stopping = num_broken > self._num_broken
        self._num_broken = num_broken
        for copies in self._copies:
            if copies.num_jobs and not self._is_stopping:
                get_block = self._pool.get_block
                free = [block_id for block_id in copies.block_ids() if not get_block(block_id).ref_cnt]
                copies.check_free(free, "there is in the free queue")

    def at_end(self) -> None:
        """No block is being copied any more, but for those that stuck copies keep out of service."""
        held = set(self._connector.held_references())
        for copies in self._copies:
            left = sorted(copies.block_ids() - held)
            self.require(not left, f"blocks {left} are still being copied, and not held for that")

    def _allocate_watched(self, num_blocks: int) -> Sequence[KVCacheBlockView]:
        blocks = self._allocate(num_blocks)
        for copies in self._copies:
            if copies.num_jobs and not self._is_stopping:
                copies.check_free([block.block_id for block in blocks], "somebody was given")
        return blocks


# --- oracle -----------------------------------------------------------------------------------------------------------

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
