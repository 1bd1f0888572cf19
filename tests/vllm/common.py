"""Options, prompts and questions that several tests share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cargohold.integrations.vllm import compat
from tests.vllm.engine import Answer, Engine
from tests.vllm.models import VOCAB_SIZE

HOST = "64MiB"
EAGER: dict[str, Any] = {"host_bytes": HOST}
LAZY: dict[str, Any] = {"mode": "lazy", "host_bytes": HOST}
RESTARTED: dict[str, Any] = {**EAGER, "restore": "always", "restore_timeout_s": 60.0, "shutdown_timeout_s": 20.0}
"""For engines that are started one after the other. A server's shorter timeouts would end before a busy machine's disk."""
EVENTS: dict[str, Any] = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
LATENT: dict[str, Any] = {"num_blocks": 80, "attention_backend": "CPU_MLA"}
"""Options of vLLM for latent attention: on CPUs with AMX it would choose a backend that takes no float32."""
COMPOSED: dict[str, Any] = {"mode": "multi", "connectors": [EAGER, LAZY]}

CAN_DRAFT = compat.vllm_version() != (0, 30)
"""The CPU build of vLLM 0.30 dies at the first draft, with or without a connector: it has no kernel that judges drafts."""


def make_prompts(count: int, num_tokens: int, seed: int = 0) -> list[list[int]]:
    """Random prompts that share nothing."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)] for _ in range(count)]


def ask_twice(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int = 6) -> list[Answer]:
    """Ask each prompt, let the device forget them all, then ask each again. Returns the second answers."""
    for prompt in prompts:
        engine.ask([prompt], max_tokens)
    forget(engine)
    return [engine.ask([prompt], max_tokens)[0] for prompt in prompts]


def with_disk(directory: Path) -> dict[str, Any]:
    """Options of an engine that keeps chunks on a disk."""
    return {**RESTARTED, "tiers": [{"kind": "disk", "directory": str(directory), "max_bytes": "64MiB"}]}


def reload(engine: Engine, path: str) -> None:
    """Load other weights in place, as a trainer does, while nothing is copied."""
    engine.settle()
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


def forget(engine: Engine) -> None:
    """Ask so many other prompts that everything cached on the device before is evicted."""
    engine.settle()
    manager = engine.scheduler.kv_cache_manager
    pool, num_groups = manager.block_pool, len(manager.kv_cache_config.kv_cache_groups)
    cached = {block.block_hash for block in pool.blocks} - {None}
    # Each prompt leaves at least two blocks per group behind; in a group with a window, no more than two.
    count = 2 + len(pool.blocks) // (2 * num_groups)
    num_tokens = min(3 * pool.hash_block_size, pool.hash_block_size + 60)
    # A block that a store held meanwhile is among the youngest when it becomes free, and outlives the prompts asked first.
    for seed in range(99, 104):
        engine.ask(make_prompts(count, num_tokens, seed), 1)
        engine.settle()
        if cached.isdisjoint(block.block_hash for block in pool.blocks):
            return
    pytest.fail("the device does not forget what it has cached")


def follow_events(engine: Engine, ask: Callable[[], object]) -> dict[str, dict[Any, Any]]:
    """Run ``ask``. Returns what events tell of blocks stored meanwhile, per medium by group and hash."""
    told: dict[str, dict[Any, Any]] = {"GPU": {}, "CPU": {}}

    def follow(batch: Any) -> None:
        for event in batch.events:
            if type(event).__name__ == "BlockStored":
                size = event.block_size
                for at, block_hash in enumerate(event.block_hashes):
                    told[event.medium][event.group_idx, block_hash] = {
                        "parent": event.block_hashes[at - 1] if at else event.parent_block_hash,
                        "tokens": list(event.token_ids[at * size : (at + 1) * size]),
                        "adapter": (event.lora_id, event.lora_name),
                        "kind": (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window),
                        "extra_keys": event.extra_keys and event.extra_keys[at],
                    }

    engine.scheduler.kv_event_publisher.publish = follow
    ask()
    engine.settle()
    engine.ask(make_prompts(1, 20), 1)  # makes a step that publishes the events of the last stores
    return told


def tokens(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    """The generated tokens of each answer."""
    return [answer.tokens for answer in answers]


def restored(answers: Sequence[Answer]) -> int:
    """Tokens restored over all answers."""
    return sum(answer.restored for answer in answers)
