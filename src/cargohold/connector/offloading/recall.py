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

A deadline ends the wait at every point, in time in which the engine steps: chunks that have not come by then are computed.
While the engine has no place for the request, its deadline is put off: the request would have to wait anyway. A request whose
look-ups or loads try whether a tier works again that was resting waits for one step only, or it would pay for the trial.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cargohold.blocks import READY, GroupUnits, PrefixHit, longest_hit
from cargohold.connector.offloading.jobs import Origins
from cargohold.connector.offloading.pacing import StepPace
from cargohold.connector.offloading.recall_plan import chains_to_promote, needed_keys, sources_per_token
from cargohold.connector.offloading.requests import Recall, RequestState
from cargohold.connector.offloading.states import DeepStates, HostStates
from cargohold.offload.manager.base import OffloadKey, OffloadManager
from cargohold.offload.tier.jobs import Access
from cargohold.offload.tiering import Chain, LowerTiers

PATIENCE = 0.5
"""Fraction of ``restore_timeout_s`` that a load may take by its estimate, because estimates err."""
LOOK_AGAIN_S = 0.02
"""Seconds until a request that waits for slots or for other requests' chunks looks again whether it can have them."""


class Recalls:
    """Decides which chunks to bring up from lower tiers, for each waiting request.

    Args:
        host: the manager of host memory.
        lower: the tiers below host memory.
        pace: predicts how long computing takes; ``None`` to bring up all chunks of a hit, even if computing may be faster.
    """

    def __init__(self, host: OffloadManager, lower: LowerTiers, pace: StepPace | None) -> None:
        self._host = host
        self._lower = lower
        self._clock = lower.clock
        self._pace = pace
        self._live: list[Recall] = []
        self._last_step = self._clock()

    def note_step(self) -> None:
        """Learn that a step was scheduled; put off the deadlines of requests that the engine has not asked for since the last.

        There was no place for them, so the time since then was not spent waiting for lower tiers.
        """
        now = self._clock()
        self._live = [recall for recall in self._live if not recall.is_over]
        for recall in self._live:
            if not recall.was_asked_for:
                recall.deadline += now - self._last_step
            recall.was_asked_for = False
        self._last_step = now

    def must_wait(self, state: RequestState, num_computed_tokens: int, limit_tokens: int) -> bool:
        """Whether a request must wait for lower tiers before it is looked up in host memory. Starts what is needed for that.

        Mutates ``state``, host memory and lower tiers.

        Args:
            state: the request.
            num_computed_tokens: leading tokens that are on the device.
            limit_tokens: maximum length in tokens of a hit, computed tokens included.
        """
        recall = state.recall
        if recall is None:
            deadline = self._clock() + self._lower.config.restore_timeout_s
            recall = state.recall = Recall(deadline, alarm_at=deadline)
            self._live.append(recall)
            self._lower.wake_at(deadline)
            state.notes += [
                f"tier {tier.name} is off, because a worker can no longer use it"
                for tier in self._lower.tiers
                if tier.is_off
            ]
        if recall.is_over:
            return False
        now = self._clock()
        if recall.promotion is not None and not recall.promotion.num_running:
            recall.is_over = True
        elif now >= recall.deadline:
            waited = f"took longer than {self._lower.config.restore_timeout_s:g} s"
            state.notes.append(f"lower tiers {'are only being tried again' if recall.is_trial else waited}")
            recall.give_up()
        elif recall.promotion is None and self._is_time(recall):
            self._begin(recall, state, num_computed_tokens, limit_tokens)
        if not recall.is_over and now >= recall.alarm_at:
            recall.alarm_at = recall.deadline  # it was put off
            self._lower.wake_at(recall.deadline)
        return not recall.is_over

    def _begin(self, recall: Recall, state: RequestState, num_computed_tokens: int, limit_tokens: int) -> None:
        """Ask the tiers, or bring up what they have; end ``recall`` if that is not worth while."""
        recall.probes = ()  # earlier probes have been answered
        unknown: list[OffloadKey] = []
        hit = self._deep_hit(state, num_computed_tokens, limit_tokens, unknown)
        if not (recall.indexed_only or self._is_worth_asking(state, num_computed_tokens, limit_tokens, len(unknown))):
            recall.indexed_only = True
            unknown.clear()
            hit = self._deep_hit(state, num_computed_tokens, limit_tokens, unknown)
        if hit.undecided:
            recall.probes = self._lower.probe(list(dict.fromkeys(unknown)), indexed_only=recall.indexed_only)
            self._look_again_later(recall)
            self._limit_trial(recall, {probe.tier for probe in recall.probes}, Access.LOOK_UP)
            return
        num_tokens, chains = self._worth_while(state, num_computed_tokens, hit.num_tokens)
        if not chains:
            recall.end()
            return
        needed = needed_keys(state, num_computed_tokens, num_tokens)
        kept = [key for key, at in zip(needed, self._host.lookup(needed), strict=True) if at == READY]
        promotion = self._lower.promote(chains, kept)
        if promotion is None:
            self._look_again_later(recall)
            return
        recall.promotion = promotion
        recall.is_over = not promotion.num_running
        self._limit_trial(recall, {chain.tier for chain in chains}, Access.LOAD)

    def _limit_trial(self, recall: Recall, tiers: Iterable[int], access: Access) -> None:
        """Let a request wait for one step only if jobs for it try whether one of these tiers works again."""
        if any(self._lower.tiers[at].is_tried(access) for at in tiers):
            recall.is_trial = True
            recall.deadline = self._clock()
            self._lower.wake_at(recall.deadline)

    def _is_worth_asking(
        self, state: RequestState, num_computed_tokens: int, limit_tokens: int, num_unknown: int
    ) -> bool:
        """Whether asking tiers without an index takes no longer than computing all that they could give back."""
        ask_s = self._lower.estimate_look_up_s(num_unknown) if num_unknown else None
        if not ask_s:
            return True
        asked = (tier.name for tier in self._lower.tiers if not tier.options.has_index)
        return not self._is_slower(ask_s, "asking", asked, state, num_computed_tokens, limit_tokens)

    def _is_time(self, recall: Recall) -> bool:
        """Whether it is time to look again for a request that waits for answers, slots or other requests' chunks."""
        if recall.probes:
            return all(probe.has_ended for probe in recall.probes)
        return self._clock() >= recall.look_again_at

    def _look_again_later(self, recall: Recall) -> None:
        if not recall.probes:
            recall.look_again_at = self._clock() + LOOK_AGAIN_S
            self._lower.wake_at(recall.look_again_at)

    def _deep_hit(
        self, state: RequestState, num_computed_tokens: int, limit_tokens: int, unknown: list[OffloadKey]
    ) -> PrefixHit:
        """Return the longest prefix that all tiers together have. Adds chunks that tiers must be asked for to ``unknown``."""
        only = state.recall is not None and state.recall.indexed_only
        deep = [DeepStates(self._host, self._lower, keys, unknown, indexed_only=only) for keys in state.keys]
        groups = [
            GroupUnits(keys.group, keys.chunk_tokens, states) for keys, states in zip(state.keys, deep, strict=True)
        ]
        return longest_hit(groups, state.request.num_tokens, num_computed_tokens, limit_tokens)

    def _worth_while(
        self, state: RequestState, num_computed_tokens: int, num_hit_tokens: int
    ) -> tuple[int, Sequence[Chain]]:
        """Return how many leading tokens to restore with the help of lower tiers, and which chunks to bring up for that."""
        chains = chains_to_promote(state, self._host, self._lower, num_computed_tokens, num_hit_tokens)
        load_s = self._lower.estimate_s(_count(chains))
        limit_s = PATIENCE * self._lower.config.restore_timeout_s
        if load_s is not None and load_s > limit_s:
            # Only as many tokens as are likely to come in time.
            part = int(limit_s / load_s * (num_hit_tokens - num_computed_tokens))
            num_hit_tokens = self._deep_hit(state, num_computed_tokens, num_computed_tokens + part, []).num_tokens
            chains = chains_to_promote(state, self._host, self._lower, num_computed_tokens, num_hit_tokens)
            load_s = self._lower.estimate_s(_count(chains))
        if load_s is None or not chains:
            return num_hit_tokens, chains
        used = (self._lower.tiers[at].name for at in sorted(_count(chains)))
        if self._is_slower(load_s, "loading from", used, state, num_computed_tokens, num_hit_tokens):
            return num_computed_tokens, ()
        return num_hit_tokens, chains

    def _is_slower(
        self,
        seconds: float,
        doing: str,
        tiers: Iterable[str],
        state: RequestState,
        num_computed_tokens: int,
        num_tokens: int,
    ) -> bool:
        """Whether ``doing`` something with tiers, which takes ``seconds``, takes longer than computing; if so, note it.

        What counts is computing those of the first ``num_tokens`` tokens that neither the device nor host memory has.
        """
        if self._pace is None:
            return False
        compute_s = self._pace.predict(num_tokens - self._host_hit(state, num_computed_tokens, num_tokens))
        if compute_s is None or seconds <= compute_s:
            return False
        names = " and ".join(tiers)
        state.notes.append(
            f"computing was expected to be faster than {doing} {names}: {compute_s:.3f} s against {seconds:.3f} s"
        )
        return True

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
