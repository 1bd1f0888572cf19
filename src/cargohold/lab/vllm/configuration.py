"""A scenario's engine in vLLM's terms: vLLM's configuration and its KV-cache groups."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextvars import ContextVar
from copy import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)

from cargohold.deadlines import CONNECTOR
from cargohold.engine.core.request_queues import QueuePolicy
from cargohold.lab.simulation.fingerprints import FINGERPRINT_BYTES, layout_of
from cargohold.lab.simulation.replica import VOCAB_SIZE
from cargohold.lab.simulation.world import Shape, World
from cargohold.lab.vllm.adapters import lora_config
from cargohold.protocol import AttentionKind, KVCacheGroup, KVCacheLayout

ASYNC: Final = "async_scheduling"
"""Key in a shape's scheduler options: whether vLLM schedules a step before it has the output of the one before."""
MATCH_UNIT: Final = "prefix_match_unit"
"""Key in a shape's scheduler options: tokens per block hash, where prefixes of recurrent state may end inside a block."""
RETAINED: Final = "prefix_cache_retention_interval"
"""Key in a shape's scheduler options: what vLLM's prefix cache keeps of windows and states; ``None`` for all."""
CAN_RETAIN_LESS: Final = RETAINED in KVCacheConfig.__dataclass_fields__
ADAPTED: Final = "adapters"
"""Key in a shape's scheduler options: whether requests are computed with adapters; left out where there are none."""
SLEEPS: Final = "sleeps"
"""Key in a shape's scheduler options: whether vLLM may sleep; left out where it may not."""
DRAFTED: Final = "num_speculative_tokens"
"""Key in a shape's scheduler options: tokens that a draft model proposes in each step; left out where there is none."""
MAX_MODEL_LEN: Final = "max_model_len"
"""Key in a shape's scheduler options: tokens of the longest request."""
TRANSFER_TIMEOUT_S: Final = 0.5
LOAD_TIMEOUT_S: Final = CONNECTOR.seconds(TRANSFER_TIMEOUT_S)

WORLD: Final[ContextVar[World]] = ContextVar("world")
"""Where connectors that vLLM makes find what surrounds them: vLLM cannot pass it on to them."""

# A model of which only the shape matters. Twelve heads can be shared among up to four workers.
_MODEL: Final[Mapping[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1 << 20,
}


def vllm_config(shape: Shape, transfer: Any = None) -> Any:
    """Configuration of vLLM for an engine of this shape, with this ``KVTransferConfig`` if it has a connector."""
    options = shape.scheduler
    model = model_config()
    model.max_model_len = options[MAX_MODEL_LEN]
    model.enable_sleep_mode = SLEEPS in options  # set here because vLLM has no such mode on CPUs
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(
            # The value that vLLM's engine core would set: a prompt's steps end at its multiples, where states are left.
            block_size=min(plan.block_tokens for plan in shape.groups),
            enable_prefix_caching=options["prefix_caching"],
            prefix_match_unit=options.get(MATCH_UNIT),
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=options["max_num_seqs"],
            max_num_batched_tokens=options["max_num_batched_tokens"],
            max_model_len=options[MAX_MODEL_LEN],
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            policy="priority" if options["policy"] is QueuePolicy.PRIORITY else "fcfs",
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=shape.world_size,
            distributed_executor_backend="mp" if shape.world_size > 1 else "uni",
        ),
        kv_transfer_config=transfer,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=options["emit_events"], publisher="null"),
    )
    if any(plan.kind is AttentionKind.RECURRENT for plan in shape.groups):
        # Set here because vLLM would look at the model's configuration, which has no recurrent layers.
        config.cache_config.mamba_cache_mode = "align"
    config.cache_config.num_gpu_blocks = shape.num_blocks
    if ADAPTED in options:
        config.lora_config = lora_config()
    if DRAFTED in options:
        config.speculative_config = _speculation(options[DRAFTED])
    # Set here because vLLM turns it off on CPUs; the simulation is about what happens on GPUs.
    config.scheduler_config.async_scheduling = options[ASYNC]
    return config


def _speculation(num_tokens: int) -> Any:
    """Configuration of multi-token prediction. Made as one that needs no files of a draft model."""
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=num_tokens, prompt_lookup_max=1)
    speculation.method = "mtp"
    return speculation


def config_of_rank(config: Any, rank: int) -> Any:
    """A copy of the configuration for the worker of this rank."""
    own = copy(config)
    own.parallel_config, own.compilation_config = copy(config.parallel_config), copy(config.compilation_config)
    own.parallel_config.rank = rank
    return own


def kv_cache_config(shape: Shape) -> Any:
    """The paged KV as vLLM describes it: one layer per group, all over the same bytes."""
    layout = layout_of(shape.groups, shape.num_blocks, shape.world_size)
    return caches_of(layout, **{RETAINED: shape.scheduler.get(RETAINED)} if CAN_RETAIN_LESS else {})


def caches_of(layout: KVCacheLayout, **options: Any) -> Any:
    """A paged KV cache as vLLM describes it. Sizes of blocks are right; what they say of heads is made up."""
    size = layout.num_blocks * layout.block_bytes
    return KVCacheConfig(
        num_blocks=layout.num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=size,
                layers=list(group.layer_names),
                layer_stride=group.block_bytes or size,
                block_stride=layout.block_bytes,
            )
            for group in layout.groups
        ],
        kv_cache_groups=[KVCacheGroupSpec(list(group.layer_names), _spec(group, layout)) for group in layout.groups],
        **options,
    )


def num_blocks_needed(shape: Shape) -> int:
    """Fewest blocks, the null block included, with which vLLM starts for requests of the shape's ``MAX_MODEL_LEN`` tokens."""
    config = vllm_config(shape)
    specs = [group.kv_cache_spec for group in kv_cache_config(shape).kv_cache_groups]
    return 1 + sum(int(-(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)) for spec in specs)


def _spec(group: KVCacheGroup, layout: KVCacheLayout) -> Any:
    # Key and value of one head of one element are as many bytes as a fingerprint.
    element = torch.float32
    assert 2 * element.itemsize == FINGERPRINT_BYTES
    common = {
        "block_size": group.block_tokens,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": element,
        "page_size_padded": layout.block_bytes,
    }
    match group.kind:
        case AttentionKind.FULL:
            return FullAttentionSpec(**common)
        case AttentionKind.SLIDING_WINDOW:
            return SlidingWindowSpec(**common, sliding_window=group.window_tokens)
        case AttentionKind.CHUNKED_LOCAL:
            return ChunkedLocalAttentionSpec(**common, attention_chunk_size=group.window_tokens)
        case AttentionKind.RECURRENT:
            return MambaSpec(
                block_size=group.block_tokens,
                shapes=((group.block_tokens * FINGERPRINT_BYTES // element.itemsize,),),
                dtypes=(element,),
                page_size_padded=layout.block_bytes,
                mamba_cache_mode="align",
            )


@cache
def _directory() -> TemporaryDirectory[str]:
    """A model's directory that lives as long as the process; there are no weights in it."""
    directory = TemporaryDirectory(prefix="cargohold-simulation-")
    (Path(directory.name) / "config.json").write_text(json.dumps(_MODEL))
    return directory


def model_config() -> Any:
    """Configuration of a model of which only the shape matters; a copy."""
    return copy(_model())


@cache
def _model() -> Any:
    return ModelConfig(model=_directory().name, skip_tokenizer_init=True, dtype="float32")
