"""Worker side: makes the contract's calls in the contract's order, whatever vLLM's is; and the messages of both sides.

Messages between the two sides travel inside vLLM's own. vLLM's worker metadata carries each rank's report as a whole, and vLLM
merges them by calling ``aggregate``. Our own aggregator on the scheduler side then counts which ranks have reported a job.

With pipeline parallelism, each worker has the layers of its stage, so the size of a block differs between workers, but vLLM
tells the scheduler only about the first worker. So at start every worker reports what it has, through the hooks that vLLM has
for handshakes::

    rank 0   layers 0 to 15     48 KiB a block     host_bytes / 2 for its rows
    rank 1   layers 16 to 25    30 KiB a block     host_bytes / 2 for its rows, more of them
    scheduler                                      chunks by the fewest rows: those of the largest blocks
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import distributed

from cargohold.cache.rows import plan_rows
from cargohold.connector.factory import Parts
from cargohold.connector.multi_worker import ChildReport, MultiMetadata, MultiWorkerMetadata
from cargohold.errors import ConfigError, one_line, option_path
from cargohold.integrations.vllm import compat
from cargohold.integrations.vllm.adapters import HeldAdapters, Look
from cargohold.integrations.vllm.identity import with_arrangement
from cargohold.integrations.vllm.regions import regions_of
from cargohold.protocol import (
    EmptyMetadata,
    Exchange,
    KVCacheLayout,
    KVConnectorFactory,
    KVConnectorMetadata,
    KVConnectorOutput,
    NullConnectorWorker,
    UndeliveredMetadata,
    WorkerConnectorGuard,
    WorkerEnvironment,
)


@dataclass(frozen=True)
class StepMessage(compat.KVConnectorMetadata):  # type: ignore[misc]  # vLLM's class, or an inert one
    """Scheduler side to workers, once a step.

    Attributes:
        inner: the connector's own message.
        new_loads: requests whose load starts in this step, with the blocks that it fills.
        new_sends: requests that ended, whose blocks the connector keeps.
        synchronous: those of the new loads that end within this step.
        stop: the connector was turned off: let its transfers end and do without it.
        look: number of a look at what the model holds, to be reported before anything is computed; 0 for none.
        adapters: adapters to look at, too, as vLLM describes them.
    """

    inner: KVConnectorMetadata = field(default_factory=EmptyMetadata)
    new_loads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    new_sends: tuple[str, ...] = ()
    synchronous: tuple[str, ...] = ()
    stop: bool = False
    look: int = 0
    adapters: Mapping[Look, Any] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        _, *others = (getattr(self, part.name) for part in fields(self))
        return StepMessage, (_portable_message(self.inner), *others)


@dataclass(frozen=True)
class RankReport:
    """One rank's report after a step.

    Attributes:
        output: the connector's own report.
        failed_loads: requests whose load ended in failure on this rank.
        error: the rule that the connector's worker side broke; it has stopped.
        stopped: whether it stopped in this step, as requested.
        weights: fingerprints of what the model holds, by the number of the look; 0 is the one at the start.
        adapters: fingerprints of adapters: of those to look at, and of those that changed before this step.
    """

    output: KVConnectorOutput = field(default_factory=KVConnectorOutput)
    failed_loads: frozenset[str] = frozenset()
    error: str | None = None
    stopped: bool = False
    weights: Mapping[int, str] = field(default_factory=dict)
    adapters: Mapping[Look, str] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        meta, problem = _portable_report(self.output.kv_connector_worker_meta)
        output = replace(self.output, kv_connector_worker_meta=meta)
        return RankReport, (output, self.failed_loads, self.error or problem, self.stopped, self.weights, self.adapters)


@dataclass(frozen=True)
class WorkerMessage(compat.KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM's class, or an inert one
    """Workers to scheduler side.

    Attributes:
        reports: by rank; ranks with nothing to say are left out.
    """

    reports: dict[int, RankReport]

    def aggregate(self, other: WorkerMessage) -> WorkerMessage:
        """Merge the messages of two workers, whose reports are of different ranks."""
        return WorkerMessage({**self.reports, **other.reports})


@dataclass(frozen=True, slots=True)
class _Pickled:
    """A connector's message as bytes. What is read at the other end is the message."""

    data: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self.data,)


def _portable(message: Any) -> tuple[Any, str | None]:
    """Return what to pickle in place of a message, or ``None`` and why it cannot be pickled: vLLM's engine would end."""
    try:
        return _Pickled(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)), None
    except Exception as error:  # noqa: BLE001  # a third party's types: whatever making bytes of them raises
        return None, f"its {type(message).__name__} cannot be carried to another process: {one_line(error)}"


def _portable_message(message: Any) -> Any:
    """Return what to pickle in place of a message to workers; of a composed connector, message by message."""
    if isinstance(message, MultiMetadata):
        return replace(message, children=tuple(map(_portable_message, message.children)))
    carried, problem = _portable(message)
    return carried if problem is None else UndeliveredMetadata(problem)


def _portable_report(meta: Any) -> tuple[Any, str | None]:
    """Return what to pickle in place of a worker's message, and why it cannot be, if it cannot."""
    if not isinstance(meta, MultiWorkerMetadata):
        return _portable(meta)
    children = []
    for child in meta.children:
        carried, problem = _portable_report(child.worker_meta)
        children.append(ChildReport(carried, child.error or problem))
    return replace(meta, children=tuple(children)), None


def exchange_with_workers(num_replicas: int, message: bytes) -> list[bytes]:
    """The messages of the tensor-parallel workers that hold the same KV, neighbours; see ``cargohold.protocol.Exchange``."""
    group = compat.tensor_parallel_group()
    messages: list[bytes] = [b""] * group.world_size
    distributed.all_gather_object(messages, message, group=group.cpu_group)
    first = group.rank_in_group // num_replicas * num_replicas
    return messages[first : first + num_replicas]


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
        # Stages before the last don't know when a step is over: they would not start a store, nor take the next message.
        obstacles.append("pipeline parallelism together with speculative decoding is not served")
    if getattr(vllm_config.model_config, "runner_type", None) == "pooling":
        obstacles.append("pipeline parallelism of models that make embeddings is not served")
    if compat.Executor is None or compat.MultiprocExecutor is None:
        return [*obstacles, "vLLM does not say how it runs stages"]
    executor = compat.Executor.get_class(vllm_config)
    if not issubclass(executor, compat.MultiprocExecutor):
        # With other executors only the last stage answers: the end of a copy on earlier stages would stay unknown.
        obstacles.append(
            f"with pipeline parallelism {executor.__name__} passes on the last stage's reports only; use mp"
        )
    return obstacles


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ended:
    """Requests whose transfers ended on this rank.

    Attributes:
        sent: the connector no longer reads their blocks.
        received: their loads have ended, failed ones included.
        failed: those of them whose load failed.
        invalid_block_ids: the blocks that failed loads were to fill.
    """

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()


class WorkerSide:
    """The adapter's worker side: runs one rank's part of the connector, contained in a guard.

    Args:
        rank: which worker this is, from 0.
        obstacle: why this rank cannot take part, as a sentence; ``None`` if it can. The scheduler side receives it in the first
            report, if it has not turned the connector off by itself.
        look_at_weights: returns a fingerprint of what the model holds; empty if that is unknown.
        adapters: the adapters that vLLM's worker holds; ``None`` if there cannot be any.
    """

    def __init__(
        self,
        rank: int,
        obstacle: str | None = None,
        look_at_weights: Callable[[], str] | None = None,
        adapters: HeldAdapters | None = None,
    ) -> None:
        self._rank = rank
        self._adapters = adapters
        self._look_at_weights = look_at_weights
        self._weights: dict[int, str] = {}
        self._guard = WorkerConnectorGuard(NullConnectorWorker())
        self._guard.stop()  # messages are ignored until the connector is made, and for good if it cannot be made
        self._layer_names: tuple[str, ...] = ()
        self._message: StepMessage | None = None
        self._has_saved = False
        self._report = RankReport()
        # Transfers that have not ended on this rank: loads with the blocks they fill, and requests whose blocks are kept.
        self._loading: dict[str, tuple[int, ...]] = {}
        self._sending: set[str] = set()
        self._failed: set[str] = set()
        # What was not reported to the scheduler side yet.
        self._untold_error = None if obstacle is None else f"rank {rank} cannot take part: {obstacle}"

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, Any],
        factory: KVConnectorFactory,
        layout: KVCacheLayout,
        clock: Callable[[], float],
        exchange: Exchange | None = None,
    ) -> None:
        """Take the paged KV; the connector is made now that its size is known.

        Args:
            kv_caches: vLLM's tensors, by layer.
            factory: makes the connector.
            layout: the paged KV, as the scheduler side knows it.
            clock: monotonic time in seconds.
            exchange: with which the workers that hold the same KV talk.
        """
        try:
            own, by_group = as_regions(kv_caches, with_arrangement(layout, kv_caches))
            with option_path("kv_connector_extra_config."):
                inner = factory.make_worker_side(WorkerEnvironment(own, self._rank, clock, exchange))
            self._guard = WorkerConnectorGuard(inner)
            self._layer_names = tuple(name for group in own.groups for name in group.layer_names)
        except ConfigError:
            raise
        except Exception as error:  # whatever it is, vLLM can serve without offloading
            logger.exception("rank %d cannot take part in offloading", self._rank)
            self._untold_error = f"rank {self._rank} could not register the KV cache: {error!r}"
            return
        self._look(0)
        if self._adapters is not None:
            self._adapters.find_worker()
        self._guard.register_kv_caches(by_group)

    def unregister_kv_caches(self) -> None:
        """Touch the paged KV no more. If a copy does not end in time, the connector is stopped when it has."""
        self._guard.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """Use the paged KV again."""
        self._guard.restore_kv_caches()

    def begin(self, message: StepMessage) -> None:
        """Take this step's message. May be called twice in a step; only the first time counts."""
        if self._message is message:
            return
        if self._message is not None:
            self.end()  # with speculation, vLLM 0.32 leaves this call out on all pipeline stages but the last
        self._message = message
        self._has_saved = False
        if message.look:
            self._look(message.look)
        if self._adapters is not None:
            self._adapters.look(message.adapters)
        self._loading |= message.new_loads
        self._sending |= set(message.new_sends)
        if message.stop:
            self._guard.stop()
        self._guard.bind_connector_metadata(message.inner)
        self._guard.handle_preemptions()

    def start_load(self) -> None:
        """Start the loads. Their blocks are not part of this step's forward pass, so they need not wait for it."""
        self._guard.start_load_kv()
        if self._message is not None and self._message.synchronous:
            for name in self._layer_names:
                self._guard.wait_for_layer_load(name)

    def save(self) -> None:
        """The forward pass is over: start the stores."""
        self._has_saved = True
        if self._guard.listens_to_layers:
            for name in self._layer_names:
                self._guard.save_kv_layer(name)
        self._guard.wait_for_save()

    def collect(self, finished_req_ids: AbstractSet[str]) -> Ended:
        """The transfers that ended since the last call. Also prepares this step's report for ``build_meta``."""
        if self._adapters is not None:
            self._adapters.check()
        output = self._with_synchronous(self._guard.collect(finished_req_ids))
        error = self._guard.take_error() or self._untold_error
        self._untold_error = None
        stopped = self._message is not None and self._message.stop
        for request_id, block_ids in self._loading.items():
            if not output.invalid_block_ids.isdisjoint(block_ids):
                self._failed.add(request_id)
        strays = (output.finished_recving - self._loading.keys()) | (output.finished_sending - self._sending)
        if strays and not self._guard.is_stopped:
            error = error or f"reported the end of transfers that these requests do not have: {sorted(strays)}"
        # vLLM ends itself if it gets a request that it does not know.
        received = frozenset(self._loading if stopped else output.finished_recving & self._loading.keys())
        sent = frozenset(self._sending if stopped else output.finished_sending & self._sending)
        failed = received if stopped else received & (output.failed_recving | self._failed)
        invalid = frozenset(block_id for request_id in failed for block_id in self._loading.get(request_id, ()))
        self._failed -= received
        self._sending -= sent
        for request_id in received:
            del self._loading[request_id]
        self._report = RankReport(output, failed, error, stopped)
        return Ended(sent, received, failed, invalid)

    def _with_synchronous(self, output: KVConnectorOutput) -> KVConnectorOutput:
        """Add the end of the loads that ended within this step: nothing else reports them."""
        synchronous = () if self._message is None else self._message.synchronous
        if not synchronous:
            return output
        if self._guard.is_stopped:
            self._failed.update(synchronous)  # maybe before it had loaded them
        received = output.finished_recving.union(synchronous)
        return replace(output, finished_recving=received)

    def build_meta(self) -> WorkerMessage | None:
        """This rank's report; ``None`` if there is nothing to report."""
        report, self._report = self._report, RankReport()
        weights, self._weights = self._weights, {}
        adapters = {} if self._adapters is None else self._adapters.take()
        report = replace(report, weights=weights, adapters=adapters) if weights or adapters else report
        is_silent = report.output.is_empty() and not (
            report.failed_loads or report.error or report.stopped or report.weights or report.adapters
        )
        return None if is_silent else WorkerMessage({self._rank: report})

    def _look(self, number: int) -> None:
        if self._look_at_weights is not None:
            self._weights[number] = self._look_at_weights()

    def end(self) -> None:
        """End the step, whatever happened in it."""
        if self._message is not None and not self._has_saved:
            self._guard.wait_for_save()  # vLLM 0.28 leaves this call out in steps without tokens
        self._message = None
        self._guard.clear_connector_metadata()

    def shutdown(self) -> None:
        """Let transfers in flight end."""
        self._guard.stop()


def as_regions(kv_caches: Mapping[str, Any], layout: KVCacheLayout) -> tuple[KVCacheLayout, list[list[torch.Tensor]]]:
    """The layout as it is on this worker, and the regions of each group.

    A block id belongs to one group at a time. So where groups hardly differ in size, all of them share all bytes of a block.
    """
    if plan_rows(layout).is_even:
        regions = regions_of(kv_caches, layout.num_blocks)
        # Padding between regions is left out, so a row may be shorter here than the scheduler side assumes: then there are
        # more of them than it will use.
        size = _checked(sum(region.shape[1] for region in regions), layout)
        groups = tuple(replace(group, block_bytes=None) for group in layout.groups)
        own = replace(layout, block_bytes=size, groups=groups)
        return own, [regions] * len(layout.groups)
    by_group = []
    for group in layout.groups:
        of_group = {name: kv_caches[name] for name in group.layer_names if name in kv_caches}
        by_group.append(_reaching(regions_of(of_group, layout.num_blocks), layout.group_bytes[group.index]))
    return layout, by_group


def _reaching(regions: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    """The regions with so much of the padding after the last one that they have ``size`` bytes of a block."""
    *others, last = regions
    width = size - sum(region.shape[1] for region in others)
    return [*others, last.as_strided((last.shape[0], width), last.stride())] if width > last.shape[1] else regions


def _checked(block_bytes: int, layout: KVCacheLayout) -> int:
    if block_bytes > layout.block_bytes:
        raise ValueError(f"a block takes {block_bytes} bytes here, and {layout.block_bytes} in the layout")
    return block_bytes
