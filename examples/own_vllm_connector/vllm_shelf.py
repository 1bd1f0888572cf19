"""A connector for vLLM in a few lines: each worker keeps copies of blocks in its own memory, and copies within the step."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request


@dataclass
class Orders(KVConnectorMetadata):  # type: ignore[misc]  # vLLM ships no types
    """One step's copies: pairs of a block and a place on the shelf."""

    loads: list[tuple[int, int]] = field(default_factory=list)
    stores: list[tuple[int, int]] = field(default_factory=list)


class ShelfConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM ships no types
    """Keeps full blocks of one KV-cache group. What was used longest ago gives its place to what is new."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._num_places = self._kv_transfer_config.get_from_extra_config("num_places", 64)
        self._requests = dict[str, Request]()
        self._first = dict[str, int]()  # of each request's blocks, the first that is not on the device
        self._tables = dict[str, list[int]]()  # the blocks of requests that run
        self._orders = Orders()
        self._shelf = dict[int, list[torch.Tensor]]()
        self.reset_cache()

    # --- in the scheduler: which prefix lies where --------------------------------------------------------------------

    def reset_cache(self) -> bool:
        self._places = OrderedDict({b"nothing yet %d" % place: place for place in range(self._num_places)})
        return True

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        first = end = self._first[request.request_id] = num_computed_tokens // self._size
        limit = (request.num_tokens - 1) // self._size  # one token is left to compute
        while end < limit and request.block_hashes[end] in self._places:
            end += 1
        return (end - first) * self._size, False  # nobody need wait: it is loaded before the forward pass

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        first, table = self._first.get(request.request_id, 0), blocks.get_block_ids()[0]
        for at in range(first, first + num_external_tokens // self._size):
            self._places.move_to_end(request.block_hashes[at])
            self._orders.loads.append((table[at], self._places[request.block_hashes[at]]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        for new in scheduler_output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            self._store(new.req_id, new.num_computed_tokens, scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, new_blocks, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            kept = [] if req_id in cached.resumed_req_ids else self._tables[req_id]
            self._tables[req_id] = kept + (new_blocks[0] if new_blocks else [])
            self._store(req_id, start, scheduler_output)
        orders, self._orders = self._orders, Orders()
        return orders

    def _store(self, req_id: str, start: int, scheduler_output: SchedulerOutput) -> None:
        """Plan to store the blocks that a step fills."""
        request, table = self._requests[req_id], self._tables[req_id]
        end = min(start + scheduler_output.num_scheduled_tokens[req_id], request.num_tokens)
        for at in range(start // self._size, end // self._size):
            if (block_hash := request.block_hashes[at]) not in self._places:
                self._places[block_hash] = self._places.popitem(last=False)[1]
                self._orders.stores.append((table[at], self._places[block_hash]))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if connector_output.invalid_block_ids:
            self.reset_cache()  # what that step computed, and we stored, may be garbage

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        for of_requests in (self._requests, self._first, self._tables):
            of_requests.pop(request.request_id, None)
        return False, None

    # --- in the workers: copies ---------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for block_id, place in self._get_connector_metadata().loads:
            for layer, kept in zip(self._layers, self._shelf[place], strict=True):
                layer[block_id] = kept

    def wait_for_save(self) -> None:
        for block_id, place in self._get_connector_metadata().stores:
            self._shelf[place] = [layer[block_id].clone() for layer in self._layers]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers were loaded by ``start_load_kv``."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are stored by ``wait_for_save``."""
