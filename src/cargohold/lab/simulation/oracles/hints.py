"""Oracle of hints and quotas: each holds what it says, for its tenant, and nothing more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from cargohold.cache import OffloadKey
from cargohold.cache.grants import Grant
from cargohold.cache.manager import offload_key
from cargohold.cache.retention import HELD, NO_RETENTION, NORMAL, Budget
from cargohold.cache.tier_manager import TierManager
from cargohold.connector.config import HINTS_OFF, HINTS_RETAIN, HintConfig
from cargohold.connector.kernel.requests import RequestState
from cargohold.connector.offloading import OffloadingScheduler
from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.lab.simulation.connectors import TierPlan, live_sides, offloading_sides
from cargohold.lab.simulation.fault_wrappers import FaultyManager
from cargohold.lab.simulation.replica import STEP_S, Oracle, Replica
from cargohold.lab.simulation.tiers import ListedMedium
from cargohold.protocol import Hint, HintKind, HintOutcome, HintStatus, RequestView

_DEFAULTS: Final = HintConfig()
_LATE_S = 2.0
"""Seconds by which a lease may be overdue: an engine with nothing to do makes no steps."""


class HintOracle(Oracle):
    """Watches grants and evictions of the offloading connectors' tiers.

    * Budgets are kept, for all tenants together and for each, and count what grants cover.
    * A tenant's hints do what its rights allow, cover nothing outside their range, and end no grant of another.
    * Only the tenant's own requests renew its leases.
    * A chunk under a lease is not evicted.
    * No tenant has more than its hard limit; no store of another tenant pushes one below its reservation.
    * What has expired, was released or is void weighs nothing: no chunk is out of the policy's order then.
    * In the end, disks know of leases and priorities what the hints in force ask, unless a fault has struck.

    Args:
        engine: the replica.
        plans: the options of its offloading connectors, in order; empty if they are not known.
        media: yields each tier that lists its chunks and takes what hints ask.
        is_excused: whether a fault has struck.
    """

    name = "hints"

    def __init__(
        self,
        engine: Replica,
        plans: Sequence[TierPlan] = (),
        media: Callable[[], Iterable[ListedMedium]] = tuple,
        is_excused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._media = media
        self._is_excused = is_excused
        self._found = ""
        sides = (side for side, _ in offloading_sides(engine.scheduler.connector)) if plans else ()
        self._config: dict[OffloadingScheduler, HintConfig] = {
            side: plan.options.get("hints", _DEFAULTS) for side, plan in zip(sides, plans, strict=True)
        }
        for side in live_sides(engine.scheduler.connector):
            self._watch_hints(side)
            manager = _tier_manager(side.shared.manager)
            if manager is not None:
                self._watch(side, manager)

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Check grants, budgets and quotas."""
        if self._found:
            self.fail(self._found)
        for side in live_sides(self._engine.scheduler.connector):
            hints = side.hints
            try:
                hints.grants.check()
            except AssertionError as error:
                self.fail(f"{side.name}: {error}")
            if hints.grants and side in self._config:
                self._check_budgets(side, self._config[side])
            now = self._engine.clock() - STEP_S
            overdue = [grant for grant in hints.grants if grant.ends_at < now - _LATE_S and step.scheduled]
            if overdue:
                self.fail(
                    f"{side.name}: hint {overdue[0].hint.action_id} should have ended at {overdue[0].ends_at:.3f} s"
                )
            manager = _tier_manager(side.shared.manager)
            if manager is not None:
                self._check_quotas(side, manager)
                num_aside = 0 if manager.shares is None else manager.shares.num_aside
                if num_aside and not hints.grants:
                    self.fail(f"{side.name}: {num_aside} chunks are out of order although there are no hints")

    def at_end(self) -> None:
        """Compare what hints ask with what disks know."""
        sides = {id(side.lower): side for side in live_sides(self._engine.scheduler.connector)}
        for medium in self._media():
            side = sides.get(id(medium.lower))
            if side is not None and medium.is_certain and medium.tier.ranks and not self._is_excused():
                self._check_retentions(side, medium)

    def _check_retentions(self, side: OffloadingScheduler, medium: ListedMedium) -> None:
        now = self._engine.clock()
        covered = [key for grant in side.hints.grants for key in grant.keys]
        for key in medium.find(covered):
            kept, asked = medium.retention(key), side.hints.grants.retention_of(key)
            if kept is None:
                continue
            what = f"{side.name}: of chunk {key.hex()[:8]}, the disk knows {kept}, and hints ask {asked}"
            if asked == NO_RETENTION:
                self.require(kept.level_at(now + _LATE_S) == NORMAL, what)
            elif asked.level_at(0.0) != NORMAL:
                self.require(kept.level_at(now) == asked.level, what)

    def _check_budgets(self, side: OffloadingScheduler, config: HintConfig) -> None:
        """Add up what grants cover: a budget is a part of the tier, of which a tenant with a name has half, rounded up."""
        for budget, part in ((Budget.PINNED, config.pin_fraction), (Budget.RAISED, config.retain_fraction)):
            most = int(part * side.shared.manager.capacity)
            used = {tenant: number for (tenant, of), number in _used(side.hints.grants).items() if of is budget}
            if sum(used.values()) > most:
                self.fail(f"{side.name}: {sum(used.values())} chunks are under {budget.value}, which allows {most}")
            for tenant, num_chunks in used.items():
                if tenant is not None and num_chunks > most - most // 2:
                    self.fail(f"{side.name}: {tenant} has {num_chunks} of the {most} chunks that {budget.value} allows")

    def _watch_hints(self, side: OffloadingScheduler) -> None:
        """Look at what each call changes. Not raised there: guards would catch that."""
        hints: Any = side.hints
        on_hints, note_used = hints.on_hints, hints.note_used

        def given(request: RequestView, given: Sequence[Hint]) -> list[HintOutcome]:
            before: Sequence[Grant] = list(hints.grants)
            used = _used(before)
            outcomes: list[HintOutcome] = on_hints(request, given)
            for grant in before:
                if not grant.is_over or grant.ends_at <= self._engine.clock() or grant.tenant == request.tenant:
                    continue
                if grant.is_lease or used[grant.tenant, grant.budget] <= used[request.tenant, grant.budget]:
                    self._found = f"a hint of {request.tenant} has ended one of {grant.tenant}, which had no more"
            if side in self._config:
                self._check_rights(self._config[side].allowed_to(request.tenant), request.tenant, given, outcomes)
            for grant in set(hints.grants).difference(before):
                self._check_range(side, request, grant)
            return outcomes

        def used(state: RequestState) -> None:
            ends = {grant: grant.ends_at for grant in hints.grants}
            note_used(state)
            for grant in hints.grants:
                if grant.ends_at != ends[grant] and grant.tenant != state.request.tenant:
                    self._found = f"a request of {state.request.tenant} has renewed a lease of {grant.tenant}"

        vars(hints).update(on_hints=given, note_used=used)

    def _check_rights(
        self, allowed: str, tenant: str | None, given: Sequence[Hint], outcomes: Sequence[HintOutcome]
    ) -> None:
        for hint, outcome in zip(given, outcomes, strict=False):
            takes_from_others = hint.kind in (HintKind.PIN, HintKind.PREFETCH, HintKind.SHARE)
            is_forbidden = allowed == HINTS_OFF or (allowed == HINTS_RETAIN and takes_from_others)
            if is_forbidden and outcome.status is not HintStatus.REJECTED:
                self._found = f"a {hint.kind} of {tenant} is {outcome.status}, who may give: {allowed}"

    def _check_range(self, side: OffloadingScheduler, request: RequestView, grant: Grant) -> None:
        """A grant covers whole chunks within its range; one that makes them worth more also those before it."""
        hint, layout = grant.hint, self._engine.layout
        allowed: set[OffloadKey] = set()
        for group in layout.groups:
            size = group.block_tokens * side.shared.config.blocks_per_chunk
            first = -(-hint.start // size) * size if hint.is_lowering else 0
            end = request.num_tokens if hint.end is None else hint.end
            ends = range(first + size, end + 1, size)
            hashes = request.block_hashes
            numbers = (at // layout.hash_block_tokens - 1 for at in ends)
            allowed.update(
                offload_key(hashes[number], group.index, side.shared.namespace)
                for number in numbers
                if number < len(hashes)
            )
        if not grant.keys.keys() <= allowed:
            self._found = f"hint {hint.action_id} covers chunks outside of tokens {hint.start} to {hint.end}"

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
                level = side.hints.grants.level_of(key)
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
    while isinstance(manager, FaultyManager):
        manager = manager.inner
    return manager if isinstance(manager, TierManager) else None


def _used(grants: Iterable[Grant]) -> Counter[tuple[str | None, Budget]]:
    """Return how many chunks grants cover, by tenant and budget."""
    used: Counter[tuple[str | None, Budget]] = Counter()
    for grant in grants:
        used[grant.tenant, grant.budget] += len(grant.keys)
    return used
