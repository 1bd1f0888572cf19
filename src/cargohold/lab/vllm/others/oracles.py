"""What must hold with any connector, whatever it is asked: nothing stands still, and nothing goes on for ever."""

from __future__ import annotations

from collections import Counter
from typing import Final

from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.lab.simulation.oracles import Oracle, OracleError
from cargohold.lab.vllm.engine import VllmEngine

PATIENCE: Final = 200
"""Steps in a row in which nothing runs and no block is copied, although requests wait, after which nothing ever will."""
UNREST: Final = 1000
"""Steps in a row with no request in the engine, or none that runs, after which that never changes, whatever is copied."""


class StandstillOracle(Oracle):
    """While there are requests, they run or something is copied; and when there are none, the engine comes to rest.

    Args:
        engine: the replica.
    """

    name = "standstill"

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._num_idle = self._num_waiting = self._num_empty = 0

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Count steps in which nothing has happened."""
        requests, is_waiting = self._engine.vllm.requests, not step.scheduled and output.connector.is_empty()
        is_copying = any(copies.num_jobs for copies in self._engine.copies)
        self._num_waiting = self._num_waiting + 1 if is_waiting and requests else 0
        self._num_idle = self._num_idle + 1 if is_waiting and requests and not is_copying else 0
        self._num_empty = 0 if requests else self._num_empty + 1
        if self._num_idle > PATIENCE:
            self.fail(self._complaint(PATIENCE, "nothing runs, and nothing is copied from or to the device"))
        if self._num_waiting > UNREST:
            self.fail(self._complaint(UNREST, "nothing runs, whatever is stored"))
        if self._num_empty > UNREST and self._engine.scheduler.has_work():
            message = f"for {UNREST} steps the engine has had no request, and it still has work to do for the connector"
            raise OracleError("unrest", message)

    def _complaint(self, num_steps: int, what: str) -> str:
        vllm, pool = self._engine.vllm, self._engine.scheduler.kv.pool
        managers = vllm.kv_cache_manager.coordinator.single_type_managers
        held = Counter(
            {
                name: sum(not block.is_null for manager in managers for block in manager.req_to_blocks.get(name, ()))
                for name in vllm.requests
            }
        )
        holders = (
            ", ".join(f"{name} holds {count} blocks" for name, count in held.items() if count) or "nobody holds blocks"
        )
        return (
            f"for {num_steps} steps {what}, and {len(vllm.requests)} requests wait: {holders}, "
            f"{pool.num_free_blocks} of {pool.num_usable_blocks} are free"
        )
