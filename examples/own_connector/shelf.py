"""A KV connector in a few lines: every worker keeps copies of blocks on a shelf, and copies within the step."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cargohold import protocol
from cargohold.errors import ConfigError


@dataclass(frozen=True)
class Orders:
    """One step's copies: pairs of a block and a place on the shelf."""

    loads: tuple[tuple[int, int], ...] = ()
    stores: tuple[tuple[int, int], ...] = ()


class ShelfScheduler(protocol.KVConnectorScheduler):
    """Knows which prefix lies where; what was used longest ago gives its place to what is new."""

    name, num_places = "shelf", 64

    def __init__(self, environment: protocol.SchedulerEnvironment) -> None:
        layout, (group, *others) = environment.layout, environment.layout.groups
        if others or group.kind is not protocol.AttentionKind.FULL or group.block_tokens != layout.hash_block_tokens:
            raise ConfigError("layout", layout, "the shelf is for one group of full attention, with a hash per block")
        self._size, self._full_hits = group.block_tokens, environment.full_hits
        self._requests = dict[str, protocol.RequestView]()
        self._first = dict[str, int]()  # of each request's blocks, the first that is not on the device
        self._loads = list[tuple[int, int]]()
        self.reset_cache()

    def reset_cache(self) -> bool:
        self._places = OrderedDict({b"nothing yet %d" % place: place for place in range(self.num_places)})
        return True

    def on_new_request(self, request: protocol.RequestView) -> None:
        self._requests[request.request_id], self._first[request.request_id] = request, 0

    def get_num_new_matched_tokens(self, request: protocol.RequestView, num_computed_tokens: int) -> tuple[int, bool]:
        first = end = self._first[request.request_id] = num_computed_tokens // self._size
        limit = (request.num_tokens - (not self._full_hits)) // self._size
        while end < limit and request.block_hashes[end] in self._places:
            end += 1
        return (end - first) * self._size, False  # nobody need wait: it is loaded before the forward pass

    def update_state_after_alloc(self, request: protocol.RequestView, blocks: protocol.BlockIds, num_new: int) -> None:
        first = self._first[request.request_id]
        for at in range(first, first + num_new // self._size):
            self._places.move_to_end(request.block_hashes[at])
            self._loads.append((blocks[0][at], self._places[request.block_hashes[at]]))

    def build_connector_meta(self, step: protocol.StepView) -> Orders:
        loads, self._loads, stores = tuple(self._loads), [], []
        for share in step.scheduled:
            request = self._requests[share.request_id]
            num_tokens = min(share.num_computed_tokens + share.num_scheduled_tokens, request.num_tokens)
            for at in range(share.num_computed_tokens // self._size, num_tokens // self._size):
                if (block_hash := request.block_hashes[at]) not in self._places:
                    self._places[block_hash] = self._places.popitem(last=False)[1]
                    stores.append((share.block_ids[0][at], self._places[block_hash]))
        return Orders(loads, tuple(stores))

    def update_connector_output(self, connector_output: protocol.KVConnectorOutput) -> None:
        if connector_output.step_failed or connector_output.invalid_block_ids:
            self.reset_cache()  # what that step computed, and we stored, may be garbage

    def explain(self, request_id: str) -> protocol.CacheReport:
        del self._requests[request_id], self._first[request_id]
        return protocol.CacheReport()


class ShelfWorker(protocol.KVConnectorWorker):
    """One worker's shelf."""

    name, metadata_type = "shelf", Orders

    def __init__(self, environment: protocol.WorkerEnvironment) -> None:
        self._shelf, self._orders = dict[int, list[Any]](), Orders()

    def register_kv_caches(self, kv_caches: Sequence[Sequence[Any]]) -> None:
        self._regions = kv_caches[0]

    def bind_connector_metadata(self, connector_metadata: protocol.KVConnectorMetadata) -> None:
        self._orders = connector_metadata if isinstance(connector_metadata, Orders) else Orders()

    def start_load_kv(self) -> None:
        for block_id, place in self._orders.loads:
            for region, kept in zip(self._regions, self._shelf[place], strict=True):
                region[block_id] = kept

    def wait_for_save(self) -> None:
        for block_id, place in self._orders.stores:
            self._shelf[place] = [region[block_id].clone() for region in self._regions]

    def clear_connector_metadata(self) -> None:
        self._orders = Orders()


FACTORY = protocol.ClassFactory(ShelfScheduler, ShelfWorker)
