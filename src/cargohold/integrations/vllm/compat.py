"""What this adapter takes from vLLM, in whatever version it is installed, and whether it is what the adapter was tested with.

What cannot be imported is replaced by something inert and noted in ``MISSING``: the connector then turns itself off with one
clear line, where an ``ImportError`` would take the server down. Two names have no substitute: the connector's base class and
its roles.

vLLM calls its connector interface experimental, and the block pool is not part of it. So everything that is used of vLLM is
listed here and looked for at start, and vLLM's hooks are compared with our class's methods: if a version has changed, the log
says so in one line, before the first request.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from inspect import Parameter, Signature, signature
from types import FunctionType
from typing import Any, Final

from vllm import __version__ as VLLM_VERSION  # noqa: N812  # a constant, whatever its author calls it
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from cargohold.integrations.vllm import NEWEST, OLDEST

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def refused_call(what: str, function: Callable[..., Any], num_args: int = 0, keywords: Iterable[str] = ()) -> list[str]:
    """A sentence if ``function`` does not take ``num_args`` arguments by position and these keywords; else none.

    The function is not called.
    """
    try:
        signature(function).bind(*[None] * num_args, **dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        return [f"{what} wants other arguments: {error}"]
    return []


def changed_hooks(ours: type, *, later: Iterable[str] = ()) -> list[str]:
    """Hooks whose signature in a class does not fit its bases', and hooks that the bases demand and it lacks, as sentences.

    Args:
        ours: the class. Its own public methods and properties are taken for hooks, and its bases must have all of them.
        later: hooks that the bases of some versions do not have yet.
    """
    changed = [sentence for name in vars(ours) if name not in later for sentence in _changed_hook(name, ours)]
    changed += [sentence for name in later if _inherited(name, ours) for sentence in _changed_hook(name, ours)]
    demanded = [name for name in dir(ours) if getattr(getattr(ours, name, None), "__isabstractmethod__", False)]
    return changed + [f"vLLM demands a hook {name}" for name in demanded]


def _inherited(name: str, ours: type) -> Any:
    """The attribute that the class would inherit under this name, had it none of its own; ``None`` if there is none."""
    return next((vars(base)[name] for base in ours.__mro__[1:] if name in vars(base)), None)


def _changed_hook(name: str, ours: type) -> list[str]:
    own = vars(ours).get(name)
    if name.startswith("_") or not isinstance(own, FunctionType | classmethod | property):
        return []
    theirs = _inherited(name, ours)
    if theirs is None:
        return [f"vLLM has no hook {name}"]
    if type(own) is not type(theirs):
        return [f"vLLM's hook {name} is a {type(theirs).__name__} now"]
    if isinstance(own, property):
        return []
    problem = _misfit(_signature(own), _signature(theirs))
    return [] if problem is None else [f"vLLM's hook {name} {problem}"]


def _signature(hook: Any) -> Signature:
    return signature(hook.__func__ if isinstance(hook, classmethod) else hook)


def _misfit(ours: Signature, theirs: Signature) -> str | None:
    """Why a function of signature ``ours`` may fail where one of signature ``theirs`` is expected."""
    if ours == theirs:
        return None
    own, expected = list(ours.parameters.values()), list(theirs.parameters.values())
    for at, parameter in enumerate(expected):
        if not _takes(own, at, parameter):
            return f"has a parameter {parameter.name} at place {at}"
    names = {parameter.name for parameter in expected}
    for parameter in own:
        is_needed = parameter.default is Parameter.empty and parameter.kind in (*_BY_POSITION, Parameter.KEYWORD_ONLY)
        if is_needed and parameter.name not in names:
            return f"has no parameter {parameter.name} any more"
    return None


def _takes(own: list[Parameter], at: int, parameter: Parameter) -> bool:
    """Whether what is passed for ``parameter``, at place ``at``, finds one of ``own``."""
    kinds = {candidate.kind for candidate in own}
    if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
        return parameter.kind in kinds
    if parameter.kind is Parameter.KEYWORD_ONLY:
        named = any(candidate.name == parameter.name and candidate.kind in _BY_NAME for candidate in own)
        return named or Parameter.VAR_KEYWORD in kinds
    same = at < len(own) and own[at].kind in _BY_POSITION and own[at].name == parameter.name
    return same or {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} <= kinds


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

tensor_parallel_group: Any = _find("vllm.distributed.parallel_state", "get_tp_group")
"""Returns the workers among which each layer of the model is split."""

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


def fp8_dtype() -> str:
    """The type of numbers in a byte that this platform computes with."""
    return str(_find("vllm.platforms", "current_platform").fp8_dtype())


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


# --- what else is relied on -------------------------------------------------------------------------------------------

_MANAGER = ("block_pool",)
_MANAGER_CALLS = {"get_blocks": 1}
_POOL = ("blocks", "cached_block_hash_to_block", "free_block_queue", "hash_block_size")
_POOL_CALLS = {"touch": 1, "free_blocks": 1, "get_num_free_blocks": 0}
_QUEUE = ("fake_free_list_head", "fake_free_list_tail")
_QUEUE_CALLS = {"prepend_n": 1}
_BLOCK = ("block_hash", "block_id", "is_null", "next_free_block", "ref_cnt")
_REQUEST = (
    "all_token_ids",
    "block_hashes",
    "kv_transfer_params",
    "num_computed_tokens",
    "num_prompt_tokens",
    "num_tokens",
    "request_id",
    "status",
)

_STEP = ("finished_req_ids", "num_scheduled_tokens", "preempted_req_ids")
_OUTPUT = ("invalid_block_ids", "kv_connector_worker_meta")

_SOURCES_HOOK = "get_external_cache_hit_sources"
_SOURCES = ("EXTERNAL_UNSPECIFIED", "HOST")
_SLEEP_HOOKS = ("supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches")
_LATER_HOOKS = (_SOURCES_HOOK, "get_transfer_results", "has_pending_block_frees", *_SLEEP_HOOKS)
_BINDING_HOOKS = ("bind_kv_cache_manager", "bind_gpu_block_pool")
"""Hooks that not every tested version has. Of the binding hooks, a version must have at least one."""

_EVENT_FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality"),
    "AllBlocksCleared": (),
}  # fmt: skip


def version_warning() -> str | None:
    """A sentence about a version that was not tested; ``None`` for those that were."""
    version = vllm_version()
    if version is not None and OLDEST <= version <= NEWEST:
        return None
    tested = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return f"vLLM {VLLM_VERSION} is outside the range that was tested, {tested}"


def vllm_version() -> tuple[int, int] | None:
    """The first two numbers of vLLM's version; ``None`` if it has none."""
    match = re.match(r"(\d+)\.(\d+)", VLLM_VERSION)
    return None if match is None else (int(match[1]), int(match[2]))


def hashes_differ(algorithm: str) -> bool:
    """Whether vLLM hashes blocks differently in each process: with this algorithm, or any (0.28), unless it has a seed."""
    is_random = algorithm.startswith("xxhash") or _find("vllm.v1.core.kv_cache_utils", "resolve_none_hash_seed") is None
    return is_random and os.environ.get("PYTHONHASHSEED") is None


def missing_from_vllm(connector: type) -> list[str]:
    """What this version lacks or calls in another way, as sentences, as far as its classes and functions tell."""
    if MISSING:
        return list(MISSING)  # the stand-ins of missing names would be reported as changed, too
    missing = changed_hooks(connector, later=(*_LATER_HOOKS, *_BINDING_HOOKS))
    if not any(hasattr(KVConnectorBase_V1, name) for name in _BINDING_HOOKS):
        missing.append(f"vLLM has none of the hooks {', '.join(_BINDING_HOOKS)}")
    for name, keywords in _EVENT_FIELDS.items():
        missing += refused_call(f"vLLM's {name}", globals()[name], keywords=keywords)
    if TransferResults is not None:
        missing += refused_call("vLLM's KVConnectorTransferResults", TransferResults, 3)
    if hasattr(KVConnectorBase_V1, _SOURCES_HOOK):
        missing += _missing("vLLM's CacheHitSource", CacheHitSource, _SOURCES)
    for part, names in ((SchedulerOutput, _STEP), (KVConnectorOutput, _OUTPUT)):
        fields = part.__dataclass_fields__
        missing += [f"vLLM's {part.__name__} has no {name}" for name in names if name not in fields]
    return missing


def missing_from_manager(manager: Any) -> list[str]:
    """What this KV-cache manager lacks, as sentences."""
    what = "its KV-cache manager"
    return [*_missing(what, manager, _MANAGER), *_changed_calls(what, manager, _MANAGER_CALLS)]


def missing_from_pool(pool: Any) -> list[str]:
    """What this block pool lacks, as sentences."""
    missing = [*_missing("its block pool", pool, _POOL), *_changed_calls("its block pool", pool, _POOL_CALLS)]
    if missing:
        return missing
    queue = pool.free_block_queue
    return [
        *_missing("its free queue", queue, _QUEUE),
        *_changed_calls("its free queue", queue, _QUEUE_CALLS),
        *_missing("a block", pool.blocks[0], _BLOCK),
    ]


def missing_from_request(request: Any) -> list[str]:
    """What this request lacks, as sentences."""
    return _missing("a request", request, _REQUEST)


def missing_from_config(vllm_config: Any, needs: Mapping[str, Iterable[str]]) -> list[str]:
    """What vLLM's configuration lacks: ``needs`` maps its parts to their attributes."""
    return [
        sentence
        for part, names in needs.items()
        for sentence in _missing(f"its {part}", getattr(vllm_config, part, None), names)
    ]


def _missing(what: str, subject: Any, names: Iterable[str]) -> list[str]:
    return [f"{what} has no {name}" for name in names if not hasattr(subject, name)]


def _changed_calls(what: str, subject: Any, calls: Mapping[str, int]) -> list[str]:
    """Methods that ``subject`` lacks, or that do not take the given number of arguments, as sentences."""
    missing = _missing(what, subject, calls)
    return missing or [
        sentence
        for name, num_args in calls.items()
        for sentence in refused_call(f"{what}'s {name}", getattr(subject, name), num_args)
    ]


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
    "changed_hooks",
    "convert_block_hash",
    "describe_group",
    "environment_option",
    "event_keys",
    "extra_keys",
    "fp8_dtype",
    "has_own_process",
    "hashes_of",
    "missing_from_config",
    "missing_from_manager",
    "missing_from_pool",
    "missing_from_request",
    "missing_from_vllm",
    "refused_call",
    "version_warning",
    "vllm_version",
    "worker_connector",
]
