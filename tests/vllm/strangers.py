"""A connector of somebody else inside vLLM: the shelf of docs/conformance.md with options and with faults on demand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cargohold import protocol
from cargohold.errors import ConfigError
from examples.own_connector.shelf import ShelfScheduler, ShelfWorker

LOADED = protocol.metrics.counter(
    "stranger_loaded_tokens", "tokens", "Loaded by a connector of somebody else.", start=[()]
).of()
FAULTS = ("none", "spoils", "fails", "raises", "orders", "reports")
"""The last two: its message to workers, or theirs to it, cannot be pickled."""


class Scheduler(ShelfScheduler):
    """Counts what it has loaded."""

    name = "stranger"

    def __init__(self, environment: protocol.SchedulerEnvironment, num_places: int, fault: str) -> None:
        self.num_places = num_places
        self._fault = fault
        self._num_loaded = 0
        super().__init__(environment)

    def update_state_after_alloc(self, request: protocol.RequestView, blocks: protocol.BlockIds, num_new: int) -> None:
        super().update_state_after_alloc(request, blocks, num_new)
        self._num_loaded += num_new

    def build_connector_meta(self, step: protocol.StepView) -> Any:
        orders = super().build_connector_meta(step)
        return (lambda: orders) if self._fault == "orders" and orders.stores else orders

    def get_kv_connector_stats(self) -> protocol.Stats:
        stats: dict[protocol.Series, float] = {LOADED: self._num_loaded}
        self._num_loaded = 0
        return stats


class Worker(ShelfWorker):
    """Stores a block when its last layer is saved, and loads before the first one is read, as a layer-wise connector does."""

    name = "stranger"

    def __init__(self, environment: protocol.WorkerEnvironment, fault: str) -> None:
        super().__init__(environment)
        self._fault = fault
        self._layers = [name for group in environment.layout.groups for name in group.layer_names]

    def start_load_kv(self) -> None:
        if self._fault == "raises" and self._orders.loads:
            raise OSError("the shelf fell down")

    def wait_for_layer_load(self, layer_name: str) -> None:
        if layer_name == self._layers[0]:
            super().start_load_kv()
            for block_id, _ in self._orders.loads if self._fault in {"spoils", "fails"} else ():
                for region in self._regions:
                    region[block_id] = 1

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        return frozenset(block_id for block_id, _ in self._orders.loads) if self._fault == "fails" else frozenset()

    def build_connector_worker_meta(self) -> Any:
        return (lambda: self) if self._fault == "reports" and self._orders.stores else None

    def wait_for_save(self) -> None:
        """It has saved after the last layer."""

    def save_kv_layer(self, layer_name: str) -> None:
        if layer_name == self._layers[-1]:
            super().wait_for_save()


@dataclass(frozen=True, kw_only=True)
class Stranger:
    """Its factory, with its options."""

    places: int = 256
    fault: str = "none"

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ConfigError("fault", self.fault, f"it must be one of {', '.join(FAULTS)}")

    def make_scheduler_side(self, environment: protocol.SchedulerEnvironment) -> Scheduler:
        return Scheduler(environment, self.places, self.fault)

    def make_worker_side(self, environment: protocol.WorkerEnvironment) -> Any:
        return Worker(environment, self.fault)
