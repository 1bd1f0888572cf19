"""Engines that write the last token's KV again must not be told that a request is there as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from cargohold.blocks import NOT_YET, READY, extend_hashes, root_hash
from cargohold.cache import ForwardingManager, OffloadManager, make_manager
from cargohold.cache.manager import offload_key
from cargohold.connector.offloading import OffloadConfig, OffloadingScheduler
from cargohold.protocol import AttentionKind, KVCacheGroup, KVCacheLayout, SchedulerEnvironment, TurnEnd

BLOCK_TOKENS = 4
KINDS = {
    "full": KVCacheGroup(0, AttentionKind.FULL, BLOCK_TOKENS, ("layer",)),
    "window": KVCacheGroup(0, AttentionKind.SLIDING_WINDOW, BLOCK_TOKENS, ("layer",), window_tokens=6),
    "recurrent": KVCacheGroup(0, AttentionKind.RECURRENT, BLOCK_TOKENS, ("layer",)),
}


@dataclass
class Asked:
    """A request that has just arrived."""

    all_token_ids: list[int]
    request_id: str = "r"
    kv_transfer_params: Mapping[str, Any] | None = None
    adapter: None = None
    salt: None = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        extend_hashes(self.block_hashes, self.all_token_ids, BLOCK_TOKENS, root_hash())

    tenant = None
    turn_end = TurnEnd.UNKNOWN

    def extra_keys(self, start: int, end: int) -> tuple[()]:
        return ()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.all_token_ids)


class Slow(ForwardingManager):
    """Does not know yet what it has of one chunk."""

    unknown: bytes = b""
    num_lookups: int = 0

    def lookup_run(self, keys: Sequence[bytes]) -> bytes:
        self.num_lookups += 1
        return bytes(NOT_YET if key == self.unknown else READY for key in keys)


def asked_of(kind: str, request: Asked, first_chunk: int = 0, *, unknown: int | None = None) -> OffloadingScheduler:
    """A scheduler side that was told of a request whose every chunk from ``first_chunk`` on is in the tier.

    Args:
        unknown: of which chunk that is not known yet, if of any.
    """
    manager: OffloadManager = make_manager("lru", 100)
    keys = [offload_key(block_hash, 0) for block_hash in request.block_hashes]
    manager.prepare_store(keys[first_chunk:]).commit()
    if unknown is not None:
        manager = Slow(manager)
        manager.unknown = keys[unknown]
    layout = KVCacheLayout((KINDS[kind],), 40, 64, BLOCK_TOKENS)
    environment = SchedulerEnvironment(layout, lambda: 0.0, full_hits=False)
    scheduler = OffloadingScheduler(OffloadConfig(host_bytes="1MiB"), environment, manager)
    scheduler.on_new_request(request)
    return scheduler


def matched(kind: str, num_tokens: int, num_computed_tokens: int) -> int | None:
    """What is found of a request whose every chunk is in the tier."""
    request = Asked(list(range(num_tokens)))
    return asked_of(kind, request).get_num_new_matched_tokens(request, num_computed_tokens)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_ends_before_the_last_token(kind: str) -> None:
    assert matched(kind, 16, 0) == 12
    assert matched(kind, 17, 0) == 16
    assert matched(kind, 16, 8) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_found_where_only_the_last_chunk_is_missing(kind: str) -> None:
    assert matched(kind, 16, 12) == 0
    assert matched(kind, 4, 0) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_wish_to_load_more_than_the_prompt_changes_nothing(kind: str) -> None:
    for num_tokens, found in ((16, 12), (17, 16)):
        request = Asked(list(range(num_tokens)), kv_transfer_params={"max_load_tokens": 100})
        assert asked_of(kind, request).get_num_new_matched_tokens(request, 0)[0] == found


@pytest.mark.parametrize("kind", KINDS)
def test_a_wish_counts_from_what_the_device_has(kind: str) -> None:
    request = Asked(list(range(17)), kv_transfer_params={"max_load_tokens": 4})
    assert asked_of(kind, request).get_num_new_matched_tokens(request, 8)[0] == 4


@pytest.mark.parametrize("unknown", [0, 2, 3])
def test_who_may_find_more_in_a_moment_is_told_to_wait(unknown: int) -> None:
    request = Asked(list(range(17)))
    scheduler = asked_of("full", request, unknown=unknown)
    for _ in range(5):
        assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert isinstance(scheduler.shared.manager, Slow)
    assert scheduler.shared.manager.num_lookups == 1, "in vain while nothing has changed"
    assert scheduler.get_num_new_matched_tokens(request, 12) == ((None, False) if unknown == 3 else (4, True))
    assert scheduler.get_num_new_matched_tokens(request, 16) == (0, False)


def test_an_answer_counts_for_as_many_computed_tokens_as_it_was_asked_for() -> None:
    """A request that waits may be asked about again when the device has lost what it had of it."""
    request = Asked(list(range(17)))
    scheduler = asked_of("full", request, first_chunk=2)
    answers = [scheduler.get_num_new_matched_tokens(request, num_computed)[0] for num_computed in (8, 0, 8, 12)]
    assert answers == [8, 0, 8, 4]
