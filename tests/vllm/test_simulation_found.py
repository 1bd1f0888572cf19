"""What the simulation of vLLM has found, each with the seed that found it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

# Something that vLLM has since 0.32, whose inside the simulation follows.
pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

from vllm.v1.core import single_type_kv_cache_manager

from cargohold.engine.core.request_queues import LoadFailurePolicy, QueuePolicy
from cargohold.integrations.vllm.groups import bears_full_hits
from cargohold.integrations.vllm.loads import LoadRoom
from cargohold.integrations.vllm.scheduler import SchedulerSide
from cargohold.lab.simulation.connectors import ConnectorPlan, TierPlan
from cargohold.lab.simulation.fingerprints import GroupPlan
from cargohold.lab.simulation.traffic import Ask
from cargohold.lab.simulation.transfers import LinkProfile
from cargohold.lab.simulation.world import Scenario, Shape
from cargohold.lab.vllm.configuration import ASYNC, CAN_RETAIN_LESS, MATCH_UNIT, MAX_MODEL_LEN, RETAINED
from cargohold.lab.vllm.recipe import VllmRecipe
from cargohold.protocol import AttentionKind, KVCacheGroup
from tests.vllm.test_simulation import play


def scene(groups: tuple[GroupPlan, ...], connector: ConnectorPlan, *asks: Ask, **options: Any) -> Scenario:
    """A scene that is written out; what a seed plays changes with the code that draws scenarios."""
    scheduler = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "policy": QueuePolicy.FCFS,
        "prefix_caching": True,
        "load_failure_policy": LoadFailurePolicy.RECOMPUTE,
        "emit_events": True,
        "emit_salted_events": True,
        MAX_MODEL_LEN: 64,
        ASYNC: False,
        **({RETAINED: 0} if CAN_RETAIN_LESS else {}),
        **options,
    }
    shape = Shape(groups, 24, 1, scheduler, LinkProfile(latency_s=0.2))
    return Scenario(1, "by hand", shape, connector, {}, 0.0, asks)


def end_of(scenario: Scenario) -> str | None:
    error = VllmRecipe("any", "any").run(scenario).play().error
    return None if error is None else str(error)


def test_what_was_served_without_offloading_is_not_kept_beside_the_index() -> None:
    # vLLM serves a request whose wish is refused without telling us its tokens. Lazy offloading kept its blocks, and nothing
    # was announced of them.
    lazy = ConnectorPlan("lazy", (TierPlan(32, 40, {}),))
    refused = Ask(0.0, "refused", tuple(range(40)), 2, params={"max_load_tokens": "all"})
    assert end_of(scene((GroupPlan(),), lazy, refused, Ask(1.0, "other", tuple(range(100, 140)), 2))) is None


def test_a_load_of_no_block_at_all_is_no_prefix_that_is_loaded_twice() -> None:
    # A mistake of an oracle: a window of one token needs no block of what is before it.
    eager = ConnectorPlan("eager", (TierPlan(32, None, {}),))
    asks = [Ask(0.0, name, tuple(range(17)), 2) for name in ("first", "second")]
    assert end_of(scene((GroupPlan(AttentionKind.SLIDING_WINDOW, 4, 1),), eager, *asks)) is None


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


# --- vLLM's own, without any connector --------------------------------------------------------------------------------


def shared_block(connector: ConnectorPlan) -> Scenario:
    """Two requests arrive together; the second one's prefix ends in a block that the first one is about to fill."""
    known = tuple(range(100, 136))
    first = (*known, *range(200, 211))
    asks = (
        Ask(0.0, "before", (*known, 1, 2, 3), 1),  # leaves a state inside a block of attention
        Ask(1.0, "first", first, 1),
        Ask(1.0, "second", (*first, *range(300, 311)), 1),
    )
    groups = (GroupPlan(AttentionKind.FULL, 8), GroupPlan(AttentionKind.RECURRENT, 4))
    return scene(groups, connector, *asks, **{MATCH_UNIT: 2})


def test_vllm_copies_a_block_before_the_same_step_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # With our adapter, the second one waits for the next step: what it computes from such a copy would be stored, and served.
    none = ConnectorPlan("none", ())
    for connector in (none, ConnectorPlan("eager", (TierPlan(64, None, {}),))):
        assert end_of(shared_block(connector)) is None
    monkeypatch.setattr(SchedulerSide, "_is_filled_now", lambda *_: False)
    assert "request second, group 0: block 16 does not hold the KV of token 32" in str(end_of(shared_block(none)))
    # Where such a hit waits for the next step, as hits on recurrent states do (``MambaManager``), it ends well.
    begun: set[int] = set()
    manager = single_type_kv_cache_manager.FullAttentionManager
    cache, needed = manager.cache_blocks, manager.get_num_blocks_to_allocate

    def cache_and_note(self: Any, request: Any, *args: Any, **options: Any) -> None:
        cache(self, request, *args, **options)
        begun.update(id(block) for block in self.req_to_blocks[request.request_id])

    def wait_for_the_step(self: Any, request_id: str, num_tokens: int, found: Any, *args: Any, **options: Any) -> int:
        if found and id(found[-1]) in begun:
            return int(self.block_pool.num_gpu_blocks) + 1
        return int(needed(self, request_id, num_tokens, found, *args, **options))

    monkeypatch.setattr(manager, "cache_blocks", cache_and_note)
    monkeypatch.setattr(manager, "get_num_blocks_to_allocate", wait_for_the_step)
    monkeypatch.setattr(manager, "new_step_starts", lambda self: begun.clear())
    assert end_of(shared_block(none)) is None
