"""The engine's options, and what follows from them for a given model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cargohold.engine.core.config import LoadFailurePolicy, SchedulerConfig
from cargohold.engine.core.kv_cache_manager import max_held_blocks
from cargohold.engine.core.waiting_queue import QueuePolicy
from cargohold.engine.model.info import DTYPES, ModelInfo
from cargohold.errors import ConfigError
from cargohold.machine import memory_limit_bytes
from cargohold.protocol import KVCacheGroup, KVCacheLayout
from cargohold.units import format_bytes, is_positive_int

DEFAULT_KV_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of the embedded engine. Checked when made; raises ``ConfigError`` naming the option.

    Attributes:
        model: a directory, a GGUF file, a hub id, or ``smollm2``.
        dtype: type of weights and KV: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for the one the model was saved in.
        device: ``cpu`` or a CUDA device.
        block_tokens: tokens per KV block.
        num_device_blocks: blocks of the device pool, one of which is the null block. By default 2 GiB worth of them, but no
            more than ``max_num_seqs`` of the longest requests need, and no less than one.
        max_model_len: longest sequence, prompt and generated tokens together. By default the model's own limit, or what the
            pool holds if that is less.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens computed in one step; longer prompts are computed in chunks.
        queue_policy: ``fcfs`` or ``priority``.
        prefix_caching: whether the device pool keeps blocks for later requests.
        load_failure_policy: ``recompute`` or ``fail``: what becomes of a request whose KV could not be loaded.
        load_timeout_s: a connector that does not end a load within this time is turned off.
        kv_events: whether KV events are collected.
    """

    model: str
    dtype: str = "auto"
    device: str = "cpu"
    block_tokens: int = 16
    num_device_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    queue_policy: str = "fcfs"
    prefix_caching: bool = True
    load_failure_policy: str = "recompute"
    load_timeout_s: float = 120.0
    kv_events: bool = False

    def __post_init__(self) -> None:
        self._require("dtype", self.dtype == "auto" or self.dtype in DTYPES, f"auto or one of {', '.join(DTYPES)}")
        for key in ("block_tokens", "max_num_seqs", "max_num_batched_tokens"):
            self._require(key, is_positive_int(getattr(self, key)), "an integer from 1")
        for key in ("num_device_blocks", "max_model_len"):
            value = getattr(self, key)
            self._require(key, value is None or is_positive_int(value), "an integer from 1, or None")
        for key, values in (
            ("queue_policy", [policy.value for policy in QueuePolicy]),
            ("load_failure_policy", [policy.value for policy in LoadFailurePolicy]),
        ):
            self._require(key, getattr(self, key) in values, f"one of {', '.join(values)}")
        self._require("load_timeout_s", self.load_timeout_s > 0, "a number of seconds above 0")

    def _require(self, key: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(key, getattr(self, key), f"it must be {expected}")


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """An engine that fits its model and machine.

    Attributes:
        config: the options.
        info: the model.
        layout: the paged KV cache.
        scheduler: limits and policies of the scheduler.
    """

    config: EngineConfig
    info: ModelInfo
    layout: KVCacheLayout
    scheduler: SchedulerConfig


def plan_engine(config: EngineConfig, info: ModelInfo, world_size: int = 1) -> EnginePlan:
    """Derive sizes and check that they fit, before anything heavy is loaded.

    Raises:
        ConfigError: an option is impossible for this model or machine.
    """
    groups = info.geometry.groups(config.block_tokens)
    block_bytes = info.geometry.block_bytes(config.block_tokens, info.dtype_bytes, world_size)
    if config.max_model_len is not None and config.max_model_len > info.max_positions:
        raise ConfigError(
            "max_model_len", config.max_model_len, f"{info.name} was made for at most {info.max_positions}"
        )
    wanted_len = config.max_model_len or info.max_positions
    needed = _num_blocks(groups, wanted_len, config.max_num_batched_tokens)
    num_blocks = config.num_device_blocks or _default_num_blocks(needed, config.max_num_seqs, block_bytes * world_size)
    max_model_len = _longest_that_fits(groups, config, wanted_len, num_blocks)
    if config.device == "cpu":
        _check_memory(num_blocks, block_bytes * world_size)
    return EnginePlan(
        config=config,
        info=info,
        layout=KVCacheLayout(groups, num_blocks, block_bytes, config.block_tokens, world_size),
        scheduler=SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=QueuePolicy(config.queue_policy),
            prefix_caching=config.prefix_caching,
            load_failure_policy=LoadFailurePolicy(config.load_failure_policy),
            load_timeout_s=config.load_timeout_s,
            emit_events=config.kv_events,
        ),
    )


def _default_num_blocks(needed_by_one: int, max_num_seqs: int, block_bytes: int) -> int:
    return max(needed_by_one, min(DEFAULT_KV_BYTES // block_bytes, needed_by_one * max_num_seqs))


def _num_blocks(groups: tuple[KVCacheGroup, ...], num_tokens: int, max_step_tokens: int) -> int:
    """Blocks of a pool that can serve one request of that length, the null block included."""
    return 1 + sum(max_held_blocks(group, num_tokens, max_step_tokens) for group in groups)


def _longest_that_fits(groups: tuple[KVCacheGroup, ...], config: EngineConfig, wanted_len: int, num_blocks: int) -> int:
    def fits(num_tokens: int) -> bool:
        return _num_blocks(groups, num_tokens, config.max_num_batched_tokens) <= num_blocks

    if fits(wanted_len):
        return wanted_len
    needed = _num_blocks(groups, wanted_len, config.max_num_batched_tokens)
    if config.max_model_len is not None:
        raise ConfigError(
            "num_device_blocks",
            num_blocks,
            f"one request of max_model_len={wanted_len} tokens needs {needed} blocks of {config.block_tokens} tokens; "
            f"raise num_device_blocks or lower max_model_len",
        )
    longest = _last_true(fits, wanted_len)
    if longest <= config.block_tokens:
        raise ConfigError("num_device_blocks", num_blocks, f"a request of {wanted_len} tokens needs {needed} blocks")
    return longest


def _last_true(holds: Callable[[int], bool], end: int) -> int:
    """The last number below ``end`` for which ``holds``, which must be true, then false; 0 if it never is."""
    low, high = 0, end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _check_memory(num_blocks: int, block_bytes: int) -> None:
    limit = memory_limit_bytes()
    if num_blocks * block_bytes > limit:
        raise ConfigError(
            "num_device_blocks",
            num_blocks,
            f"that is {format_bytes(num_blocks * block_bytes)} of KV, and this machine allows {format_bytes(limit)} in all; "
            f"use at most {limit // 2 // block_bytes}",
        )
