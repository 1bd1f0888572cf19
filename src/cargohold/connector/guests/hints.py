"""Hints: leases and priorities of chunks in host memory, their budgets, and their ends.

A *grant* is what a hint has led to: it gives chunks a level in the tier (see ``cargohold.cache.shares``) until its time is
over. Chunks of the hint's request that are not there yet get it when they come. Where grants meet on a chunk, a lease counts
most, then the newest. The ends of grants are in a heap, so a step looks at the first one only, and at nothing without hints.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import count
from math import inf
from typing import Final

from cargohold.blocks import READY
from cargohold.cache.manager import ChunkKeys, OffloadKey, OffloadManager
from cargohold.cache.retention import HELD, NO_RETENTION, NO_TENANT, NORMAL, Budget, Budgets, Ends, Retention
from cargohold.connector.config import HINTS_ALL, HINTS_OFF, OffloadConfig
from cargohold.connector.kernel.guest import ORDINARY, Admission, Guest, Worth
from cargohold.connector.kernel.jobs import Store
from cargohold.connector.kernel.requests import RequestState
from cargohold.protocol import (
    MAX_PRIORITY,
    BlockIds,
    Clock,
    Hint,
    HintEnd,
    HintEvent,
    HintKind,
    HintOutcome,
    HintStatus,
    Pin,
    RequestView,
    Stats,
    StepView,
    Tally,
    TransferOutcome,
    level_changes,
    metrics,
)
from cargohold.tiers.scheduler_side import Ahead, Prefetches

MAX_GRANTS: Final = 4096
"""Maximum number of grants in force; one tenant may have half of them."""
MAX_EVENTS: Final = 4096
"""Maximum number of events kept until they are taken; beyond it the oldest are forgotten."""
DEFAULT_PIN_S: Final = 300.0
"""Seconds that a lease without ``ttl_s`` lasts after each use."""
DEMOTED: Final = {"nowhere": 0, "lower": 10}
"""Levels of demoted chunks."""

_FREE = (HintKind.RETAIN, HintKind.DEMOTE, HintKind.RELEASE)
"""Kinds that clients may ask for who may not take what others could need."""


@dataclass(slots=True, eq=False)
class Grant:
    """What a hint has led to.

    Attributes:
        hint: the hint.
        tenant: who gave it.
        level: the level that its chunks get.
        ends_at: when it ends.
        ttl_s: by how long a use renews it, if it is a lease.
        number: in the order of hints.
        keys: the chunks that it covers, in the tier or not.
        num_tokens: number of leading tokens whose chunks it covers.
        alone: itself: what most of its chunks have.
        is_dropping: whether its chunks are worth nothing from now on: they leave host memory as soon as nothing needs them.
        is_told: whether it was told how the hint has ended.
        is_over: whether it has ended.
        told_until: until when it lasts as far as lower tiers know.
    """

    hint: Hint
    tenant: str | None
    level: int
    ends_at: float
    ttl_s: float
    number: int
    keys: dict[OffloadKey, None] = field(default_factory=dict)
    num_tokens: int = 0
    alone: tuple[Grant, ...] = field(init=False)
    is_dropping: bool = False
    is_told: bool = False
    is_over: bool = False
    told_until: float = field(init=False)

    def __post_init__(self) -> None:
        self.alone = (self,)
        self.told_until = self.ends_at

    @property
    def is_lease(self) -> bool:
        """Whether it is a lease."""
        return self.level == HELD

    @property
    def budget(self) -> Budget:
        """What it takes from others."""
        return Budget.of(self.level)

    def __lt__(self, other: Grant) -> bool:
        return self.number < other.number


class Hints(Guest):
    """Carries out hints in one tier.

    Args:
        config: options.
        manager: the manager of the tier; its chunks' levels are changed.
        new_keys: makes keys per group, of no chunks yet.
        clock: monotonic time in seconds.
        requests: the connector's requests, by id.

    Attributes:
        ahead: prefetches under way; ``None`` without lower tiers.
        on_retained: told of chunks for which hints ask something else now, for lower tiers.
        on_ask: told of a request's keys before its chunks are fetched for a hint.
        coming: tells which chunks are on their way into the tier.
    """

    name = "hints"

    def __init__(
        self,
        config: OffloadConfig,
        manager: OffloadManager,
        new_keys: Callable[[], tuple[ChunkKeys, ...]],
        clock: Clock,
        requests: Mapping[str, RequestState],
    ) -> None:
        self._config = config.hints
        self._manager = manager
        self._new_keys = new_keys
        self._clock = clock
        self._requests = requests
        # Leases leave to tenants what is reserved for them.
        num_reserved = sum(limits.reserved for limits in manager.quotas.values())
        capacity = manager.capacity
        self.budgets = Budgets(
            {
                Budget.PINNED: min(int(config.hints.pin_fraction * capacity), capacity - num_reserved),
                Budget.RAISED: int(config.hints.retain_fraction * capacity),
                Budget.LOWERED: capacity,
            }
        )
        self._numbers = count(1)
        self._grants: dict[int, Grant] = {}
        self._num_of: Counter[str | None] = Counter()
        self._ends = Ends[Grant]()
        self._leases: dict[tuple[str | None, str], Grant] = {}
        # By chunk: the grants that cover it, the oldest first.
        self._of: dict[OffloadKey, tuple[Grant, ...]] = {}
        self.ahead: Prefetches | None = None
        self.on_retained: Callable[[Iterable[OffloadKey]], None] = lambda _: None
        self.on_ask: Callable[[RequestView, Iterable[ChunkKeys]], None] = lambda _request, _keys: None
        self.coming: Callable[[Sequence[OffloadKey]], AbstractSet[OffloadKey]] = lambda _: frozenset()
        self._events: deque[HintEvent] = deque(maxlen=MAX_EVENTS)
        # What the hints of requests that have not ended have led to.
        self._of_request: dict[str, tuple[Grant, ...]] = {}
        self._stats = Tally()
        self._levels: Stats = {}

    def __bool__(self) -> bool:
        return bool(self._grants)

    @property
    def grants(self) -> Sequence[Grant]:
        """The grants in force: for inspection."""
        return list(self._grants.values())

    def level_of(self, key: OffloadKey) -> int:
        """Return the level that a chunk has, or gets when it comes."""
        grants = self._of.get(key)
        return NORMAL if grants is None else _counting(grants).level

    def retention_of(self, key: OffloadKey) -> Retention:
        """Return what lower tiers are asked for a chunk. To give back a place in host memory is nothing to them."""
        grants = [grant for grant in self._of.get(key, ()) if grant.hint.to != "lower"]
        if not grants or (grant := _counting(grants)).level == NORMAL:
            return NO_RETENTION
        ends_s = grant.ends_at - self._clock() if grant.level > NORMAL else inf
        return Retention(grant.level, ends_s, _digest_of(grant.tenant))

    def retentions_of(self, keys: Sequence[OffloadKey]) -> list[Retention]:
        """Return what lower tiers are asked for each of these chunks."""
        return list(map(self.retention_of, keys))

    @property
    def num_pinned(self) -> int:
        """Number of chunks that leases cover."""
        return self.budgets.num_used(Budget.PINNED)

    # --- hints --------------------------------------------------------------------------------------------------------

    def on_hints(self, request: RequestView, hints: Sequence[Hint]) -> list[HintOutcome]:
        """Carry out hints about a request, or about a prefix without one; return an outcome for each."""
        self.expire()
        return [self._carry_out(request, hint.within(request.num_prompt_tokens)) for hint in hints]

    def _carry_out(self, request: RequestView, hint: Hint) -> HintOutcome:
        refusal = self._refusal_of(hint, request.tenant)
        if refusal:
            return HintOutcome(hint.action_id, HintStatus.REJECTED, refusal)
        if hint.kind is HintKind.RELEASE:
            return self._release(request, hint)
        if hint.kind in (HintKind.PREFETCH, HintKind.SHARE):
            return self._prefetch(request, hint)
        return self._grant(request, hint)

    def _refusal_of(self, hint: Hint, tenant: str | None) -> str:
        """Return why a hint may not be carried out; empty if it may."""
        allowed = self._config.allowed_to(tenant)
        if allowed == HINTS_OFF or (allowed != HINTS_ALL and hint.kind not in _FREE):
            return f"this tenant may not give such hints (allow={allowed})"
        if not self._manager.takes_hints:
            return "the replacement policy keeps its own order of eviction"
        return ""

    def _grant(self, request: RequestView, hint: Hint) -> HintOutcome:
        state = self._requests.get(request.request_id)
        keys = self._keys_about(request)
        ttl_s, limits = self._ttl(hint)
        grant = Grant(hint, request.tenant, _level_of(hint), self._clock() + ttl_s, ttl_s, next(self._numbers))
        if not self.budgets.limit_of(grant.tenant, grant.budget):
            return HintOutcome(hint.action_id, HintStatus.REJECTED, "host memory is too small for it")
        if len(self._grants) >= MAX_GRANTS or self._num_of[grant.tenant] >= MAX_GRANTS // 2:
            return HintOutcome(hint.action_id, HintStatus.REJECTED, "too many hints are in force")
        is_renewal = hint.lease is not None and (grant.tenant, hint.lease) in self._leases
        if is_renewal:
            self._end(self._leases[grant.tenant, hint.lease or ""], HintEnd.RELEASED)
        in_range = _in_range(keys, hint)
        num_others = len(self._manager.others(in_range, grant.tenant))
        num_left = self._cover(grant, in_range, only_present=state is None)
        if num_others:
            limits.append(f"{num_others} chunks count for another tenant")
        if state is None and not grant.keys:
            if num_others:
                return HintOutcome(hint.action_id, HintStatus.MISSING, "; ".join(limits))
            if num_left:
                return HintOutcome(hint.action_id, HintStatus.CLIPPED, self._limit_reached(grant))
            return HintOutcome(hint.action_id, HintStatus.MISSING, "host memory has none of these chunks")
        self._begin(grant)
        if state is not None and not state.has_ended:
            self._of_request[request.request_id] = (*self._granted_to(request), grant)
        limits += [self._limit_reached(grant)] if num_left else []
        status = HintStatus.CLIPPED if limits else HintStatus.ACCEPTED
        grant.num_tokens = _num_covered(keys, grant.keys)
        if state is None or state.has_ended:
            self._drop(grant)
        return HintOutcome(hint.action_id, status, "; ".join(limits), grant.num_tokens)

    def _prefetch(self, request: RequestView, hint: Hint) -> HintOutcome:
        """Begin to bring chunks up, if there is anything to do; ``share`` also retains what is there already."""
        if self.ahead is None or not self.ahead.has_room(request.tenant):
            why = "there is no tier below host memory" if self.ahead is None else "too many prefetches are under way"
            return HintOutcome(hint.action_id, HintStatus.REJECTED, why)
        keys = self._keys_about(request)
        smallest = min([of_group.chunk_tokens for of_group in keys])
        num_whole = min([len(of_group.keys) * of_group.chunk_tokens for of_group in keys])
        num_tokens = num_whole if hint.end is None else min(num_whole, hint.end)
        if num_tokens < smallest:
            return HintOutcome(hint.action_id, HintStatus.MISSING, f"the prefix has no chunk of {smallest} tokens")
        if not self.ahead.lacks_any(keys, num_tokens) or self._are_coming(_in_range(keys, hint)):
            if hint.kind is HintKind.SHARE:
                return self._grant(request, hint)
            return HintOutcome(hint.action_id, HintStatus.ACCEPTED, "host memory has all of it", num_tokens)
        room = self.budgets.room(request.tenant, Budget.RAISED) // len(keys) * smallest
        if room < smallest:
            return HintOutcome(hint.action_id, HintStatus.REJECTED, "retain_fraction leaves no room for it")
        on_ask = partial(self.on_ask, request, keys)
        self.ahead.begin(hint, request.tenant, keys, min(num_tokens, room), on_ask)
        status = HintStatus.DEFERRED if num_tokens <= room else HintStatus.CLIPPED
        reason = "" if num_tokens <= room else f"retain_fraction leaves room for {room} tokens"
        return HintOutcome(hint.action_id, status, reason, min(num_tokens, room))

    def _are_coming(self, keys: Sequence[OffloadKey]) -> bool:
        """Whether those of the chunks that host memory lacks are all on their way into it."""
        lacking = [key for key, state in zip(keys, self._manager.lookup(keys), strict=True) if state != READY]
        return bool(lacking) and len(self.coming(lacking)) == len(set(lacking))

    def end_ahead(self, ahead: Ahead, how: HintEnd) -> None:
        """Learn that a prefetch has ended: what has come is retained, so that it is still there when it is needed."""
        hint, now = ahead.hint, self._clock()
        is_shared = hint.kind is HintKind.SHARE and how is HintEnd.DONE
        left_s = self._ttl(hint)[0] if is_shared else max(1.0, ahead.deadline - now)
        level = hint.priority if is_shared else MAX_PRIORITY
        if how is HintEnd.DONE and len(self._grants) < MAX_GRANTS:
            grant = Grant(hint, ahead.tenant, level, now + left_s, left_s, next(self._numbers))
            self._cover(grant, _in_range(ahead.wanted.keys, hint), only_present=True)
            grant.is_told = not is_shared
            if grant.keys:
                self._begin(grant)
                if is_shared:
                    return  # it ends with its time
        self._tell(hint, how, ahead.tenant)

    def _keys_about(self, request: RequestView) -> tuple[ChunkKeys, ...]:
        """Return the keys of the chunks that hints about a request, or a prefix without one, are about."""
        state = self._requests.get(request.request_id)
        if state is not None:
            state.extend_keys()
            return state.keys
        keys = self._new_keys()
        for of_group in keys:
            of_group.extend(request.block_hashes)
        return keys

    def _release(self, request: RequestView, hint: Hint) -> HintOutcome:
        """End a lease, or all grants of the tenant on a prefix."""
        if hint.lease is not None:
            named = self._leases.get((request.tenant, hint.lease))
            ended = [] if named is None else [named]
        else:
            keys = self._keys_about(request)
            covering = [self._of.get(key, ()) for key in _in_range(keys, hint)]
            found = {grant.number: grant for grants in covering for grant in grants}
            found |= {grant.number: grant for grant in self._granted_to(request) if not grant.is_over}
            ended = [grant for grant in found.values() if grant.tenant == request.tenant]
        for grant in ended:
            self._end(grant, HintEnd.RELEASED)
        if not ended:
            return HintOutcome(hint.action_id, HintStatus.MISSING, "there is nothing to release")
        return HintOutcome(hint.action_id, HintStatus.ACCEPTED)

    def _ttl(self, hint: Hint) -> tuple[float, list[str]]:
        """Return how long a grant lasts, and the limit that has made it shorter, if one has."""
        most = self._config.max_ttl_s
        if hint.ttl_s is None:
            return (min(most, DEFAULT_PIN_S) if hint.kind is HintKind.PIN else most), []
        if hint.ttl_s > most:
            return most, [f"it may last {most:g} s at most (max_ttl_s)"]
        return hint.ttl_s, []

    def _limit_reached(self, grant: Grant) -> str:
        most = self.budgets.limit_of(grant.tenant, grant.budget)
        return f"{grant.budget.value} leaves this tenant {most} chunks at most, and others may have some of them"

    # --- what it hears ------------------------------------------------------------------------------------------------

    def step_begins(self, step: StepView) -> None:
        """Go on with prefetches, behind the requests that the engine has asked for; end what is over."""
        if self.ahead:
            self.ahead.step()
        if self._grants:
            self.expire()

    def request_admitted(self, state: RequestState, admission: Admission) -> None:
        """See ``note_used``."""
        self.note_used(state)

    def request_ended(self, state: RequestState, block_ids: BlockIds) -> None:
        """Let its grants also cover what it has generated."""
        if state.request.request_id in self._of_request:
            self._note_ended(state)

    def store_ended(self, store: Store, since: float | None, outcome: TransferOutcome) -> None:
        """See ``note_stored``."""
        if outcome is TransferOutcome.DONE and not store.is_spoiled:
            self.note_stored(store.handle.keys)

    def worth(self, state: RequestState) -> Worth:
        """Return the highest level that a hint gives its chunks, and whether a lease covers them."""
        if state.request.request_id not in self._of_request:
            return ORDINARY
        grants = [grant for grant in self._granted_to(state.request) if not grant.is_over]
        return Worth(max([NORMAL, *(grant.level for grant in grants)]), any(grant.is_lease for grant in grants))

    def is_busy(self) -> bool:
        """Whether prefetches are under way."""
        return bool(self.ahead)

    def reset(self) -> None:
        """Forget all grants: the tier was reset."""
        self.void_all()

    def shutdown(self) -> None:
        """End leases and priorities: the manager may outlive the connector."""
        self.void_all()

    def take_stats(self, tier: str, chunk_bytes: int) -> Stats:
        """Return counters since the last call, and how the number of pinned chunks has changed since then."""
        stats, self._stats = self._stats, Tally()
        before, self._levels = (
            self._levels,
            {metrics.PINNED_CHUNKS: self.num_pinned, metrics.TIER_PINNED.of(tier): self.num_pinned * chunk_bytes},
        )
        return {**stats, **(level_changes(before, self._levels) if before != self._levels else {})}

    def _granted_to(self, request: RequestView) -> tuple[Grant, ...]:
        return self._of_request.get(request.request_id, ())

    # --- chunks come and are used -------------------------------------------------------------------------------------

    def note_stored(self, keys: Iterable[OffloadKey]) -> None:
        """Learn that chunks have come into the tier: those with grants get their levels.

        Grants of other tenants than the one for whom a chunk has come let go of it: they cannot hold it.
        """
        if not self._of:
            return
        covered = [key for key in keys if key in self._of]
        for grant in self._grants_on(covered) if self._manager.quotas else ():
            others = self._manager.others([key for key in covered if key in grant.keys], grant.tenant)
            for key in others:
                self._uncover(grant, key)
            self.on_retained(others)
        covered = [key for key in covered if key in self._of]
        self._rank(covered)
        for grant in self._grants_on(covered):
            if grant.is_dropping:
                self._drop(grant)

    def note_used(self, state: RequestState) -> None:
        """Learn that a request is admitted: it uses its chunks, which renews leases, and makes lowered chunks normal."""
        if not self._of:
            return
        used = [key for keys in state.keys for key in keys.keys if key in self._of]
        now, own = self._clock(), set(self._granted_to(state.request))
        for grant in self._grants_on(used):
            if grant.is_lease and grant.tenant == state.request.tenant:
                grant.ends_at = now + grant.ttl_s
                self._ends.set(grant, grant.ends_at)
                if grant.told_until - now < grant.ttl_s / 2:
                    grant.told_until = grant.ends_at
                    self.on_retained(grant.keys)
        lowered = [(key, grant) for key in used for grant in self._of[key] if grant.level < NORMAL and grant not in own]
        for of_somebody, grant in lowered:
            self._uncover(grant, of_somebody)
        if lowered:
            self.on_retained([key for key, _ in lowered])
        self._rank(used)  # some may have come from lower tiers

    def _note_ended(self, state: RequestState) -> None:
        for grant in self._of_request.pop(state.request.request_id):
            if not grant.is_over and grant.hint.end is None:
                keys = self._keys_about(state.request)
                self._cover(grant, _in_range(keys, grant.hint))
                grant.num_tokens = _num_covered(keys, grant.keys)
            if not grant.is_over:
                self._drop(grant)

    # --- time ---------------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """End what is over by now. To be called once a step."""
        for grant in self._ends.take_ended(self._clock()):
            has_some = READY in self._manager.lookup(list(grant.keys))
            self._end(grant, HintEnd.EXPIRED if has_some else HintEnd.VOID)

    def void_all(self) -> None:
        """Forget all grants: the tier was reset, or its connector ends. On disks, what they were told lasts for its time."""
        if self.ahead is not None:
            self.ahead.end_all()
        for grant in list(self._grants.values()):
            self._end(grant, HintEnd.VOID, tells_tiers=False)

    def take_events(self) -> list[HintEvent]:
        """Return the events since the last call."""
        events = list(self._events)
        self._events.clear()
        return events

    def pins(self) -> list[Pin]:
        """Return the leases in force, the one that ends first in front."""
        now = self._clock()
        pins = [
            Pin(grant.hint.lease, grant.tenant, len(grant.keys), grant.num_tokens, grant.ends_at - now)
            for grant in self._grants.values()
            if grant.is_lease and grant.ends_at > now
        ]
        return sorted(pins, key=lambda pin: pin.left_s)

    def check(self) -> None:
        """Verify every invariant. Raises ``AssertionError``."""
        assert all(not grant.is_over for grant in self._grants.values()), "a grant that is over is in force"
        for budget in Budget:
            grants = [grant for grant in self._grants.values() if grant.budget is budget]
            num_used = sum(len(grant.keys) for grant in grants)
            assert num_used == self.budgets.num_used(budget), "a budget is counted wrongly"
            for tenant in {grant.tenant for grant in grants}:
                own = sum(len(grant.keys) for grant in grants if grant.tenant == tenant)
                assert own <= self.budgets.limit_of(tenant, budget), f"{tenant} has more than its part of a budget"
        covered: dict[OffloadKey, set[Grant]] = {}
        for grant in self._grants.values():
            for key in grant.keys:
                covered.setdefault(key, set()).add(grant)
        assert covered == {key: set(grants) for key, grants in self._of.items()}, (
            "a chunk has grants that are not in force"
        )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _begin(self, grant: Grant) -> None:
        self._grants[grant.number] = grant
        self._num_of[grant.tenant] += 1
        self._ends.set(grant, grant.ends_at)
        if grant.hint.lease is not None:
            self._leases[grant.tenant, grant.hint.lease] = grant

    def _end(self, grant: Grant, how: HintEnd, *, tells_tiers: bool = True) -> None:
        grant.is_over = True
        self._ends.forget(grant)
        del self._grants[grant.number]
        self._num_of[grant.tenant] -= 1
        if not self._num_of[grant.tenant]:
            del self._num_of[grant.tenant]
        if grant.hint.lease is not None:
            del self._leases[grant.tenant, grant.hint.lease]
        keys = list(grant.keys)
        for key in keys:
            self._uncover(grant, key)
        self._rank(keys)
        if tells_tiers:
            # What lower tiers were told of a lease or a raised priority ends by itself.
            ends_alone = how is HintEnd.EXPIRED and grant.level > NORMAL
            self.on_retained([key for key in keys if key in self._of] if ends_alone else keys)
        if not grant.is_told:
            self._tell(grant.hint, how, grant.tenant)

    def _tell(self, hint: Hint, how: HintEnd, tenant: str | None) -> None:
        self._stats[metrics.HINTS.of(how.value)] += 1
        self._events.append(HintEvent(hint.action_id, hint.kind, how, tenant))

    def _cover(self, grant: Grant, keys: Sequence[OffloadKey], *, only_present: bool = False) -> int:
        """Let a grant cover chunks, as far as its budget goes; return how many it cannot cover.

        Chunks that are not there get the level when they come. With ``only_present``, those are left out that are not on their
        way. Chunks that count for another tenant are not covered.
        """
        others = set(self._manager.others(keys, grant.tenant))
        new = [key for key in keys if key not in grant.keys and key not in others]
        if only_present:
            states = self._manager.lookup(new)
            coming = frozenset() if states.count(READY) == len(new) else self.coming(new)
            new = [key for key, state in zip(new, states, strict=True) if state == READY or key in coming]
        covered = new[: self.budgets.room(grant.tenant, grant.budget)]
        self.budgets.take(grant.tenant, grant.budget, len(covered))
        grant.keys.update(dict.fromkeys(covered))
        for key in covered:
            before = self._of.get(key)
            self._of[key] = grant.alone if before is None else (*before, grant)
        self._rank(covered)
        self.on_retained(covered)
        return len(new) - len(covered)

    def _grants_on(self, keys: Sequence[OffloadKey]) -> list[Grant]:
        """Return the grants that cover some of these chunks, each once."""
        return list(dict.fromkeys(grant for key in keys for grant in self._of[key]))

    def _drop(self, grant: Grant) -> None:
        """Let chunks that are worth nothing leave host memory, if that is what the hint asks for; tell when none is left.

        What is in use stays, what other chunks continue, and what others have hints on; these are evicted first.
        """
        if grant.hint.kind is not HintKind.DEMOTE or grant.hint.to != "nowhere":
            return
        grant.is_dropping = True
        mine = [key for key in grant.keys if all(other.tenant == grant.tenant for other in self._of[key])]
        self._manager.drop([key for key in mine if _counting(self._of[key]) is grant], grant.tenant)
        keys = list(grant.keys)
        if not grant.is_told and READY not in self._manager.lookup(keys) and not self.coming(keys):
            grant.is_told = True
            self._tell(grant.hint, HintEnd.DONE, grant.tenant)

    def _uncover(self, grant: Grant, key: OffloadKey) -> None:
        """Let a grant cover a chunk no more."""
        del grant.keys[key]
        self.budgets.take(grant.tenant, grant.budget, -1)
        left = tuple(other for other in self._of[key] if other is not grant)
        if left:
            self._of[key] = left
        else:
            del self._of[key]

    def _rank(self, keys: Sequence[OffloadKey]) -> None:
        """Give chunks the levels that follow from their grants."""
        by_level: dict[tuple[int, str | None], list[OffloadKey]] = {}
        for key in keys:
            grants = self._of.get(key)
            if grants is None:
                by_level.setdefault((NORMAL, None), []).append(key)
            else:
                grant = _counting(grants)
                by_level.setdefault((grant.level, grant.tenant), []).append(key)
        for (level, tenant), same in by_level.items():
            self._manager.rank(same, level, tenant)


def _counting(grants: Sequence[Grant]) -> Grant:
    """Return the grant that counts where several meet: a lease, or else the newest."""
    return next((grant for grant in grants if grant.is_lease), grants[-1])


def _digest_of(tenant: str | None) -> bytes:
    """Return the 8 bytes that stand for a tenant in lower tiers."""
    return NO_TENANT if tenant is None else blake2b(tenant.encode(), digest_size=len(NO_TENANT)).digest()


def _level_of(hint: Hint) -> int:
    if hint.kind is HintKind.PIN:
        return HELD
    return DEMOTED[hint.to or "lower"] if hint.kind is HintKind.DEMOTE else hint.priority


def _in_range(keys: Sequence[ChunkKeys], hint: Hint) -> list[OffloadKey]:
    """Return the chunks that a hint is about. What makes chunks worth more is also about all chunks before them.

    Of a window, only the chunks that the end of the range needs are kept, so only they count.
    """
    found: list[OffloadKey] = []
    for of_group in keys:
        size = of_group.chunk_tokens
        end = len(of_group.keys) if hint.end is None else min(len(of_group.keys), hint.end // size)
        first = of_group.group.num_skipped_tokens(end * size) // size
        if hint.is_lowering or hint.kind is HintKind.RELEASE:
            first = max(first, -(-hint.start // size))
        found += of_group.keys[first:end]
    return found


def _num_covered(keys: Sequence[ChunkKeys], covered: Mapping[OffloadKey, None]) -> int:
    """Return up to which token chunks of any group are covered."""
    ends = (
        max((at + 1 for at, key in enumerate(of_group.keys) if key in covered), default=0) * of_group.chunk_tokens
        for of_group in keys
    )
    return max(ends, default=0)
