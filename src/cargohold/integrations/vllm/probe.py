"""Which versions of vLLM this adapter was tested with, and what it needs of vLLM's objects beyond their documented interface.

vLLM calls its connector interface experimental, and the block pool is not part of it. So everything that is used of vLLM is
listed here and looked for at start, and vLLM's hooks are compared with our class's methods: if a version has changed, the log
says so in one line, before the first request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from cargohold.integrations.vllm import NEWEST, OLDEST, compat
from cargohold.integrations.vllm.signatures import changed_hooks, refused_call

SCHEDULER_ONLY: Final = ((0, 33),)
"""Versions of which only the scheduler's side was tested, because there is no build for CPUs."""

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
_LATER_HOOKS = (_SOURCES_HOOK, "get_transfer_results", "has_pending_block_frees")
_BINDING_HOOKS = ("bind_kv_cache_manager", "bind_gpu_block_pool")
"""Hooks that not every tested version has. Of the binding hooks, a version must have at least one."""

_EVENTS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality"),
    "AllBlocksCleared": (),
}  # fmt: skip


def version_warning() -> str | None:
    """A sentence about a version that was not tested, or not wholly; ``None`` for those that were."""
    version = vllm_version()
    if version is not None and OLDEST <= version <= NEWEST:
        return None
    if version in SCHEDULER_ONLY:
        return f"of vLLM {compat.VLLM_VERSION} only the scheduler's side was tested"
    tested = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return f"vLLM {compat.VLLM_VERSION} is outside the range that was tested, {tested}"


def vllm_version() -> tuple[int, int] | None:
    """The first two numbers of vLLM's version; ``None`` if it has none."""
    match = re.match(r"(\d+)\.(\d+)", compat.VLLM_VERSION)
    return None if match is None else (int(match[1]), int(match[2]))


def missing_from_vllm(connector: type) -> list[str]:
    """What this version lacks or calls in another way, as sentences, as far as its classes and functions tell."""
    if compat.MISSING:
        return list(compat.MISSING)  # the stand-ins of missing names would be reported as changed, too
    missing = changed_hooks(connector, later=(*_LATER_HOOKS, *_BINDING_HOOKS))
    if not any(hasattr(compat.KVConnectorBase_V1, name) for name in _BINDING_HOOKS):
        missing.append(f"vLLM has none of the hooks {', '.join(_BINDING_HOOKS)}")
    for name, keywords in _EVENTS.items():
        missing += refused_call(f"vLLM's {name}", getattr(compat, name), keywords=keywords)
    if compat.TransferResults is not None:
        missing += refused_call("vLLM's KVConnectorTransferResults", compat.TransferResults, 3)
    if hasattr(compat.KVConnectorBase_V1, _SOURCES_HOOK):
        missing += _missing("vLLM's CacheHitSource", compat.CacheHitSource, _SOURCES)
    for part, names in ((compat.SchedulerOutput, _STEP), (compat.KVConnectorOutput, _OUTPUT)):
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
