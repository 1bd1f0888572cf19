"""Connectors of vLLM's interface for tests of the bridge: with asynchronous loads, for several groups, and wrong ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd, lcm
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import SupportsHMA
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec
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


class GroupsShelf(ShelfConnector, SupportsHMA):  # type: ignore[misc]  # vLLM ships no types
    """For several groups that keep tokens. A hit is as long as all of them have it."""

    num_loaded_groups: int | None = None  # all

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        if any(isinstance(spec, MambaSpec) for spec in specs):
            raise ValueError("a state has no blocks of tokens")
        self._sizes = [spec.block_size for spec in specs]
        self._unit, self._stride = gcd(*self._sizes), lcm(*self._sizes)
        self._group_tables = dict[str, list[list[int]]]()

    def _keys(self, request: Request, group: int, start: int, end: int) -> list[tuple[int, bytes]]:
        """Place in the table, and key, of each block of a group that ends within these tokens."""
        size = self._sizes[group]
        hashes, per_block = request.block_hashes, size // self._unit
        return [(at, b"%d " % group + hashes[(at + 1) * per_block - 1]) for at in range(start // size, end // size)]

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        start = end = self._first[request.request_id] = num_computed_tokens
        while (
            start % self._stride == 0
            and end + self._stride < request.num_tokens
            and all(
                key in self._places
                for group in range(len(self._sizes))
                for _, key in self._keys(request, group, end, end + self._stride)
            )
        ):
            end += self._stride
        return end - start, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        start = self._first.get(request.request_id, 0)
        for group, table in enumerate(blocks.get_block_ids()[: self.num_loaded_groups]):
            for at, key in self._keys(request, group, start, start + num_external_tokens):
                self._places.move_to_end(key)
                if table[at]:
                    self._orders.loads.append((table[at], self._places[key]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        for new in scheduler_output.scheduled_new_reqs:
            self._group_tables[new.req_id] = [list(table) for table in new.block_ids]
            self._store(new.req_id, new.num_computed_tokens, scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        for at, req_id in enumerate(cached.req_ids):
            if req_id in cached.resumed_req_ids:
                self._group_tables[req_id] = [[] for _ in self._sizes]
            for table, more in zip(self._group_tables[req_id], cached.new_block_ids[at] or (), strict=False):
                table.extend(more)
            self._store(req_id, cached.num_computed_tokens[at], scheduler_output)
        orders, self._orders = self._orders, Orders()
        return orders

    def _store(self, req_id: str, start: int, scheduler_output: SchedulerOutput) -> None:
        request = self._requests[req_id]
        end = min(start + scheduler_output.num_scheduled_tokens[req_id], request.num_tokens)
        for group, table in enumerate(self._group_tables[req_id]):
            for at, key in self._keys(request, group, start, end):
                if table[at] and key not in self._places:
                    self._places[key] = self._places.popitem(last=False)[1]
                    self._orders.stores.append((table[at], self._places[key]))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._group_tables.pop(request.request_id, None)
        return super().request_finished(request, block_ids[0])


class FirstGroup(GroupsShelf):
    """Loads the blocks of the first group alone."""

    num_loaded_groups = 1


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
