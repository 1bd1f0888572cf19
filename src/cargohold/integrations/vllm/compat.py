"""Names from vLLM, in whatever version it is installed.

What cannot be imported is replaced by something inert and noted in ``MISSING``: the connector then turns itself off with one
clear line, where an ``ImportError`` would take the server down. Two names have no substitute: the connector's base class and
its roles.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

from vllm import __version__ as VLLM_VERSION  # noqa: N812  # a constant, whatever its author calls it
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from cargohold.integrations.vllm.signatures import refused_call

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_EVENTS = "vllm.distributed.kv_events"
_HASHES = "vllm.v1.core.kv_cache_utils"
_SPECS = "vllm.v1.kv_cache_interface"

MISSING: list[str] = []
"""What this version of vLLM lacks, as sentences."""


def _find(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return None


def _need(module: str, name: str) -> Any:
    found = _find(module, name)
    if found is None:
        MISSING.append(f"vLLM has no {module}.{name}")
        return type(name, (), {})
    return found


def _ask(module: str, name: str, num_args: int, otherwise: Callable[..., Any]) -> Any:
    """A function of vLLM, which must take ``num_args`` arguments; ``otherwise`` if this version has no such function."""
    found = _find(module, name)
    if found is None:
        return otherwise
    MISSING.extend(refused_call(f"vLLM's {name}", found, num_args))
    return found


def _names_in(function: Any) -> tuple[str, ...]:
    """The attributes that a function of vLLM reads, among other names; none if there is no such function."""
    names: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_names", ())
    return names


SupportsHMA = _need(_BASE, "SupportsHMA")
KVConnectorMetadata = _need(_BASE, "KVConnectorMetadata")
KVConnectorWorkerMetadata = _need(_BASE, "KVConnectorWorkerMetadata")
KVConnectorHandshakeMetadata = _need(_BASE, "KVConnectorHandshakeMetadata")
KVConnectorStats = _need(_METRICS, "KVConnectorStats")
KVConnectorPromMetrics = _need(_METRICS, "KVConnectorPromMetrics")
BlockStored = _need(_EVENTS, "BlockStored")
BlockRemoved = _need(_EVENTS, "BlockRemoved")
AllBlocksCleared = _need(_EVENTS, "AllBlocksCleared")
SchedulerOutput = _need("vllm.v1.core.sched.output", "SchedulerOutput")
KVConnectorOutput = _need("vllm.v1.outputs", "KVConnectorOutput")

TransferResults: Any = _find(_BASE, "KVConnectorTransferResults")
"""Since 0.30: failed loads are reported by request. Before, by block, and with several groups vLLM cannot tell whose it is."""

worker_connector: Any = _need("vllm.distributed.kv_transfer", "get_kv_transfer_group")
"""Returns the one connector that a worker's model runner calls."""

Executor: Any = _find("vllm.v1.executor.abstract", "Executor")
MultiprocExecutor: Any = _find("vllm.v1.executor.multiproc_executor", "MultiprocExecutor")
"""vLLM's executors, which run the workers, and the only kind of them that merges the reports of all pipeline stages."""

CacheHitSource: Any = _find("vllm.v1.metrics.cache_hit_source", "CacheHitSource")
"""Since 0.32: where an external hit came from, for vLLM's own statistics."""

convert_block_hash: Any = _ask(_HASHES, "maybe_convert_block_hash", 1, lambda digest: digest)
"""Converts a block hash to the form that vLLM's events use."""

extra_keys: Any = _ask(_HASHES, "generate_block_hash_extra_keys", 4, lambda *_: (None, 0))
event_keys: Any = _ask(_HASHES, "to_event_extra_keys", 1, list)
"""Find what block hashes cover besides tokens, and convert it to the form of vLLM's events (since 0.31 without kinds)."""


_KEEPS: Any = _find("vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager")
SHARED_PREFIX_END: Final = "shared_prefix_boundary"
KEEPS_SHARED_PREFIXES: Final = SHARED_PREFIX_END in _names_in(getattr(_KEEPS, "cache_blocks", None))
"""Field of a request, and whether the prefix cache keeps the windows and states that end at this token (since 0.32)."""


def environment_option(name: str) -> Any:
    """The value of one of vLLM's environment variables; ``None`` if this version does not know it."""
    return _find("vllm.envs", name)


def has_own_process() -> bool:
    """Whether vLLM runs an engine in processes of its own. If not, it runs one engine after the other in the program's."""
    return environment_option("VLLM_ENABLE_V1_MULTIPROCESSING") in (None, True)


_spec_kind: Any = _ask(_SPECS, "get_kv_cache_spec_kind", 1, lambda _: None)
_spec_window: Any = _ask(_SPECS, "get_kv_cache_spec_sliding_window", 1, lambda _: None)


def describe_group(spec: Any) -> tuple[str | None, int | None]:
    """A group's kind of KV as vLLM's events name it, and its window in tokens; ``None`` where this version does not say."""
    kind = _spec_kind(spec)
    return None if kind is None else kind.value, _spec_window(spec)


def hashes_of(request: Any, token_ids: list[int]) -> list[bytes]:
    """The block hashes of another prompt, as if it had come with the salt and adapter of a request.

    Empty if this version's requests do not keep what makes their hashes, or hash nothing.
    """
    hasher = getattr(request, "_block_hasher", None)
    if hasher is None:
        return []
    other = type(request)(
        request_id="",
        prompt_token_ids=token_ids,
        sampling_params=request.sampling_params,
        pooling_params=request.pooling_params,
        lora_request=request.lora_request,
        cache_salt=request.cache_salt,
        block_hasher=hasher,
    )
    hashes: list[bytes] = other.block_hashes
    return hashes


__all__ = [
    "KEEPS_SHARED_PREFIXES",
    "MISSING",
    "SHARED_PREFIX_END",
    "VLLM_VERSION",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheHitSource",
    "Executor",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "MultiprocExecutor",
    "SchedulerOutput",
    "SupportsHMA",
    "TransferResults",
    "convert_block_hash",
    "describe_group",
    "environment_option",
    "event_keys",
    "extra_keys",
    "has_own_process",
    "hashes_of",
    "worker_connector",
]
