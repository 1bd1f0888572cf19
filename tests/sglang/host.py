"""SGLang's own cache, host pools and cache controller on CPU tensors, for three kinds of models, with a storage below."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed
from sglang.srt import runtime_context
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.server_args import ServerArgs

from cargohold.integrations.sglang.plugin import watch

KINDS: Final = ("attention", "latent", "hybrid")
PAGE_TOKENS: Final = {
    "attention": 4,
    "latent": 4,
    "hybrid": 1,
}  # SGLang keeps states at any token only with pages of one
NUM_TOKENS: Final = 256
WAIT_S: Final = 60.0  # a bound on hangs, not a measure
CARGOHOLD: Final = {
    "backend_name": "cargohold",
    "module_path": "cargohold.integrations.sglang.backend",
    "class_name": "CargoholdStorage",
    "interface_v1": 1,
}


def write_model(directory: Path, weights: bytes = b"weights") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def disk(directory: Path, **options: object) -> dict[str, Any]:
    return {"kind": "disk", "directory": str(directory), "max_bytes": "64MiB", "reserve_bytes": 0, **options}


def extra_config(*tiers: Mapping[str, Any], **options: object) -> dict[str, Any]:
    return {
        **CARGOHOLD,
        "tiers": list(tiers),
        "hicache_storage_pass_prefix_keys": True,
        "prefetch_threshold": 4,
        **options,
    }


@contextmanager
def configured(model: Path, **options: Any) -> Iterator[ServerArgs]:
    """SGLang's options in this process. The model's path is set later: SGLang would read more of it than there is."""
    args = ServerArgs(
        model_path="dummy",
        device="cpu",
        enable_hierarchical_cache=True,
        hicache_io_backend="direct",
        hicache_ratio=2.0,
        hicache_write_policy="write_through",
        hicache_storage_prefetch_policy="wait_complete",
        **{"hicache_mem_layout": "page_first_direct", **options},
    )
    runtime_context.publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
    runtime_context.get_context().override("test", model_path=str(model), load_format="auto")
    args._mamba_cache_chunk_size = 1  # a state may be kept at any token; SGLang would ask the model's configuration
    watch.began_s, watch.change = time.time() + 60, ""  # files of a test may be newer than its process
    try:
        yield args
    finally:
        watch.began_s, watch.change = None, ""


class Host:
    """One SGLang from the cache down, without a model.

    Args:
        kind: which kind of model.
        args: SGLang's options.
    """

    def __init__(self, kind: str, args: ServerArgs) -> None:
        self.kind, page = kind, PAGE_TOKENS[kind]
        requests: Any = None
        components: tuple[Any, ...] = (ComponentType.FULL,)
        size: dict[str, Any] = {"size": NUM_TOKENS, "page_size": page, "dtype": torch.float16, "device": "cpu"}
        if kind == "latent":
            self.pool = MLATokenToKVPool(
                **size, kv_lora_rank=12, qk_rope_head_dim=4, layer_num=3, enable_memory_saver=False
            )
            self.tensors = list(self.pool.kv_buffer)
        elif kind == "attention":
            self.pool = MHATokenToKVPool(**size, head_num=2, head_dim=8, layer_num=3, enable_memory_saver=False)
            self.tensors = [*self.pool.k_buffer, *self.pool.v_buffer]
        else:
            requests, components = _states(), (ComponentType.FULL, ComponentType.MAMBA)
            self.pool = HybridLinearKVPool(
                **size, head_num=2, head_dim=8, full_attention_layer_ids=[1, 3], mamba_pool=requests.mamba_pool
            )
            self.tensors = [*self.pool.full_kv_pool.k_buffer, *self.pool.full_kv_pool.v_buffer]
        self.requests = requests
        of_pages: Any = {"kvcache": self.pool, "dtype": torch.float16, "device": "cpu", "need_sort": False}
        self.allocator = (
            TokenToKVPoolAllocator(NUM_TOKENS, **of_pages)
            if page == 1
            else PagedTokenToKVPoolAllocator(NUM_TOKENS, page_size=page, **of_pages)
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page,
            tp_cache_group=torch.distributed.group.WORLD,
            tree_components=components,
        )
        self.cache = UnifiedRadixCache(params)
        self.cache.init_hicache(args, params)
        self._num_requests = 0

    @property
    def storage(self) -> Any:
        return self.cache.cache_controller.storage_backend

    def compute(self, tokens: array[int]) -> list[torch.Tensor]:
        """Put KV of tokens into the cache as a forward pass would; return it."""
        slots = self.allocator.alloc(len(tokens))
        generator = torch.Generator().manual_seed(tokens[0])
        for tensor in self.tensors:
            tensor[slots] = torch.randn(tensor[slots].shape, generator=generator).to(tensor.dtype)
        state = None
        if self.requests is not None:
            state = self.requests.mamba_allocator.alloc(1)
            for tensor in self._state_tensors():
                tensor[:, state] = torch.randn(tensor[:, state].shape, generator=generator).to(tensor.dtype)
        kept = self._kv(slots, state)
        self.cache.insert(InsertParams(key=RadixKey(tokens), value=slots, mamba_value=state))
        return kept

    def back_up(self) -> None:
        """Wait until everything is in host memory and in the storage."""
        self.cache.flush_pending_backups()
        self._until(lambda: not (self.cache.ongoing_write_through or self.cache.ongoing_backup))

    def evict(self) -> None:
        """Drop everything from the device and from host memory."""
        self.cache.evict(EvictParams(num_tokens=NUM_TOKENS, mamba_num=NUM_TOKENS))
        self.cache.evict_host(2 * NUM_TOKENS)

    def prefetch(self, tokens: array[int]) -> int:
        """Fetch a request's tokens from the storage; return how many came."""
        self._num_requests += 1
        handle, found = CacheRequestHandle(f"request-{self._num_requests}", 0), self._match(tokens)
        at = found.last_host_node
        matched = found.device_prefix_len + found.host_hit_length
        self.cache.prefetch_from_storage(
            handle, at, tokens[matched:], self.cache.get_last_hash_value(at), self.cache.get_prefix_hash_values(at)
        )
        self._until(lambda: bool(self.cache.check_prefetch_progress(handle)))
        return int(self.cache.pop_prefetch_loaded_tokens(handle))

    def load(self, tokens: array[int]) -> tuple[int, list[torch.Tensor]]:
        """Bring what host memory has of tokens to the device; return how many are there, and their KV."""
        found = self._match(tokens)
        if found.host_hit_length or found.mamba_host_hit_length:
            assert self.cache.load_back(found.best_match_node, None)
            self.cache.ready_to_load_host_cache()
            self.cache.loading_check()
            found = self._match(tokens)
        slots = self.cache.path_device_indices(found.best_match_node)
        state = None
        if self.requests is not None and len(slots):
            state = self.cache.all_mamba_values_flatten()
        return len(slots), self._kv(slots, state)

    def close(self) -> None:
        self.cache.shutdown()

    def _match(self, tokens: array[int]) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

    def _until(self, is_done: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while True:
            self.cache.check_hicache_events()
            if is_done():
                return
            assert time.monotonic() < end
            time.sleep(0.001)  # SGLang's threads work meanwhile

    def _state_tensors(self) -> list[torch.Tensor]:
        state = self.requests.mamba_pool.mamba_cache
        return [state.temporal, *state.conv]

    def _kv(self, slots: torch.Tensor, state: torch.Tensor | None) -> list[torch.Tensor]:
        kept = [tensor[slots].clone() for tensor in self.tensors]
        return kept if state is None else [*kept, *(tensor[:, state].clone() for tensor in self._state_tensors())]


def _states() -> Any:
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=16, n_groups=1, num_heads=2, head_dim=8, state_size=4, conv_kernel=4
    )
    return HybridReqToTokenPool(
        size=8,
        mamba_size=32,
        mamba_spec_state_size=0,
        max_context_len=NUM_TOKENS,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2]),
        mamba_layer_ids=[0, 2],
        enable_mamba_extra_buffer=False,
    )


def tokens_from(first: int, count: int = 64) -> array[int]:
    return array("q", range(first, first + count))


def with_backend(backend: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {"hicache_storage_backend": backend, "hicache_storage_backend_extra_config": json.dumps(dict(extra))}
