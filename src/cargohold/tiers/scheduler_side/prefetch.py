"""Prefetching: chunks are fetched from lower tiers before the request that wants them is looked up in host memory.

Who wants chunks has a ``Waiting``, and asks in every step whether to wait still (``Prefetcher.must_wait``), which only notes
that it was asked. All else happens twice per step, in ``Prefetcher._advance``, for those that asked, in their order: when the
step begins, and when it ends, because answers have come by then.

Chunks that another engine has announced may still be on their way to a tier. The request asks for them again and again, less
often the longer it has waited, as long as there is time for questions.

A wait ends when its time is up, whatever the tiers do: chunks that have not come by then are computed. That is twice the time
that computing is expected to take, where that is known, and at most ``restore_timeout_s``. Only steps count in which the
request asked and the engine had a place for it: otherwise it would have to wait anyway. Half of the time is for look-ups, and
half for loads: what is not known by then to be there counts as absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Final

from cargohold.blocks import ABSENT, READY
from cargohold.cache.manager import ChunkKeys, OffloadKey, OffloadManager
from cargohold.deadlines import AHEAD, ESTIMATE, WAIT
from cargohold.pace import StepPace
from cargohold.protocol import AttentionKind, Clock, Hint, HintEnd, SchedulerEnvironment, StepView
from cargohold.tiers.port import Access
from cargohold.tiers.scheduler_side.lower_tiers import LowerTiers
from cargohold.tiers.scheduler_side.plan import FetchPlan, FetchPlanner, Wanted
from cargohold.tiers.scheduler_side.waiting import Event, Phase, Waiting, tell_nobody

MAX_COMPUTE_RATIO: Final = 2.0
"""A request waits for lower tiers for at most this many times the time that computing takes."""
MAX_STEP_PART: Final = 0.5
"""Part of ``restore_timeout_s`` that one step counts for at most."""
LOOK_AGAIN_S: Final = 0.02
"""Seconds until a request that waits for slots or for others' chunks looks again whether it can have them.

Looking takes time, the more the longer a prompt is.
"""
MIN_POLL_S: Final = 0.005
"""Seconds until a request looks again for announced chunks; later, ``POLL_PART`` of the time that it has waited already."""
POLL_PART: Final = 0.2
_NOWHERE = bytes([ABSENT, ABSENT])
_NOT_ENOUGH_TIME = "there was not enough time to ask {} for more chunks"


class Prefetcher:
    """Fetches chunks from lower tiers for requests that wait for them.

    Args:
        host: the manager of host memory.
        lower: the tiers below host memory.
        environment: facts about the engine.
        pace: how fast the engine computes; measured by its owner.
        only_if_faster: whether to fetch chunks only if that is expected to be faster than computing them.

    Attributes:
        planner: decides what is worth fetching for requests.
    """

    def __init__(
        self,
        host: OffloadManager,
        lower: LowerTiers,
        environment: SchedulerEnvironment,
        pace: StepPace,
        *,
        only_if_faster: bool,
    ) -> None:
        self._host = host
        self._lower = lower
        timeout_s = lower.config.restore_timeout_s
        self._timeout_s, self._load_s = WAIT.seconds(timeout_s), ESTIMATE.seconds(timeout_s)
        self.planner = FetchPlanner(host, lower, pace if only_if_faster else None)
        self._ahead_planner = FetchPlanner(host, lower, None)
        self._max_num_seqs = environment.max_num_seqs
        # How many requests the engine can admit before the next step, and how many it has asked for.
        self._num_places = environment.max_num_seqs
        self._num_asked = 0
        # Requests that have asked since the last step began, and those that had before it.
        self._asked: list[Waiting] = []
        self._current: list[Waiting] = []
        # Within one call time stands still: what was compared with a limit is not compared with a later time after it.
        self._now = self._counted_to = lower.clock()
        self._are_slots_taken = False

    # --- look-ups: they read, and change only the record of what waits -----------------------------------------------

    def begin(
        self,
        wanted: Wanted,
        notes: MutableSequence[str],
        num_found_tokens: int = 0,
        num_announced: int = 0,
        on_ask: Callable[[], None] = tell_nobody,
        *,
        is_ahead: bool = False,
    ) -> Waiting:
        """Begin to wait for chunks that lower tiers may have. The wait may be over at once.

        Args:
            wanted: what is wanted.
            notes: takes lines for the request that waits.
            num_found_tokens: number of leading tokens that device and host memory have.
            num_announced: number of leading tokens whose chunks will come if they are not there yet.
            on_ask: called before tiers are asked for its chunks, or chunks are fetched.
            is_ahead: whether no request waits for it yet, so that it does not matter whether computing is faster.
        """
        planner, wanted = self._ahead_planner if is_ahead else self.planner, self._within_reach(wanted)
        limit = self._timeout_s, f"lower tiers took longer than {self._timeout_s:g} s"
        waiting = Waiting(wanted, notes, planner, *limit, num_announced=num_announced, on_ask=on_ask)
        for tier in self._lower.tiers:
            if tier.trouble:
                notes.append(tier.trouble)
        if self._lower.is_readable and (num_announced or self._may_have_more(wanted, num_found_tokens)):
            self._note_asked(waiting)
        else:
            waiting.num_to_have = num_found_tokens
            waiting.go(Event.NOTHING)
        return waiting

    def begins_again(self, waiting: Waiting, wanted: Wanted, num_tokens: int) -> bool:
        """Whether a request whose wait was over waits again, because device and host memory have only ``num_tokens`` by now.

        Mutates nothing but ``waiting``.
        """
        if not waiting.has_lost(num_tokens) or not self._lower.is_readable:
            return False
        waiting.go(Event.LOST)
        waiting.wanted = self._within_reach(wanted)
        waiting.num_again += 1
        self._note_asked(waiting)
        return True

    def must_wait(self, waiting: Waiting | None, wanted: Wanted) -> bool:
        """Whether the answer for a request is still "not yet". To be called for every look-up; ``None`` if it does not wait.

        Mutates nothing but ``waiting``.
        """
        self._num_asked += 1
        if waiting is None or not waiting.must_wait:
            return False
        if waiting.has_arrived:
            waiting.arrive()
            return False
        waiting.wanted = self._within_reach(wanted)
        self._note_asked(waiting)
        return True

    def _may_have_more(self, wanted: Wanted, num_found_tokens: int) -> bool:
        """Whether lower tiers may have more leading tokens than were found in host memory, as far as is known without asking.

        They do not if no tier has the next chunk of a group of full attention, which needs every chunk. That is so for nearly
        all new prompts.
        """
        for keys in wanted.keys:
            at = num_found_tokens // keys.chunk_tokens
            following = keys.keys[at : at + 1]
            if keys.group.kind is AttentionKind.FULL and following:
                states = self._host.lookup(following) + self._lower.lookup(following)
                if states == _NOWHERE:
                    return False
        return True

    def _within_reach(self, wanted: Wanted) -> Wanted:
        # All answers of one look-up must be remembered until the last has come.
        max_tokens = int(self._lower.max_look_up / sum([1 / keys.chunk_tokens for keys in wanted.keys]))
        return wanted._replace(limit_tokens=min(wanted.limit_tokens, wanted.num_computed_tokens + max_tokens))

    def _note_asked(self, waiting: Waiting) -> None:
        waiting.has_place = self._num_places is None or self._num_asked <= self._num_places
        self._asked.append(waiting)

    # --- effects: twice per step --------------------------------------------------------------------------------------

    def begin_step(self, step: StepView) -> None:
        """Note that a step begins; do what requests need that have asked since the last one, in their order.

        Asks tiers, reserves slots, begins loads. Mutates host memory, lower tiers and the waits.
        """
        self._now = self._lower.clock.begin_step()
        self._lower.begin_writes()
        if not self._current:
            self._counted_to = self._now  # no request has waited until now
        self._current, self._asked, self._num_asked = self._asked, [], 0
        if self._max_num_seqs is not None:
            self._num_places = max(1, self._max_num_seqs - len(step.scheduled))  # without any, it would not ask
        if self._current:
            self._advance_all()

    def end_step(self) -> None:
        """Note that a step has ended, and all jobs that ended in it; count time, and do what answers that have come allow."""
        self._now = now = self._lower.clock.end_step()
        for waiting in self._current:
            if waiting.has_place:
                # It is looked at only between steps: one that takes long is not to be all of its time.
                waiting.waited_s += min(now - self._counted_to, MAX_STEP_PART * self._lower.config.restore_timeout_s)
            if waiting.waited_s >= waiting.limit_s and waiting.must_wait and not waiting.has_arrived:
                waiting.give_up()
        self._counted_to = now
        if self._current:
            self._lower.begin_writes()
            self._advance_all()

    def _advance_all(self) -> None:
        self._are_slots_taken = False
        for waiting in self._current:
            if waiting.must_wait and not waiting.has_arrived:
                self._advance(waiting)
                # First come, first served: the next ones find no slots, either.
                self._are_slots_taken |= waiting.needs_slots

    def _advance(self, waiting: Waiting) -> None:
        """Ask tiers, or fetch what they have, if it is time for that."""
        if not waiting.is_limited:
            self._limit_by_computing(waiting, waiting.wanted.limit_tokens)
        if waiting.phase is Phase.ASK:
            waiting.begin_again()
        if waiting.fetch is not None:
            return
        if waiting.asking_s <= 0:
            self._stop_asking(waiting)
        is_answered = all(probe.has_ended for probe in waiting.probes)
        if not is_answered or self._now < waiting.look_at or (waiting.needs_slots and self._are_slots_taken):
            return
        if waiting.num_announced and not waiting.probes and waiting.phase is Phase.ASK:
            for keys in waiting.wanted.keys:  # they may have come since a tier was asked last
                self._lower.forget_absent(keys.keys[: waiting.num_announced // keys.chunk_tokens])
        for probe in waiting.probes:
            waiting.num_found[probe.tier] += probe.num_found
        waiting.probes = ()
        self._decide(waiting)

    def _decide(self, waiting: Waiting) -> None:
        """Ask the tiers further, or fetch what they have, or wait no more: by what is known now."""
        if waiting.wanted.may_end_inside:
            waiting.wanted = waiting.planner.with_tail(waiting.wanted)
        wanted, unknown = waiting.wanted, list[OffloadKey]()
        hit = waiting.planner.deep_hit(wanted, wanted.limit_tokens, unknown, waiting.skipped)
        if self._skip_slow(waiting, len(unknown)):
            unknown.clear()
            hit = waiting.planner.deep_hit(wanted, wanted.limit_tokens, unknown, waiting.skipped)
        if hit.undecided:
            waiting.on_ask()
            self._ask(waiting, list(dict.fromkeys(unknown)))
            return
        if self._is_to_come(waiting, hit.num_tokens):
            waiting.look_at = self._now + max(MIN_POLL_S, POLL_PART * waiting.waited_s)
            return
        left_s = min(self._load_s, waiting.limit_s - waiting.waited_s)
        plan = waiting.planner.worth_while(wanted, hit.num_tokens, left_s, waiting.skipped, waiting.notes)
        waiting.planned, waiting.num_to_have = wanted, plan.num_tokens
        if plan.chains:
            waiting.on_ask()
            self._fetch(waiting, plan)
        else:
            waiting.num_to_have = waiting.planner.host_hit(wanted, wanted.limit_tokens)
            waiting.go(Event.NOTHING)

    def _is_to_come(self, waiting: Waiting, num_tokens: int) -> bool:
        """Whether announced chunks have not come yet, and there is time to wait for them; note how many tokens have come."""
        waiting.num_come = num_tokens
        chunk_tokens = max([keys.chunk_tokens for keys in waiting.wanted.keys])
        is_missing = num_tokens + chunk_tokens <= min(waiting.num_announced, waiting.wanted.limit_tokens)
        return is_missing and waiting.phase is Phase.ASK and waiting.asking_s > 0 and self._lower.is_readable

    def _ask(self, waiting: Waiting, unknown: Sequence[OffloadKey]) -> None:
        """Ask the tiers for chunks; if no tier can be asked now, other requests' chunks are waited for."""
        waiting.probes = self._lower.probe(
            unknown, skipped=waiting.skipped, num_found=waiting.num_found, within_s=waiting.asking_s
        )
        if not waiting.probes:
            waiting.look_at = self._now + LOOK_AGAIN_S
        self._limit_trial(waiting, {probe.tier for probe in waiting.probes}, Access.LOOK_UP)

    def _fetch(self, waiting: Waiting, plan: FetchPlan) -> None:
        """Reserve slots and begin to load, or wait for slots."""
        if not self._are_slots_taken and self._lower.may_fetch(sum([len(chain.keys) for chain in plan.chains])):
            needed = waiting.wanted.needed_keys(plan.num_tokens)
            kept = [key for key, at in zip(needed, self._host.lookup(needed), strict=True) if at == READY]
            waiting.fetch = self._lower.fetches.begin(plan.chains, kept, waiting.wanted.tenant)
        if waiting.phase is Phase.ASK:
            waiting.go(Event.FOUND)
        if waiting.fetch is None:
            waiting.look_at = self._now + LOOK_AGAIN_S
        elif waiting.has_arrived:
            waiting.notes.append(
                "the request's own chunks fill host memory: there was no room for more from lower tiers"
            )
            waiting.arrive()
        else:
            num_wanted = sum([len(chain.keys) for chain in plan.chains])
            if waiting.fetch.num_reserved < num_wanted:
                waiting.notes.append(f"host memory had room for {waiting.fetch.num_reserved} of {num_wanted} chunks")
            self._limit_by_computing(waiting, plan.num_tokens)
            self._limit_trial(waiting, plan.first_tokens, Access.LOAD)

    # --- how long to wait ---------------------------------------------------------------------------------------------

    def _limit_by_computing(self, waiting: Waiting, num_tokens: int) -> None:
        """Let a request wait from now on for no more than twice the time that computing takes, if that is known.

        What a tier did lately says nothing of what it does when it hangs: until its jobs count as failed, each request would
        wait for ``restore_timeout_s``, even if it can be computed in a moment.
        """
        compute_s = self._compute_s(waiting, num_tokens)
        if compute_s is not None:
            waiting.is_limited = True
            left_s = MAX_COMPUTE_RATIO * compute_s
            waiting.limit(
                left_s,
                f"lower tiers took longer than {left_s:.3g} s, and computing is expected to take {compute_s:.3g} s",
            )

    def _compute_s(self, waiting: Waiting, num_tokens: int) -> float | None:
        """Return the seconds that computing takes of the first ``num_tokens`` tokens what neither device nor host memory has.

        ``None`` if that is not known, or if it is not to be asked. What host memory has is looked up again only when that may
        have changed: many requests may wait for as long as the pace is not known.
        """
        pace, wanted = waiting.planner.pace, waiting.wanted
        if pace is None or not pace.num_sizes:
            return None
        basis = self._host.generation, wanted.num_computed_tokens, num_tokens
        if waiting.in_host is None or waiting.in_host[0] != basis:
            waiting.in_host = basis, waiting.planner.host_hit(wanted, num_tokens)
        return pace.predict(num_tokens - waiting.in_host[1])

    def _limit_trial(self, waiting: Waiting, tiers: Iterable[int], access: Access) -> None:
        """Let a request wait for one step only if its jobs try whether one of these tiers works again: it would pay."""
        if any(self._lower.tiers[at].is_tried(access) for at in tiers):
            waiting.limit(0.0, "a lower tier that had failed was tried with this request, for one step")

    def _stop_asking(self, waiting: Waiting) -> None:
        """Make do with what the tiers have said: from now on, what is not known to be in one of them is not there.

        The questions are answered all the same, for later requests.
        """
        unanswered = {probe.tier for probe in waiting.probes if not probe.has_ended}
        if waiting.num_announced and not waiting.skipped:
            waiting.notes.append(
                f"{waiting.num_announced} tokens were announced; "
                f"{waiting.num_come} had arrived after {waiting.waited_s:.3g} s"
            )
        waiting.num_announced = 0
        for at, tier in enumerate(self._lower.tiers):
            if at not in waiting.skipped and tier.is_readable and (at in unanswered or not tier.options.has_index):
                waiting.notes.append(_NOT_ENOUGH_TIME.format(tier.name))
        waiting.skipped.update(range(len(self._lower.tiers)))
        waiting.probes = [probe for probe in waiting.probes if probe.has_ended]

    def _skip_slow(self, waiting: Waiting, num_unknown: int) -> bool:
        """Skip tiers that are expected to take longer to answer than that saves, or than there is time left, and note it.

        A tier with an index answers at once.

        Returns:
            Whether there are any.
        """
        if not num_unknown:
            return False
        num_skipped = len(waiting.skipped)
        for at, tier in enumerate(self._lower.tiers):
            if at in waiting.skipped or not tier.is_readable or tier.options.has_index:
                continue
            num_found = waiting.num_found[at]
            if not tier.num_to_ask(num_unknown, num_found, waiting.asking_s):
                waiting.skipped.add(at)
                waiting.notes.append(_NOT_ENOUGH_TIME.format(tier.name))
                continue
            # A tier that has the first chunks may have all, and so may one for which they were announced.
            part = 1.0 if num_found or waiting.num_announced else tier.look_up_gain.expected
            ask_s = tier.look_up_s(num_unknown, num_found, part)
            compute_s = self._compute_s(waiting, waiting.wanted.limit_tokens)
            if ask_s is not None and compute_s is not None and ask_s > part * compute_s:
                waiting.skipped.add(at)
                waiting.notes.append(
                    f"asking {tier.name} was expected to take {ask_s:.3f} s, and to save {part * compute_s:.3f} s"
                )
        return len(waiting.skipped) > num_skipped


# --- prefetches that hints ask for: a wait like a request's, but after all requests, and whether or not computing is faster --

MAX_AHEAD: Final = 64
"""Maximum number of prefetches under way; one tenant may have half of them."""


@dataclass(slots=True, eq=False)
class Ahead:
    """One prefetch under way.

    Attributes:
        hint: what asked for it.
        tenant: the hint's sender.
        wanted: what is to be fetched.
        deadline: time after which it is not needed.
        on_ask: called before tiers are asked for its chunks, or chunks are fetched.
        waiting: the wait for its chunks; ``None`` before the next step.
        notes: why chunks were not fetched.
    """

    hint: Hint
    tenant: str | None
    wanted: Wanted
    deadline: float
    on_ask: Callable[[], None]
    waiting: Waiting | None = None
    notes: list[str] = field(default_factory=list)


EndAhead = Callable[[Ahead, HintEnd], None]


class Prefetches:
    """Carries out the prefetches that hints ask for.

    Args:
        prefetcher: fetches chunks from the tiers.
        host: the manager of host memory.
        clock: monotonic time in seconds.
        end: called when a prefetch has ended.
    """

    def __init__(self, prefetcher: Prefetcher, host: OffloadManager, clock: Clock, end: EndAhead) -> None:
        self._prefetcher = prefetcher
        self._host = host
        self._clock = clock
        self._end = end
        self._under_way: list[Ahead] = []
        self._num_of: Counter[str | None] = Counter()

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def has_room(self, tenant: str | None) -> bool:
        """Whether a tenant may ask for one more."""
        return len(self._under_way) < MAX_AHEAD and self._num_of[tenant] < MAX_AHEAD // 2

    def lacks_any(self, keys: Sequence[ChunkKeys], num_tokens: int) -> bool:
        """Whether host memory lacks a chunk of the first ``num_tokens`` tokens."""
        return any(
            len(self._host.lookup_run(of_group.keys[first:end])) < end - first
            for of_group in keys
            for end in [num_tokens // of_group.chunk_tokens]
            for first in [min(end, of_group.group.num_skipped_tokens(num_tokens) // of_group.chunk_tokens)]
        )

    def begin(
        self, hint: Hint, tenant: str | None, keys: Sequence[ChunkKeys], num_tokens: int, on_ask: Callable[[], None]
    ) -> None:
        """Fetch the chunks of the first ``num_tokens`` tokens of a prefix, from the next step on."""
        deadline = self._clock() + (hint.deadline_s or AHEAD.seconds())
        # A hit of all tokens would need one less, because the last one is computed: here it may have all.
        wanted = Wanted(keys, num_tokens + 1, 0, num_tokens, tenant)
        self._under_way.append(Ahead(hint, tenant, wanted, deadline, on_ask))
        self._num_of[tenant] += 1

    def step(self) -> None:
        """Go on with all of them. To be called once a step, when all requests have been asked for."""
        for ahead in list(self._under_way):
            if ahead.waiting is None:
                ahead.waiting = self._prefetcher.begin(ahead.wanted, ahead.notes, on_ask=ahead.on_ask, is_ahead=True)
            elif self._prefetcher.must_wait(ahead.waiting, ahead.wanted):
                if self._clock() >= ahead.deadline:
                    ahead.waiting.end()
                    self._forget(ahead, HintEnd.FAILED)
                continue
            if not ahead.waiting.must_wait:
                has_all = not self.lacks_any(ahead.wanted.keys, ahead.wanted.limit_tokens)
                self._forget(ahead, HintEnd.DONE if has_all else HintEnd.FAILED)
                ahead.waiting.end()

    def end_all(self) -> None:
        """Give all of them up: the tiers were reset, or the connector is shut down."""
        for ahead in list(self._under_way):
            if ahead.waiting is not None:
                ahead.waiting.end()
            self._forget(ahead, HintEnd.VOID)

    def _forget(self, ahead: Ahead, how: HintEnd) -> None:
        self._under_way.remove(ahead)
        self._num_of[ahead.tenant] -= 1
        if not self._num_of[ahead.tenant]:
            del self._num_of[ahead.tenant]
        self._end(ahead, how)
