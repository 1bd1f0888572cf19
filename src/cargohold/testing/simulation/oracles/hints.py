"""Oracle: hints and quotas hold what they say, and nothing more, after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cargohold.cache.shares import HELD, NORMAL
from cargohold.cache.tier_manager import TierManager
from cargohold.connector.offloading import OffloadingScheduler
from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.testing.simulation.engine import STEP_S
from cargohold.testing.simulation.faulty import FaultyManager
from cargohold.testing.simulation.oracles.base import Oracle
from cargohold.testing.simulation.replica import Replica, live_sides
from cargohold.testing.simulation.tiers import ListedMedium
from cargohold.tiers.chunk_format import NO_CLAIM
from cargohold.tiers.scheduler_side import TieringManager

_LATE_S = 2.0
"""Seconds by which a lease may be overdue: an engine with nothing to do makes no steps."""


class HintOracle(Oracle):
    """Watches grants and evictions of the offloading connectors' tiers.

    * Budgets are kept, for all tenants together and for each, and count what grants cover.
    * A chunk under a lease is not evicted.
    * No tenant has more than its hard limit; nobody else's store pushes a tenant below what is reserved for it.
    * What has expired, was released or is void weighs nothing: no chunk is out of the policy's order then.
    * In the end, disks know of leases and priorities what the hints in force ask, unless a fault has struck.

    Args:
        engine: the replica.
        media: yields each tier that lists its chunks and takes what hints ask.
        is_excused: whether a fault has struck.
    """

    name = "hints"

    def __init__(
        self,
        engine: Replica,
        media: Callable[[], Iterable[ListedMedium]] = tuple,
        is_excused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._media = media
        self._is_excused = is_excused
        self._found = ""
        for side in live_sides(engine.scheduler.connector):
            manager = _tier_manager(side.manager)
            if manager is not None:
                self._watch(side, manager)

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Check grants, budgets and quotas."""
        if self._found:
            self.fail(self._found)
        for side in live_sides(self._engine.scheduler.connector):
            hints = side.hints
            try:
                hints.check()
            except AssertionError as error:
                self.fail(f"{side.name}: {error}")
            now = self._engine.clock() - STEP_S
            overdue = [grant for grant in hints.grants if grant.ends_at < now - _LATE_S and step.scheduled]
            if overdue:
                self.fail(
                    f"{side.name}: hint {overdue[0].hint.action_id} should have ended at {overdue[0].ends_at:.3f} s"
                )
            manager = _tier_manager(side.manager)
            if manager is not None:
                self._check_quotas(side, manager)
                num_aside = 0 if manager.shares is None else manager.shares.num_aside
                if num_aside and not hints.grants:
                    self.fail(f"{side.name}: {num_aside} chunks are out of order although there are no hints")

    def at_end(self) -> None:
        """Compare what hints ask with what disks were told."""
        sides = {id(side.manager): side for side in live_sides(self._engine.scheduler.connector)}
        for medium in self._media():
            side = sides.get(id(medium.manager))
            if side is not None and medium.is_certain and medium.tier.ranks and not self._is_excused():
                self._check_claims(side, medium)

    def _check_claims(self, side: OffloadingScheduler, medium: ListedMedium) -> None:
        now = self._engine.clock()
        covered = [key for grant in side.hints.grants for key in grant.keys]
        for key in medium.find(covered):
            told = medium.claimed(key)
            if told is None:
                continue
            (claim, ends), asked = told, side.hints.claim_of(key)
            is_live = ends > now
            what = f"{side.name}: of chunk {key.hex()[:8]}, the disk was told {claim}, and hints ask {asked}"
            if asked == NO_CLAIM:
                self.require(ends <= now + _LATE_S and (claim.priority or NORMAL) >= NORMAL, what)
            elif asked.priority is not None and asked.priority < NORMAL:
                self.require(claim.priority == asked.priority, what)
            elif asked.lasts_s > 0:
                self.require(is_live and claim.priority == asked.priority, what)

    def _check_quotas(self, side: OffloadingScheduler, manager: TierManager) -> None:
        used = manager.usage()
        for tenant, limits in manager.quotas.items():
            if limits.hard is not None and used[tenant] > limits.hard:
                self.fail(f"{side.name}: {tenant} has {used[tenant]} chunks, and at most {limits.hard} are allowed")

    def _watch(self, side: OffloadingScheduler, manager: TierManager) -> None:
        """Look at every eviction as it happens. Not raised there: guards would catch that."""
        table: Any = manager.table
        evict_end = table.evict_end

        def watched(slots: list[int], num_chunks: int) -> tuple[list[int], list[int]]:
            keys, owners, used = table.keys[:], table.owners, list(table.used)
            victims, exposed = evict_end(slots, num_chunks)
            for slot in victims:
                key = keys[slot]
                level = side.hints.level_of(key)
                if level == HELD:
                    self._found = f"{side.name} evicted chunk {key.hex()[:8]} although a lease holds it"
                if owners is not None:
                    self._check_reserved(manager, owners[slot], used, is_lowered=level < NORMAL)
                    used[owners[slot]] -= 1
            return victims, exposed

        table.evict_end = watched

    def _check_reserved(self, manager: TierManager, owner: int, used: list[int], *, is_lowered: bool) -> None:
        shares = manager.shares
        if shares is None or owner in (0, shares.tenant) or is_lowered:
            return
        tenant, limits = list(manager.quotas.items())[owner - 1]
        if used[owner] <= limits.reserved:
            self._found = f"{tenant} was pushed below the {limits.reserved} chunks that are reserved for it"


def _tier_manager(manager: object) -> TierManager | None:
    """The manager of host memory itself, without what is around it."""
    while isinstance(manager, FaultyManager | TieringManager):
        manager = manager.inner
    return manager if isinstance(manager, TierManager) else None
