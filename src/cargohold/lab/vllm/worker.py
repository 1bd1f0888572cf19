"""One rank: a fingerprint model and the adapter's worker side, called as vLLM's model runner calls them.

Recurrent state as vLLM's workers keep it with ``--mamba-cache-mode align``.

A request has one state at a time, in the block of the last token that its step computes. When a step ends in another block
than the one before, the state is copied there first, and what it was copied from stays as it is. So blocks that a step passes
over hold no state, and a block is a state at a boundary only if a step has ended there::

    blocks of 4                  0     1     2     3
    prompt of 15, a step to 12   null  null  12
    a step to 15                             12 -> 15        copied, then advanced in place
    one more token                           12    16        full: it can be found from now on
    one more                                       16 -> 17  in block 4
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from cargohold.engine.core.request import GREEDY, ScheduledTokens, SchedulerStep
from cargohold.engine.executor import LayerHooks
from cargohold.lab.simulation.fingerprints import FINGERPRINT_BYTES, WRONG_TOKEN, FingerprintRunner, StateBlocks, end_of
from cargohold.lab.simulation.transfers import CopiesInFlight
from cargohold.protocol import AttentionKind, KVCacheGroup


@dataclass(slots=True)
class _Row:
    """One request.

    Attributes:
        num_prompt_tokens: tokens of its prompt.
        tables: its block ids per group, as far as this worker knows.
    """

    num_prompt_tokens: int
    tables: tuple[list[int], ...]


class InputBatch:
    """Follows vLLM's scheduler outputs, and converts each of them to a step of the model.

    Args:
        tokens_of: gives the prompt and answer of a request; the simulated model's answers are known beforehand.

    Attributes:
        drafted: how many of a request's speculative tokens are right in this step, and how many are not, by its id.
    """

    def __init__(self, tokens_of: Callable[[str], Sequence[int]]) -> None:
        self._tokens_of = tokens_of
        self._rows: dict[str, _Row] = {}
        self.drafted: dict[str, tuple[int, int]] = {}

    def follow(self, output: Any) -> SchedulerStep:
        """The step that a scheduler output describes."""
        for request_id in output.finished_req_ids:
            self._rows.pop(request_id, None)
        self.drafted.clear()
        shares = [self._start(new, output) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            self._take_blocks(request_id, cached.new_block_ids[at], request_id in cached.resumed_req_ids)
            num_known = self._rows[request_id].num_prompt_tokens + cached.num_output_tokens[at]
            shares.append(self._share(request_id, cached.num_computed_tokens[at], num_known, output))
        return SchedulerStep(
            scheduled=tuple(shares),
            preempted_req_ids=frozenset(output.preempted_req_ids or ()),
            finished_req_ids=frozenset(output.finished_req_ids),
        )

    def _start(self, new: Any, output: Any) -> ScheduledTokens:
        self._rows[new.req_id] = _Row(len(new.prompt_token_ids), new.block_ids)
        num_known = len(new.prefill_token_ids or new.prompt_token_ids)
        return self._share(new.req_id, new.num_computed_tokens, num_known, output)

    def _take_blocks(self, request_id: str, block_ids: Any, is_resumed: bool) -> None:
        row = self._rows[request_id]
        if is_resumed:
            row.tables = block_ids
        elif block_ids is not None:
            for table, new in zip(row.tables, block_ids, strict=True):
                table.extend(new)

    def _share(self, request_id: str, num_computed_tokens: int, num_known: int, output: Any) -> ScheduledTokens:
        end = num_computed_tokens + output.num_scheduled_tokens[request_id]
        if num_drafted := len(output.scheduled_spec_decode_tokens.get(request_id, ())):
            num_right = crc32(f"{request_id} {end}".encode()) % (num_drafted + 1)  # at random, alike on all ranks
            self.drafted[request_id] = num_right, num_drafted - num_right
            end -= num_drafted - num_right
        return ScheduledTokens(
            request_id=request_id,
            token_ids=tuple(self._tokens_of(request_id)[num_computed_tokens:end]),
            num_computed_tokens=num_computed_tokens,
            write_from=num_computed_tokens,
            block_ids=self._rows[request_id].tables,
            # The last known token is computed to learn the next one.
            sample=GREEDY if end >= num_known else None,
        )


# --- recurrent state as vLLM's workers keep it with ``--mamba-cache-mode align`` --------------------------------------


@dataclass(frozen=True, slots=True)
class StateMove:
    """A state that is copied before a step.

    Attributes:
        share: the request's share of the step.
        source: the place in its table where the state is.
        destination: the place where the step goes on.
    """

    share: ScheduledTokens
    source: int
    destination: int


class RunningStates:
    """The places of running requests' states in their block tables, as vLLM's workers remember them.

    Args:
        block_tokens: tokens per block of all recurrent groups.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._places: dict[str, int] = {}

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended or lost their blocks."""
        for request_id in request_ids:
            self._places.pop(request_id, None)

    def moves(self, shares: Sequence[ScheduledTokens]) -> list[StateMove]:
        """The copies to make before a step. Notes that the states are then in the blocks where the step goes on."""
        moves = []
        for share in shares:
            # A request that was not running before has found its state in the prefix cache, or has loaded it.
            found_at = (share.num_computed_tokens - 1) // self._block_tokens
            source = self._places.get(share.request_id, found_at)
            destination = place_of_state(share, self._block_tokens)
            self._places[share.request_id] = destination
            if source not in (-1, destination):
                moves.append(StateMove(share, source, destination))
        return moves


class AlignedStateBlocks(StateBlocks):
    """The blocks of one recurrent group, of which each step reads and writes one."""

    def copy(self, moves: Sequence[StateMove]) -> None:
        """Copy states, all at once."""
        pairs = [(self._table(move.share)[move.source], self._table(move.share)[move.destination]) for move in moves]
        sources = {source for source, _ in pairs}
        assert sources.isdisjoint(destination for _, destination in pairs), "a state is overwritten while it is copied"
        for source, destination in pairs:
            self._copies.check_read([source], "a state's copy")
            self._copies.check_write([destination], "a state's copy")
            self._blocks[destination][:] = self._blocks[source]

    def _source(self, share: ScheduledTokens) -> int:
        return place_of_state(share, self._group.block_tokens)

    def _places(self, share: ScheduledTokens) -> Iterable[tuple[int, int]]:
        return [(end_of(share), place_of_state(share, self._group.block_tokens))]


def place_of_state(share: ScheduledTokens, block_tokens: int) -> int:
    """The place in a request's table of the block whose state a step advances."""
    return (end_of(share) - 1) // block_tokens


# --- the fingerprint model --------------------------------------------------------------------------------------------


class WriteFirstRunner(FingerprintRunner):
    """Writes the KV of a whole batch before any of it is read, layer by layer, as vLLM's model runner does.

    So a request may hit blocks that another one fills in the same step; vLLM's prefix cache relies on it. Recurrent states
    are copied and advanced one by one: a request may hit only states that an earlier step has left.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        recurrent = [group for group in self.groups if group.kind is AttentionKind.RECURRENT]
        # vLLM requires that all recurrent groups have blocks of the same size.
        self._running = RunningStates(recurrent[0].block_tokens) if recurrent else None
        self._lost_states: Iterable[str] = ()

    def lose_states(self, request_ids: Iterable[str]) -> None:
        """Note requests that will have other blocks at the next step, or none."""
        self._lost_states = request_ids

    def reject(self, share: ScheduledTokens, num_tokens: int) -> None:
        """Write the KV of speculative tokens that are wrong, after what a request computes in a step."""
        for group in self.groups:
            for at in range(end_of(share), end_of(share) + num_tokens):
                block_id = share.block_ids[group.index][at // group.block_tokens]
                self._copies.check_write([block_id], share.request_id)
                self.memory[block_id, at % group.block_tokens] = WRONG_TOKEN

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
        assert hooks is not None
        layers = [name for group in self.groups for name in group.layer_names]
        for name in layers:
            hooks.wait_for_layer_load(name)
        pairs = [(share, group) for share in step.scheduled for group in self.groups]
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
        for name in layers:
            hooks.save_kv_layer(name)
        return {share.request_id: self._next_token(share) for share in step.scheduled if share.sample is not None}

    def _new_states(self, group: KVCacheGroup) -> AlignedStateBlocks:
        index = group.index
        return AlignedStateBlocks(group, self._blocks[index], self._chains, self.salts[index], self._copies)

    def _advance_states(self, shares: Sequence[ScheduledTokens], running: RunningStates) -> None:
        running.forget(self._lost_states)
        moves = running.moves(shares)
        for group in self.groups:
            states = self._states.get(group.index)
            if isinstance(states, AlignedStateBlocks):
                states.copy(moves)
                for share in shares:
                    self._read(share, group)
                    self._write(share, group)


# --- one rank ---------------------------------------------------------------------------------------------------------


class SimulatedWorker:
    """Executes vLLM's scheduler outputs.

    The hooks of the connector are called by vLLM's own code, in vLLM's order.

    Args:
        config: vLLM's configuration, with this worker's rank.
        kv_cache_config: vLLM's description of the paged KV.
        runner: the model and the paged KV.
        tokens_of: gives the prompt and answer of a request.
        copies: this worker's copies in flight.

    Attributes:
        connector: the connector.
        runner: the model.
    """

    def __init__(
        self,
        config: Any,
        kv_cache_config: Any,
        runner: WriteFirstRunner,
        tokens_of: Callable[[str], Sequence[int]],
        copies: CopiesInFlight,
    ) -> None:
        self.runner = runner
        self._config = config
        self._copies = copies
        self._batch = InputBatch(tokens_of)
        self.connector: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache_config)
        memory = torch.from_numpy(runner.memory).view(torch.uint8)
        self._layers = {
            name: _layer(memory, group) for group in kv_cache_config.kv_cache_groups for name in group.layer_names
        }
        self.connector.register_kv_caches(self._layers)
        # Where connectors find layers that were not registered with them.
        config.compilation_config.static_forward_context = {
            name: SimpleNamespace(kv_cache=tensor) for name, tensor in self._layers.items()
        }

    def execute(self, message: bytes) -> tuple[SchedulerStep, bytes]:
        """Run one step.

        Args:
            message: the scheduler output, pickled as on its way to another process.

        Returns:
            The step, and the pickled model runner output.
        """
        output = pickle.loads(message)  # noqa: S301  # our own bytes
        with patch.object(
            kv_transfer_state, "_KV_CONNECTOR_AGENT", self.connector
        ):  # one per process; here of all ranks
            self.connector.handle_preemptions(output.kv_connector_metadata)
            step = self._batch.follow(output)
            self._prepare(output)
            answer = self._forward(output, step) if step.scheduled else self._no_forward(output)
        return step, pickle.dumps(answer)

    def sleep(self) -> None:
        """Take the device's memory away, as vLLM (0.33) does when it sleeps; what it held is lost."""
        self.connector.unregister_kv_caches()
        self._copies.unmap()
        self.runner.memory[1:] = 0

    def wake_up(self) -> None:
        """Give the memory back."""
        self._copies.map()
        self.connector.restore_kv_caches()

    def shutdown(self) -> None:
        """Let transfers end."""
        self.connector.shutdown()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Tell the connector that a layer is about to be computed, as vLLM's attention does."""
        self.connector.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str) -> None:
        self.connector.save_kv_layer(layer_name, self._layers[layer_name], None)

    def _prepare(self, output: Any) -> None:
        """What vLLM's model runner does between taking a step's message and its forward pass."""
        if output.kv_cache_block_copies:
            self.runner.copy_blocks(output.kv_cache_block_copies)
        if output.num_scheduled_tokens:  # vLLM forgets states only before a forward pass
            resumed = output.scheduled_cached_reqs.resumed_req_ids
            self.runner.lose_states({*output.finished_req_ids, *(output.preempted_req_ids or ()), *resumed})

    def _forward(self, output: Any, step: SchedulerStep) -> Any:
        with (
            set_forward_context(dict.fromkeys(self._layers), self._config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as report,
        ):
            sampled = self.runner.execute(step, self)
            for share in step.scheduled:
                self.runner.reject(share, self._batch.drafted.get(share.request_id, (0, 0))[1])
        ids = [share.request_id for share in step.scheduled]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: at for at, request_id in enumerate(ids)},
            sampled_token_ids=[
                [*self._accepted(share), sampled[share.request_id]] if share.request_id in sampled else []
                for share in step.scheduled
            ],
            kv_connector_output=report,
        )

    def _accepted(self, share: ScheduledTokens) -> Sequence[int]:
        """The request's speculative tokens that are right."""
        num_right, _ = self._batch.drafted.get(share.request_id, (0, 0))
        return share.token_ids[len(share.token_ids) - num_right :]

    def _no_forward(self, output: Any) -> Any:
        self.runner.wrong.clear()
        self.runner.before_forward()
        return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self._config)


def _layer(memory: Any, group: Any) -> Any:
    """A layer's KV: for attention, shape ``(blocks, heads, tokens per block, key and value)``; a state is bytes."""
    spec, num_blocks = group.kv_cache_spec, memory.shape[0]
    if isinstance(spec, MambaSpec):
        return memory.view(num_blocks, 1, 1, -1)
    used = memory[:, : spec.block_size * FINGERPRINT_BYTES]
    return used.unflatten(1, (1, spec.block_size, FINGERPRINT_BYTES)).view(torch.float32)
