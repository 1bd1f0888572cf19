"""Hints that an orchestrator could have given in a trace: it knows what each session waits for, and when it is over.

When a turn has ended, the orchestrator of an agent knows whether a quick tool runs, a slow one, or a person reads, or whether
the session is over; it does not know when the next turn comes. A trace tells only when that was. So from the pause behind a
turn only its kind is taken: quick, slow, long, or none; see ``QUICK_S`` and ``SLOW_S``. Besides, the orchestrator knows the
prompts that it has sent, and how large the cache is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Final

import numpy as np

from cargohold.cache import OffloadManager
from cargohold.cache.shares import NORMAL
from cargohold.errors import ConfigError
from cargohold.replay.workload import UNKNOWN, Ints, Workload

HINTED: Final = "+hints"
"""What is appended to a policy's name where it gets hints."""
QUICK_S: Final = 15.0
"""A pause up to this comes from a quick tool."""
SLOW_S: Final = 60.0
"""A pause up to this comes from a slow tool. Behind longer ones is a person, or a long job."""
RETAIN_FRACTION: Final = 0.5
"""Part of the tier whose priority may be raised: the default of ``HintConfig.retain_fraction``."""
SEVERAL: Final = 4
"""Number of sessions for which the tier must have room: else those that are raised would take the place of the running one."""

_QUICK, _SLOW, _TAIL, _OVER = 80, 60, 1, 0
_TAIL_CHUNKS: Final = 2
"""What a prompt ends with that the next one has otherwise: up to this it is the end of an answer, put into other words."""
_LONG: Final = ((0.0, 30), (120.0, 25), (240.0, 20), (480.0, 15), (960.0, 10))
"""Levels behind a long pause, by the seconds that it has lasted: the longer, the later the session is expected back."""


@dataclass(slots=True)
class _Said:
    """What was said of a prompt, until its session goes on.

    Attributes:
        keys: its chunks.
        num_raised: how many of them count against ``RETAIN_FRACTION``.
        is_void: whether it holds no more.
    """

    keys: Sequence[bytes]
    num_raised: int = 0
    is_void: bool = False


class DerivedHints:
    """Gives hints to a tier while a workload is replayed.

    Args:
        workload: the requests; they must have times and sessions.
        manager: the tier.

    Raises:
        ConfigError: the trace has no times, or no sessions.
    """

    def __init__(self, workload: Workload, manager: OffloadManager) -> None:
        if not workload.is_timed or (workload.sessions == UNKNOWN).all():
            raise ConfigError(
                "hints", "derived", "the trace must say when requests arrived, and of which session each is"
            )
        self._manager = manager
        self._arrivals_s = workload.arrivals_s
        self._sessions = workload.sessions.tolist()
        self._pauses_s = _pauses_s(workload)
        self._budget = int(RETAIN_FRACTION * manager.capacity)
        # By session that is not over: its last turn, and what its turns have left behind.
        self._waiting: dict[int, _Said] = {}
        self._left: dict[int, list[_Said]] = {}
        self._num_waiting = 0
        self._due: list[tuple[float, int, _Said, int]] = []
        self._numbers = count()

    def before(self, request: int, prompt: Sequence[bytes]) -> None:
        """A request arrives: what was said of its session is void, and what the new prompt does not contain was left behind."""
        now, session = self._arrivals_s[request], self._sessions[request]
        while self._due and self._due[0][0] <= now:
            _, _, said, level = heappop(self._due)
            if not said.is_void:
                self._manager.rank(said.keys, level)
        last = self._waiting.pop(session, None)
        if last is None:
            return
        self._num_waiting -= len(last.keys)
        self._budget += last.num_raised
        last.is_void = True
        num_common = next(
            (at for at, (old, new) in enumerate(zip(last.keys, prompt, strict=False)) if old != new),
            min(len(last.keys), len(prompt)),
        )
        self._manager.rank(last.keys[:num_common], NORMAL)
        if num_common < len(last.keys):
            left = _Said(last.keys[num_common:])
            self._left.setdefault(session, []).append(left)
            if len(left.keys) <= _TAIL_CHUNKS:
                self._manager.rank(left.keys, _TAIL)
            else:  # it may be that of another agent of the session, with a tool of its own
                self._lower(left, now, not_before_s=SLOW_S)

    def after(self, request: int, keys: Sequence[bytes]) -> None:
        """A request has ended: its orchestrator says what it knows."""
        session, pause_s = self._sessions[request], self._pauses_s[request]
        if session == UNKNOWN:
            return
        said = _Said(keys)
        if not np.isfinite(pause_s):
            for branch in (*self._left.pop(session, ()), said):
                branch.is_void = True
                self._manager.rank(branch.keys, _OVER)
            return
        self._waiting[session] = said
        self._num_waiting += len(keys)
        if self._num_waiting <= self._manager.capacity:
            return  # there is room for all who wait
        if pause_s > SLOW_S:
            self._lower(said, self._arrivals_s[request])
        elif self._manager.capacity >= SEVERAL * self._num_waiting / len(self._waiting):
            self._raise(said, _QUICK if pause_s <= QUICK_S else _SLOW)

    def _lower(self, said: _Said, now: float, not_before_s: float = 0.0) -> None:
        """Say that a prompt is not expected back soon, and the longer it takes, the less."""
        for after_s, level in _LONG:
            heappush(self._due, (now + max(after_s, not_before_s), next(self._numbers), said, level))

    def _raise(self, said: _Said, level: int) -> None:
        """Say that a prompt is expected back soon, as far as the budget goes."""
        raised = said.keys[: self._budget]
        said.num_raised = len(raised)
        self._budget -= len(raised)
        self._manager.rank(raised, level)


def _pauses_s(workload: Workload) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Per request, seconds until the next one of its session; infinite behind its last."""
    pauses = np.full(len(workload.ends), np.inf)
    order = np.lexsort((np.arange(len(pauses)), workload.sessions))
    sessions: Ints = workload.sessions[order]
    same = sessions[:-1] == sessions[1:]
    pauses[order[:-1][same]] = (workload.arrivals_s[order[1:]] - workload.arrivals_s[order[:-1]])[same]
    return pauses
