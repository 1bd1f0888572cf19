"""The adapter's scheduler side alone: what it passes on of a connector's answers, and what it counts."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm.adapters import Adapters
from cargohold.integrations.vllm.groups import Groups
from cargohold.integrations.vllm.loads import LoadRoom
from cargohold.integrations.vllm.pool_view import NotedTables, PoolContext
from cargohold.integrations.vllm.scheduler import SchedulerSide, SideOptions
from cargohold.lab.simulation import simulated_layout
from cargohold.protocol import BlockIds, NullConnectorScheduler, RequestView, ToolTokens, TurnEnd, metrics

LAYOUT = simulated_layout(20)
GROUPS = Groups(LAYOUT.groups, LAYOUT.groups, bear_full_hits=True)


class Finds(NullConnectorScheduler):
    """Finds a prompt up to a token, and answers with parameters of its own."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.is_async = True

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_found = max(0, self.num_tokens - num_computed_tokens)
        return num_found, self.is_async and num_found > 0

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        return False, {"do_remote_prefill": True, "own": 1}


def side_over(num_tokens: int, **options: Any) -> SchedulerSide:
    pool = SimpleNamespace(
        blocks=[None] * LAYOUT.num_blocks,
        hash_block_size=4,
        cached_block_hash_to_block=SimpleNamespace(_cache={}),
        reset_prefix_cache=lambda: True,
    )
    tables = NotedTables(1)
    room = LoadRoom(pool, LAYOUT.groups, tables, max_in_flight_tokens=64)
    chosen = SideOptions(60.0, GROUPS, LAYOUT.token_bytes, **options)
    return SchedulerSide(Finds(num_tokens), LAYOUT, pool, tables, room, clock=lambda: 0.0, options=chosen)


def asked(side: SchedulerSide, num_tokens: int, params: Any = None) -> Any:
    """A request of vLLM's that the side knows."""
    request = SimpleNamespace(
        request_id="r",
        all_token_ids=list(range(num_tokens)),
        block_hashes=[],
        kv_transfer_params=params,
        num_computed_tokens=0,
        num_prompt_tokens=num_tokens,
        num_tokens=num_tokens,
        status=None,
        cache_salt=None,
    )
    side.on_new_request(request)
    return request


@pytest.mark.parametrize(("num_tokens", "num_loaded"), [(40, 8), (32, 0), (34, 8)])
def test_what_vllm_would_drop_of_a_hit_is_not_loaded(num_tokens: int, num_loaded: int) -> None:
    # To draft, vLLM computes the last block of 4 again, and with all tokens there also the one before.
    side = side_over(32, dropped_tokens=4)
    request = asked(side, num_tokens)
    assert side.get_num_new_matched_tokens(request, 24) == (num_loaded, num_loaded > 0)


def test_a_synchronous_load_of_which_nothing_was_taken_says_nothing_of_a_later_one() -> None:
    """VLLM 0.33 may take nothing of a hit. Taken for synchronous, a load would be reported ended while it runs."""
    side = side_over(32)
    request, connector = asked(side, 40), side.guard.inner
    assert isinstance(connector, Finds)
    blocks = SimpleNamespace(blocks=([SimpleNamespace(block_id=at) for at in range(1, 9)],))
    for is_async, num_taken in ((False, 0), (True, 32)):
        connector.is_async = is_async
        assert side.get_num_new_matched_tokens(request, 0) == (32, True)
        side.update_state_after_alloc(request, blocks, num_taken)
    news = side._loads.take_news()
    assert (list(news.loads), news.synchronous) == (["r"], [])


def test_where_a_prompt_comes_from_is_counted_once_however_often_it_is_admitted() -> None:
    side = side_over(0)
    request = asked(side, 40)
    blocks = SimpleNamespace(blocks=((),))
    for num_computed in (8, 24):  # it was preempted, and finds what it has computed itself
        side.get_num_new_matched_tokens(request, num_computed)
        side.update_state_after_alloc(request, blocks, 0)
    assert (side._stats[metrics.PROMPT.of("device")], side._stats[metrics.PROMPT.of("computed")]) == (8, 32)


def test_hints_name_no_more_tokens_than_a_prompt_may_have() -> None:
    """VLLM's engine would hash them all in one step, in the time of all requests."""
    side = side_over(0, max_model_len=40)
    given = [{"action_type": "retain", "payload": {"token_ids": [5] * num}} for num in (30, 11, 10)]
    _, answer = side.request_finished(asked(side, 8, {"cargohold_hints": given}), ([],))
    assert answer is not None
    reasons = {outcome["action_id"]: outcome["reason"] for outcome in answer["cargohold_hints"]}
    assert "more than a prompt may have" in reasons["#1"]
    assert not any("more than a prompt" in reasons[name] for name in ("#0", "#2"))


def test_a_key_that_other_connectors_answer_is_left_to_them() -> None:
    side = side_over(0)
    assert side.request_finished(asked(side, 8), ([],)) == (False, {"own": 1})


ENDS = [
    ("FINISHED_STOPPED", [1, 2], {}, "answer"),
    ("FINISHED_STOPPED", [1, 7], {}, "tool_call"),
    ("FINISHED_LENGTH_CAPPED", [1, 7], {}, "length"),
    ("FINISHED_ABORTED", [1], {}, "abort"),
    ("FINISHED_ERROR", [1], {}, "error"),
    ("FINISHED_OF_A_LATER_VERSION", [1], {}, "unknown"),
    # A stop string is found in front of the engine, which then sees an abort.
    ("FINISHED_ABORTED", [1], {"stop": ["###"]}, "unknown"),
    # A call that a grammar forces is plain JSON.
    ("FINISHED_STOPPED", [1], {"structured_outputs": object()}, "unknown"),
    ("FINISHED_STOPPED", [7], {"structured_outputs": object()}, "tool_call"),
]


@pytest.mark.parametrize(("status", "answer", "sampling", "end"), ENDS)
def test_connectors_hear_how_a_turn_ended_as_far_as_vllm_knows(
    status: str, answer: list[int], sampling: dict[str, object], end: str
) -> None:
    side = side_over(0, tool_tokens=ToolTokens({7: "<tool_call>"}))
    request = asked(side, 8)
    assert side._requests["r"].seen.turn_end is TurnEnd.UNKNOWN
    seen = side._requests["r"].seen
    request.all_token_ids += answer
    request.status, request.sampling_params = SimpleNamespace(name=status), SimpleNamespace(**sampling)
    side.request_finished(request, ([],))
    assert seen.turn_end is TurnEnd(end)


def test_a_model_without_tokens_for_calls_leaves_it_open() -> None:
    side = side_over(0)
    request = asked(side, 8)
    seen = side._requests["r"].seen
    request.status = SimpleNamespace(name="FINISHED_STOPPED")
    side.request_finished(request, ([],))
    assert seen.turn_end is TurnEnd.UNKNOWN


@pytest.mark.parametrize(("num_hashed_tokens", "is_whole"), [(8, True), (4, True), (6, False), (None, True)])
def test_a_block_whose_prefix_ends_inside_it_holds_no_whole_block(
    num_hashed_tokens: int | None, is_whole: bool
) -> None:
    key = b"h" * 32 + (0).to_bytes(4, "big")
    block = SimpleNamespace(block_id=1, block_hash=key, block_hash_num_tokens=num_hashed_tokens)
    pool = SimpleNamespace(blocks=[None, block], hash_block_size=2)
    context = PoolContext(pool, GROUPS, NotedTables(1), tuple)
    assert context.prefixes_of(context.contents([1])) == [(b"h" * 32, 0) if is_whole else None]


def test_what_waits_over_a_reset_is_not_looked_up_by_its_adapters_weights_of_before() -> None:
    """Found by seed 95572: a reset was noticed at the end of a step only, after look-ups of requests that waited."""
    pool = SimpleNamespace(blocks=[None] * 4, cached_block_hash_to_block=object(), hash_block_size=4)
    adapters = Adapters(pool, num_workers=1, max_looks=1)
    adapter = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/a")
    seen = adapters.seen(SimpleNamespace(request_id="r", lora_request=adapter))
    assert not adapters.why_not(seen)
    pool.cached_block_hash_to_block = object()
    assert "prefix cache was reset" in adapters.why_not(seen)
