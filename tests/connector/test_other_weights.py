"""Other weights: chunks of each are kept apart, and found again when their weights return."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cargohold.cache.manager import namespace_of_key
from cargohold.cache.tier_manager import TierManager
from cargohold.connector.offloading.scheduler import MAX_WEIGHTS, OffloadingScheduler
from cargohold.lab.simulation import SimulatedEngine
from cargohold.protocol import MEDIUM_HOST, MEDIUM_STORAGE, Hint, SchedulerEnvironment
from cargohold.tiers.scheduler_side import TierOptions
from tests.connector.common import prompt
from tests.connector.test_events import RouterIndex, blocks_of, finish_all
from tests.connector.test_found_again import LISTED
from tests.connector.test_handoff import REMOTE_DECODE, announcement, shared
from tests.connector.tiering import DISK, fetching_engine, finish, make_engine, restored, serve
from tests.held_tiers import SimulatedTiering

NAMES = {0: "", 1: "first of the trainer's", 2: "second"}
MODES: dict[str, Any] = {"eager": {}, "exclusive": {}, "lazy": {"lookahead_blocks": 60}}


def hold(engine: SimulatedEngine, number: int) -> None:
    """Give the model weights, as an engine does whose prefix cache is reset for that."""
    assert engine.scheduler.kv.pool.reset_cache()
    engine.load_weights(number)
    assert engine.scheduler.connector.use_weights(NAMES.get(number, str(number)))


@pytest.mark.parametrize(("blocks_per_chunk", "stores"), [(1, "eager"), (2, "eager"), (1, "lazy"), (1, "exclusive")])
def test_what_is_kept_of_weights_is_found_when_they_return(blocks_per_chunk: int, stores: str) -> None:
    """Every read is checked against the KV of the weights of now."""
    tiering = SimulatedTiering(90, [DISK], blocks_per_chunk=blocks_per_chunk, mode=stores, **MODES[stores])
    engine = make_engine(tiering)
    for at, number in enumerate((0, 1, 2, 0, 1, 2)):
        hold(engine, number)
        serve(engine, tiering, f"r{at}", prompt(0, 45))
        assert sum(restored(engine, f"r{at}").values()) == (
            0 if at < 3 else 44 // (4 * blocks_per_chunk) * 4 * blocks_per_chunk
        )
        serve(engine, tiering, f"other {at}", prompt(100 + at, 9))  # lazy stores save meanwhile what is free


def in_host_memory(tiering: SimulatedTiering) -> list[bytes]:
    assert isinstance(tiering.manager, TierManager)
    return [key for key in tiering.manager.table.keys if key is not None]


def test_lower_tiers_have_them_too_and_a_later_engine_those_of_the_files_alone() -> None:
    tiering = SimulatedTiering(90, [LISTED])
    engine = make_engine(tiering, emit_events=True)
    for number in (0, 1):
        hold(engine, number)
        serve(engine, tiering, f"before {number}", prompt(number, 45))
    tiering.manager.remove(in_host_memory(tiering))
    for number in (1, 0):
        hold(engine, number)
        serve(engine, tiering, f"after {number}", prompt(number, 45))
        assert restored(engine, f"after {number}") == {"disk": 44}
    later, index = make_engine(tiering, emit_events=True), RouterIndex()
    finish_all(later, tiering)
    index.follow(later.scheduler.take_events())
    of_files = {(block_hash, 0) for block_hash in engine.requests["before 0"].block_hashes}
    assert index.blocks[MEDIUM_STORAGE] and index.blocks[MEDIUM_STORAGE] <= of_files
    serve(later, tiering, "later", prompt(1, 45))
    assert restored(later, "later") == {}


class KeepsWeights(SimulatedTiering):
    """For engines whose operator wants chunks of other weights to outlive the process, too."""

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        return super().make_scheduler_side(replace(environment, keeps_weights=True))


@pytest.mark.parametrize("tier", [DISK, LISTED, shared()], ids=["asked", "listed", "shared"])
def test_a_later_engine_finds_those_of_the_same_weights_alone_if_the_operator_says_so(tier: TierOptions) -> None:
    """It meets the same weights in another order, and begins with something else in its host memory."""
    tiering = KeepsWeights(90, [tier])
    engine = make_engine(tiering)
    for number in (1, 2, 0):
        hold(engine, number)
        serve(engine, tiering, f"first {number}", prompt(0, 45))
    later = make_engine(tiering)
    finish_all(later, tiering)
    for number, is_found in ((3, False), (2, True), (0, True), (1, True)):
        hold(later, number)
        serve(later, tiering, f"later {number}", prompt(0, 45))
        assert restored(later, f"later {number}") == ({tier.name: 44} if is_found else {})
    engine = make_engine(tiering)
    hold(engine, 1)
    assert engine.scheduler.reset_cache(), (
        "an operator wants all to be dropped: nothing is found until the next restart"
    )
    hold(engine, 2)
    serve(engine, tiering, "dropped", prompt(0, 45))
    assert restored(engine, "dropped") == {}


def test_of_so_many_weights_names_last_and_more_are_not_remembered() -> None:
    tiering = KeepsWeights(90, [DISK])
    engine = make_engine(tiering)
    for number in range(1, 2 * MAX_WEIGHTS):
        hold(engine, number)
        serve(engine, tiering, f"first {number}", prompt(0, 9), 1)
    for number in (1, 2 * MAX_WEIGHTS - 1):
        hold(engine, number)
        serve(engine, tiering, f"again {number}", prompt(0, 9), 1)
        assert sum(restored(engine, f"again {number}").values()) == 8, "under another number, it has the same name"


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_router_hears_of_what_can_be_found_now(blocks_per_chunk: int) -> None:
    tiering = SimulatedTiering(60, [LISTED], blocks_per_chunk=blocks_per_chunk)
    engine, index = make_engine(tiering, emit_events=True), RouterIndex()
    used: list[int] = []
    for at, number in enumerate((0, 1, 0, 2, 1)):
        hold(engine, number)
        used += [number] if number not in used else []
        serve(engine, tiering, f"r{at}", prompt(number, 45 - 4 * at))
        finish_all(engine, tiering)
        index.follow(engine.scheduler.take_events())
        keys = [key for key in in_host_memory(tiering) if namespace_of_key(key) == used.index(number)]
        assert len(keys) > 2
        for medium in (MEDIUM_HOST, MEDIUM_STORAGE):
            assert index.blocks[medium] == blocks_of(keys, engine, blocks_per_chunk)


def test_a_request_that_waits_for_chunks_looks_for_those_of_the_new_weights() -> None:
    tiering = SimulatedTiering(60, [DISK])
    engine, queue = fetching_engine(tiering)
    hold(engine, 1)
    queue.complete(queue.pending[0])
    queue.auto = True
    finish(engine, tiering)
    assert restored(engine, "second") == {}


def test_leases_end_and_nothing_is_promised_under_weights_that_no_other_engine_has() -> None:
    tiering = SimulatedTiering(60, [shared()])
    engine = make_engine(tiering)
    engine.add("r", prompt(0, 41), 1, hints=[Hint.pin(20, "mine")])
    finish(engine, tiering)
    for number, num_announced in ((1, 0), (0, 40)):
        hold(engine, number)
        (contents,) = engine.scheduler.connector.get_contents()
        assert contents.pins == []
        engine.add(f"sent {number}", prompt(0, 41), 1, kv_transfer_params=REMOTE_DECODE)
        finish(engine, tiering)
        assert announcement(engine, f"sent {number}")[0] == num_announced


def test_so_many_weights_are_remembered_and_after_a_reset_none() -> None:
    tiering = SimulatedTiering(400, [DISK])
    engine = make_engine(tiering)
    for number in range(MAX_WEIGHTS + 2):
        hold(engine, number)
        serve(engine, tiering, f"r{number}", prompt(0, 9), 1)
    for number, is_found in ((0, True), (MAX_WEIGHTS, True), (1, False)):
        hold(engine, number)
        serve(engine, tiering, f"again {number}", prompt(0, 9), 1)
        assert restored(engine, f"again {number}") == ({"host": 8} if is_found else {})
    assert engine.scheduler.reset_cache()
    for number in (MAX_WEIGHTS, 0):
        hold(engine, number)
        serve(engine, tiering, f"once more {number}", prompt(0, 9), 1)
        assert restored(engine, f"once more {number}") == {}
