"""Our adapter over simulated tiers, under vLLM's scheduler: what is seen of it, and done to it, beyond any connector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from vllm.config import KVTransferConfig

from cargohold.integrations.vllm.connector import CargoholdConnector
from cargohold.integrations.vllm.weights import HeldWeights
from cargohold.lab.vllm.adapters import AdapterWorker, SimulatedHeld
from cargohold.lab.vllm.configuration import TRANSFER_TIMEOUT_S, WORLD
from cargohold.lab.vllm.engine import VllmEngine
from cargohold.lab.vllm.requests import SchedulerView
from cargohold.lab.vllm.worker import SimulatedWorker
from cargohold.protocol import Clock, KVConnectorFactory, KVConnectorOutput, OutputAggregator

_FIRST_RANK_ALONE: Final = 1


class SimulatedConnector(CargoholdConnector):
    """The adapter, with a simulated factory and clock.

    Attributes:
        weights: what its worker says that it holds.
        adapters: which adapters it says so of, if there are any.
    """

    weights = "0"

    def _factory(self) -> KVConnectorFactory:
        return WORLD.get().factory

    def _clock(self) -> Clock:
        return WORLD.get().clock

    def _look_at_weights(self, held: HeldWeights) -> Callable[[], str]:
        return lambda: self.weights

    def _make_held_adapters(self) -> SimulatedHeld:
        self.adapters = SimulatedHeld()
        return self.adapters


def transfer_config(load_failure_policy: str) -> Any:
    """VLLM's configuration of the adapter."""
    return KVTransferConfig(
        kv_connector=SimulatedConnector.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_connector_extra_config={
            # The simulated tiers have sizes of their own.
            "host_bytes": "64MiB",
            "if_unsupported": "refuse",
            "load_failure_policy": load_failure_policy,
            "transfer_timeout_s": TRANSFER_TIMEOUT_S,
            "kv_events_salted": True,
        },
    )


class AdapterEngine(VllmEngine):
    """vLLM's scheduler and our adapter.

    Attributes:
        side: the adapter's scheduler side.
    """

    guards_appends = True

    @property
    def num_half_reported(self) -> int:
        """Transfers that the adapter has heard of from some workers and not from others."""
        return int(self.side._aggregator.num_incomplete)

    def load_weights(self, version: int) -> None:
        """Compute with other weights from now on. They come while the device sleeps or not, as chance has it."""
        num_naps = self._random.choice((0, 1, 2))
        if num_naps:
            self._run_workers(len(self._in_flight))
        for worker in self.workers * num_naps:
            worker.sleep()
        super().load_weights(version)
        version = self.chains.version
        for rank, worker in enumerate(self.workers):
            # Other weights differ from the first ones on one rank alone.
            worker.connector.weights = str(version if version % self.layout.world_size == rank else 0)
        for worker in self.workers * num_naps:
            worker.wake_up()

    def is_shown(self, request_id: str) -> bool:
        """Not if it waited while its adapter's files changed: of such a request nothing is offloaded."""
        return request_id not in self.side._adapters._given_up

    def _new_worker(self, config: Any, caches: Any, rank: int) -> SimulatedWorker:
        worker = super()._new_worker(config, caches, rank)
        if self.tells_weights_apart:
            worker.connector.adapters.hold(AdapterWorker(self._files, rank, self.layout.world_size))
        return worker

    def _report(self, answer: Any) -> KVConnectorOutput:
        """Ranks are not counted: what one of them has reported is in the result."""
        reports = self._rank_reports(answer)
        aggregator = OutputAggregator(self.layout.world_size, _FIRST_RANK_ALONE)
        return aggregator.aggregate([report.output for report in reports])

    def _error(self, answer: Any) -> str | None:
        return next((report.error for report in self._rank_reports(answer) if report.error is not None), None)

    def _rank_reports(self, answer: Any) -> list[Any]:
        report = answer.kv_connector_output
        message = None if report is None else report.kv_connector_worker_meta
        return [] if message is None else [message.reports[rank] for rank in sorted(message.reports)]

    def _view(self) -> SchedulerView:
        self.side = self.vllm.connector._scheduler
        return SchedulerView(self.vllm, self.layout.groups, self._is_busy, self.side.guard)
