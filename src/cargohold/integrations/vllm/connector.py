"""The class that vLLM instantiates, once in the scheduler's process and once per worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final
from weakref import WeakSet

from cargohold.connector.factory import (
    Parts,
    check_chunks,
    check_memory,
    connector_factory,
    equal_parts,
    lower_tiers,
    row_plan,
    start_report,
)
from cargohold.connector.held import held_levels
from cargohold.errors import ConfigError, option_path
from cargohold.integrations.vllm import compat, start
from cargohold.integrations.vllm.adapters import LOCAL_HASHES, HeldAdapters
from cargohold.integrations.vllm.layout import (
    NO_GROUPS,
    Translation,
    block_bytes,
    dropped_tokens,
    group_sizes,
    make_layout,
    marks_shared_prefixes,
    may_load,
    may_span_machines,
    shares_load_ends,
    shares_loads,
    smallest_block_tokens,
    translate,
)
from cargohold.integrations.vllm.loads import LoadRoom
from cargohold.integrations.vllm.metrics import EventTranslator, PromMetrics, TransferStats
from cargohold.integrations.vllm.plugin import follow_vllm_log
from cargohold.integrations.vllm.pool_view import BlockTables, ManagerTables, NotedTables
from cargohold.integrations.vllm.scheduler import SchedulerSide, SideOptions
from cargohold.integrations.vllm.settings import REFUSE, VllmSettings
from cargohold.integrations.vllm.weights import HeldWeights
from cargohold.integrations.vllm.worker import (
    Ended,
    StepMessage,
    WorkerMessage,
    WorkerPart,
    WorkerSide,
    check_stages,
    exchange_with_workers,
    has_stages,
    stage_obstacles,
    united,
)
from cargohold.protocol import Clock, KVCacheLayout, KVConnectorFactory, SchedulerEnvironment

logger = logging.getLogger(__name__)

_NEEDS = {
    "cache_config": ("cache_dtype", "enable_prefix_caching", "prefix_caching_hash_algo"),
    "kv_transfer_config": (
        "is_kv_consumer",
        "is_kv_producer",
        "kv_connector_extra_config",
        "kv_load_failure_policy",
        "kv_role",
    ),
    "load_config": ("load_format",),
    "model_config": (
        "dtype",
        "hf_overrides",
        "max_model_len",
        "model",
        "quantization",
        "revision",
        "served_model_name",
    ),
    "parallel_config": ("distributed_executor_backend", "pipeline_parallel_size", "rank", "world_size"),
    "scheduler_config": ("max_num_batched_tokens",),
}


_SERVED_POOLS: Final[WeakSet[Any]] = WeakSet()
"""The block pools that connectors of ours serve. vLLM's ``MultiConnector`` gives the same pool to all of its children."""


class CargoholdConnector(compat.KVConnectorBase_V1, compat.SupportsHMA):  # type: ignore[misc]  # vLLM ships no types
    """vLLM's V1 connector interface, served by Cargohold's connectors. Passes calls on to ``SchedulerSide`` or ``WorkerSide``.

    If the model, the configuration or the version of vLLM cannot be served, the connector stays in place and keeps nothing,
    or refuses to start; see ``AdapterSettings.if_unsupported``.

    Args:
        vllm_config: vLLM's configuration.
        role: which of the two sides this object is.
        kv_cache_config: vLLM's KV-cache configuration for the model's layers.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # vLLM sets up handlers for its own loggers alone; ours use the same handlers.
        follow_vllm_log()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._ended = Ended()
        # With pipeline stages: makes the scheduler side, once all workers have said which part of the model they hold.
        self._begin: Callable[[Parts], None] | None = None
        self._mean_block_bytes = 0.0
        self._events = EventTranslator(())  # until there is a scheduler side
        replica = int(getattr(vllm_config.parallel_config, "data_parallel_index", 0))
        transfer = vllm_config.kv_transfer_config
        settings = VllmSettings.parse(transfer.kv_connector_extra_config).of_replica(replica)
        self._settings = settings.of_role(stores=transfer.is_kv_producer)
        self._is_scheduler = role is compat.KVConnectorRole.SCHEDULER
        self._obstacles: list[str] = []
        self._groups = NO_GROUPS
        if self._is_scheduler:
            check_stages(vllm_config)
        if self._turn_off(self._missing()):
            return
        translation = self._translate()
        self._groups = translation.groups
        written, self._settings = self._settings, self._settings.of_groups(self._groups.served)
        if self._settings is not written and self._is_scheduler:
            logger.warning("%s", start.SINGLE_BLOCKS)
        is_off = self._turn_off(translation.obstacles)
        if not self._is_scheduler:
            # The scheduler side may know of no obstacle: vLLM tells it only of the first layer of each group.
            rank = int(vllm_config.parallel_config.rank)
            adapters = None if getattr(vllm_config, "lora_config", None) is None else self._make_held_adapters()
            self._worker = WorkerSide(rank, "; ".join(translation.obstacles) or None, self._look_at_weights(), adapters)
            if rank == 0 and not is_off and not may_span_machines(vllm_config.parallel_config):
                with option_path("kv_connector_extra_config."):
                    check_memory(self._settings.offload)
        elif not is_off:
            # vLLM's scheduler reads this option right after it has made the connector.
            vllm_config.kv_transfer_config.kv_load_failure_policy = self._settings.adapter.load_failure_policy

    # --- what vLLM asks of the class ----------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """``False``: tokens whose KV was not stored are computed again."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """``False``: nothing happens between layers. Raises ``ConfigError`` for bad options, before the model is loaded."""
        VllmSettings.parse(extra_config).require_packages()
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        """Counters that crossed a process boundary as a plain dict."""
        return TransferStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """The time series in vLLM's metrics endpoint."""
        transfer = getattr(vllm_config, "kv_transfer_config", None)
        settings = VllmSettings.parse(getattr(transfer, "kv_connector_extra_config", None) or {})
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, lower_tiers(settings.offload))

    # --- worker side --------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the paged KV."""
        if self._worker is not None and not self._obstacles:
            layout = self._layout(smallest_block_tokens(self._groups.served))
            exchange = partial(exchange_with_workers, layout.num_replicas) if layout.num_replicas > 1 else None
            served = {name: tensor for name, tensor in kv_caches.items() if name not in self._groups.left_out_layers}
            self._worker.register_kv_caches(served, self._factory(), layout, self._clock(), exchange)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """``True``: vLLM may take the device's memory away (since 0.33)."""
        return True

    def unregister_kv_caches(self) -> None:
        """Touch the paged KV no more: vLLM puts its memory to sleep (since 0.33)."""
        if self._worker is not None:
            self._worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        """Use the paged KV again: vLLM has woken up (since 0.33)."""
        if self._worker is not None:
            self._worker.restore_kv_caches()

    def get_handshake_metadata(self) -> WorkerPart | None:
        """Which part of the model this worker holds, or why it keeps nothing; ``None`` if the scheduler side knows its part.

        Also ``None`` inside vLLM's ``MultiConnector``, which hears only the first child that says something, and passes that on
        to all children: others need their handshake to work at all.
        """
        if compat.worker_connector() is not self:
            return None
        if self._obstacles:
            return WorkerPart(obstacles=tuple(self._obstacles))
        if not has_stages(self._vllm_config):
            return None
        num_layers = tuple(len(group.layer_names) for group in self._groups.served)
        return WorkerPart(block_bytes(self._kv_cache_config), num_layers)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Take this step's message: vLLM makes this call first in a step."""
        if self._worker is not None and kv_connector_metadata is not None:
            self._worker.begin(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take this step's message."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start the loads."""
        if self._worker is not None:
            self._worker.start_load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all loads are asynchronous, so a step computes only with KV that has arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: stores start when the whole step is computed."""

    def wait_for_save(self) -> None:
        """The forward pass is over: start the stores."""
        if self._worker is not None:
            self._worker.save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Ids of requests whose transfers ended: those sent, and those received."""
        if self._worker is None:
            return None, None
        self._ended = self._worker.collect(finished_req_ids)
        return set(self._ended.sent), set(self._ended.received)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Like ``get_finished``, with the requests whose load failed (since vLLM 0.30)."""
        sent, received = self.get_finished(finished_req_ids)
        return compat.TransferResults(sent or set(), received or set(), set(self._ended.failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads, for versions of vLLM that don't accept the request."""
        ended, self._ended = self._ended, Ended()
        return set() if compat.TransferResults is not None else set(ended.invalid_block_ids)

    def build_connector_worker_meta(self) -> WorkerMessage | None:
        """This rank's report."""
        return None if self._worker is None else self._worker.build_meta()

    def clear_connector_metadata(self) -> None:
        """End the step: vLLM makes this call last."""
        super().clear_connector_metadata()
        if self._worker is not None:
            self._worker.end()

    # --- scheduler side -----------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take vLLM's block pool and the requests' tables (since vLLM 0.30)."""
        if not self._obstacles and not self._turn_off(compat.missing_from_manager(kv_cache_manager)):
            self._bind(kv_cache_manager.block_pool, ManagerTables(kv_cache_manager))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take vLLM's block pool, which is all that versions before 0.30 give."""
        self._bind(gpu_block_pool, NotedTables(len(self._groups.by_number)))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take what workers said of their parts, by stage and by rank within it. Called before the first request."""
        if self._obstacles or not self._is_scheduler:
            return
        parts = {at: part for at, part in metadata.items() if isinstance(part, WorkerPart)}
        obstacles = sorted({obstacle for part in parts.values() for obstacle in part.obstacles})
        if self._begin is not None and len(parts) < int(self._vllm_config.parallel_config.world_size):
            obstacles.append("not all workers say what they hold; as a child of vLLM's MultiConnector they cannot")
        if self._turn_off(obstacles):
            self.shutdown()
            self._scheduler = None
        elif self._begin is not None:
            self._begin(united(parts, len(self._groups.served)))

    def on_new_request(self, request: Any) -> None:
        """Note that a request arrived."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those computed."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note that blocks were allocated for a request, and how many of its tokens are to be loaded."""
        if self._scheduler is not None:
            self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Where hits come from, for vLLM's own statistics: host memory, or unspecified if there are tiers below it.

        With tiers, our own counters tell: vLLM asks before a load has ended, and has no names for our tiers.
        """
        source = compat.CacheHitSource.EXTERNAL_UNSPECIFIED if self._settings.has_tiers else compat.CacheHitSource.HOST
        return {source: num_external_tokens} if num_external_tokens else {}

    def build_connector_meta(self, scheduler_output: Any) -> StepMessage:
        """This step's message to the workers. If only this side knows that offloading is off, they learn it so."""
        if self._scheduler is None:
            return StepMessage(stop=bool(self._obstacles))
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' reports of a step."""
        if self._scheduler is not None:
            # Inside vLLM's MultiConnector, the message is this connector's own, and the blocks are those of all connectors.
            self._scheduler.update_connector_output(
                connector_output.kv_connector_worker_meta, step_failed=bool(connector_output.invalid_block_ids)
            )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note that a request ended, in a model with one KV-cache group; see ``request_finished_all_groups``."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note that a request ended. Returns whether its blocks are kept, and parameters for the response."""
        return (False, None) if self._scheduler is None else self._scheduler.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping for transfers."""
        return self._scheduler is not None and self._scheduler.has_pending_work()

    def has_pending_block_frees(self) -> bool:
        """Whether blocks will become free if vLLM waits, so that it need not preempt a request."""
        return self._scheduler is not None and self._scheduler.has_pending_block_frees()

    # --- both ---------------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[Any]:
        """KV events since the last call. Also ends the step on the scheduler side.

        vLLM calls this after every step's output, whether workers reported something or not.
        """
        if self._scheduler is None:
            return ()
        self._scheduler.end_step()
        return list(self._events.translate(self._scheduler.take_events()))

    def get_kv_connector_stats(self) -> TransferStats | None:
        """Counters of both sides since the last call, on the scheduler side; ``None`` on workers or if nothing was counted."""
        if self._scheduler is None:
            return None
        stats = self._scheduler.take_stats(self._mean_block_bytes)
        return TransferStats.of(stats) if stats else None

    def reset_cache(self) -> bool | None:
        """Drop everything kept; ``False`` while transfers are in flight."""
        return None if self._scheduler is None else self._scheduler.reset_cache()

    def shutdown(self) -> None:
        """Let transfers in flight end, and release everything."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.shutdown()

    # --- replaced in the simulation -----------------------------------------------------------------------------------

    def _factory(self) -> KVConnectorFactory:
        """The factory that makes this side of the connector. Raises ``ConfigError`` if an option is impossible."""
        return self._settings.factory() if self._is_scheduler else connector_factory(self._settings.offload)

    def _clock(self) -> Clock:
        """Monotonic time in seconds."""
        return time.monotonic

    def _look_at_weights(self) -> Callable[[], str]:
        """What tells which weights a worker holds."""
        return HeldWeights(self._vllm_config).look

    def _make_held_adapters(self) -> HeldAdapters:
        """What tells which adapters a worker holds."""
        return HeldAdapters(self._vllm_config)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _missing(self) -> list[str]:
        """What this version of vLLM lacks, as sentences; the same on both sides. Warns of a version that was not tested."""
        warning = compat.version_warning()
        if warning is not None and self._is_scheduler:
            logger.warning("%s", warning)
        return compat.missing_from_vllm(CargoholdConnector) + compat.missing_from_config(self._vllm_config, _NEEDS)

    def _translate(self) -> Translation:
        translation = translate(
            self._vllm_config, self._kv_cache_config, reports_requests=compat.TransferResults is not None
        )
        obstacles = stage_obstacles(self._vllm_config) if self._is_scheduler else []
        return Translation(NO_GROUPS, (*translation.obstacles, *obstacles)) if obstacles else translation

    def _layout(self, hash_block_tokens: int) -> KVCacheLayout:
        config, caches = self._vllm_config, self._kv_cache_config
        # Stages differ in what they have of each group. Managers and transfers of the user's own know no rows.
        may_differ = not has_stages(config) and not self._settings.has_own_parts
        return make_layout(self._groups.served, config, caches, hash_block_tokens, may_differ=may_differ)

    def _bind(self, pool: Any, tables: BlockTables) -> None:
        """Make the scheduler side now that the pool is known; with pipeline stages, once all workers have reported."""
        if self._obstacles or self._turn_off(_pool_obstacles(pool)):
            return
        _SERVED_POOLS.add(pool)
        layout = self._layout(int(pool.hash_block_size))
        if has_stages(self._vllm_config):
            self._begin = partial(self._make_scheduler, pool, tables, layout)
        else:
            self._make_scheduler(pool, tables, layout, equal_parts(layout))

    def _make_scheduler(self, pool: Any, tables: BlockTables, layout: KVCacheLayout, parts: Parts) -> None:
        layout = replace(layout, block_bytes=parts.largest_block_bytes)
        plan = row_plan(self._settings.offload, layout)
        mean = parts.all_block_bytes / layout.world_size
        self._mean_block_bytes = mean if plan.is_even else plan.mean_block_bytes(layout)
        self._events = EventTranslator(self._kv_cache_config.kv_cache_groups, self._groups.numbers)
        events = getattr(self._vllm_config, "kv_events_config", None)
        environment = SchedulerEnvironment(
            layout=layout,
            clock=self._clock(),
            max_step_tokens=int(self._vllm_config.scheduler_config.max_num_batched_tokens),
            max_num_seqs=int(self._vllm_config.scheduler_config.max_num_seqs),
            prefix_caching=bool(self._vllm_config.cache_config.enable_prefix_caching),
            shares_loads=shares_loads(self._kv_cache_config, layout.groups),
            shares_load_ends=shares_load_ends(self._vllm_config, layout.groups),
            emits_events=bool(events is not None and events.enable_kv_cache_events),
            emits_salted_events=self._settings.adapter.kv_events_salted,
            full_hits=self._groups.bear_full_hits,
            keeps_partial_loads=False,
            keeps_weights=True,
            local_hashes=LOCAL_HASHES,
            # If a failed load's request is named, vLLM frees all of its blocks. If its blocks are, vLLM computes into them.
            give_up_loads_after_s=None if compat.TransferResults is None else self._settings.load_timeout_s / 2,
        )
        with option_path("kv_connector_extra_config."):
            check_chunks(self._settings.offload, layout, int(self._vllm_config.model_config.max_model_len))
            inner = self._factory().make_scheduler_side(environment)
        options = SideOptions(
            load_timeout_s=self._settings.load_timeout_s,
            groups=self._groups,
            tier_token_bytes=plan.token_bytes(layout),
            may_sleep=bool(getattr(self._vllm_config.model_config, "enable_sleep_mode", False)),
            has_tiers=self._settings.has_tiers,
            dropped_tokens=dropped_tokens(self._vllm_config, layout.groups),
            loads=may_load(self._vllm_config),
            by_priority=getattr(self._vllm_config.scheduler_config, "policy", "fcfs") == "priority",
            tool_tokens=start.tool_tokens(self._vllm_config.model_config),
            marks_shared_prefixes=marks_shared_prefixes(layout.groups),
            levels=held_levels(layout, self._settings.offload, group_sizes(self._kv_cache_config, layout.groups)),
            max_adapters=getattr(getattr(self._vllm_config, "lora_config", None), "max_loras", 1),
            max_model_len=int(self._vllm_config.model_config.max_model_len),
        )
        # All tested versions have this option. Its stand-in is right for two steps in flight, the most without pipeline stages.
        in_flight = getattr(self._vllm_config, "max_in_flight_tokens", 2 * environment.max_step_tokens)
        room = LoadRoom(pool, self._groups.in_pool, tables, int(in_flight), has_tails=layout.has_tails)
        self._scheduler = SchedulerSide(inner, layout, pool, tables, room, clock=environment.clock, options=options)
        configs = self._vllm_config, self._kv_cache_config
        for line in (
            *start_report(layout, self._settings.offload, parts),
            *start.remarks(*configs, layout, self._settings),
        ):
            logger.info("%s", line)
        for line in start.warnings(*configs, layout, self._settings):
            logger.warning("%s", line)

    def _turn_off(self, obstacles: Iterable[str]) -> bool:
        """Note and log the obstacles to offloading; returns whether there are any.

        Raises:
            ConfigError: there are some, and ``if_unsupported`` is ``refuse``.
        """
        self._obstacles = list(obstacles)
        if not self._obstacles:
            return False
        reasons = "; ".join(self._obstacles)
        if self._settings.adapter.if_unsupported == REFUSE:
            raise ConfigError(
                "kv_connector_extra_config.if_unsupported", REFUSE, f"nothing can be offloaded: {reasons}"
            )
        if self._is_scheduler:
            logger.error("offloading is off, requests are served without it: %s", reasons)
        return True


# It is made even if vLLM demands hooks that it lacks: the log then says why nothing is offloaded.
CargoholdConnector.__abstractmethods__ = frozenset()


def _pool_obstacles(pool: Any) -> list[str]:
    """Why this block pool cannot be served, as sentences."""
    if pool in _SERVED_POOLS:
        # Both would give a request's explanation under the same key, and vLLM's engine would end.
        return ["another Cargohold connector serves this engine; with mode multi, one keeps KV in several ways"]
    return compat.missing_from_pool(pool)
