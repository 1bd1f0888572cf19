"""The fingerprint model, with reads and writes of KV in vLLM's order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cargohold.engine.core.step import ScheduledTokens, SchedulerStep
from cargohold.engine.executor.runner import LayerHooks
from cargohold.integrations.vllm.simulation.states import AlignedStateBlocks, RunningStates
from cargohold.protocol import AttentionKind, KVCacheGroup
from cargohold.simulation.fingerprints import FingerprintRunner


class WriteFirstRunner(FingerprintRunner):
    """Writes the KV of a whole batch before any of it is read, layer by layer, as vLLM's model runner does.

    So a request may hit blocks that another one fills in the same step; vLLM's prefix cache relies on it. Recurrent states
    are copied and advanced one by one: a request may hit only states that an earlier step has left.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        recurrent = [group for group in self._groups if group.kind is AttentionKind.RECURRENT]
        # vLLM requires that all recurrent groups have blocks of the same size.
        self._running = RunningStates(recurrent[0].block_tokens) if recurrent else None
        self._lost_states: Iterable[str] = ()

    def lose_states(self, request_ids: Iterable[str]) -> None:
        """Note requests that will have other blocks at the next step, or none."""
        self._lost_states = request_ids

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks before anything else in a step, as vLLM does with blocks that a prefix ends in.

        They are copied one after the other, as a block may be copied from one that was just copied to. vLLM (0.32) copies all
        at once, so that such a block gets the old contents.
        """
        for source, destination in pairs:
            self._copies.check_read([source], "a copy on write")
            self._copies.check_write([destination], "a copy on write")
            self.memory[destination] = self.memory[source]

    def execute(self, step: SchedulerStep, hooks: LayerHooks | None) -> Mapping[str, int]:
        """Write the step's fingerprints, and check everything that the step reads."""
        self.wrong.clear()
        self.before_forward()
        pairs = [(share, group) for share in step.scheduled for group in self._groups]
        if self._running is not None:
            self._advance_states(step.scheduled, self._running)
        for share, group in pairs:
            if group.index not in self._states:
                self._write(share, group)
        for share, group in pairs:
            if group.index not in self._states:
                self._read(share, group)
        for share, group in pairs:
            self._compare_written(share, group)
        return {share.request_id: self._next_token(share) for share in step.scheduled if share.sample is not None}

    def _new_states(self, group: KVCacheGroup) -> AlignedStateBlocks:
        index = group.index
        return AlignedStateBlocks(group, self._blocks[index], self._chains, self._salts[index], self._copies)

    def _advance_states(self, shares: Sequence[ScheduledTokens], running: RunningStates) -> None:
        running.forget(self._lost_states)
        moves = running.moves(shares)
        for group in self._groups:
            states = self._states.get(group.index)
            if isinstance(states, AlignedStateBlocks):
                states.copy(moves)
                for share in shares:
                    self._read(share, group)
                    self._write(share, group)
