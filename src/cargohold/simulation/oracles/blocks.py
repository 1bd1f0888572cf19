"""Oracles of the device pool's blocks: none leaks, is counted twice, or is reused while a copy uses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cargohold.connector.offloading.jobs import Load, Store
from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.protocol import KVCacheBlockView
from cargohold.simulation.inside import guards_of, offloading_sides
from cargohold.simulation.oracles.base import Oracle
from cargohold.simulation.replica import Replica


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
