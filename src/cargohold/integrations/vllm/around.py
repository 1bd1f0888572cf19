"""What of vLLM is around the scheduler side: it pauses, and lets the workers do what somebody asks. No connector is told.

Scheduler and engine core make the connector, so they are found among its callers. Later, vLLM hides them from searches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final, Self

_SCHEDULER: Final = "vllm.v1.core.sched.interface", "SchedulerInterface"
_CORE: Final = "vllm.v1.engine.core", "EngineCore"


class Around:
    """vLLM's scheduler and engine core.

    Args:
        scheduler: the scheduler; ``None`` if it was not found.
        core: the engine core; ``None`` if there is none.

    Attributes:
        scheduler: the scheduler.
    """

    def __init__(self, scheduler: Any = None, core: Any = None) -> None:
        self.scheduler = scheduler
        self._core = core

    @classmethod
    def found(cls) -> Self:
        """Find both. To be called while they are being made."""
        return cls(_caller(*_SCHEDULER), _caller(*_CORE))

    def is_paused(self) -> bool:
        """Whether vLLM is paused, as for sleep or a change of weights."""
        state = getattr(self.scheduler, "pause_state", None)
        return state is not None and bool(state.name != "UNPAUSED")

    @property
    def hears_calls(self) -> bool:
        """Whether it can tell that somebody lets the workers do something."""
        return hasattr(self._core, "collective_rpc")

    def tell_calls(self, told: Callable[[], object]) -> None:
        """Call ``told`` before all that somebody lets the workers do; never, if that cannot be heard."""
        if not self.hears_calls:
            return
        call = self._core.collective_rpc

        def call_and_tell(*args: Any, **named: Any) -> Any:
            told()
            return call(*args, **named)

        self._core.collective_rpc = call_and_tell


def _caller(module: str, name: str) -> Any | None:
    """Return the object of this class, one of whose methods is running now; ``None`` if there is none."""
    wanted: Any = getattr(sys.modules.get(module), name, None)
    frame = None if wanted is None else sys._getframe()  # noqa: SLF001  # nothing else knows the callers' objects
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, wanted):
            return own
        frame = frame.f_back
    return None
