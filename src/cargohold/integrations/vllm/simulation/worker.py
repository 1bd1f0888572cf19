"""One rank: a fingerprint model and the adapter's worker side, called as vLLM's model runner calls them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from cargohold.engine.core.step import SchedulerStep
from cargohold.integrations.vllm.simulation.batch import InputBatch
from cargohold.integrations.vllm.simulation.runner import WriteFirstRunner

_GLOBAL: Final = "_KV_CONNECTOR_AGENT"


class SimulatedWorker:
    """Executes vLLM's scheduler outputs.

    The hooks of the connector are called by vLLM's own code, in vLLM's order.

    Args:
        config: vLLM's configuration, with this worker's rank.
        kv_cache_config: vLLM's description of the paged KV.
        runner: the model and the paged KV.
        tokens_of: gives the prompt and answer of a request.

    Attributes:
        connector: the adapter.
        runner: the model.
    """

    def __init__(
        self, config: Any, kv_cache_config: Any, runner: WriteFirstRunner, tokens_of: Callable[[str], Sequence[int]]
    ) -> None:
        self.runner = runner
        self._config = config
        self._batch = InputBatch(tokens_of)
        self.connector: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache_config)
        memory = torch.from_numpy(runner.memory).view(torch.uint8)
        layers = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        self.connector.register_kv_caches(dict.fromkeys(layers, memory))

    def execute(self, message: bytes) -> tuple[SchedulerStep, bytes]:
        """Run one step.

        Args:
            message: the scheduler output, pickled as on its way to another process.

        Returns:
            The step, and the pickled model runner output.
        """
        output = pickle.loads(message)  # noqa: S301  # our own bytes
        with _is_the_connector(self.connector):
            self.connector.handle_preemptions(output.kv_connector_metadata)
            step = self._batch.follow(output)
            self._prepare(output)
            answer = self._forward(output, step) if step.scheduled else self._no_forward(output)
        return step, pickle.dumps(answer)

    def shutdown(self) -> None:
        """Let transfers end."""
        self.connector.shutdown()

    def _prepare(self, output: Any) -> None:
        """What vLLM's model runner does between taking a step's message and its forward pass."""
        if output.kv_cache_block_copies:
            self.runner.copy_blocks(output.kv_cache_block_copies)
        if output.num_scheduled_tokens:  # vLLM forgets states only before a forward pass
            resumed = output.scheduled_cached_reqs.resumed_req_ids
            self.runner.lose_states({*output.finished_req_ids, *(output.preempted_req_ids or ()), *resumed})

    def _forward(self, output: Any, step: SchedulerStep) -> Any:
        with (
            set_forward_context(None, self._config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as report,
        ):
            sampled = self.runner.execute(step, None)
        ids = [share.request_id for share in step.scheduled]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: at for at, request_id in enumerate(ids)},
            sampled_token_ids=[[sampled[request_id]] if request_id in sampled else [] for request_id in ids],
            kv_connector_output=report,
        )

    def _no_forward(self, output: Any) -> Any:
        self.runner.wrong.clear()
        self.runner.before_forward()
        return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self._config)


@contextmanager
def _is_the_connector(connector: Any) -> Iterator[None]:
    """Within the ``with`` block, vLLM finds ``connector`` in its global variable, which here all ranks share."""
    vars(kv_transfer_state)[_GLOBAL] = connector
    try:
        yield
    finally:
        vars(kv_transfer_state)[_GLOBAL] = None
