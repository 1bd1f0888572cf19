"""The hints that an orchestrator of agents would give while a workload is replayed: which sessions are over.

They are those that the front gives of a request that says so: its prompt and its answer go first. What else may be known (all
that the session has used before, how long pauses last, how turns end, which chunks the next prompt will not use) adds little:
see ``docs/replay.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cargohold.cache import OffloadManager
from cargohold.cache.retention import NORMAL
from cargohold.errors import ConfigError
from cargohold.lab.replay.workload import UNKNOWN, Workload

_OVER: Final = 0
"""The level of what is over."""


class OrchestratorHints:
    """Gives hints to a tier while a workload is replayed.

    That a turn is its session's last is read from the trace's future: orchestrators close sessions, but traces do not say it.

    Args:
        workload: the requests.
        manager: the tier.

    Raises:
        ConfigError: the trace has no times, or no sessions.
    """

    def __init__(self, workload: Workload, manager: OffloadManager) -> None:
        if not workload.is_timed or (workload.sessions == UNKNOWN).all():
            raise ConfigError(
                "hints", "known", "the trace must say when requests arrived, and of which session each is"
            )
        self._manager = manager
        last = {session: request for request, session in enumerate(workload.sessions.tolist())}
        self._last = frozenset(request for session, request in last.items() if session != UNKNOWN)

    def before(self, prompt: Sequence[bytes]) -> None:
        """A request arrives: what it shares with sessions that are over is not over."""
        self._manager.rank(prompt, NORMAL)

    def after(self, request: int, keys: Sequence[bytes]) -> None:
        """The answer to a request is complete: its session waits from now on, or is over."""
        if request in self._last:
            self._manager.rank(keys, _OVER)
