"""Hints that an orchestrator could have given in a trace: it knows what each session waits for, and when it is over.

When a turn has ended, the orchestrator of an agent knows whether a quick tool runs, a slow one, or a person reads, or whether
the session is over; it does not know when the next turn comes. A trace tells only when that was. So from the pause behind a
turn only its kind is taken: quick, slow, long, or none; see ``QUICK_S`` and ``SLOW_S``.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

import numpy as np

from cargohold.cache import OffloadManager
from cargohold.cache.shares import NORMAL
from cargohold.errors import ConfigError
from cargohold.replay.workload import UNKNOWN, Ints, Workload

HINTED: Final = "+hints"
"""What is appended to a policy's name where it gets hints."""
QUICK_S: Final = 15.0
"""A pause up to this comes from a quick tool: the session is retained."""
SLOW_S: Final = 60.0
"""A pause up to this comes from a slow tool: nothing is said. Behind longer ones is a person, or a long job: it is demoted."""
RETAINED_S: Final = 60.0
"""Time of a ``retain``."""
RETAIN_FRACTION: Final = 0.5
"""Part of the tier whose priority may be raised: the default of ``HintConfig.retain_fraction``."""
_RAISED, _DEMOTED, _OVER = 80, 10, 0


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
        # By session: the number of its last turn, and its chunks whose level is not normal.
        self._ranked: dict[int, tuple[int, Sequence[bytes]]] = {}
        self._raised: dict[int, int] = {}
        self._num_raised = 0
        self._ends: list[tuple[float, int, int]] = []

    def before(self, request: int) -> None:
        """A request arrives: hints whose time is over end, and what its session's last hint said is void."""
        now, session = self._arrivals_s[request], self._sessions[request]
        while self._ends and self._ends[0][0] <= now:
            _, turn, other = heappop(self._ends)
            if self._ranked.get(other, (UNKNOWN, ()))[0] == turn:
                self._lift(other)
        self._lift(session)

    def after(self, request: int, keys: Sequence[bytes]) -> None:
        """A request has ended: its orchestrator says what it knows."""
        session, pause_s = self._sessions[request], self._pauses_s[request]
        if session == UNKNOWN or QUICK_S < pause_s <= SLOW_S:
            return
        if pause_s > SLOW_S:
            is_over = not np.isfinite(pause_s)
            self._manager.rank(keys, _OVER if is_over else _DEMOTED)
            if not is_over:
                self._ranked[session] = request, keys
            return
        raised = keys[: self._budget - self._num_raised]
        self._manager.rank(raised, _RAISED)
        self._num_raised += len(raised)
        self._raised[session] = len(raised)
        self._ranked[session] = request, raised
        heappush(self._ends, (self._arrivals_s[request] + RETAINED_S, request, session))

    def _lift(self, session: int) -> None:
        _, keys = self._ranked.pop(session, (UNKNOWN, ()))
        self._num_raised -= self._raised.pop(session, 0)
        if keys:
            self._manager.rank(keys, NORMAL)


def _pauses_s(workload: Workload) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Per request, seconds until the next one of its session; infinite behind its last."""
    pauses = np.full(len(workload.ends), np.inf)
    order = np.lexsort((np.arange(len(pauses)), workload.sessions))
    sessions: Ints = workload.sessions[order]
    same = sessions[:-1] == sessions[1:]
    pauses[order[:-1][same]] = (workload.arrivals_s[order[1:]] - workload.arrivals_s[order[:-1]])[same]
    return pauses
