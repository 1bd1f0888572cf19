"""What the log says at start besides what is kept: what holds, what can never be found, and what should be set otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

from cargohold.connector.factory import never_found
from cargohold.connector.held import held_per_gib, tokens_per_gib
from cargohold.errors import ConfigError, one_line
from cargohold.integrations.vllm import compat
from cargohold.integrations.vllm.layout import group_sizes, may_load, replicas
from cargohold.integrations.vllm.settings import VllmSettings
from cargohold.option_values import format_count
from cargohold.protocol import KVCacheLayout, ToolTokens, added_tokens
from cargohold.tiers.namespace import find_files

logger = logging.getLogger(__name__)

_SUDDEN_END: Final = (
    "with --shutdown-timeout 0, its default, `vllm serve` kills its engine when it is stopped, and what is being written to a "
    "tier then is lost; 10 is enough for that"
)
_LOADS_NOTHING: Final = (
    "in kv_role=kv_producer, vLLM does not protect loads while steps overlap (--async-scheduling), so nothing is loaded; use "
    "kv_both to load, too"
)
_HAS_NOTHING: Final = (
    "in kv_role=kv_consumer, nothing is stored, and there is no tier in which other engines could store; use kv_both, or add a "
    "tier that they share"
)
_OTHER_HASHES: Final = (
    "vLLM hashes blocks differently in each process here, so nothing that is written to a tier is ever found by another "
    "process or after a restart; set the environment variable PYTHONHASHSEED, to the same number everywhere"
)
SINGLE_BLOCKS: Final = (
    "blocks_per_chunk is taken as 1: vLLM keeps a recurrent state where a step has ended with a block, which is seldom where a "
    "chunk of several ends"
)


def warnings(vllm_config: Any, kv_cache_config: Any, layout: KVCacheLayout, settings: VllmSettings) -> Iterator[str]:
    """Yield what should be set otherwise, because something is never stored or never found, as sentences."""
    if not may_load(vllm_config):
        yield _LOADS_NOTHING
    if not vllm_config.kv_transfer_config.is_kv_producer and not settings.has_tiers:
        yield _HAS_NOTHING
    if settings.has_tiers and compat.hashes_differ(str(vllm_config.cache_config.prefix_caching_hash_algo)):
        yield _OTHER_HASHES
    yield from never_found(settings.offload, layout, int(vllm_config.model_config.max_model_len))


def remarks(vllm_config: Any, kv_cache_config: Any, layout: KVCacheLayout, settings: VllmSettings) -> Iterator[str]:
    """Yield what is worth knowing, as sentences."""
    possible = tokens_per_gib(layout, group_sizes(kv_cache_config, layout.groups))
    for tier, held in held_per_gib(layout, settings.offload).items():
        of_possible = f", of {possible:,} by the sizes of their KV" if held < possible else ""
        where = "host memory" if tier == "host" else tier
        yield f"a GiB of {where} holds {format_count(held, 'token')} of long prompts{of_possible}"
    policy = settings.adapter.load_failure_policy
    yield (
        f"if a load fails, vLLM's policy is to {policy} its request (load_failure_policy; inside MultiConnector, the outer "
        "kv_load_failure_policy holds)"
    )
    if settings.has_tiers and getattr(vllm_config, "shutdown_timeout", None) == 0:
        yield _SUDDEN_END
    _, reason = replicas(vllm_config, kv_cache_config)
    if reason:
        yield f"KV that is the same on several workers is kept once for each: {reason}"


def tool_tokens(model_config: Any) -> ToolTokens:
    """The tokens with which the model calls tools, from the local files of its tokenizer; none if they do not say."""
    path = getattr(model_config, "tokenizer", None)
    if not path:
        return ToolTokens({})
    try:
        revision = getattr(model_config, "tokenizer_revision", None)
        return ToolTokens(added_tokens(find_files(str(path), revision, "tokenizer")))
    except (ConfigError, OSError, ValueError) as error:
        logger.info("turns that end with a tool call cannot be recognized: %s", one_line(error))
        return ToolTokens({})
