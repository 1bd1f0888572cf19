"""What requests that a pause has frozen hold is restored when they go on, although the device has slept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cargohold.blocks import READY
from cargohold.connector.kernel.answers import KEPT_SHARE
from cargohold.connector.offloading import OffloadingScheduler
from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.lab.simulation.connectors import offloading_sides
from cargohold.lab.simulation.replica import Oracle, Replica
from cargohold.lab.simulation.run import ScenarioRun
from cargohold.lab.simulation.timeline import NO_TIMELINE, Timeline
from cargohold.lab.simulation.world import Scenario
from cargohold.lab.vllm.adapter import AdapterEngine
from cargohold.lab.vllm.recipe import VllmRecipe, VllmRun, VllmWorld
from cargohold.protocol import AttentionKind, BlockIds, RequestView


class FrozenOracle(Oracle):
    """Checks pauses before sleep, where device and host memory are one cache and the model has full attention alone.

    When the pause has settled, nothing that is stored at all of the running requests is on the device alone, or half of host
    memory is full of theirs, and no block is held. When they go on, those that are admitted first are given what host memory
    had of them: later, others may have taken its place. Only while no fault has struck.

    Args:
        engine: the replica.
        is_excused: whether a fault has struck.
    """

    name = "frozen"

    def __init__(self, engine: AdapterEngine, is_excused: Callable[[], bool]) -> None:
        self._engine, self._is_excused = engine, is_excused
        self._owed: dict[str, int] = {}  # tokens, by request
        self._missed, self._has_begun = "", False
        sides = [side for side, _ in offloading_sides(engine.scheduler.connector)]
        is_simple = len(sides) == 1 and [group.kind for group in engine.layout.groups] == [AttentionKind.FULL]
        if is_simple and sides[0].shared.device is not None and engine.side._options.may_sleep:
            self._watch(sides[0])

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Not raised in the connector's call: guards would catch that."""
        if self._missed and not self._is_excused():
            self.fail(self._missed)
        if self._has_begun:
            self._owed.clear()
            self._has_begun = False

    def _watch(self, side: OffloadingScheduler) -> None:
        vllm, admit = self._engine.vllm, side.update_state_after_alloc
        reset_prefix_cache = vllm.reset_prefix_cache

        def reset(*args: Any) -> bool:
            is_pause = self._engine.view.reset.mode == "keep" and self._engine.view.reset.waits
            owed = self._look(side) if is_pause else {}
            # Raises where a request that has loaded, and does not run yet, holds blocks.
            is_reset = bool(reset_prefix_cache(*args))
            self._owed = owed if is_reset else {}
            return is_reset

        def admitted(request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
            state = side.requests[request.request_id]
            num_found = 0 if state.lookup is None else state.lookup.num_computed_tokens + num_external_tokens
            admit(request, blocks, num_external_tokens)
            owed = self._owed.get(request.request_id, 0)
            self._has_begun |= owed > 0
            if num_found < owed:
                self._missed = (
                    f"{request.request_id} was frozen and gets {num_found} of the {owed} tokens that were kept"
                )

        vllm.reset_prefix_cache = reset
        vars(side)["update_state_after_alloc"] = admitted

    def _look(self, side: OffloadingScheduler) -> dict[str, int]:
        """Check what is kept; return how many tokens each frozen request is to be given."""
        manager, kept, alone, owed = side.shared.manager, set[bytes](), set[bytes](), dict[str, int]()
        context = side.shared.context
        assert context is not None
        frozen = [
            request
            for request in self._engine.vllm.requests.values()
            if request.status.name in ("RUNNING", "PREEMPTED")
        ]
        for request in frozen:
            state, (blocks,) = side.requests[request.request_id], context.get_request_blocks(request.request_id)
            (keys,), (first,) = state.keys, state.next_chunk
            states = manager.lookup(keys.keys)
            kept |= {key for key, of in zip(keys.keys, states, strict=True) if of == READY}
            alone |= set(manager.listed(keys.keys))
            if state.due_tokens <= request.num_tokens + keys.chunk_tokens:  # else what it generates is not stored
                unoffered = zip(keys.keys[first:], context.contents(blocks[first:]), strict=False)
                alone |= {key for key, content in unoffered if content is not None}
            num_leading = len(states) - len(states.lstrip(bytes([READY])))
            owed[request.request_id] = min(num_leading * keys.chunk_tokens, request.num_tokens - 1)
        if self._is_excused():
            return {}
        alone -= kept
        self.require(
            not alone or len(kept) >= int(KEPT_SHARE * manager.capacity),
            f"of frozen requests, {len(alone)} chunks are on the device alone, and {len(kept)} in {manager.capacity} slots",
        )
        held = self._engine.scheduler.connector.held_references()
        self.require(not held, f"blocks {sorted(held)} are held as long as the pause lasts")
        return owed


class FrozenWorld(VllmWorld):
    """Has that oracle, too."""

    def oracles(self, engine: Replica) -> list[Oracle]:
        assert isinstance(engine, AdapterEngine)
        return [*super().oracles(engine), FrozenOracle(engine, lambda: self.source.struck.total() > 0)]


class FrozenRecipe(VllmRecipe):
    """Plays pauses before sleep under that oracle."""

    def run(self, scenario: Scenario, timeline: Timeline = NO_TIMELINE) -> ScenarioRun:
        return VllmRun(scenario, timeline=timeline, world=FrozenWorld(scenario))
