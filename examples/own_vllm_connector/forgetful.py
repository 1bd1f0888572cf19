"""The same connector with a mistake: the last block of a hit is not loaded."""

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request
from vllm_shelf import ShelfConnector


class ForgetfulShelf(ShelfConnector):
    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._orders.loads.pop()
