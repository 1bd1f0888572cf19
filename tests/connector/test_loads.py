"""Loads from host memory, in a simulated engine: what is loaded, once, and who waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cargohold.connector.offloading import OffloadingScheduler
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.protocol import (
    BlockIds,
    RequestView,
    SchedulerEnvironment,
)
from cargohold.transfer import Direction
from tests.connector.common import alone, evict_everything, finish, prompt, serve_and_lose


def test_a_prompt_shorter_than_a_chunk_is_not_transferred() -> None:
    offloading = SimulatedOffloading(60, blocks_per_chunk=3)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 25), 1)
    engine.add("its start", prompt(0, 9), 1, kv_transfer_params={"max_load_tokens": 0})
    finish(engine, offloading)
    engine.add("two blocks and a chunk", prompt(0, 13), 1)
    finish(engine, offloading)
    assert engine.requests["two blocks and a chunk"].num_first_device_tokens == 8
    assert engine.outputs["two blocks and a chunk"].cache_report.restored_tokens == {}


def test_blocks_behind_a_window_are_neither_allocated_nor_loaded() -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(40, windows=(6,)), offloading)
    serve_and_lose(engine, offloading, prompt(0, 41), 1)
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("second", prompt(0, 41), 1)
    engine.step()
    (load,) = transfers.pending
    assert len(load.block_ids) == 2, "the next token's query reads 5 tokens before itself"
    pool = engine.scheduler.kv.pool
    assert pool.num_usable_blocks - pool.num_free_blocks == 2
    transfers.auto = True
    finish(engine, offloading)
    assert engine.tokens("second") == alone(prompt(0, 41), 1)


@pytest.mark.parametrize("num_on_device", [0, 16])
def test_two_requests_with_the_same_prefix_cause_one_load(num_on_device: int) -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 40), 1)
    if num_on_device:
        engine.add("start", prompt(0, num_on_device), 1, kv_transfer_params={"max_load_tokens": 0})
        finish(engine, offloading)
    transfers = offloading.transfers[0]
    transfers.auto = False
    engine.add("a", [*prompt(0, 40), 1], 1)
    engine.add("b", [*prompt(0, 40), 2], 1)
    engine.add("other", prompt(9, 10), 1)
    for _ in range(3):
        engine.step()
    assert [job.direction for job in transfers.pending if job.direction is Direction.LOAD] == [Direction.LOAD]
    assert "other" in engine.outputs, "a request that waits does not starve those behind it"
    assert [request.request_id for request in engine.scheduler.waiting_requests()] == ["b"]
    transfers.auto = True
    finish(engine, offloading)
    assert engine.requests["b"].num_first_device_tokens == 40
    assert engine.outputs["b"].cache_report.restored_tokens == {}


class SparseOffloading(SimulatedOffloading):
    """For an engine whose prefix cache keeps little of what is loaded."""

    keeps_ends = True

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        sparse = replace(environment, shares_loads=False, shares_load_ends=self.keeps_ends)
        return super().make_scheduler_side(sparse)


@pytest.mark.parametrize("keeps_ends", [True, False])
def test_where_only_the_end_of_a_load_is_kept_only_requests_that_go_on_there_wait_for_it(keeps_ends: bool) -> None:
    offloading = SparseOffloading(60)
    offloading.keeps_ends = keeps_ends
    engine = SimulatedEngine(simulated_layout(100), offloading)
    serve_and_lose(engine, offloading, prompt(0, 40), 1)
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("loads", [*prompt(0, 40), 1], 1)
    engine.add("ends there", [*prompt(0, 40), 2], 1)
    engine.add("ends before", prompt(0, 21), 1)
    engine.add("ends with the prompt", prompt(0, 40), 1)
    engine.step()
    loads = [len(job.block_ids) for job in transfers.pending if job.direction is Direction.LOAD]
    assert loads == ([10, 5] if keeps_ends else [10, 10, 5, 10])
    transfers.auto = True
    finish(engine, offloading)
    assert engine.outputs["ends there"].cache_report.restored_tokens == ({} if keeps_ends else {"host": 40})


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_what_requests_share_is_loaded_once_where_one_of_them_ends_there(windows: tuple[int | None, ...]) -> None:
    """Conversations that begin with the same system prompt load only what each has behind it."""
    offloading = SparseOffloading(120)
    engine = SimulatedEngine(simulated_layout(120, windows=windows), offloading)
    known = [[*prompt(0, 20), *prompt(seed, 20)] for seed in (1, 2)]
    for at, tokens in enumerate((prompt(0, 20), *known)):
        engine.add(f"before {at}", tokens, 1)
        finish(engine, offloading)
    evict_everything(engine)
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("ends there", [*prompt(0, 20), 5], 1)
    for at, tokens in enumerate(known):
        engine.add(f"goes on {at}", [*tokens, 6], 1)
    num_loaded: list[int] = []
    while engine.scheduler.has_work():
        engine.step()
        loads = [job for job in transfers.pending if job.direction is Direction.LOAD]
        num_loaded += [len(job.block_ids) for job in loads]
        for job in list(transfers.pending):
            transfers.complete(job)
    num_groups = len(windows)
    assert num_loaded == ([5, 5, 5] if num_groups == 1 else [7, 7, 7])
    transfers.auto = True
    finish(engine, offloading)
    for at, tokens in enumerate(known):
        assert engine.tokens(f"goes on {at}") == alone([*tokens, 6], 1)
        assert engine.outputs[f"goes on {at}"].cache_report.restored_tokens == {"host": 20}


def test_a_request_does_not_wait_for_loads_of_what_it_has_on_the_device() -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 41), 1)
    transfers = offloading.transfers[0]
    transfers.auto = False
    engine.add("loads the start", prompt(0, 17), 1)
    engine.add("computes the start", prompt(0, 17), 1, kv_transfer_params={"max_load_tokens": 0})
    engine.step()
    engine.add("loads the rest", prompt(0, 41), 1)
    engine.step()
    assert [len(job.block_ids) for job in transfers.pending if job.direction is Direction.LOAD] == [4, 6]
    transfers.auto = True
    finish(engine, offloading)


def test_without_prefix_cache_each_request_loads_for_itself() -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading, prefix_caching=False)
    engine.add("first", prompt(0, 40), 1)
    engine.run()
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("a", prompt(0, 41), 1)
    engine.add("b", prompt(0, 41), 1)
    engine.step()
    assert [job.direction for job in transfers.pending] == [Direction.LOAD] * 2, "neither waits for the other"
    transfers.auto = True
    finish(engine, offloading)
    assert [engine.outputs[name].cache_report.restored_tokens for name in "ab"] == [{"host": 40}, {"host": 40}]
    assert not any(engine.requests[name].num_preemptions for name in "ab"), "what was loaded is not computed again"


def test_blocks_loaded_for_an_aborted_request_serve_the_next() -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 40), 1)
    offloading.transfers[0].auto = False
    engine.add("a", [*prompt(0, 40), 1], 1)
    engine.add("b", [*prompt(0, 40), 2], 1)
    engine.step()
    engine.abort("a")
    offloading.transfers[0].auto = True
    finish(engine, offloading)
    assert engine.requests["b"].num_first_device_tokens == 40


def test_a_full_hit_computes_the_last_token() -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 40), 1)
    engine.add("second", prompt(0, 40), 3)
    computed: list[int] = []
    while engine.scheduler.has_work():
        step, _ = engine.step()
        computed += [share.num_scheduled_tokens for share in step.scheduled]
    finish(engine, offloading)
    assert engine.outputs["second"].cache_report.restored_tokens == {"host": 40}
    assert computed == [1, 1, 1], "one token a step, of which each gives the next"
    (note,) = engine.outputs["second"].cache_report.notes
    assert note.endswith("40 more in host; only the last is computed again, for its logits")


def test_requests_with_the_same_full_hit_do_not_wait_for_each_other() -> None:
    """Found by seed 2101608: each loads the block with its last token for itself, so waiting for another's load is in vain."""
    offloading = SimulatedOffloading(60, verify="off")
    engine = SimulatedEngine(simulated_layout(60), offloading)
    tokens = prompt(0, 40)
    serve_and_lose(engine, offloading, tokens, 1)
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("first", tokens, 2)
    engine.step()
    for name in ("second", "third"):
        engine.add(name, tokens, 2)
    engine.step()
    (load,) = transfers.pending
    assert len(load.block_ids) == 10, "the others wait for these blocks"
    transfers.complete(load)
    finish(engine, offloading)
    assert not transfers.pending, "the block with the last token alone is not loaded"
    for name in ("first", "second", "third"):
        assert engine.tokens(name) == alone(tokens, 2)


def test_a_request_that_waits_for_a_load_is_looked_up_again_when_it_ends_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by reading: a thousand requests that waited for one load were looked up again whenever a chunk was stored."""
    offloading = SimulatedOffloading(200)
    engine = SimulatedEngine(simulated_layout(200), offloading, max_num_seqs=20)
    shared = prompt(0, 200)
    serve_and_lose(engine, offloading, shared, 1)
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("loads", [*shared, 1], 1)
    engine.step()
    (load,) = transfers.pending
    looks: list[Sequence[bytes]] = []
    lookup_run = offloading.manager.lookup_run

    def counted(keys: Sequence[bytes]) -> bytes:
        looks.append(keys)
        return lookup_run(keys)

    monkeypatch.setattr(offloading.manager, "lookup_run", counted)
    for at in range(5):
        engine.add(f"waits {at}", [*shared, 2 + at], 1)
    engine.add("busy", prompt(1, 9), 40)
    for _ in range(30):
        engine.step()
        transfers.finish_stores()
    assert offloading.manager.num_ready > 51, "nothing was stored meanwhile"
    assert len([keys for keys in looks if keys[0] == looks[0][0]]) == 5
    transfers.complete(load)
    transfers.auto = True
    finish(engine, offloading)
    for at in range(5):
        assert engine.outputs[f"waits {at}"].request.num_first_device_tokens == 200


def test_a_connector_is_told_of_a_loaded_request_again_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 30), 1)
    told: list[int] = []
    update_state_after_alloc = OffloadingScheduler.update_state_after_alloc

    def noted(self: OffloadingScheduler, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        told.append(num_external_tokens)
        update_state_after_alloc(self, request, blocks, num_external_tokens)

    monkeypatch.setattr(OffloadingScheduler, "update_state_after_alloc", noted)
    engine.add("second", prompt(0, 30), 3)
    finish(engine, offloading)
    assert told == [28, 0]


def test_tokens_computed_behind_a_load_fit_one_step() -> None:
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading, max_num_batched_tokens=8)
    engine.add("first", prompt(0, 13), 1)
    finish(engine, offloading)
    for name, length, computed in (("long", 30, [8, 8, 2]), ("short", 14, [2])):
        evict_everything(engine)
        engine.add(name, prompt(0, length), 1, kv_transfer_params={"max_load_tokens": 12, "max_store_tokens": 0})
        steps = []
        while name not in engine.outputs:
            step, _ = engine.step()
            steps += [step.num_tokens] if step.num_tokens else []
        assert steps == computed
        finish(engine, offloading)
        assert engine.outputs[name].cache_report.restored_tokens == {"host": 12}


def test_the_last_block_alone_is_computed_with_the_last_token() -> None:
    """Found by use: three equal prompts of whole blocks loaded one block each, which took longer than computing it."""
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 16), 1)
    for name in ("lost", "kept", "kept, too"):
        engine.add(name, prompt(0, 16), 1)
        finish(engine, offloading)
    restored = [engine.outputs[name].cache_report.restored_tokens for name in ("lost", "kept", "kept, too")]
    assert restored == [{"host": 16}, {}, {}]


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_an_engine_may_take_nothing_of_what_was_found(
    windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM 0.33 drops a whole hit for whose tokens it has not kept which experts they were routed to."""
    offloading = SimulatedOffloading(120)
    engine = SimulatedEngine(simulated_layout(60, windows=windows), offloading)
    serve_and_lose(engine, offloading, prompt(0, 40), 1)
    find = OffloadingScheduler.get_num_new_matched_tokens
    found: list[int | None] = []

    def nothing(self: OffloadingScheduler, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        found.append(find(self, request, num_computed_tokens)[0])
        return 0, False

    monkeypatch.setattr(OffloadingScheduler, "get_num_new_matched_tokens", nothing)
    engine.add("second", [*prompt(0, 40), 1], 1)
    finish(engine, offloading)
    assert found == [40]
    assert engine.tokens("second") == alone([*prompt(0, 40), 1], 1)
    report = engine.outputs["second"].cache_report
    assert report.restored_tokens == {}
    assert any("the engine loaded no more" in note for note in report.notes)


def test_an_engine_may_never_come_back_to_what_was_found() -> None:
    """The request is aborted between the question and the allocation: nothing stays pinned for it."""
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), offloading)
    serve_and_lose(engine, offloading, prompt(0, 40), 1)
    engine.add("second", [*prompt(0, 40), 1], 1)
    request = engine.requests["second"]
    assert engine.scheduler.connector.get_num_new_matched_tokens(request, 0) == (40, True)
    engine.abort("second")
    finish(engine, offloading)
    engine.add("third", [*prompt(0, 40), 2], 1)
    finish(engine, offloading)
    assert engine.tokens("third") == alone([*prompt(0, 40), 2], 1)
    assert engine.outputs["third"].cache_report.restored_tokens == {"host": 40}


@pytest.mark.parametrize("windows", [(None,), (1,), (6,), (None, 6)])
def test_no_more_is_found_than_is_hashed(windows: tuple[int | None, ...]) -> None:
    """Found by the simulation of vLLM 0.33, where tokens behind a block may be part of its hash: the load raised."""
    offloading = SimulatedOffloading(120)
    engine = SimulatedEngine(simulated_layout(60, windows=windows), offloading)
    serve_and_lose(engine, offloading, prompt(0, 40), 1)
    engine.add("ahead", [*prompt(0, 40), 1], 1)
    engine.requests["ahead"].block_hashes.pop()
    connector, request = engine.scheduler.connector, engine.requests["ahead"]
    assert connector.get_num_new_matched_tokens(request, 0) == (36, True)
    connector.update_state_after_alloc(request, tuple(range(10, 20) for _ in windows), 36)
    assert connector.broken is None
