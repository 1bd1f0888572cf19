"""Our adapter over simulated tiers, under vLLM's scheduler: what is seen of it, and done to it, beyond any connector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import KVTransferConfig

from cargohold.integrations.vllm.connector import CargoholdConnector
from cargohold.lab.vllm.adapters import AdapterWorker, SimulatedHeld
from cargohold.lab.vllm.configuration import TRANSFER_TIMEOUT_S, WORLD
from cargohold.lab.vllm.engine import VllmEngine
from cargohold.lab.vllm.requests import SchedulerView, VllmReset
from cargohold.lab.vllm.worker import SimulatedWorker
from cargohold.protocol import Clock, KVConnectorFactory, KVConnectorOutput, OutputAggregator


class SimulatedConnector(CargoholdConnector):
    """The adapter, with a simulated factory and clock.

    Attributes:
        weights: what its worker says that it holds.
        adapters: which adapters it says so of, if there are any.
    """

    weights = ""

    def _factory(self) -> KVConnectorFactory:
        return WORLD.get().factory

    def _clock(self) -> Clock:
        return WORLD.get().clock

    def _look_at_weights(self) -> Callable[[], str]:
        # With adapters these change, and nothing else.
        version = 0 if self._vllm_config.lora_config else WORLD.get().weights
        self.weights = held_by(version, self._vllm_config.parallel_config)
        return lambda: self.weights

    def _make_held_adapters(self) -> SimulatedHeld:
        self.adapters = SimulatedHeld()
        return self.adapters


def held_by(version: int, parallel: Any) -> str:
    """What a worker says that it holds: other weights differ from the first ones on one rank alone."""
    return str(version if version % parallel.world_size == parallel.rank else 0)


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
        """Transfers that some workers have reported to the adapter and others have not."""
        return int(self.side._aggregator.num_incomplete)

    def announce_reset(self, *, sleeps: bool) -> bool:
        """Pause or not, as chance has it, and before sleep always; whether the pause aborts all requests."""
        reset = VllmReset("keep", True, True, True) if sleeps else VllmReset.draw(self._random)
        if self._late is not None and reset.mode != "wait":  # blocks that were not reported forbid it
            reset = VllmReset(is_of_connector=reset.is_of_connector)
        self.view.announce_reset(reset)
        return reset.mode == "abort"

    @property
    def num_steps_before_weights(self) -> int:
        """As many as chance has it while vLLM is paused: then it takes only such steps as connectors need."""
        return 0 if self.view.reset.mode is None else self._random.choice((0, 1, 3))

    def load_weights(self, version: int) -> None:
        """Compute with other weights from now on. They come while the device sleeps or not, as chance has it."""
        num_naps = self._random.choice((0, 1, 2))
        self._run_workers(len(self._in_flight))  # they hear of it after the steps that were sent before
        for worker in self.workers * num_naps:
            worker.sleep()
        super().load_weights(version)
        for worker in self.workers:
            worker.connector.weights = held_by(self.chains.version, worker.connector._vllm_config.parallel_config)
        for worker in self.workers * num_naps:
            worker.wake_up()
        self.view.resume()

    def is_shown(self, request_id: str, num_computed_tokens: int) -> bool:
        """Not if it waited while its adapter's files changed, or has started over since, because of a refused reset."""
        started_over = self.vllm.requests[request_id].num_computed_tokens < num_computed_tokens
        record = self.side._requests.get(request_id)
        return not started_over and not (record is not None and self.side._adapters.why_not(record.seen))

    def _new_worker(self, config: Any, caches: Any, rank: int) -> SimulatedWorker:
        worker = super()._new_worker(config, caches, rank)
        # What is behind a tail may be written on while it is stored.
        worker.runner.guards_appends = not self.vllm.connector._scheduler.layout.has_tails
        if self.tells_weights_apart:
            worker.connector.adapters.hold(AdapterWorker(self._files, rank, self.layout.world_size))
        return worker

    def _report(self, answer: Any) -> KVConnectorOutput:
        """Ranks are not counted: what one of them has reported is in the result."""
        reports = self._rank_reports(answer)
        aggregator = OutputAggregator(self.layout.world_size, 1)
        return aggregator.aggregate([report.output for report in reports])

    def _error(self, answer: Any) -> str | None:
        return next((report.error for report in self._rank_reports(answer) if report.error is not None), None)

    def _rank_reports(self, answer: Any) -> list[Any]:
        report = answer.kv_connector_output
        message = None if report is None else report.kv_connector_worker_meta
        return [] if message is None else [message.reports[rank] for rank in sorted(message.reports)]

    def _view(self) -> SchedulerView:
        self.side = self.vllm.connector._scheduler
        return SchedulerView(self.vllm, self.layout.groups, lambda: bool(self._in_flight), self.side.guard)
