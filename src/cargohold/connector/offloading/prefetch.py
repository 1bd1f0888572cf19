"""Prefetching: the chunks of waiting requests are fetched from lower tiers before the requests are looked up in host memory.

::

    ASK ----> ask the tiers about what host memory does not have
     |          | all have answered
     |          v
     |        how much is it worth while to fetch? --nothing--> OVER: host memory's answer counts
     v          | some leading chunks
    BRING --> reserve slots, fetch these chunks, hold those that host memory has
     |          | all have arrived or failed
     v          v
    HELD ---> host memory's answer counts, with the chunks held until the request is admitted

A look-up only reads: it notes what it wants, and the answer is "not yet" (``Prefetcher.must_wait``). What reserves slots, asks
a tier or begins a load happens once per step, in ``build_connector_meta``, for the requests that asked since the last step,
in their order (``Prefetcher.act``).

If the request is not admitted for long, its chunks are not held any more, and it begins anew when the engine asks for it.
Requests that wait do not hold more than half of host memory together. Further ones stand in line, and fetch their chunks when
those before them are admitted.

Chunks that another engine has announced (``Handoff``) may still be on their way to a tier. The request asks for them again and
again, less often the longer it has waited, as long as there is time for questions.

A deadline ends the wait at every point, in time in which the engine steps: chunks that have not come by then are computed.
It is twice the time that computing is expected to take, where that is known, and at most ``restore_timeout_s``. While the
engine has no place for the request, its deadline is put off: the request would have to wait anyway. Half of the time is for
look-ups, and half for loads: what is not known by then to be there counts as absent. A request whose look-ups or loads try
whether a tier works again that was suspended waits for one step only, or it would pay for the trial.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from cargohold.blocks import READY, GroupUnits, PrefixHit, longest_hit
from cargohold.cache.manager import OffloadKey, OffloadManager
from cargohold.connector.offloading.jobs import Origins
from cargohold.connector.offloading.prefetch_plan import (
    StepPace,
    chains_to_fetch,
    needed_keys,
    num_tokens_in_time,
    soonest,
    sources_per_token,
)
from cargohold.connector.offloading.requests import RequestState
from cargohold.connector.offloading.states import DeepStates, HostStates
from cargohold.connector.offloading.waiting import Event, Phase, Plan, Waiting, Wish
from cargohold.tiers.port import Access
from cargohold.tiers.scheduler_side import Chain, LowerTiers

MAX_COMPUTE_RATIO = 2.0
"""A request waits for lower tiers for at most this many times the time that computing takes."""
MAX_TIMEOUT_PART = 0.5
"""Part of ``restore_timeout_s`` that a load may take by its estimate, because estimates err."""
_NOT_ENOUGH_TIME = "there was not enough time to learn from {} whether it has more chunks"
MIN_POLL_S = 0.005
"""Seconds until a request looks again for announced chunks; later, a part of the time that it has waited already."""
POLL_PART = 0.2
LOOK_AGAIN_S = 0.02
"""Seconds until a request that waits for slots or for other requests' chunks looks again whether it can have them."""


class Prefetcher:
    """Decides which chunks to fetch from lower tiers, for each waiting request.

    Args:
        host: the manager of host memory.
        lower: the tiers below host memory.
        pace: predicts how long computing takes; ``None`` to fetch all chunks of a hit, even if computing may be faster.
        max_num_seqs: maximum number of requests that run at the same time; ``None`` if that is not known.
    """

    def __init__(
        self, host: OffloadManager, lower: LowerTiers, pace: StepPace | None, max_num_seqs: int | None
    ) -> None:
        self._host = host
        self._lower = lower
        self._clock = lower.clock
        self._pace = pace
        self._max_num_seqs = max_num_seqs
        # How many requests the engine can admit before the next step, and how many it has asked for.
        self._num_places = max_num_seqs
        self._num_asked = 0
        # Requests that wait, those of them that the engine has asked for since the last step, and those that wait for slots in
        # host memory: first come, first served.
        self._live: list[tuple[RequestState, Waiting]] = []
        self._asked: list[tuple[RequestState, Waiting]] = []
        self._line: list[Waiting] = []
        # Within one call time stands still: what was compared with a deadline is not compared with a later time behind it.
        self._now = self._last_step = self._clock()
        self._num_steps = 0
        self._num_sizes = 0

    # --- look-ups: they read, and change nothing but their request's own record ---------------------------------------

    def must_wait(self, state: RequestState, num_computed_tokens: int, limit_tokens: int) -> bool:
        """Whether a request that the engine asks for waits for lower tiers: whether the answer is still "not yet".

        Mutates nothing but ``state``. To be called for every look-up, before host memory is looked at.

        Args:
            state: the request.
            num_computed_tokens: leading tokens that are on the device.
            limit_tokens: maximum length in tokens of a hit, computed tokens included.
        """
        self._num_asked += 1
        waiting = state.waiting
        if waiting is None:
            return False
        waiting.asked_in, waiting.has_place = self._num_steps, self._has_place
        if waiting.has_expired:
            state.notes.append("the engine had no place for the request for so long that lower tiers were asked anew")
            state.waiting = None
            return False
        if waiting.must_wait():
            waiting.note_asked(num_computed_tokens, limit_tokens)
            if waiting.has_arrived:
                waiting.go(Event.ARRIVED)
            elif self._clock() >= waiting.deadline:
                state.notes.append(waiting.excuse_now)
                waiting.go(Event.LATE)
            else:
                self._asked.append((state, waiting))
        return waiting.must_wait()

    def begins_to_wait(
        self, state: RequestState, num_computed_tokens: int, limit_tokens: int, num_host_tokens: int
    ) -> bool:
        """Let a request that does not wait begin to, if lower tiers may have more than host memory.

        Mutates nothing but ``state``.

        Args:
            state: the request.
            num_computed_tokens: leading tokens that are on the device.
            limit_tokens: maximum length in tokens of a hit, computed tokens included.
            num_host_tokens: leading tokens that are on the device or in host memory.
        """
        if state.waiting is not None or limit_tokens - num_host_tokens < state.chunk_tokens:
            return False
        now, timeout_s = self._clock(), self._lower.config.restore_timeout_s
        waiting = state.waiting = Waiting(
            begun_at=now,
            deadline=now + timeout_s,
            excuse=f"lower tiers took longer than {timeout_s:g} s",
            asked_in=self._num_steps,
            has_place=self._has_place,
            max_tokens=int(self._lower.max_look_up / sum([1 / keys.chunk_tokens for keys in state.keys])),
            num_announced=0 if state.params.handoff is None else state.params.handoff.num_tokens,
        )
        waiting.note_asked(num_computed_tokens, limit_tokens)
        state.notes += [tier.trouble for tier in self._lower.tiers if tier.trouble]
        if not self._lower.is_readable:
            waiting.go(Event.NOTHING)
        else:
            self._live.append((state, waiting))
            self._asked.append((state, waiting))
        return waiting.must_wait()

    @property
    def _has_place(self) -> bool:
        """Whether the engine could admit the request that it asks for now."""
        return self._num_places is None or self._num_asked <= self._num_places

    # --- effects: once per step --------------------------------------------------------------------------------------

    def act(self) -> None:
        """Do what the requests need that the engine has asked for since the last step, in their order.

        Asks tiers, reserves slots, begins loads. Mutates host memory, lower tiers and the requests.
        """
        asked, self._asked = self._asked, []
        self._now = self._clock()
        for state, waiting in asked:
            if state.waiting is waiting and waiting.must_wait() and waiting.fetch is None:
                self._advance(state, waiting)
            if waiting.must_wait() and not waiting.is_limited:
                waiting.is_limited = self._limit_wait(state, waiting, waiting.limit_tokens)

    def note_answered(self) -> None:
        """Learn that jobs have ended: requests whose questions are answered need not wait if there is nothing for them.

        Mutates these requests. They keep what they want, for ``act``.
        """
        self._now = self._clock()
        for state, waiting in self._live:
            is_answered = waiting.phase is Phase.ASK and waiting.probes and waiting.is_answered
            if is_answered and state.waiting is waiting and waiting.asked_in == self._num_steps - 1:
                self._wish(state, waiting)

    def _advance(self, state: RequestState, waiting: Waiting) -> None:
        """Do what one request needs, if it is time."""
        if waiting.is_in_line:
            is_time = self._is_turn(waiting)
        else:
            if self._now >= waiting.ask_until:
                self._stop_asking(state, waiting)
            is_time = waiting.is_answered if waiting.probes else self._now >= waiting.look_at
        if not is_time:
            return
        if waiting.num_announced and not waiting.probes and waiting.phase is Phase.ASK:
            self._look_for_announced(state, waiting)
        # Requests before it may have changed what host memory has.
        if waiting.wish is None or waiting.wish.version != self._host.generation:
            self._wish(state, waiting)
        wish, waiting.wish = waiting.wish, None
        if wish is None:
            return
        if wish.plan is None:
            self._ask(waiting, wish.unknown)
        else:
            self._fetch(state, waiting, wish.plan)

    def _wish(self, state: RequestState, waiting: Waiting) -> None:
        """Note what a request wants now: to ask tiers, or to fetch what they have. It waits no more if that does not pay."""
        for answered in waiting.probes:
            waiting.num_found[answered.tier] += answered.num_found
        waiting.probes, waiting.wish = (), None
        unknown: list[OffloadKey] = []
        hit = self._deep_hit(state, waiting, waiting.limit_tokens, unknown)
        if self._skip_slow(state, waiting, len(unknown)):
            unknown.clear()
            hit = self._deep_hit(state, waiting, waiting.limit_tokens, unknown)
        if self._is_to_come(state, waiting, hit):
            return
        if hit.undecided:
            waiting.wish = Wish(list(dict.fromkeys(unknown)), None, self._host.generation)
            return
        plan = self._worth_while(state, waiting, hit.num_tokens)
        if plan.chains:
            waiting.wish = Wish((), plan, self._host.generation)
        else:
            waiting.go(Event.NOTHING)

    def _look_for_announced(self, state: RequestState, waiting: Waiting) -> None:
        """Forget that announced chunks were not there when a tier was asked last: they may have come since."""
        handoff = state.params.handoff
        assert handoff is not None, "announced by nobody"
        difference = handoff.difference(self._lower.namespace)
        if difference:
            state.notes.append(
                f"what was announced was computed by an engine that differs in its {difference}, so it cannot be used here"
            )
            waiting.num_announced = 0
            return
        for keys in state.keys:
            announced = keys.keys[: waiting.num_announced // keys.chunk_tokens]
            self._lower.forget_absent(announced)

    def _is_to_come(self, state: RequestState, waiting: Waiting, hit: PrefixHit) -> bool:
        """Whether to look again soon, because announced chunks have not come yet and there is time to wait for them."""
        if waiting.phase is not Phase.ASK or hit.undecided or not self._lower.is_readable:
            return False
        chunk_tokens = max([keys.chunk_tokens for keys in state.keys])
        if not waiting.misses_announced(hit.num_tokens, chunk_tokens) or self._now >= waiting.ask_until:
            return False
        waiting.look_at = self._now + max(MIN_POLL_S, POLL_PART * (self._now - waiting.begun_at))
        return True

    def _ask(self, waiting: Waiting, unknown: Sequence[OffloadKey]) -> None:
        """Ask the tiers for chunks of which it is not known whether they are there."""
        waiting.probes = self._lower.probe(
            unknown, skipped=waiting.skipped, num_found=waiting.num_found, within_s=self._asking_s(waiting)
        )
        if not waiting.probes:
            waiting.look_at = self._now + LOOK_AGAIN_S
        self._limit_trial(waiting, {probe.tier for probe in waiting.probes}, Access.LOOK_UP)

    def _fetch(self, state: RequestState, waiting: Waiting, plan: Plan) -> None:
        """Reserve slots and begin to load, or stand in line for slots."""
        fetch = None
        if self._is_first_in_line(waiting) and self._lower.may_hold_more:
            needed = needed_keys(state, waiting.num_computed_tokens, plan.num_tokens)
            kept = [key for key, at in zip(needed, self._host.lookup(needed), strict=True) if at == READY]
            fetch = self._lower.fetch(plan.chains, kept)
        if waiting.phase is Phase.ASK:
            waiting.go(Event.FOUND)
            if fetch is None:
                self._line.append(waiting)
        waiting.fetch = fetch
        if fetch is None:
            waiting.look_at = self._now + LOOK_AGAIN_S
        elif not fetch.num_running:
            state.notes.append("the request's own chunks fill host memory: there was no room for more from lower tiers")
            waiting.go(Event.ARRIVED)
        else:
            waiting.is_limited = self._limit_wait(state, waiting, plan.num_tokens)
            self._limit_trial(waiting, plan.first_tokens, Access.LOAD)

    def note_step(self, num_running: int) -> None:
        """Learn that a step was scheduled for ``num_running`` requests; put off the deadlines of those that had no place in it.

        The engine has not asked for them since the last step, or has asked for as many before them as it has places for. So
        they have not spent the time since then waiting for lower tiers. Those that were late release what they held.
        """
        now = self._now = self._clock()
        live, self._live = self._live, []
        for state, waiting in live:
            if state.waiting is not waiting:
                continue
            if not waiting.must_wait():
                if waiting.phase is Phase.OVER:
                    waiting.release()
                continue
            self._live.append((state, waiting))
            if waiting.asked_in != self._num_steps or not waiting.has_place:
                waiting.put_off(now - max(self._last_step, waiting.begun_at))
        waits = {id(waiting) for _, waiting in self._live}
        self._line = [waiting for waiting in self._line if waiting.is_in_line and id(waiting) in waits]
        self._last_step = now
        self._num_steps += 1
        self._num_asked = 0
        if self._max_num_seqs is not None:
            self._num_places = max(1, self._max_num_seqs - num_running)  # without any, it would not ask
        self._note_pace()

    def _note_pace(self) -> None:
        """Limit the waits that began before it was known how long computing takes, once it is."""
        if self._pace is None or self._pace.num_sizes <= self._num_sizes:
            return
        self._num_sizes = self._pace.num_sizes
        for state, waiting in self._live:
            if not waiting.is_limited:
                waiting.is_limited = self._limit_wait(state, waiting, waiting.limit_tokens)

    # --- the line for slots in host memory ----------------------------------------------------------------------------

    def _is_turn(self, waiting: Waiting) -> bool:
        """Whether a request in line is to look now whether it can have slots."""
        return waiting.is_answered and self._now >= waiting.look_at and self._is_first_in_line(waiting)

    def _is_first_in_line(self, waiting: Waiting) -> bool:
        """Whether no other request that the engine could admit now waits for slots in host memory since longer ago.

        Looking for slots takes time, the more the longer a prompt is. So only the first in line looks.
        """
        others = (other for other in self._line if other.is_in_line and other.asked_in == self._num_steps)
        return next(others, waiting) is waiting

    # --- how long to wait ---------------------------------------------------------------------------------------------

    def _limit_wait(self, state: RequestState, waiting: Waiting, num_tokens: int) -> bool:
        """Let a request wait from now on for no more than twice the time that computing takes.

        What a tier did lately says nothing of what it does when it hangs: until its jobs count as failed, each request would
        wait for ``restore_timeout_s``, even if it can be computed in a moment.

        Returns:
            Whether that time is known.
        """
        compute_s = self._compute_s(state, waiting.num_computed_tokens, num_tokens)
        if compute_s is None:
            return False
        limit_s = MAX_COMPUTE_RATIO * compute_s
        excuse = f"lower tiers took longer than {limit_s:.3g} s, and computing is expected to take {compute_s:.3g} s"
        waiting.bring_forward(self._now + limit_s, excuse)
        return True

    def _limit_trial(self, waiting: Waiting, tiers: Iterable[int], access: Access) -> None:
        """Let a request wait for one step only if jobs for it try whether one of these tiers works again."""
        if any(self._lower.tiers[at].is_tried(access) for at in tiers):
            waiting.bring_forward(self._now, "lower tiers are only being tried again")

    def _stop_asking(self, state: RequestState, waiting: Waiting) -> None:
        """Make do with what the tiers have said: from now on, what is not known to be in one of them is not there.

        The questions are answered all the same, for later requests.
        """
        unanswered = {probe.tier for probe in waiting.probes if not probe.has_ended}
        if waiting.num_announced and not waiting.skipped:
            waited_s = self._now - waiting.begun_at
            state.notes.append(
                f"{waiting.num_announced} tokens were announced; {waiting.num_come} had come after {waited_s:.3g} s"
            )
        for at, tier in enumerate(self._lower.tiers):
            if at not in waiting.skipped and tier.is_readable and (at in unanswered or not tier.options.has_index):
                state.notes.append(_NOT_ENOUGH_TIME.format(tier.name))
        waiting.skipped.update(range(len(self._lower.tiers)))
        waiting.num_announced = 0
        waiting.wish = None
        if waiting.probes:
            waiting.probes = [probe for probe in waiting.probes if probe.has_ended]
            waiting.look_at = self._now

    def _skip_slow(self, state: RequestState, waiting: Waiting, num_unknown: int) -> bool:
        """Skip tiers that are expected to take longer to answer than that saves, or than there is time left, and note it.

        A tier with an index answers at once.

        Returns:
            Whether there are any.
        """
        num_skipped = len(waiting.skipped)
        asked = []
        for at, tier in enumerate(self._lower.tiers):
            if num_unknown and at not in waiting.skipped and tier.is_readable and not tier.options.has_index:
                num_found = waiting.num_found[at]
                if not tier.num_to_ask(num_unknown, num_found, self._asking_s(waiting)):
                    waiting.skipped.add(at)
                    state.notes.append(_NOT_ENOUGH_TIME.format(tier.name))
                    continue
                # A tier that has the first chunks may have all, and so may one for which they were announced.
                part = 1.0 if num_found or waiting.num_announced else tier.look_up_gain.expected
                if (ask_s := tier.look_up_s(num_unknown, num_found, part)) is not None:
                    asked.append((at, tier, part, ask_s))
        compute_s = self._compute_s(state, waiting.num_computed_tokens, waiting.limit_tokens) if asked else None
        for at, tier, part, ask_s in asked:
            saved_s = float("inf") if compute_s is None else part * compute_s
            if ask_s > saved_s:
                waiting.skipped.add(at)
                state.notes.append(
                    f"asking {tier.name} was expected to take {ask_s:.3f} s, and to save {saved_s:.3f} s"
                )
        return len(waiting.skipped) > num_skipped

    def _asking_s(self, waiting: Waiting) -> float:
        """Return the seconds that a request may still wait for answers. In line for slots, it is on nobody's account."""
        return (waiting.deadline if waiting.is_in_line else waiting.ask_until) - self._now

    # --- what to fetch ------------------------------------------------------------------------------------------------

    def _deep_hit(
        self, state: RequestState, waiting: Waiting, limit_tokens: int, unknown: list[OffloadKey]
    ) -> PrefixHit:
        """Return the longest prefix that all tiers together have. Adds chunks that tiers must be asked for to ``unknown``."""
        groups = [
            GroupUnits(
                keys.group, keys.chunk_tokens, DeepStates(self._host, self._lower, keys, unknown, waiting.skipped)
            )
            for keys in state.keys
        ]
        return longest_hit(groups, state.request.num_tokens, waiting.num_computed_tokens, limit_tokens)

    def _worth_while(self, state: RequestState, waiting: Waiting, num_hit_tokens: int) -> Plan:
        """Return what is worth fetching for a hit: all of it, a part, or nothing."""
        plan = self._soonest(state, waiting, self._plan(state, waiting, num_hit_tokens))
        limit_s = min(MAX_TIMEOUT_PART * self._lower.config.restore_timeout_s, waiting.deadline - self._now)
        num_in_time = num_tokens_in_time(plan.num_tokens - waiting.num_computed_tokens, plan.load_s, limit_s)
        limit_tokens = waiting.num_computed_tokens + num_in_time
        if limit_tokens == plan.num_tokens:
            return plan
        return self._soonest(state, waiting, self._cut(state, waiting, limit_tokens))

    def _soonest(self, state: RequestState, waiting: Waiting, plan: Plan) -> Plan:
        """Return ``plan``, the part of it before the chunks of a tier, or nothing: whatever is expected to take least time.

        What is not fetched is computed. If that is faster for some of it, it is noted for the request.
        """
        if self._pace is None or not plan.load_s:
            return plan
        num_here = self._host_hit(state, waiting.num_computed_tokens, plan.num_tokens)
        plans = [plan]
        ways: list[tuple[float, float | None]] = [(plan.load_s, 0.0)]
        for part in self._parts(state, waiting, plan):
            plans.append(part)
            ways.append((part.load_s, self._pace.predict(plan.num_tokens - max(num_here, part.num_tokens))))
        best = plans[soonest(ways)]
        left_out = sorted(plan.first_tokens.keys() - best.first_tokens.keys())
        if left_out:
            names = " and ".join(self._lower.tiers[at].name for at in left_out)
            best_s = min(load_s + rest_s for load_s, rest_s in ways if rest_s is not None)
            state.notes.append(
                f"computing was expected to be faster than loading from {names}: {best_s:.3f} s against {plan.load_s:.3f} s"
            )
        return best

    def _parts(self, state: RequestState, waiting: Waiting, plan: Plan) -> Iterator[Plan]:
        """Yield nothing, and the parts of a plan before the first chunk of each tier."""
        yield Plan(waiting.num_computed_tokens, (), {}, 0.0)
        if len(plan.first_tokens) > 1:
            for first in sorted(plan.first_tokens.values()):
                if first > waiting.num_computed_tokens:
                    yield self._cut(state, waiting, first)

    def _cut(self, state: RequestState, waiting: Waiting, limit_tokens: int) -> Plan:
        """Return the plan for a hit of at most ``limit_tokens`` tokens."""
        return self._plan(state, waiting, self._deep_hit(state, waiting, limit_tokens, []).num_tokens)

    def _plan(self, state: RequestState, waiting: Waiting, num_tokens: int) -> Plan:
        chains, first_tokens = chains_to_fetch(state, self._host, self._lower, waiting.num_computed_tokens, num_tokens)
        return Plan(num_tokens, chains, first_tokens, self._lower.estimate_s(_count(chains)))

    def _compute_s(self, state: RequestState, num_computed_tokens: int, num_tokens: int) -> float | None:
        """Return the seconds that computing takes of the first ``num_tokens`` tokens what neither device nor host memory has.

        ``None`` if that is not known, or if it is not to be asked.
        """
        if self._pace is None:
            return None
        return self._pace.predict(num_tokens - self._host_hit(state, num_computed_tokens, num_tokens))

    def origins(self, state: RequestState, num_computed_tokens: int, num_hit_tokens: int, host_name: str) -> Origins:
        """Return which tier each token about to be loaded came from."""
        fetch = None if state.waiting is None else state.waiting.fetch
        if fetch is None:
            return Origins((host_name,), bytes(num_hit_tokens - num_computed_tokens))
        names = (host_name, *(tier.name for tier in self._lower.tiers))
        return Origins(names, sources_per_token(state, fetch.sources, num_computed_tokens, num_hit_tokens))

    def _host_hit(self, state: RequestState, num_computed_tokens: int, limit_tokens: int) -> int:
        """Return how many leading tokens host memory can give back without a lower tier, computed tokens included."""
        groups = [GroupUnits(keys.group, keys.chunk_tokens, HostStates(self._host, keys)) for keys in state.keys]
        return longest_hit(groups, state.request.num_tokens, num_computed_tokens, limit_tokens).num_tokens


def _count(chains: Sequence[Chain]) -> Counter[int]:
    """Return the number of chunks per tier."""
    counts: Counter[int] = Counter()
    for chain in chains:
        counts[chain.tier] += len(chain.keys)
    return counts
