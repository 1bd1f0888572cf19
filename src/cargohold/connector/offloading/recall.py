"""Bringing a waiting request's chunks up from lower tiers, before it is looked up in host memory.

::

    first look-up ---> ask the tiers about what host memory does not have
                         | all have answered
                         v
                       how much is it worth while to bring up? --nothing--> over: host memory's answer counts
                         | some leading chunks
                         v
                       bring these chunks up, hold those that host memory has
                         | all have arrived or failed
                         v
                       over, with the chunks held until the request is admitted

If the request is not admitted for long, its chunks are not held any more, and it begins anew when the engine asks for it.
Requests that wait do not hold more than half of host memory together. Further ones stand in line, and bring their chunks up
when those before them are admitted.

A deadline ends the wait at every point, in time in which the engine steps: chunks that have not come by then are computed.
It is twice the time that computing is expected to take, where that is known, and at most ``restore_timeout_s``. While the
engine has no place for the request, its deadline is put off: the request would have to wait anyway. Half of the time is for
look-ups, and half for loads: what is not known by then to be there counts as absent. A request whose look-ups or loads try
whether a tier works again that was suspended waits for one step only, or it would pay for the trial.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cargohold.blocks import READY, GroupUnits, PrefixHit, longest_hit
from cargohold.connector.offloading.jobs import Origins
from cargohold.connector.offloading.pacing import StepPace
from cargohold.connector.offloading.recall_plan import (
    chains_to_promote,
    needed_keys,
    num_tokens_in_time,
    sources_per_token,
)
from cargohold.connector.offloading.requests import Recall, RequestState
from cargohold.connector.offloading.states import DeepStates, HostStates
from cargohold.offload.manager.base import OffloadKey, OffloadManager
from cargohold.offload.tier.jobs import Access
from cargohold.offload.tiering import Chain, LowerTiers

MAX_COMPUTE_RATIO = 2.0
"""A request waits for lower tiers for at most this many times the time that computing takes."""
MAX_TIMEOUT_PART = 0.5
"""Part of ``restore_timeout_s`` that a load may take by its estimate, because estimates err."""
MAX_ASKING_PART = 0.5
"""Part of the time that a request may wait in which it asks tiers what they have. The rest is for bringing that up."""
_NOT_ENOUGH_TIME = "there was not enough time to learn from {} whether it has more chunks"
LOOK_AGAIN_S = 0.02
"""Seconds until a request that waits for slots or for other requests' chunks looks again whether it can have them."""


class _Plan(NamedTuple):
    """What to bring up for a request.

    Attributes:
        num_tokens: number of leading tokens that host memory then has, computed tokens included.
        chains: the chunks to bring up.
        first_tokens: for each tier that chunks are brought up from, the first token that one of them stands for.
        load_s: estimated seconds that takes; 0 if that is not known.
    """

    num_tokens: int
    chains: Sequence[Chain]
    first_tokens: Mapping[int, int]
    load_s: float


class Recalls:
    """Decides which chunks to bring up from lower tiers, for each waiting request.

    Args:
        host: the manager of host memory.
        lower: the tiers below host memory.
        pace: predicts how long computing takes; ``None`` to bring up all chunks of a hit, even if computing may be faster.
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
        self._live: list[Recall] = []
        # Those that wait for slots in host memory, first come, first served.
        self._line: list[Recall] = []
        # Within one call time stands still: what was compared with a deadline is not compared with a later time behind it.
        self._now = self._last_step = self._clock()
        self._num_steps = 0
        self._num_sizes = 0

    def note_step(self, num_running: int) -> None:
        """Learn that a step was scheduled for ``num_running`` requests; put off the deadlines of those that had no place in it.

        The engine has not asked for them since the last step, or has asked for as many before them as it has places for. So
        they have not spent the time since then waiting for lower tiers.
        """
        now = self._now = self._clock()
        self._live = [recall for recall in self._live if not recall.is_over]
        self._line = [recall for recall in self._line if recall.is_in_line and not recall.is_over]
        for recall in self._live:
            if recall.asked_in != self._num_steps or not recall.has_place:
                put_off_s = now - max(self._last_step, recall.begun_at)
                recall.deadline += put_off_s
                recall.ask_until += put_off_s
        self._last_step = now
        self._num_steps += 1
        self._num_asked = 0
        if self._max_num_seqs is not None:
            self._num_places = max(1, self._max_num_seqs - num_running)  # without any, it would not ask
        if self._pace is not None and self._pace.num_sizes > self._num_sizes:
            self._num_sizes = self._pace.num_sizes
            if not all(recall.is_limited for recall in self._live):
                self._lower.wake_at(now)  # now it may be known how long computing takes

    def note_asked(self, state: RequestState) -> None:
        """Learn that the engine asks for a request. Let it begin anew if its chunks are not held any more."""
        self._num_asked += 1
        recall = state.recall
        if recall is None:
            return
        recall.asked_in, recall.has_place = self._num_steps, self._has_place
        if recall.has_expired:
            state.notes.append("the engine had no place for the request for so long that lower tiers were asked anew")
            state.end_recall()
            state.lookup = None

    @property
    def _has_place(self) -> bool:
        """Whether the engine could admit the request that it asks for now."""
        return self._num_places is None or self._num_asked <= self._num_places

    def must_wait(self, state: RequestState, num_computed_tokens: int, limit_tokens: int) -> bool:
        """Whether a request must wait for lower tiers before it is looked up in host memory. Starts what is needed for that.

        Mutates ``state``, host memory and lower tiers.

        Args:
            state: the request.
            num_computed_tokens: leading tokens that are on the device.
            limit_tokens: maximum length in tokens of a hit, computed tokens included.
        """
        now = self._now = self._clock()
        recall = state.recall or self._new_recall(state)
        if recall.is_over:
            return False
        limit_tokens = min(limit_tokens, num_computed_tokens + self._max_tokens(state))
        if recall.promotion is not None and not recall.promotion.num_running:
            recall.is_over = True
        elif now >= recall.deadline:
            state.notes.append(
                "host memory had no room for what lower tiers have" if recall.is_in_line else recall.excuse
            )
            recall.give_up()
        elif recall.promotion is None:
            if now >= recall.ask_until and not recall.is_in_line:  # there, answers grow old, and are asked for anew
                self._stop_asking(recall, state)
            if self._is_time(recall):
                self._begin(recall, state, num_computed_tokens, limit_tokens)
        if recall.is_over:
            return False
        if not recall.is_limited:
            recall.is_limited = self._limit_wait(recall, state, num_computed_tokens, limit_tokens)
        if now >= recall.alarm_at:  # at the beginning, or if its time was put off
            recall.alarm_at = recall.deadline if now >= recall.ask_until else recall.ask_until
            self._lower.wake_at(recall.alarm_at)
        return True

    def _new_recall(self, state: RequestState) -> Recall:
        """Let a request begin to wait."""
        now, timeout_s = self._now, self._lower.config.restore_timeout_s
        recall = state.recall = Recall(
            now,
            deadline=now + timeout_s,
            ask_until=now + MAX_ASKING_PART * timeout_s,
            excuse=f"lower tiers took longer than {timeout_s:g} s",
            alarm_at=now,
            asked_in=self._num_steps,
            has_place=self._has_place,
        )
        self._live.append(recall)
        state.notes += [tier.trouble for tier in self._lower.tiers if tier.trouble]
        return recall

    def _begin(self, recall: Recall, state: RequestState, num_computed_tokens: int, limit_tokens: int) -> None:
        """Ask the tiers, or bring up what they have; end ``recall`` if that is not worth while."""
        for answered in recall.probes:
            recall.num_found[answered.tier] += answered.num_found
        recall.probes = ()
        unknown: list[OffloadKey] = []
        hit = self._deep_hit(state, num_computed_tokens, limit_tokens, unknown)
        if self._skip_slow(recall, state, num_computed_tokens, limit_tokens, len(unknown)):
            unknown.clear()
            hit = self._deep_hit(state, num_computed_tokens, limit_tokens, unknown)
        if hit.undecided:
            recall.probes = self._lower.probe(
                list(dict.fromkeys(unknown)),
                skipped=recall.skipped,
                num_found=recall.num_found,
                within_s=self._asking_s(recall),
            )
            self._look_again_later(recall)
            self._limit_trial(recall, {probe.tier for probe in recall.probes}, Access.LOOK_UP)
            return
        plan = self._worth_while(recall, state, num_computed_tokens, hit.num_tokens)
        if not plan.chains:
            recall.end()
            return
        promotion = None
        if self._is_first_in_line(recall) and self._lower.may_hold_more:
            needed = needed_keys(state, num_computed_tokens, plan.num_tokens)
            kept = [key for key, at in zip(needed, self._host.lookup(needed), strict=True) if at == READY]
            promotion = self._lower.promote(plan.chains, kept)
        if promotion is None:
            self._stand_in_line(recall)
            return
        recall.is_in_line = False
        recall.promotion = promotion
        if not promotion.num_running:
            recall.is_over = True
            state.notes.append("the request's own chunks fill host memory: there was no room for more from lower tiers")
            return
        recall.is_limited = self._limit_wait(recall, state, num_computed_tokens, plan.num_tokens)
        self._limit_trial(recall, plan.first_tokens, Access.LOAD)

    def _limit_wait(self, recall: Recall, state: RequestState, num_computed_tokens: int, num_tokens: int) -> bool:
        """Let a request wait from now on for no more than twice the time that computing takes.

        What a tier did lately says nothing of what it does when it hangs: until its jobs count as failed, each request would
        wait for ``restore_timeout_s``, even if it can be computed in a moment.

        Returns:
            Whether that time is known.
        """
        compute_s = self._compute_s(state, num_computed_tokens, num_tokens)
        if compute_s is None:
            return False
        limit_s = MAX_COMPUTE_RATIO * compute_s
        excuse = f"lower tiers took longer than {limit_s:.3g} s, and computing is expected to take {compute_s:.3g} s"
        self._bring_forward(recall, self._now + limit_s, excuse)
        return True

    def _bring_forward(self, recall: Recall, deadline: float, excuse: str) -> None:
        """Let a request wait no longer than until ``deadline``, and note ``excuse`` for it if it stops then."""
        if deadline < recall.deadline:
            recall.deadline, recall.excuse = deadline, excuse
            recall.ask_until = min(recall.ask_until, self._now + MAX_ASKING_PART * (deadline - self._now))
            recall.alarm_at = self._now  # to be set anew

    def _limit_trial(self, recall: Recall, tiers: Iterable[int], access: Access) -> None:
        """Let a request wait for one step only if jobs for it try whether one of these tiers works again."""
        if any(self._lower.tiers[at].is_tried(access) for at in tiers):
            self._bring_forward(recall, self._now, "lower tiers are only being tried again")

    def _stop_asking(self, recall: Recall, state: RequestState) -> None:
        """Make do with what the tiers have said: from now on, what is not known to be in one of them is not there.

        Mutates ``recall`` and ``state``. The questions are answered all the same, for later requests.
        """
        unanswered = {probe.tier for probe in recall.probes if not probe.has_ended}
        for at, tier in enumerate(self._lower.tiers):
            if at not in recall.skipped and tier.is_readable and (at in unanswered or not tier.options.has_index):
                state.notes.append(_NOT_ENOUGH_TIME.format(tier.name))
        recall.skipped.update(range(len(self._lower.tiers)))
        recall.probes = [probe for probe in recall.probes if probe.has_ended]

    def _skip_slow(
        self, recall: Recall, state: RequestState, num_computed_tokens: int, limit_tokens: int, num_unknown: int
    ) -> bool:
        """Skip tiers that are expected to take longer to answer than that saves, or than there is time left, and note it.

        Mutates ``recall`` and ``state``. A tier with an index answers at once.

        Returns:
            Whether there are any.
        """
        num_skipped = len(recall.skipped)
        asked = []
        for at, tier in enumerate(self._lower.tiers):
            if num_unknown and at not in recall.skipped and tier.is_readable and not tier.options.has_index:
                num_found = recall.num_found[at]
                if not tier.num_to_ask(num_unknown, num_found, self._asking_s(recall)):
                    recall.skipped.add(at)
                    state.notes.append(_NOT_ENOUGH_TIME.format(tier.name))
                    continue
                part = 1.0 if num_found else tier.look_up_gain.expected  # a tier that has the first chunks may have all
                if (ask_s := tier.look_up_s(num_unknown, num_found, part)) is not None:
                    asked.append((at, tier, part, ask_s))
        compute_s = self._compute_s(state, num_computed_tokens, limit_tokens) if asked else None
        for at, tier, part, ask_s in asked:
            saved_s = float("inf") if compute_s is None else part * compute_s
            if ask_s > saved_s:
                recall.skipped.add(at)
                state.notes.append(
                    f"asking {tier.name} was expected to take {ask_s:.3f} s, and to save {saved_s:.3f} s"
                )
        return len(recall.skipped) > num_skipped

    def _asking_s(self, recall: Recall) -> float:
        """Return the seconds that a request may still wait for answers. In line for slots, it is on nobody's account."""
        return (recall.deadline if recall.is_in_line else recall.ask_until) - self._now

    def _is_time(self, recall: Recall) -> bool:
        """Whether it is time to look again for a request that waits for answers, slots or other requests' chunks."""
        if recall.probes:
            return all(probe.has_ended for probe in recall.probes)
        return self.is_next_in_line(recall) if recall.is_in_line else self._now >= recall.look_again_at

    def is_next_in_line(self, recall: Recall) -> bool:
        """Whether it is the turn of a request that waits for slots in host memory to look whether it can have them."""
        return recall.is_in_line and self._clock() >= recall.look_again_at and self._is_first_in_line(recall)

    def _is_first_in_line(self, recall: Recall) -> bool:
        """Whether no other request that the engine could admit now waits for slots in host memory since longer ago.

        Looking for slots takes time, the more the longer a prompt is. So only the first in line looks.
        """
        waiting = (
            other
            for other in self._line
            if other.is_in_line and other.asked_in == self._num_steps and not other.is_over
        )
        return next(waiting, recall) is recall

    def _stand_in_line(self, recall: Recall) -> None:
        recall.look_again_at = self._now + LOOK_AGAIN_S
        if not recall.is_in_line:
            recall.is_in_line = True
            self._line.append(recall)

    def _look_again_later(self, recall: Recall) -> None:
        if not recall.probes:
            recall.look_again_at = self._now + LOOK_AGAIN_S
            self._lower.wake_at(recall.look_again_at)

    def _max_tokens(self, state: RequestState) -> int:
        """Return how many tokens a look-up may be about, so that all of its chunks' answers are remembered."""
        return int(self._lower.max_look_up / sum(1 / keys.chunk_tokens for keys in state.keys))

    def _deep_hit(
        self, state: RequestState, num_computed_tokens: int, limit_tokens: int, unknown: list[OffloadKey]
    ) -> PrefixHit:
        """Return the longest prefix that all tiers together have. Adds chunks that tiers must be asked for to ``unknown``."""
        skipped = () if state.recall is None else state.recall.skipped
        deep = [DeepStates(self._host, self._lower, keys, unknown, skipped) for keys in state.keys]
        groups = [
            GroupUnits(keys.group, keys.chunk_tokens, states) for keys, states in zip(state.keys, deep, strict=True)
        ]
        return longest_hit(groups, state.request.num_tokens, num_computed_tokens, limit_tokens)

    def _worth_while(self, recall: Recall, state: RequestState, num_computed_tokens: int, num_hit_tokens: int) -> _Plan:
        """Return what is worth bringing up for a hit: all of it, a part, or nothing."""
        plan = self._soonest(state, num_computed_tokens, self._plan(state, num_computed_tokens, num_hit_tokens))
        limit_s = min(MAX_TIMEOUT_PART * self._lower.config.restore_timeout_s, recall.deadline - self._now)
        num_in_time = num_tokens_in_time(plan.num_tokens - num_computed_tokens, plan.load_s, limit_s)
        limit_tokens = num_computed_tokens + num_in_time
        if limit_tokens == plan.num_tokens:
            return plan
        return self._soonest(state, num_computed_tokens, self._cut(state, num_computed_tokens, limit_tokens))

    def _soonest(self, state: RequestState, num_computed_tokens: int, plan: _Plan) -> _Plan:
        """Return ``plan``, the part of it before the chunks of a tier, or nothing: whatever is expected to take least time.

        What is not brought up is computed. If that is faster for some of it, it is noted for the request.
        """
        if self._pace is None or not plan.load_s:
            return plan
        num_here = self._host_hit(state, num_computed_tokens, plan.num_tokens)
        best, best_s = plan, plan.load_s
        for other in self._parts(state, num_computed_tokens, plan):
            rest_s = self._pace.predict(plan.num_tokens - max(num_here, other.num_tokens))
            if rest_s is not None and other.load_s + rest_s < best_s:
                best, best_s = other, other.load_s + rest_s
        left_out = sorted(plan.first_tokens.keys() - best.first_tokens.keys())
        if left_out:
            names = " and ".join(self._lower.tiers[at].name for at in left_out)
            state.notes.append(
                f"computing was expected to be faster than loading from {names}: {best_s:.3f} s against {plan.load_s:.3f} s"
            )
        return best

    def _parts(self, state: RequestState, num_computed_tokens: int, plan: _Plan) -> Iterator[_Plan]:
        """Yield nothing, and the parts of a plan before the first chunk of each tier."""
        yield _Plan(num_computed_tokens, (), {}, 0.0)
        if len(plan.first_tokens) > 1:
            for first in sorted(plan.first_tokens.values()):
                if first > num_computed_tokens:
                    yield self._cut(state, num_computed_tokens, first)

    def _cut(self, state: RequestState, num_computed_tokens: int, limit_tokens: int) -> _Plan:
        """Return the plan for a hit of at most ``limit_tokens`` tokens."""
        return self._plan(
            state, num_computed_tokens, self._deep_hit(state, num_computed_tokens, limit_tokens, []).num_tokens
        )

    def _plan(self, state: RequestState, num_computed_tokens: int, num_tokens: int) -> _Plan:
        chains, first_tokens = chains_to_promote(state, self._host, self._lower, num_computed_tokens, num_tokens)
        return _Plan(num_tokens, chains, first_tokens, self._lower.estimate_s(_count(chains)))

    def _compute_s(self, state: RequestState, num_computed_tokens: int, num_tokens: int) -> float | None:
        """Return the seconds that computing takes of the first ``num_tokens`` tokens what neither device nor host memory has.

        ``None`` if that is not known, or if it is not to be asked.
        """
        if self._pace is None:
            return None
        return self._pace.predict(num_tokens - self._host_hit(state, num_computed_tokens, num_tokens))

    def origins(self, state: RequestState, num_computed_tokens: int, num_hit_tokens: int, host_name: str) -> Origins:
        """Return which tier each token about to be loaded came from."""
        promotion = None if state.recall is None else state.recall.promotion
        if promotion is None:
            return Origins((host_name,), bytes(num_hit_tokens - num_computed_tokens))
        names = (host_name, *(tier.name for tier in self._lower.tiers))
        return Origins(names, sources_per_token(state, promotion.sources, num_computed_tokens, num_hit_tokens))

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
