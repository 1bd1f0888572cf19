"""Hints: how each is answered, what it leads to, and what becomes of that as chunks come, are used and end.

A hint leads to a *grant* (see ``cargohold.cache.grants``), which covers chunks until its time is over, or to a prefetch, which
ends with one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from cargohold.blocks import READY
from cargohold.cache.grants import MAX_GRANTS, Grant, Grants, counting
from cargohold.cache.manager import ChunkKeys, OffloadKey, OffloadManager
from cargohold.cache.retention import HELD, NORMAL, Budget, Budgets
from cargohold.connector.config import HINTS_ALL, HINTS_OFF, OffloadConfig
from cargohold.connector.kernel.guest import ORDINARY, AdmissionReport, Guest, Worth
from cargohold.connector.kernel.jobs import Store
from cargohold.connector.kernel.requests import Offer, RequestState
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

MAX_EVENTS: Final = 4096
"""Maximum number of events kept until they are taken; beyond it the oldest are forgotten."""
DEFAULT_PIN_S: Final = 300.0
"""Seconds that a lease without ``ttl_s`` lasts after each use."""
DEMOTED: Final = {"nowhere": 0, "lower": 10}
"""Levels of demoted chunks."""

_FREE = (HintKind.RETAIN, HintKind.DEMOTE, HintKind.RELEASE)
"""Kinds for clients that may not take what others could need."""


class Hints(Guest):
    """Carries out hints in one tier.

    Args:
        config: options.
        manager: the manager of the tier; its chunks' levels are changed.
        new_keys: makes keys per group, of no chunks yet.
        clock: monotonic time in seconds.
        requests: the connector's requests, by id.

    Attributes:
        grants: the grants in force.
        ahead: prefetches under way; ``None`` without lower tiers.
        on_ask: called with a request's keys before its chunks are fetched for a hint.
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
        limits = {
            Budget.PINNED: min(int(config.hints.pin_fraction * capacity), capacity - num_reserved),
            Budget.RAISED: int(config.hints.retain_fraction * capacity),
            Budget.LOWERED: capacity,
        }
        self.grants = Grants(manager, Budgets(limits), clock)
        self.grants.on_displaced = lambda grant: self._end(grant, HintEnd.RELEASED)
        self.ahead: Prefetches | None = None
        self.on_ask: Callable[[RequestView, Iterable[ChunkKeys]], None] = lambda _request, _keys: None
        self._events: deque[HintEvent] = deque(maxlen=MAX_EVENTS)
        # What the hints of requests that have not ended have led to.
        self._of_request: dict[str, tuple[Grant, ...]] = {}
        self._stats = Tally()
        self._levels: Stats = {}

    @property
    def num_pinned(self) -> int:
        """Number of chunks that leases cover."""
        return self.grants.budgets.num_used(Budget.PINNED)

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
            return f"this tenant may not send such hints (allow={allowed})"
        if not self._manager.takes_hints:
            return "the replacement policy has no priorities"
        return ""

    def _grant(self, request: RequestView, hint: Hint) -> HintOutcome:
        state = self._requests.get(request.request_id)
        keys = self._keys_about(request)
        ttl_s, limits = self._ttl(hint)
        grant = self.grants.make(hint, request.tenant, _level_of(hint), self._clock(), ttl_s)
        if not self.grants.budgets.limit_of(grant.tenant, grant.budget):
            return HintOutcome(hint.action_id, HintStatus.REJECTED, "host memory is too small for it")
        if not self.grants.has_room_for(grant.tenant):
            return HintOutcome(hint.action_id, HintStatus.REJECTED, "too many hints are active")
        former = self.grants.lease(grant.tenant, hint.lease)
        if former is not None:
            self._end(former, HintEnd.RELEASED)
        in_range = _in_range(keys, hint)
        num_others = len(self._manager.others(in_range, grant.tenant))
        num_left = self.grants.cover(grant, in_range, only_present=state is None)
        if num_others:
            limits.append(f"{num_others} chunks count for another tenant")
        if state is None and not grant.keys:
            if num_others:
                return HintOutcome(hint.action_id, HintStatus.MISSING, "; ".join(limits))
            if num_left:
                return HintOutcome(hint.action_id, HintStatus.CLIPPED, self._limit_reached(grant))
            return HintOutcome(hint.action_id, HintStatus.MISSING, "host memory has none of these chunks")
        self.grants.begin(grant)
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
            why = "there is no tier below host memory" if self.ahead is None else "too many prefetches are in flight"
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
        room = self.grants.budgets.limit_of(request.tenant, Budget.RAISED) // len(keys) * smallest
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
        return bool(lacking) and len(self.grants.coming(lacking)) == len(set(lacking))

    def end_ahead(self, ahead: Ahead, how: HintEnd) -> None:
        """Note that a prefetch has ended: what has come is retained, so that it is still there when it is needed."""
        hint, now = ahead.hint, self._clock()
        is_shared = hint.kind is HintKind.SHARE and how is HintEnd.DONE
        left_s = self._ttl(hint)[0] if is_shared else max(1.0, ahead.deadline - now)
        level = hint.priority if is_shared else MAX_PRIORITY
        if how is HintEnd.DONE and len(self.grants) < MAX_GRANTS:
            grant = self.grants.make(hint, ahead.tenant, level, now, left_s)
            self.grants.cover(grant, _in_range(ahead.wanted.keys, hint), only_present=True)
            grant.is_told = not is_shared
            if grant.keys:
                self.grants.begin(grant)
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
            named = self.grants.lease(request.tenant, hint.lease)
            ended = [] if named is None else [named]
        else:
            keys = self._keys_about(request)
            own = [grant for grant in self._granted_to(request) if not grant.is_over]
            found = dict.fromkeys([*self.grants.on(_in_range(keys, hint)), *own])
            ended = [grant for grant in found if grant.tenant == request.tenant]
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
        most = self.grants.budgets.limit_of(grant.tenant, grant.budget)
        return f"{grant.budget.value} leaves this tenant {most} chunks at most, and others may have some of them"

    # --- what it hears ------------------------------------------------------------------------------------------------

    def step_begins(self, step: StepView) -> None:
        """Go on with prefetches, after the requests that the engine has asked for; end what is over."""
        if self.ahead:
            self.ahead.step()
        if self.grants.in_force:
            self.expire()

    def request_admitted(self, state: RequestState, admission: AdmissionReport) -> None:
        """See ``note_used``."""
        self.note_used(state)

    def request_ended(self, state: RequestState, block_ids: BlockIds) -> None:
        """Let its grants also cover what it has generated."""
        if state.request.request_id in self._of_request:
            self._note_ended(state)

    def chunks_listed(self, offers: Sequence[Offer]) -> None:
        for offer in offers:
            self.note_stored(offer.keys)

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
        """Note that chunks have come into the tier: those with grants get their levels.

        Grants of other tenants than the one that a chunk was fetched for release it: they cannot hold it.
        """
        grants = self.grants
        if not grants.covered:
            return
        covered = [key for key in keys if grants.of(key)]
        for grant in grants.on(covered) if self._manager.quotas else ():
            others = self._manager.others([key for key in covered if key in grant.keys], grant.tenant)
            for key in others:
                grants.uncover(grant, key)
            grants.on_retained(others)
        covered = [key for key in covered if grants.of(key)]
        grants.rank(covered)
        for grant in grants.on(covered):
            if grant.is_dropping:
                self._drop(grant)

    def note_used(self, state: RequestState) -> None:
        """Note that a request is admitted: it uses its chunks, which renews leases, and makes lowered chunks normal."""
        grants = self.grants
        if not grants.covered:
            return
        used = [key for keys in state.keys for key in keys.keys if grants.of(key)]
        now, own = self._clock(), set(self._granted_to(state.request))
        for grant in grants.on(used):
            if grant.is_lease and grant.tenant == state.request.tenant:
                grants.renew(grant, now)
        lowered = [
            (key, grant) for key in used for grant in grants.of(key) if grant.level < NORMAL and grant not in own
        ]
        for of_somebody, grant in lowered:
            grants.uncover(grant, of_somebody)
        if lowered:
            grants.on_retained([key for key, _ in lowered])
        grants.rank(used)  # some may have come from lower tiers

    def _note_ended(self, state: RequestState) -> None:
        for grant in self._of_request.pop(state.request.request_id):
            if not grant.is_over and grant.hint.end is None:
                keys = self._keys_about(state.request)
                self.grants.cover(grant, _in_range(keys, grant.hint))
                grant.num_tokens = _num_covered(keys, grant.keys)
            if not grant.is_over:
                self._drop(grant)

    # --- time ---------------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """End what is over by now. To be called once a step."""
        for grant in self.grants.take_ended():
            keys = list(grant.keys)
            has_some = READY in self._manager.lookup(keys) or bool(self.grants.coming(keys))
            self._end(grant, HintEnd.EXPIRED if has_some else HintEnd.VOID)

    def void_all(self) -> None:
        """Forget all grants: the tier was reset, or its connector ends. On disks, retentions last for their time."""
        if self.ahead is not None:
            self.ahead.end_all()
        for grant in self.grants:
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
            for grant in self.grants
            if grant.is_lease and grant.ends_at > now
        ]
        return sorted(pins, key=lambda pin: pin.left_s)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _end(self, grant: Grant, how: HintEnd, *, tells_tiers: bool = True) -> None:
        keys = self.grants.end(grant)
        if tells_tiers:
            # A lease or a raised priority in lower tiers ends by itself.
            ends_alone = how is HintEnd.EXPIRED and grant.level > NORMAL
            self.grants.on_retained([key for key in keys if self.grants.of(key)] if ends_alone else keys)
        if not grant.is_told:
            self._tell(grant.hint, how, grant.tenant)

    def _tell(self, hint: Hint, how: HintEnd, tenant: str | None) -> None:
        self._stats[metrics.HINTS.of(how.value)] += 1
        self._events.append(HintEvent(hint.action_id, hint.kind, how, tenant))

    def _drop(self, grant: Grant) -> None:
        """Let chunks that are worth nothing leave host memory, if that is what the hint asks for; tell when none is left.

        What is in use stays, what other chunks continue, and what others have hints on; these are evicted first.
        """
        if grant.hint.kind is not HintKind.DEMOTE or grant.hint.to != "nowhere":
            return
        grant.is_dropping = True
        mine = [key for key in grant.keys if all(other.tenant == grant.tenant for other in self.grants.of(key))]
        self._manager.drop([key for key in mine if counting(self.grants.of(key)) is grant], grant.tenant)
        keys = list(grant.keys)
        if not grant.is_told and READY not in self._manager.lookup(keys) and not self.grants.coming(keys):
            grant.is_told = True
            self._tell(grant.hint, HintEnd.DONE, grant.tenant)


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
