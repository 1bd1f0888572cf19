"""A connector that promises every prefix it has seen, and loads nothing."""

from __future__ import annotations

from cargohold.protocol import (
    BlockIds,
    EmptyMetadata,
    KVConnectorMetadata,
    KVConnectorScheduler,
    KVConnectorWorker,
    RequestView,
    SchedulerEnvironment,
    StepView,
    WorkerEnvironment,
)


class CarelessScheduler(KVConnectorScheduler):
    name = "careless"

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        known = [at + 1 for at, block_hash in enumerate(request.block_hashes) if block_hash in self._seen]
        return max(0, 4 * max(known, default=0) - num_computed_tokens), False

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        self._seen.update(request.block_hashes)

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        return EmptyMetadata()


class CarelessWorker(KVConnectorWorker):
    name = "careless"

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        pass

    def start_load_kv(self) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def clear_connector_metadata(self) -> None:
        pass


class CarelessFactory:
    def make_scheduler_side(self, environment: SchedulerEnvironment) -> CarelessScheduler:
        return CarelessScheduler()

    def make_worker_side(self, environment: WorkerEnvironment) -> CarelessWorker:
        return CarelessWorker()


def factory() -> CarelessFactory:
    return CarelessFactory()
