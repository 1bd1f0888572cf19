"""The engine's options, and the plan of an engine that is derived from them for a given model."""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from dataclasses import dataclass, replace
from enum import Enum
from importlib.metadata import version
from typing import Annotated, Any, Final

from cargohold.deadlines import CONNECTOR, DEFAULTS, TRANSFER
from cargohold.engine.core.kv_cache_manager import max_held_blocks
from cargohold.engine.core.request_queues import LoadFailurePolicy, QueuePolicy, SchedulerConfig
from cargohold.engine.events import WIRE_MAP, WIRES
from cargohold.engine.model.info import DTYPES, ModelInfo
from cargohold.engine.ranks.choice import ExecutorConfig, ExecutorKind
from cargohold.errors import ConfigError, PromptTooLongError
from cargohold.option_values import (
    MAX_TIMEOUT_S,
    format_bytes,
    format_count,
    is_int,
    is_number,
    is_positive_int,
)
from cargohold.options import INT_FROM_1, SHORT_TIME, Options, checked, must, one_of, require
from cargohold.process import can_share_memory, memory_limit_bytes
from cargohold.protocol import KVCacheGroup, KVCacheLayout, ServedModel

logger = logging.getLogger(__name__)

_FEW_BLOCKS: Final = 4
DEFAULT_KV_BYTES: Final = 1024**3
"""Most that the device pool takes by default, half of the commands' host memory; a quarter of the machine's if that is less."""

_DEVICE = re.compile(r"cpu|cuda(:[0-9]+)?")
_PORT = re.compile(r"[0-9]{1,5}|\*")  # 0 means any free one, too
_MAX_PORT = 65535


def _values(policies: type[Enum]) -> tuple[str, ...]:
    return tuple(policy.value for policy in policies)


def _require_endpoint(key: str, endpoint: Any) -> None:
    if not (isinstance(endpoint, str) and "://" in endpoint):
        raise ConfigError(key, endpoint, "it must be an address such as tcp://127.0.0.1:5557")
    # ZeroMQ takes a number modulo 65536, and of a word the digits at its start: it would listen on another port.
    port = endpoint.rpartition(":")[2]
    is_port = _PORT.fullmatch(port) is not None and (port == "*" or int(port) <= _MAX_PORT)
    if endpoint.startswith("tcp://") and not is_port:
        ports = f"a port from 1 to {_MAX_PORT}, or in * for any free one"
        raise ConfigError(key, endpoint, f"it must be an address that ends in {ports}: tcp://127.0.0.1:5557")


_MODEL: Final = must(lambda model: isinstance(model, str), "a directory, a .gguf file, a hub id or smollm2")
# torch.device("cpu") prints as "cpu", but is not equal to it.
_DEVICES: Final = must(
    lambda device: isinstance(device, str) and _DEVICE.fullmatch(device) is not None,
    "cpu, cuda, or one of several: cuda:1",
)
_NUM_BLOCKS: Final = must(is_positive_int, "an integer from 1, or None")
_LENGTH: Final = must(lambda value: is_int(value) and value >= 2, "an integer from 2, or None")
_CLOSING: Final = must(
    lambda value: is_number(value) and 0 <= value <= MAX_TIMEOUT_S, f"a number of seconds from 0 to {MAX_TIMEOUT_S}"
)
_TOPIC: Final = must(lambda topic: isinstance(topic, str), "a text such as kv@pod@model")
_ENDPOINT: Final = checked(_require_endpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Options):
    """Options of the embedded engine.

    Attributes:
        model: a directory, a GGUF file, a hub id, or ``smollm2``.
        dtype: type of weights and KV: ``float32``, ``bfloat16``, ``float16``, or ``auto`` for the one the model was saved in.
        device: ``cpu`` or a CUDA device.
        block_tokens: tokens per KV block.
        num_device_blocks: blocks of the device pool, one of which is the null block. By default 1 GiB worth of them, but no
            more than ``max_num_seqs`` of the longest requests need, and no less than one of ``max_model_len`` tokens needs.
        max_model_len: longest sequence, prompt and generated tokens together. By default the model's own limit, or what the
            pool holds if that is less.
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens computed in one step; longer prompts are computed in chunks.
        queue_policy: ``fcfs`` or ``priority``.
        prefix_caching: whether the device pool keeps blocks for later requests.
        load_failure_policy: ``recompute`` or ``fail``: what becomes of a request whose KV could not be loaded.
        kv_events: whether KV events are collected.
        kv_events_salted: whether that includes events of salted requests' blocks. Their tokens are others' prompts, and routers
            that ignore salts treat them as everyone's.
        kv_events_endpoint: publish KV events over ZeroMQ, bound to this address, such as ``tcp://127.0.0.1:5557``; needs the
            extra ``events``.
        kv_events_topic: the topic of messages with KV events, such as ``kv@pod@model`` for llm-d.
        kv_events_wire: ``map`` or ``array``: an event is written with names, or as its values alone, as older followers read.
        kv_events_replay_endpoint: another address, at which followers ask for messages that they have missed.
        tensor_parallel_size: workers over which weights and KV heads are split; it must divide the model's heads.
        executor: ``inline`` (one worker, in this process), ``multiprocess`` or ``ray`` (one process or Ray actor per worker).
            By default inline for one worker, and multiprocess for several.
        step_timeout_s: workers in other processes that take longer for a step are taken for dead.
        shutdown_timeout_s: how long ``close`` goes on until copies and writes to lower tiers have ended. What is being written
            then gets the connector's own ``shutdown_timeout_s``.
    """

    model: Annotated[str, _MODEL]
    dtype: Annotated[str, one_of("auto", *DTYPES)] = "auto"
    device: Annotated[str, _DEVICES] = "cpu"
    block_tokens: Annotated[int, INT_FROM_1] = 16
    num_device_blocks: Annotated[int | None, _NUM_BLOCKS] = None
    max_model_len: Annotated[int | None, _LENGTH] = None
    max_num_seqs: Annotated[int, INT_FROM_1] = 64
    max_num_batched_tokens: Annotated[int, INT_FROM_1] = 2048
    queue_policy: Annotated[str, one_of(*_values(QueuePolicy))] = "fcfs"
    prefix_caching: bool = True
    load_failure_policy: Annotated[str, one_of(*_values(LoadFailurePolicy))] = "recompute"
    kv_events: bool = False
    kv_events_salted: bool = False
    kv_events_endpoint: Annotated[str | None, _ENDPOINT] = None
    kv_events_topic: Annotated[str, _TOPIC] = ""
    kv_events_wire: Annotated[str, one_of(*WIRES)] = WIRE_MAP
    kv_events_replay_endpoint: Annotated[str | None, _ENDPOINT] = None
    tensor_parallel_size: Annotated[int, INT_FROM_1] = 1
    executor: Annotated[str | None, one_of(*_values(ExecutorKind))] = None
    step_timeout_s: Annotated[float, SHORT_TIME] = 300.0
    shutdown_timeout_s: Annotated[float, _CLOSING] = 5.0

    def __post_init__(self) -> None:
        replay = self.kv_events_replay_endpoint
        is_free = replay is None or (self.kv_events_endpoint is not None and replay != self.kv_events_endpoint)
        require(
            self, "kv_events_replay_endpoint", is_free, "None unless kv_events_endpoint is set, and another address"
        )
        is_reachable = replay is None or not replay.startswith("inproc:")
        require(self, "kv_events_replay_endpoint", is_reachable, "an address such as tcp://127.0.0.1:5558")
        is_split = self.tensor_parallel_size > 1
        fits = not (is_split and self.executor_kind is ExecutorKind.INLINE)
        require(self, "executor", fits, f"multiprocess or ray for tensor_parallel_size={self.tensor_parallel_size}")
        require(
            self, "device", not is_split or ":" not in self.device, "cpu or cuda: each worker takes a device of its own"
        )

    @property
    def executor_kind(self) -> ExecutorKind:
        """Where workers run: ``executor``, or its default."""
        if self.executor is None:
            return ExecutorKind.INLINE if self.tensor_parallel_size == 1 else ExecutorKind.MULTIPROCESS
        return ExecutorKind(self.executor)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits that a request must fit into.

    Attributes:
        max_model_len: longest sequence, prompt and generated tokens together.
        vocab_size: token ids are below it.
        eos_token_ids: tokens that end a sequence.
        hash_block_tokens: tokens per block hash.
        limited_by: what limits the longest sequence, for people, if it is not the model.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    hash_block_tokens: int
    limited_by: str = ""

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt: there is room for one to generate."""
        return self.max_model_len - 1

    def too_long(
        self, num_tokens: int, request_id: str | None = None, *, is_counted: bool = True
    ) -> PromptTooLongError:
        """The refusal of a prompt of so many tokens; see ``PromptTooLongError``."""
        limit = f": {self.limited_by}" if self.limited_by else ""
        return PromptTooLongError(num_tokens, self.max_prompt_tokens, request_id, limit=limit, is_counted=is_counted)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """An engine that fits its model and machine.

    Attributes:
        config: the options.
        info: the model.
        layout: the paged KV cache.
        scheduler: limits and policies of the scheduler.
        executor: where the workers run.
    """

    config: EngineConfig
    info: ModelInfo
    layout: KVCacheLayout
    scheduler: SchedulerConfig
    executor: ExecutorConfig

    @property
    def limits(self) -> EngineLimits:
        """Limits that a request must fit into."""
        return EngineLimits(
            max_model_len=self.scheduler.max_model_len,
            vocab_size=self.info.vocab_size,
            eos_token_ids=self.info.eos_token_ids,
            hash_block_tokens=self.layout.hash_block_tokens,
            limited_by=self._limited_by(),
        )

    def _limited_by(self) -> str:
        if self.scheduler.max_model_len == self.info.max_positions:
            return ""
        more = f"; the model itself takes {self.info.max_positions}"
        if self.config.max_model_len is not None:
            return f"max_model_len says so{more}"
        return f"the {self.layout.num_blocks} blocks of the device pool hold no more (num_device_blocks){more}"


def plan_engine(
    config: EngineConfig, info: ModelInfo, load_timeout_s: float = CONNECTOR.seconds(DEFAULTS[TRANSFER])
) -> EnginePlan:
    """Derive sizes and check that they fit, before anything heavy is loaded.

    Args:
        config: the options.
        info: the model.
        load_timeout_s: a connector that has not ended a load after this time is turned off.

    Raises:
        ConfigError: an option is impossible for this model or machine.
    """
    if config.max_model_len is not None and config.max_model_len > info.max_positions:
        raise ConfigError("max_model_len", config.max_model_len, f"{info.name} is for at most {info.max_positions}")
    world_size = config.tensor_parallel_size
    _check_split(config, info)
    geometry = info.geometry
    groups = geometry.groups(config.block_tokens)
    block_bytes = info.geometry.block_bytes(config.block_tokens, info.dtype_bytes, world_size)
    layer_bytes = block_bytes // geometry.layers_per_group
    groups = tuple(
        replace(group, block_bytes=len(group.layer_names) * layer_bytes, number_type=info.dtype) for group in groups
    )
    num_blocks = config.num_device_blocks or _default_num_blocks(config, info, groups, block_bytes * world_size)
    max_model_len = _longest_that_fits(groups, config, info.max_positions, num_blocks)
    if config.device == "cpu":
        _check_memory(config, num_blocks, block_bytes * world_size)
    return EnginePlan(
        config=config,
        info=info,
        layout=KVCacheLayout(
            groups,
            num_blocks,
            block_bytes,
            config.block_tokens,
            world_size,
            # The model's code is that of transformers.
            ServedModel(
                info.name,
                info.path,
                f"{info.dtype}, by transformers {version('transformers')}",
                read_after_s=info.read_after_s,
            ),
            _num_replicas(config, info),
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            policy=QueuePolicy(config.queue_policy),
            prefix_caching=config.prefix_caching,
            load_failure_policy=LoadFailurePolicy(config.load_failure_policy),
            load_timeout_s=load_timeout_s,
            emit_events=config.kv_events or config.kv_events_endpoint is not None,
            emit_salted_events=config.kv_events_salted,
        ),
        executor=ExecutorConfig(
            kind=config.executor_kind,
            step_timeout_s=config.step_timeout_s,
            gpus_per_worker=int(config.device != "cpu"),
        ),
    )


def _num_replicas(config: EngineConfig, info: ModelInfo) -> int:
    """Workers that hold the same KV and can share what is kept of it: all of this machine, if there is a single KV head."""
    is_one_machine = config.executor_kind is ExecutorKind.MULTIPROCESS and can_share_memory()
    return config.tensor_parallel_size if info.geometry.num_kv_heads == 1 and is_one_machine else 1


def _check_split(config: EngineConfig, info: ModelInfo) -> None:
    geometry, wanted = info.geometry, config.tensor_parallel_size
    if not geometry.splits_over(wanted):
        possible = [size for size in range(1, geometry.num_query_heads + 1) if geometry.splits_over(size)]
        heads = f"{geometry.num_query_heads} query heads and {geometry.num_kv_heads} KV heads"
        raise ConfigError(
            "tensor_parallel_size",
            wanted,
            f"{info.name} has {heads}, which can be split over {' or '.join(map(str, possible))} workers",
        )


def _default_num_blocks(
    config: EngineConfig, info: ModelInfo, groups: tuple[KVCacheGroup, ...], block_bytes: int
) -> int:
    needed_by_one = _num_blocks(groups, config.max_model_len or info.max_positions, config.max_num_batched_tokens)
    affordable = min(DEFAULT_KV_BYTES, memory_limit_bytes() // 4) // block_bytes
    # Without max_model_len, the longest request is what the pool can hold; see _longest_that_fits.
    at_least = 1 if config.max_model_len is None else needed_by_one
    return max(at_least, min(affordable, needed_by_one * config.max_num_seqs))


def _num_blocks(groups: tuple[KVCacheGroup, ...], num_tokens: int, max_step_tokens: int) -> int:
    """Blocks of the smallest pool that can serve one request of ``num_tokens`` tokens, the null block included."""
    return 1 + sum(max_held_blocks(group, num_tokens, max_step_tokens) for group in groups)


def _longest_that_fits(
    groups: tuple[KVCacheGroup, ...], config: EngineConfig, max_positions: int, num_blocks: int
) -> int:
    """Tokens of the longest request that can be served: ``max_model_len``, or by default as many as the pool can hold.

    Raises:
        ConfigError: the pool cannot hold ``max_model_len`` tokens, or hardly any at all.
    """

    def fits(num_tokens: int) -> bool:
        return _num_blocks(groups, num_tokens, config.max_num_batched_tokens) <= num_blocks

    wanted_len = config.max_model_len or max_positions
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
    longest = bisect_left(range(1, wanted_len), True, key=lambda num_tokens: not fits(num_tokens))
    if longest <= config.block_tokens:
        if config.num_device_blocks is None:
            blocks = format_count(num_blocks, "block")
            expected = f"the device pool has room for {blocks} of so many tokens; make them smaller"
            raise ConfigError("block_tokens", config.block_tokens, expected)
        raise ConfigError(
            "num_device_blocks",
            num_blocks,
            f"this holds hardly a token; one request of {wanted_len} tokens needs {needed} blocks",
        )
    # So few hold hardly any prompt: nearly all would be refused, one after the other.
    level = logging.WARNING if longest < _FEW_BLOCKS * config.block_tokens else logging.INFO
    logger.log(level, "sequences are limited to the %d tokens that %d device blocks can hold", longest, num_blocks)
    return longest


def _check_memory(config: EngineConfig, num_blocks: int, block_bytes: int) -> None:
    limit = memory_limit_bytes()
    if num_blocks * block_bytes > limit:
        asked_for = "max_model_len" if config.num_device_blocks is None else "num_device_blocks"
        raise ConfigError(
            asked_for,
            getattr(config, asked_for),
            f"that is {format_bytes(num_blocks * block_bytes)} of KV, and this machine allows {format_bytes(limit)} in all; "
            f"use at most {limit // 2 // block_bytes} blocks",
        )
