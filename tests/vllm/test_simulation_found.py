"""What the simulation of vLLM has found, each with the seed that found it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

# Something that vLLM has since 0.32, whose inside the simulation follows.
pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

from cargohold.integrations.vllm.deferrals import LoadRoom
from cargohold.integrations.vllm.layout import bears_full_hits
from cargohold.protocol import AttentionKind, KVCacheGroup
from tests.vllm.test_simulation import play


def test_a_full_hit_behind_a_window_that_begins_with_a_block() -> None:
    # The last token was computed again with a window that reached into a block that had not been loaded.
    play(0, "full-hit", "multi", "none")
    play(38, "full-hit", "eager", "none")


@pytest.mark.parametrize(
    ("kind", "window_tokens", "expected"),
    [
        (AttentionKind.FULL, None, True),
        (AttentionKind.SLIDING_WINDOW, 4, True),
        (AttentionKind.SLIDING_WINDOW, 5, False),
        (AttentionKind.SLIDING_WINDOW, 6, True),
        (AttentionKind.CHUNKED_LOCAL, 8, False),
        (AttentionKind.RECURRENT, None, False),
    ],
)
def test_which_groups_bear_a_full_hit(kind: AttentionKind, window_tokens: int | None, expected: bool) -> None:
    assert bears_full_hits(KVCacheGroup(0, kind, 4, ("layer",), window_tokens)) is expected


@pytest.mark.parametrize(
    ("workload", "seed"),
    [("windows", 99), ("windows", 165), ("mixed-groups", 40), ("mixed-groups", 43), ("mixed-groups", 186)],
)
def test_loaded_requests_do_not_wait_for_each_others_blocks(workload: str, seed: int) -> None:
    # vLLM reserves too little for what a loaded request with windows still needs: two of them filled the pool for ever.
    play(seed, workload, "eager", "none")


def test_a_request_whose_load_failed_is_not_kept_from_its_blocks_by_loads_behind_it() -> None:
    # From its beginning on it needs more than it did behind the load, and those behind it do not run before it does.
    play(1782384, "any", "any", "all")


@dataclass
class Block:
    is_null: bool = False


class Pool:
    def __init__(self, num_free_blocks: int) -> None:
        self._num_free_blocks = num_free_blocks

    def get_num_free_blocks(self) -> int:
        return self._num_free_blocks


class Tables:
    """One request, which has loaded 16 tokens and holds the blocks that its window of 6 still needs."""

    def blocks(self, request_id: str) -> list[list[Block]]:
        return [[Block(is_null=True), Block(is_null=True), Block(), Block()]]


class Parked:
    request_id = "parked"
    num_tokens = 40


WINDOW = KVCacheGroup(0, AttentionKind.SLIDING_WINDOW, 4, ("layer",), 6)
FULL = KVCacheGroup(0, AttentionKind.FULL, 4, ("layer",))


@pytest.mark.parametrize(
    ("group", "num_free_blocks", "num_parked", "expected"),
    [
        # Another load of 16 tokens takes 2 blocks; with 8 tokens in flight the parked request will hold 5, and has 2.
        (WINDOW, 5, 1, True),
        (WINDOW, 4, 1, False),
        (WINDOW, 0, 0, True),  # nobody waits: vLLM itself decides
        (FULL, 0, 1, True),  # vLLM counts well
    ],
)
def test_room_is_left_for_those_who_were_loaded(
    group: KVCacheGroup, num_free_blocks: int, num_parked: int, expected: bool
) -> None:
    room = LoadRoom(Pool(num_free_blocks), [group], Tables(), max_in_flight_tokens=8)
    assert room.admits(16, [Parked()] * num_parked) is expected


class TwoGroups:
    """The same, beside a group of recurrent state that has loaded the last of 4 blocks."""

    def blocks(self, request_id: str) -> list[list[Block]]:
        return [*Tables().blocks(request_id), [Block(is_null=True)] * 3 + [Block()]]


@pytest.mark.parametrize(("num_free_blocks", "expected"), [(8, True), (7, False)])
def test_of_recurrent_state_a_few_blocks_are_enough(num_free_blocks: int, expected: bool) -> None:
    # One load of 16 tokens takes 2 blocks and a state; the parked request will want 3 more blocks, as above, and 2 states,
    # however long it is. Counted as full attention, it would keep others waiting for 9.
    state = KVCacheGroup(1, AttentionKind.RECURRENT, 4, ("other",))
    room = LoadRoom(Pool(num_free_blocks), [WINDOW, state], TwoGroups(), max_in_flight_tokens=8)
    assert room.admits(16, [Parked()]) is expected
