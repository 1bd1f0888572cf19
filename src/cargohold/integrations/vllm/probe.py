"""Which versions of vLLM this adapter was tested with, and what it needs of vLLM's objects beyond their documented interface.

vLLM calls its connector interface experimental, and the block pool is not part of it. So what is used of it is written down
here and looked for at start: a version that has moved on is told in one line, before the first request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from cargohold.integrations.vllm import compat

OLDEST: Final = (0, 28)
NEWEST: Final = (0, 32)

_POOL = ("blocks", "free_block_queue", "free_blocks", "hash_block_size", "touch")
_QUEUE = ("fake_free_list_head", "fake_free_list_tail", "prepend_n")
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


def version_warning() -> str | None:
    """A sentence about a version outside the tested range; ``None`` inside it."""
    match = re.match(r"(\d+)\.(\d+)", compat.VLLM_VERSION)
    if match is not None and OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
        return None
    tested = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return f"vLLM {compat.VLLM_VERSION} is outside the range that was tested, {tested}"


def missing_from_vllm() -> list[str]:
    """What cannot be imported from this version, as sentences."""
    return list(compat.MISSING)


def missing_from_pool(pool: Any) -> list[str]:
    """What this block pool lacks, as sentences."""
    missing = _missing("its block pool", pool, _POOL)
    if missing:
        return missing
    return [*_missing("its free queue", pool.free_block_queue, _QUEUE), *_missing("a block", pool.blocks[0], _BLOCK)]


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
