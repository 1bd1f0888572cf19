"""Makes both sides of the bridge, and its scenarios. What a class needs and the embedded engine has not is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, supports_hma

from cargohold.engine.core.request_queues import QueuePolicy
from cargohold.errors import ConfigError
from cargohold.lab.simulation.campaign import Recipe
from cargohold.lab.simulation.connectors import ConnectorPlan
from cargohold.lab.simulation.fingerprints import GroupPlan
from cargohold.lab.simulation.transfers import LinkProfile
from cargohold.lab.simulation.world import ANY, Scenario, Shape, check_names, draw_scenario
from cargohold.lab.vllm.bridge.scheduler import BridgedScheduler
from cargohold.lab.vllm.bridge.worker import BridgedWorker
from cargohold.lab.vllm.configuration import ASYNC, MAX_MODEL_LEN, caches_of, config_of_rank, vllm_config
from cargohold.lab.vllm.others.plan import PREFIX, connector_class, transfer_options
from cargohold.protocol import AttentionKind, KVCacheLayout, SchedulerEnvironment, WorkerEnvironment

LONGEST: Final = 1 << 20
"""Tokens of the longest request that vLLM's configuration speaks of."""
_NEEDS: Final[Mapping[str, str]] = {
    "ExampleConnector": "copies by attention's slots, and layers are plain bytes here",
    "OffloadingConnector": "copies with CUDA's streams",
}
_HOOKS: Final[Mapping[str, str]] = {
    "bind_gpu_block_pool": "vLLM's block pool",
    "bind_kv_cache_manager": "vLLM's cache manager",
    "get_handshake_metadata": "another engine to shake hands with",
    "set_host_xfer_buffer_ops": "vLLM's own copies between device and host",
}
"""Hooks that nobody calls here, and what a class that has them needs."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """A connector of vLLM's interface as one of our contract. Satisfies ``KVConnectorFactory``.

    Attributes:
        name: ``MODULE:CLASS``.
        config: its ``kv_connector_extra_config``.

    Raises:
        ConfigError: there is no such class, or it needs what no engine of ours has.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind = connector_class(self.name)
        if self.name in _NEEDS:
            raise self._refused(f"it {_NEEDS[self.name]}")
        for hook, need in _HOOKS.items():
            if getattr(kind, hook) is not getattr(KVConnectorBase_V1, hook):
                raise self._refused(f"it has {hook}, so it needs {need}, which the embedded engine has not")

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> BridgedScheduler:
        """The scheduler side. Raises ``ConfigError`` if the class cannot work here."""
        layout = environment.layout
        inner = self._made(self._vllm_config(layout, environment), KVConnectorRole.SCHEDULER, layout)
        return BridgedScheduler(inner, layout)

    def make_worker_side(self, environment: WorkerEnvironment) -> BridgedWorker:
        """The worker side for one worker."""
        layout = environment.layout
        config = config_of_rank(self._vllm_config(layout), environment.rank)
        return BridgedWorker(self._made(config, KVConnectorRole.WORKER, layout), layout)

    def _made(self, config: Any, role: KVConnectorRole, layout: KVCacheLayout) -> Any:
        kind = connector_class(self.name)
        is_plain = len(layout.groups) == 1 and layout.groups[0].kind is AttentionKind.FULL
        if not (is_plain or supports_hma(kind)):
            raise self._refused("it is no SupportsHMA, so it is for one group of full attention alone")
        try:
            return kind(config, role, caches_of(layout))
        except (
            NotImplementedError,
            ValueError,
        ) as error:  # with these, vLLM's own connectors refuse what they cannot do
            raise self._refused(str(error)) from error

    def _refused(self, why: str) -> ConfigError:
        return ConfigError("connector", f"vllm:{self.name}", why)

    def _vllm_config(self, layout: KVCacheLayout, environment: SchedulerEnvironment | None = None) -> Any:
        """VLLM's configuration. A worker knows less of its engine: what it does not know is at vLLM's usual values."""
        num_seqs = environment.max_num_seqs if environment else None
        num_tokens = environment.max_step_tokens if environment else 2048
        options = {
            "prefix_caching": environment is None or environment.prefix_caching,
            "emit_events": environment is not None and environment.emits_events,
            "max_num_seqs": num_seqs or 128,
            "max_num_batched_tokens": max(num_tokens, num_seqs or 128),
            "policy": QueuePolicy.FCFS,
            MAX_MODEL_LEN: LONGEST,
            ASYNC: False,
        }
        groups = tuple(GroupPlan(group.kind, group.block_tokens, group.window_tokens) for group in layout.groups)
        shape = Shape(groups, layout.num_blocks, layout.world_size, options, LinkProfile())
        config = vllm_config(shape, KVTransferConfig(**transfer_options(self.name, self.config)))
        if layout.model is not None:
            config.model_config.model = layout.model.path
        return config


@dataclass(frozen=True, slots=True)
class BridgeRecipe(Recipe):
    """Scenarios for a class of vLLM's interface in the embedded engine.

    Attributes:
        config: the class's own options.
    """

    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_names(self.workload, ANY)
        self._bridge()

    def scenario(self, seed: int) -> Scenario:
        """The scenario of a seed."""
        scenario = draw_scenario(seed, self.workload, "none", self.faults)
        random = Random(f"{seed}/bridge")  # noqa: S311  # repeatable, on purpose
        plan = ConnectorPlan(self.connector, (), with_context=random.random() < 0.7, custom=(self._bridge(),))
        shape = replace(scenario.shape, num_replicas=1)  # with more, workers would share memory between processes
        return replace(scenario, shape=shape, connector=plan)

    def _bridge(self) -> Bridge:
        return Bridge(self.connector.removeprefix(PREFIX), dict(self.config))
