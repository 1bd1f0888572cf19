"""Connectors of vLLM's interface for tests of the bridge: the example's with asynchronous loads, and wrong ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from examples.own_vllm_connector.vllm_shelf import Orders, ShelfConnector


@dataclass
class AsyncOrders(Orders):
    """Says as well whose loads these are."""

    loading: list[str] = field(default_factory=list)


class AsyncShelf(ShelfConnector):
    """Loads between steps, and reports each load a step late."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._loading: list[str] = []
        self._loaded: set[str] = set()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        num_tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._loading.append(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> AsyncOrders:
        orders = super().build_connector_meta(scheduler_output)
        loading, self._loading = self._loading, []
        return AsyncOrders(orders.loads, orders.stores, loading)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loaded, self._loaded = self._loaded, set(self._get_connector_metadata().loading)
        return None, loaded


class Trusting(ShelfConnector):
    """Keeps what was computed behind a failed load."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        pass


class Appending(ShelfConnector):
    """Takes the blocks of a resumed request for more of the old ones."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        scheduler_output.scheduled_cached_reqs.resumed_req_ids.clear()
        return super().build_connector_meta(scheduler_output)


class Pooling(ShelfConnector):
    """Wants vLLM's block pool."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        pass
