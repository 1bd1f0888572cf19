"""What one admission of a long cached prompt costs the scheduler's thread."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from statistics import median
from typing import Any

from cargohold.cache import make_manager
from cargohold.cache.manager import offload_key
from cargohold.cache.policies import DEFAULT_POLICY
from cargohold.connector.offloading import OffloadConfig, OffloadingScheduler
from cargohold.engine.core.block_pool import BlockPool
from cargohold.protocol import AttentionKind, KVCacheGroup, KVCacheLayout, SchedulerEnvironment, TurnEnd

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Request:
    """A request as a connector sees it; see ``RequestView``."""

    request_id: str
    block_hashes: Sequence[bytes]
    all_token_ids: Sequence[int]
    kv_transfer_params: Mapping[str, Any] | None = None
    adapter: None = None
    salt: None = None
    tenant: None = None
    turn_end = TurnEnd.UNKNOWN

    def extra_keys(self, start: int, end: int) -> tuple[()]:
        return ()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass(frozen=True)
class _EmptyStep:
    scheduled: tuple[Any, ...] = ()
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: frozenset[str] = field(default_factory=frozenset)
    finished_req_ids: frozenset[str] = field(default_factory=frozenset)


def measure_admission(num_tokens: int, num_other_chunks: int, repeats: int) -> dict[str, Any]:
    """Measure the calling thread's milliseconds for a prompt all of whose chunks are in the tier.

    Args:
        num_tokens: tokens of the prompt, which has one more that is left to compute.
        num_other_chunks: further chunks in the tier.
        repeats: number of measurements; the median is reported, and the longest.
    """
    num_blocks = num_tokens // BLOCK_TOKENS
    capacity = num_other_chunks + (repeats + 1) * num_blocks
    manager = make_manager(DEFAULT_POLICY, capacity)
    group = KVCacheGroup(0, AttentionKind.FULL, BLOCK_TOKENS, ("layer",), None)
    layout = KVCacheLayout((group,), num_blocks + 2, 1, BLOCK_TOKENS)
    side = OffloadingScheduler(
        OffloadConfig(host_bytes="1GiB"),
        SchedulerEnvironment(layout, time.monotonic, max_step_tokens=num_tokens),
        manager,
    )
    pool: Any = BlockPool(num_blocks + 2)
    side.bind_scheduler_context(pool)  # loads use only those methods of a context that a pool has, too
    blocks = (tuple(block.block_id for block in pool.allocate(num_blocks + 1)),)
    fill(manager, "other", num_other_chunks, num_blocks)
    times: dict[str, list[float]] = {name: [] for name in ("first_look_up", "asked_again", "load_planned", "whole")}
    for at in range(repeats + 1):
        hashes = fill(manager, f"prompt {at}", num_blocks, num_blocks)
        # New objects with the same bytes, as the request that stored the chunks has gone.
        request = Request(f"r{at}", [bytes(bytearray(name)) for name in hashes], range(num_tokens + 1))
        side.on_new_request(request)
        marks = [time.thread_time()]
        answers = []
        for _ in range(2):
            answers.append(side.get_num_new_matched_tokens(request, 0))
            marks.append(time.thread_time())
        assert answers == [(num_tokens, True)] * 2, answers
        side.update_state_after_alloc(request, blocks, num_tokens)
        metadata: Any = side.build_connector_meta(_EmptyStep())
        marks.append(time.thread_time())
        assert len(metadata.loads[0].block_ids) == num_blocks
        first, again, planned = (end - start for start, end in pairwise(marks))
        for name, seconds in zip(times, (first, again, planned, first + planned), strict=True):
            times[name].append(seconds * 1e3)
    return {
        "prompt_tokens": num_tokens,
        "block_tokens": BLOCK_TOKENS,
        "other_chunks": num_other_chunks,
        "policy": DEFAULT_POLICY,
        **{f"{name}_ms": round(median(values[1:]), 3) for name, values in times.items()},
        "longest_whole_ms": round(max(times["whole"][1:]), 3),
    }


def fill(manager: Any, what: str, num_chunks: int, per_prefix: int) -> list[bytes]:
    """Store prefixes. Returns the block hashes of the last one."""
    hashes: list[bytes] = []
    for first in range(0, num_chunks, per_prefix):
        hashes = [sha256(f"{what} {number}".encode()).digest() for number in range(first, first + per_prefix)]
        handle = manager.prepare_store([offload_key(name, 0) for name in hashes])
        handle.commit()
    return hashes
