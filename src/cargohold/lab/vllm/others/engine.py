"""VLLM's scheduler with somebody else's connector."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma

from cargohold.engine.core.request import StepOutput
from cargohold.lab.simulation.world import Shape
from cargohold.lab.vllm.engine import VllmEngine
from cargohold.lab.vllm.others.copies import CopyRoom
from cargohold.lab.vllm.others.plan import StrangerPlan
from cargohold.lab.vllm.requests import CacheView, SchedulerView
from cargohold.lab.vllm.worker import SimulatedWorker
from cargohold.protocol import ConnectorGuard, KVConnectorOutput, NullConnectorScheduler


class _Cache(CacheView):
    """Counts what a connector holds as well: which blocks these are, vLLM's interface has no word for."""

    def reference_counts(self) -> Counter[int]:
        """References that requests hold by block id, or more where there are more."""
        counts = super().reference_counts()
        blocks = self._scheduler.kv_cache_manager.block_pool.blocks
        held = {block.block_id: max(block.ref_cnt, counts[block.block_id]) for block in blocks if not block.is_null}
        return Counter(held)


class _View(SchedulerView):
    """The scheduler; it resets the connector with its own cache, and the connector's events are not our oracles' business."""

    def __init__(self, *args: Any) -> None:
        connector = args[0].connector
        take_events = connector.take_events
        super().__init__(*args)
        connector.take_events = take_events
        self.kv = _Cache(self._scheduler, self.kv.pool)

    def reset_cache(self) -> bool:
        """Reset both caches; whether that could be done."""
        return bool(self._scheduler.reset_prefix_cache(reset_connector=True))

    def take_events(self) -> list[Any]:
        """Events of the device."""
        self._scheduler.kv_cache_manager.take_events()
        events, self._events = self._events, []
        return events


class StrangerEngine(VllmEngine):
    """VLLM's scheduler with somebody else's connector.

    Args:
        plan: the connector.
        room: what surrounds its copies.
        options: as of ``VllmEngine``.
    """

    sleeps = False  # hooks of sleep are newer than these connectors

    _hears_of_layers = True

    def __init__(self, plan: StrangerPlan, room: CopyRoom, shape: Shape, **options: Any) -> None:
        self._plan = plan
        self._room = room
        super().__init__(shape, **options)

    @property
    def num_half_reported(self) -> int:
        """None: vLLM's own connectors count for themselves what their ranks have reported."""
        return 0

    def _transfer(self, shape: Shape) -> Any:
        return self._plan.transfer_config(self._room.scratch)

    def _fit(self, config: Any) -> None:
        if not all(supports_hma(kind) for kind in self._plan.classes()):
            config.scheduler_config.disable_hybrid_kv_cache_manager = True

    def _new_worker(self, config: Any, caches: Any, rank: int) -> SimulatedWorker:
        self._room.rank = rank
        worker = super()._new_worker(config, caches, rank)
        worker.runner.guards_appends = False
        return worker

    @property
    def copies_in_real_time(self) -> bool:
        """Whether nothing of what the connector copies is simulated."""
        return not self._room.num_made

    def _read(self, answer: Any) -> StepOutput:
        report = answer.kv_connector_output
        sampled = {name: answer.sampled_token_ids[at] for name, at in answer.req_id_to_index.items()}
        return StepOutput(
            sampled={name: tokens[-1] for name, tokens in sampled.items() if tokens},
            connector=KVConnectorOutput()
            if report is None
            else KVConnectorOutput(
                finished_sending=frozenset(report.finished_sending or ()),
                finished_recving=frozenset(report.finished_recving or ()),
                failed_recving=frozenset(report.failed_recving or ()),
                invalid_block_ids=frozenset(report.invalid_block_ids or ()),
            ),
        )

    def _view(self) -> SchedulerView:
        guard = ConnectorGuard(NullConnectorScheduler(), self.layout.num_blocks)
        return _View(self.vllm, guard, self.layout.groups, self._is_busy)
