"""Oracle: a look-up reads. It changes nothing but its own request's record."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

from cargohold.connector.offloading import OffloadingScheduler
from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.offload.tiering.stepped_clock import SteppedClock
from cargohold.protocol import RequestView
from cargohold.simulation.clock import VirtualClock
from cargohold.simulation.faulty_manager import FaultyManager
from cargohold.simulation.inside import offloading_sides
from cargohold.simulation.oracles.base import Oracle
from cargohold.simulation.replica import Replica

EVERY: Final = 5
EVERY_LATER: Final = 100
NUM_EARLY: Final = 50
"""One look-up in so many is checked, the first included: to write everything down before and after takes long. Where requests
wait for tiers in trouble, there are thousands of look-ups that find all as it was."""
_APART = (SteppedClock, VirtualClock, FunctionType, MethodType, BuiltinFunctionType, memoryview)
"""Of these, only who they are is compared: of clocks, which move by themselves, of code, and of views of the tiers' memory."""


class LookUpOracle(Oracle):
    """Compares the whole state of managers, tiers and other requests before and after look-ups.

    Everything counts that can be reached from them, whatever it is called, but for clocks and the engine's view of requests.

    Args:
        engine: the replica.
    """

    name = "look-ups"

    def __init__(self, engine: Replica) -> None:
        self._num_seen = 0
        self._changed = ""
        for side, _ in offloading_sides(engine.scheduler.connector):
            self._watch(side)

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """No look-up since the last step has changed anything. Not raised in the look-up: guards would catch that."""
        if self._changed:
            self.fail(self._changed)

    def _watch(self, side: OffloadingScheduler) -> None:
        look_up = side.get_num_new_matched_tokens

        def watched(request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
            self._num_seen += 1
            if self._num_seen % (EVERY if self._num_seen <= NUM_EARLY else EVERY_LATER) != 1:
                return look_up(request, num_computed_tokens)
            before = _written_down(side, request.request_id)
            answer = look_up(request, num_computed_tokens)
            after = _written_down(side, request.request_id)
            changed = [part for part, state in before.items() if after.get(part) != state]
            if changed or len(after) > len(before):
                self._changed = (
                    f"the look-up of {request.request_id} by {side.name} changed {changed or 'what there is'}"
                )
            return answer

        side.get_num_new_matched_tokens = watched  # type: ignore[method-assign]  # of this one object only


def _written_down(side: OffloadingScheduler, asked: str) -> Mapping[str, bytes]:
    """Return everything but the record of the request that is asked for, in bytes that are equal if the state is."""
    requests = side.requests
    parts: dict[str, Any] = {"the manager": side.manager}
    parts |= {f"request {name}": state for name, state in requests.items() if name != asked}
    apart = {id(state.request) for state in requests.values()} | {id(requests[asked])}
    return {name: _bytes_of(part, apart) for name, part in parts.items()}


def _bytes_of(part: object, apart: set[int]) -> bytes:
    stream = io.BytesIO()
    _Writer(stream, apart).dump(part)
    return stream.getvalue()


class _Writer(pickle.Pickler):
    """Writes objects down, and only who they are of those that are ``apart`` and of those that cannot be written down."""

    def __init__(self, stream: io.BytesIO, apart: set[int]) -> None:
        super().__init__(stream)
        self._apart = apart

    def persistent_id(self, obj: object) -> int | None:
        """Return who an object is if it is not to be written down."""
        return id(obj) if isinstance(obj, _APART) or id(obj) in self._apart else None

    def reducer_override(self, obj: object) -> Any:
        """Write of a manager with faults only the one inside: the faults are drawn anew whenever it is asked."""
        return (FaultyManager, (obj.inner,)) if isinstance(obj, FaultyManager) else NotImplemented
