"""The hints that an orchestrator of agents would give while a workload is replayed.

What it is taken to know, and when, is written in ``docs/replay.md``. It says one thing only, with ``retain`` and priorities
below normal: of the sessions that wait, whose prompts go first. That is decided by *hit density*: of all pauses behind turns
that ended like this one, and that had lasted as long, how many ended within some time more, per second that they were waited
for; for the best such time. Only pauses that have ended by now are counted, so nothing but a few constants is fitted.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import log2
from typing import Final

import numpy as np

from cargohold.cache import OffloadManager
from cargohold.cache.retention import NORMAL
from cargohold.errors import ConfigError
from cargohold.lab.replay.workload import UNKNOWN, Floats, Workload
from cargohold.protocol import TurnEnd

CLOSED: Final = len(TurnEnd)
"""The kind of a pause that never ends; those before it are of turns that ended as ``TurnEnd`` says, in its order."""
_TAIL, _BRANCH = CLOSED + 1, CLOSED + 2
"""Kinds of what the next turn leaves behind: the end of the last prompt, or most of it."""

_OVER: Final = 0
"""The level of what is over."""
_NORMAL_UP_TO_S: Final = 30.0
_LEVELS_PER_DOUBLING: Final = 2.0
"""What promises a hit per ``_NORMAL_UP_TO_S`` seconds stays normal; half as many per second, so much less."""
_LOOKS_S: Final = (0.0, *(4.0 * 1.3**number for number in range(26)))
"""A pause is judged again when it has lasted so long; the last time after 47 minutes."""
_REFIT_PART: Final = 8
"""Densities are computed again when there are an eighth more pauses."""


class OrchestratorHints:
    """Gives hints to a tier while a workload is replayed.

    Args:
        workload: the requests; they must have times and sessions.
        manager: the tier.
    """

    def __init__(self, workload: Workload, manager: OffloadManager) -> None:
        self._manager = manager
        self._arrivals_s: list[float] = workload.arrivals_s.tolist()
        self._answered_s: list[float] = workload.answered_s.tolist()
        self._sessions: list[int] = workload.sessions.tolist()
        self._kinds = kinds_of(workload)
        self._past = tuple(_Past() for _ in range(_BRANCH + 1))
        # By session that is not closed: the wait behind its last turn, and what it has left behind by the first chunk of that.
        self._waiting: dict[int, _Wait] = {}
        self._left: dict[int, dict[bytes, _Wait]] = {}
        self._due: list[tuple[float, int, _Wait]] = []
        self._numbers = count()

    def before(self, request: int, prompt: Sequence[bytes]) -> None:
        """A request arrives: it ends a wait, and shows what its session leaves behind."""
        now, session = self._arrivals_s[request], self._sessions[request]
        self._judge_until(now)
        last = self._waiting.pop(session, None)
        if last is None:
            return
        self._end(last, now)
        self._manager.rank(prompt, NORMAL)
        left = self._left.setdefault(session, {})
        for at in sorted(map(prompt.index, left.keys() & set(prompt))):
            self._come_back(left, prompt[at:], now)
        num_common = _num_common(last.keys, prompt)
        behind = last.keys[num_common:]
        if behind:
            left[behind[0]] = self._begin(behind, _TAIL if num_common > len(behind) else _BRANCH, now)

    def after(self, request: int, keys: Sequence[bytes]) -> None:
        """The answer to a request is complete: its session waits from now on, or is closed."""
        session, now = self._sessions[request], self._answered_s[request]
        self._judge_until(now)
        if session == UNKNOWN:
            return
        kind = self._kinds[request]
        if kind != CLOSED:
            self._waiting[session] = self._begin(keys, kind, now)
            return
        for wait in (_Wait(keys, CLOSED, now), *self._left.pop(session, {}).values()):
            wait.is_over = True
            self._manager.rank(wait.keys, _OVER)

    def _come_back(self, left: dict[bytes, _Wait], keys: Sequence[bytes], now: float) -> None:
        """A session comes back to what it left behind; it counts if that is most of it. The rest is left behind still."""
        wait = left.pop(keys[0])
        num_common = _num_common(wait.keys, keys)
        rest = wait.keys[num_common:]
        if num_common > len(rest):
            self._end(wait, now)
            wait = self._begin(rest, _TAIL, now) if rest else wait
        wait.keys = rest
        if rest:
            left[rest[0]] = wait
        wait.is_over = not rest

    def _begin(self, keys: Sequence[bytes], kind: int, now: float) -> _Wait:
        wait = _Wait(keys, kind, now)
        self._past[kind].num_begun += 1
        self._judge(wait)
        return wait

    def _end(self, wait: _Wait, now: float) -> None:
        wait.is_over = True
        self._past[wait.kind].add(now - wait.since_s)

    def _judge_until(self, now: float) -> None:
        """Judge the waits that are due by now."""
        while self._due and self._due[0][0] <= now:
            _, _, wait = heappop(self._due)
            if not wait.is_over:
                self._judge(wait)

    def _judge(self, wait: _Wait) -> None:
        """Say what a wait's chunks are worth now, and look again when it has lasted longer."""
        level = self._past[wait.kind].level(wait.num_looks)
        if level != wait.level:
            wait.level = level
            self._manager.rank(wait.keys, level)
        wait.num_looks += 1
        if wait.num_looks < len(_LOOKS_S):
            heappush(self._due, (wait.since_s + _LOOKS_S[wait.num_looks], next(self._numbers), wait))


@dataclass(slots=True)
class _Wait:
    """Chunks that wait for their session to go on.

    Attributes:
        keys: the chunks.
        kind: what they wait for.
        since_s: since when.
        num_looks: how often they were judged.
        level: their level; normal until it is said.
        is_over: whether the session went on, or never will.
    """

    keys: Sequence[bytes]
    kind: int
    since_s: float
    num_looks: int = 0
    level: int = NORMAL
    is_over: bool = False


class _Past:
    """The waits of one kind so far.

    Attributes:
        num_begun: how many have begun; those that have not ended count as longer than all others.
    """

    def __init__(self) -> None:
        self.num_begun = 0
        self._ended_s: list[float] = []
        self._fitted_at = -1
        self._levels: list[int] = []

    def add(self, seconds: float) -> None:
        insort(self._ended_s, seconds)

    def level(self, look: int) -> int:
        """Return the level of a wait that was judged ``look`` times before."""
        if self.num_begun > self._fitted_at + self._fitted_at // _REFIT_PART:
            self._fitted_at = self.num_begun
            self._levels = [_level(self._density(seconds)) for seconds in _LOOKS_S]
        return self._levels[look]

    def _density(self, waited_s: float) -> float:
        """Return the most hits per second that a wait promises which has lasted for ``waited_s``.

        To keep n waits until the first r of them have ended brings r hits. Where little is known, one more wait counts that
        takes as long again, or another minute.
        """
        ended_s = self._ended_s[bisect_right(self._ended_s, waited_s) :]
        left_s: Floats = np.sort(np.array([*ended_s, waited_s + max(waited_s, 60.0)])) - waited_s
        num_open = self.num_begun - len(self._ended_s)
        hits = np.arange(1, len(left_s) + 1)
        kept_s = np.cumsum(left_s) + (len(left_s) + num_open - hits) * left_s
        return float((hits / np.maximum(kept_s, 1e-3)).max())


def _level(density: float) -> int:
    level = NORMAL - _LEVELS_PER_DOUBLING * log2(1 / (density * _NORMAL_UP_TO_S))
    return min(NORMAL, max(_OVER + 1, round(level)))


def _num_common(keys: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Return how many leading keys are the same."""
    pairs = enumerate(zip(keys, others, strict=False))
    return next((at for at, (key, other) in pairs if key != other), min(len(keys), len(others)))


def kinds_of(workload: Workload) -> list[int]:
    """Per request, how its turn ended, or ``CLOSED``.

    That a turn is its session's last is read from the trace's future: orchestrators close sessions, but traces do not say it.

    Raises:
        ConfigError: the trace has no times, or no sessions.
    """
    if not workload.is_timed or (workload.sessions == UNKNOWN).all():
        raise ConfigError("hints", "known", "the trace must say when requests arrived, and of which session each is")
    kinds: list[int] = workload.turn_ends.tolist()
    last = {session: request for request, session in enumerate(workload.sessions.tolist())}
    for request in last.values():
        kinds[request] = CLOSED
    return kinds
