"""Messages between the two sides, which travel inside vLLM's own messages.

vLLM's worker metadata carries each rank's report as a whole, and vLLM merges them by calling ``aggregate``. Our own aggregator
on the scheduler side then counts which ranks have reported a job.

The parts of a model that workers hold, which with pipeline parallelism differ from each other.

Each worker has the layers of its stage, so the size of a block differs between workers, but vLLM tells the scheduler only about
the first worker. So at start every worker reports what it has, through the hooks that vLLM has for handshakes::

    rank 0   layers 0 to 15     48 KiB a block     host_bytes / 2 for its rows
    rank 1   layers 16 to 25    30 KiB a block     host_bytes / 2 for its rows, more of them
    scheduler                                      chunks by the fewest rows: those of the largest blocks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cargohold.connector.factory import Parts
from cargohold.errors import ConfigError
from cargohold.integrations.vllm import compat
from cargohold.integrations.vllm.compat import KVConnectorMetadata, KVConnectorWorkerMetadata
from cargohold.protocol import ConnectorMetadata, EmptyMetadata, KVConnectorOutput


@dataclass(frozen=True)
class StepMessage(KVConnectorMetadata):  # type: ignore[misc]  # vLLM's class, or an inert one
    """Scheduler side to workers, once a step.

    Attributes:
        inner: the connector's own message.
        new_loads: requests whose load starts in this step, with the blocks that it fills.
        new_sends: requests that ended, whose blocks the connector keeps.
        synchronous: those of the new loads that end within this step.
        stop: the connector was turned off: let its transfers end and do without it.
    """

    inner: ConnectorMetadata = field(default_factory=EmptyMetadata)
    new_loads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    new_sends: tuple[str, ...] = ()
    synchronous: tuple[str, ...] = ()
    stop: bool = False


@dataclass(frozen=True)
class RankReport:
    """One rank's report after a step.

    Attributes:
        output: the connector's own report.
        failed_loads: requests whose load ended in failure on this rank.
        error: the rule that the connector's worker side broke; it has stopped.
        stopped: whether it stopped in this step as it was told to.
    """

    output: KVConnectorOutput = field(default_factory=KVConnectorOutput)
    failed_loads: frozenset[str] = frozenset()
    error: str | None = None
    stopped: bool = False


@dataclass(frozen=True)
class WorkerMessage(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM's class, or an inert one
    """Workers to scheduler side.

    Attributes:
        reports: by rank; ranks with nothing to say are left out.
    """

    reports: dict[int, RankReport]

    def aggregate(self, other: WorkerMessage) -> WorkerMessage:
        """Merge the messages of two workers, whose reports are of different ranks."""
        return WorkerMessage({**self.reports, **other.reports})


# --- the parts of a model that workers hold ---------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerPart(compat.KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM's class, or an inert one
    """The part of the model that one worker holds.

    Attributes:
        block_bytes: bytes of one block on this worker; 0 if it keeps nothing.
        num_layers: layers per KV-cache group.
        obstacles: reasons why it keeps nothing, as sentences.
    """

    block_bytes: int = 0
    num_layers: tuple[int, ...] = ()
    obstacles: tuple[str, ...] = ()


def united(parts: Mapping[tuple[int, int], WorkerPart], num_groups: int) -> Parts:
    """The parts of all workers together, where stages differ. ``parts`` are by stage and by rank within it."""
    first_of_stages = [part for (_, rank), part in parts.items() if rank == 0]
    return Parts(
        largest_block_bytes=max(part.block_bytes for part in parts.values()),
        all_block_bytes=sum(part.block_bytes for part in parts.values()),
        num_layers=tuple(sum(part.num_layers[group] for part in first_of_stages) for group in range(num_groups)),
    )


def has_stages(vllm_config: Any) -> bool:
    """Whether the model is cut into stages."""
    return int(getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1)) > 1


def check_stages(vllm_config: Any) -> None:
    """Refuse to start where vLLM would die with any connector, even with one that offloads nothing.

    Raises:
        ConfigError: a pooling model has pipeline stages. With a connector, vLLM's executor wants an answer of every stage to a
            pooled request, but only the last stage gives one, except with vLLM's newer model runner.
    """
    model = vllm_config.model_config
    is_pooling = getattr(model, "runner_type", None) == "pooling"
    if has_stages(vllm_config) and is_pooling and not getattr(vllm_config, "use_v2_model_runner", False):
        reason = "with pipeline parallelism vLLM ends at the first request for an embedding if it has any connector"
        raise ConfigError("kv_transfer_config.kv_connector", vllm_config.kv_transfer_config.kv_connector, reason)


def stage_obstacles(vllm_config: Any) -> list[str]:
    """Why a model that is cut into stages cannot be served, as sentences; empty if it can, or is not cut."""
    if not has_stages(vllm_config):
        return []
    obstacles = []
    if getattr(vllm_config, "speculative_config", None) is not None:
        # Stages before the last are never told that a step is over: they would not start a store, nor take the next message.
        obstacles.append("pipeline parallelism together with speculative decoding is not served")
    if getattr(vllm_config.model_config, "runner_type", None) == "pooling":
        obstacles.append("pipeline parallelism of models that make embeddings is not served")
    if compat.Executor is None or compat.MultiprocExecutor is None:
        return [*obstacles, "vLLM does not say how it runs stages"]
    executor = compat.Executor.get_class(vllm_config)
    if not issubclass(executor, compat.MultiprocExecutor):
        # With other executors only the last stage answers: nobody would learn that a copy has ended on earlier stages.
        obstacles.append(
            f"with pipeline parallelism {executor.__name__} passes on the last stage's reports only; use mp"
        )
    return obstacles
