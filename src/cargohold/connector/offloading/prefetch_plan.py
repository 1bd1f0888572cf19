"""Which chunks a hit needs, which of them to fetch from lower tiers, and what of that pays: functions without effects."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from cargohold.blocks import ABSENT
from cargohold.cache.keys import ChunkKeys
from cargohold.cache.manager import OffloadKey, OffloadManager
from cargohold.connector.offloading.requests import RequestState
from cargohold.protocol import Clock, StepView
from cargohold.tiers.scheduler_side import Chain, LowerTiers, Pace

_UNREAD = 255


def needed_keys(state: RequestState, num_computed_tokens: int, num_hit_tokens: int) -> list[OffloadKey]:
    """Return the chunks that a load of the tokens between the computed ones and the end of the hit reads."""
    return [
        key for keys in state.keys for key in _slice(keys, _needed(state, keys, num_computed_tokens, num_hit_tokens))
    ]


def chains_to_fetch(
    state: RequestState, host: OffloadManager, lower: LowerTiers, num_computed_tokens: int, num_hit_tokens: int
) -> tuple[list[Chain], dict[int, int]]:
    """Return the needed chunks that host memory lacks and a lower tier has, in chains of one tier each.

    Also return, for each of these tiers, the first token that one of its chunks stands for.
    """
    chains: list[Chain] = []
    first_tokens: dict[int, int] = {}
    for keys in state.keys:
        for index, chain in _chains(keys, _needed(state, keys, num_computed_tokens, num_hit_tokens), host, lower):
            chains.append(chain)
            first = index * keys.chunk_tokens
            first_tokens[chain.tier] = min(first, first_tokens.get(chain.tier, first))
    return chains, first_tokens


def num_tokens_in_time(num_tokens: int, load_s: float, limit_s: float) -> int:
    """Return how many of ``num_tokens`` tokens are likely to be loaded in time, if loading all of them takes ``load_s``.

    All of them if nothing is known of the speed, for which ``load_s`` is 0; none if there is no time left.

    Args:
        num_tokens: number of tokens, from 0.
        load_s: estimated seconds to load all of them, from 0.
        limit_s: seconds that are left; 0 or less once the deadline has passed.
    """
    if limit_s <= 0:
        return 0
    return num_tokens if load_s <= limit_s else int(limit_s / load_s * num_tokens)


def soonest(ways: Sequence[tuple[float, float | None]]) -> int:
    """Return the index of the way that is expected to take least time; of several, the first.

    Args:
        ways: seconds of loading and seconds of computing the rest, per way; ``None`` where that is not known. The first way
            is taken then, whose rest is known to be nothing.
    """
    times = [float("inf") if rest_s is None else load_s + rest_s for load_s, rest_s in ways]
    return times.index(min(times))


def sources_per_token(
    state: RequestState, sources: Mapping[OffloadKey, int], num_computed_tokens: int, num_hit_tokens: int
) -> bytes:
    """Return one byte per token to be loaded, for the tier that it came from: 0 is host memory, ``n + 1`` lower tier ``n``.

    If the groups' chunks of a token came from different tiers, the slowest counts. Leading tokens that no group reads any
    more, because windows have moved on, count like the first token that is read.

    Args:
        state: the request.
        sources: index of the lower tier, from 0, of each chunk that was fetched.
        num_computed_tokens: number of leading tokens that are on the device.
        num_hit_tokens: number of leading tokens that will be on the device after the load.
    """
    # Tokens that no group reads have a mark of their own.
    marks = bytearray([_UNREAD]) * (num_hit_tokens - num_computed_tokens)
    spans = sorted(
        (sources.get(keys.keys[index], -1), index * keys.chunk_tokens - num_computed_tokens, keys.chunk_tokens)
        for keys in state.keys
        for index in _needed(state, keys, num_computed_tokens, num_hit_tokens)
    )
    for tier, start, length in spans:
        first = max(0, start)
        marks[first : start + length] = bytes([tier + 1]) * (start + length - first)
    num_unread = len(marks) - len(marks.lstrip(bytes([_UNREAD])))
    marks[:num_unread] = bytes(marks[num_unread : num_unread + 1] or b"\0") * num_unread
    return bytes(marks)


def _needed(state: RequestState, keys: ChunkKeys, num_computed_tokens: int, num_hit_tokens: int) -> range:
    """Return the numbers of the chunks that one group needs. A window needs only the last ones; see ``longest_hit``."""
    next_query = min(num_hit_tokens, state.request.num_tokens - 1)
    first_token = max(num_computed_tokens, keys.group.num_skipped_tokens(next_query))
    end = num_hit_tokens // keys.chunk_tokens
    return range(min(first_token // keys.chunk_tokens, end), end)


def _slice(keys: ChunkKeys, needed: range) -> list[OffloadKey]:
    return keys.keys[needed.start : needed.stop]


def _chains(keys: ChunkKeys, needed: range, host: OffloadManager, lower: LowerTiers) -> Iterator[tuple[int, Chain]]:
    """Yield the chains of one group, each with the number of its first chunk."""
    own = _slice(keys, needed)
    absent = [at for at, state in enumerate(host.lookup(own)) if state == ABSENT]
    tiers = lower.tiers_of([own[at] for at in absent])
    # Neighbours in the same tier have the same difference between place (in ``own``) and rank (in ``places``).
    places = zip(absent, tiers, strict=True)
    for (tier, _), group in groupby(enumerate(places), lambda item: (item[1][1], item[1][0] - item[0])):
        if tier < 0:
            continue
        run = [place for _, (place, _) in group]
        first = needed.start + run[0]
        yield first, Chain(tier, own[run[0] : run[-1] + 1], keys.keys[first - 1] if first else None)


# --- measures how fast the engine computes ----------------------------------------------------------------------------

MAX_AGE_S: Final = 300.0
"""Age in seconds after which a measurement does not count: the machine does not change, but its use may."""
_KEEP: Final = 0.8
"""Weight that earlier measurements keep with each new one."""
REACH: Final = 4
"""Steps more than this many times larger than the largest measured one are not predicted."""
_MOST_STEPS: Final = 16
"""Maximum number of steps in flight: more than any engine has."""
_PROMPT_TOKENS: Final = 32
"""A request that computes so many tokens in a step computes its prompt: generating takes one, or some with speculation."""


@dataclass(slots=True)
class _Steps:
    """Measurements of steps of similar size.

    Attributes:
        num_tokens, seconds: averages over the steps, the latest counting most.
        noted_at: time at which the last one was measured.
    """

    num_tokens: float
    seconds: float
    noted_at: float


class StepPace:
    """Measures each step from handing out its work until its report arrives, and predicts compute times from that.

    A step may be handed out before the previous one has ended: then it is measured from the end of the previous one.

    Steps are averaged separately per size, in powers of two: a long answer is hundreds of steps of one token, which say
    nothing about how long a prompt takes, and must not displace what is known about prompts.

    Args:
        clock: monotonic time in seconds.
        max_step_tokens: maximum number of tokens that one step computes.
    """

    def __init__(self, clock: Clock, max_step_tokens: int) -> None:
        self._clock = clock
        self._max_step_tokens = max_step_tokens
        self._measured: dict[int, _Steps] = {}
        # Tokens of each step in flight, of them those of prompts, and the time at which it was handed out; oldest first.
        self._begun: deque[tuple[int, int, float]] = deque(maxlen=_MOST_STEPS)
        self._ended_at = clock()

    @property
    def num_sizes(self) -> int:
        """Number of sizes of which a step was measured so far; when it grows, more can be predicted."""
        return len(self._measured)

    def begin(self, step: StepView) -> None:
        """Note that a step is handed out to the workers now."""
        shares = [share.num_scheduled_tokens for share in step.scheduled]
        num_tokens, num_prompt_tokens = sum(shares), 0
        if (
            num_tokens >= len(shares) + _PROMPT_TOKENS - 1
        ):  # while all requests only generate, there is nothing to count
            num_prompt_tokens = sum([count for count in shares if count >= _PROMPT_TOKENS])
        self._begun.append((num_tokens, num_prompt_tokens, self._clock()))

    def end(self, stats: Counter[str]) -> None:
        """Note that the workers have reported the oldest step in flight, and measure it.

        Counts in ``stats`` the steps that mostly compute prompts: their tokens of prompts, and how long they took.
        """
        if not self._begun:
            return
        (num_tokens, num_prompt_tokens, since), now = self._begun.popleft(), self._clock()
        since, self._ended_at = max(since, self._ended_at), now
        if 2 * num_prompt_tokens > num_tokens:
            stats["prefill_tokens"] += num_prompt_tokens
            stats["prefill_s"] += now - since  # type: ignore[assignment]  # a Counter counts whatever can be added
        if not num_tokens:
            return
        steps = self._measured.get(num_tokens.bit_length())
        if steps is None or now - steps.noted_at > MAX_AGE_S:
            self._measured[num_tokens.bit_length()] = _Steps(num_tokens, now - since, now)
            return
        steps.num_tokens += (1 - _KEEP) * (num_tokens - steps.num_tokens)
        steps.seconds += (1 - _KEEP) * (now - since - steps.seconds)
        steps.noted_at = now

    def predict(self, num_tokens: int) -> float | None:
        """Return the seconds that computing ``num_tokens`` tokens takes; ``None`` if that is not known."""
        now = self._clock()
        fresh = [steps for steps in self._measured.values() if now - steps.noted_at <= MAX_AGE_S]
        largest = max((steps.num_tokens for steps in fresh), default=0.0)
        if largest * REACH < min(num_tokens, self._max_step_tokens):
            return None
        pace = Pace(self._clock, MAX_AGE_S)
        for steps in sorted(fresh, key=lambda steps: steps.num_tokens):
            pace.note(steps.num_tokens, steps.seconds)
        return pace.predict(num_tokens, times=-(-num_tokens // self._max_step_tokens))
