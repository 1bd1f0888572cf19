"""Chunks of requests that have ended, stored after their end."""

from __future__ import annotations

import pytest

from cargohold.blocks import ABSENT, READY
from cargohold.cache.manager import chunk_keys
from cargohold.connector.kernel.requests import RequestState
from cargohold.connector.kernel.stores import PendingStore
from cargohold.engine.core.request_queues import SortedRequests
from cargohold.engine.core.scheduler import EngineContext
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.protocol import TurnEnd
from tests.connector.common import alone, evict_everything, finish, prompt
from tests.connector.offloading import keys_of


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_chunks_of_an_ended_request_that_were_not_stored_are_stored_after_its_end(blocks_per_chunk: int) -> None:
    offloading = SimulatedOffloading(60, max_inflight_fraction=0.1, blocks_per_chunk=blocks_per_chunk)
    engine = SimulatedEngine(simulated_layout(60), offloading, max_num_batched_tokens=64)
    transfers = offloading.transfers[0]
    transfers.auto = False
    engine.add("r", prompt(0, 49), 1)
    engine.step()
    assert not engine.scheduler.num_unfinished
    num_free = engine.scheduler.kv.pool.num_free_blocks
    assert num_free == 59 - 6, "only what is being copied is held"
    transfers.auto = True
    finish(engine, offloading)
    num_chunks = 12 // blocks_per_chunk
    keys = keys_of(prompt(0, 49), num_chunks, blocks_per_chunk)
    assert offloading.manager.lookup_run(keys) == bytes([READY]) * num_chunks
    evict_everything(engine)
    engine.add("again", prompt(0, 49), 3)
    finish(engine, offloading)
    assert engine.tokens("again") == alone(prompt(0, 49), 3)


def test_chunks_of_an_ended_request_in_one_group_alone_are_stored_after_its_end() -> None:
    offloading = SimulatedOffloading(60, max_inflight_fraction=0.1)
    engine = SimulatedEngine(simulated_layout(125, windows=(None, None)), offloading, max_num_batched_tokens=64)
    transfers = offloading.transfers[0]
    transfers.auto = False
    engine.add("r", prompt(0, 49), 1)
    engine.step()
    assert not engine.scheduler.num_unfinished
    (store,) = transfers.pending
    assert len(store.block_ids) == 12, "all of the first group's chunks, and none of the second's"
    transfers.auto = True
    finish(engine, offloading)
    evict_everything(engine)
    engine.add("again", prompt(0, 49), 3)
    finish(engine, offloading)
    assert engine.outputs["again"].cache_report.restored_tokens == {"host": 48}
    assert engine.tokens("again") == alone(prompt(0, 49), 3)


def test_chunks_that_left_the_window_of_an_ended_request_are_skipped() -> None:
    offloading = SimulatedOffloading(60, max_inflight_fraction=0.1)
    engine = SimulatedEngine(simulated_layout(60, windows=(6,)), offloading, max_num_batched_tokens=64)
    transfers = offloading.transfers[0]
    transfers.auto = False
    engine.add("r", prompt(0, 49), 2)
    for _ in range(2):
        engine.step()
    assert not engine.scheduler.num_unfinished
    num_offered = sum(len(job.block_ids) for job in transfers.pending)
    transfers.auto = True
    finish(engine, offloading)
    states = [ABSENT] * (12 - num_offered) + [READY] * num_offered
    assert list(offloading.manager.lookup(keys_of(prompt(0, 49), 12))) == states, "the latest ones first"


def test_stores_after_the_end_of_a_request_keep_max_store_tokens() -> None:
    offloading = SimulatedOffloading(60, max_inflight_fraction=0.1)
    engine = SimulatedEngine(simulated_layout(60), offloading, max_num_batched_tokens=64)
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("r", prompt(0, 49), 1, kv_transfer_params={"max_store_tokens": 32})
    engine.step()
    assert not engine.scheduler.num_unfinished and offloading.manager.num_writing < 8
    transfers.auto = True
    finish(engine, offloading)
    assert offloading.manager.num_ready == 8


def test_chunks_of_an_ended_request_are_known_though_they_were_never_looked_up() -> None:
    """Under asynchronous scheduling the last tokens are known when no step is planned for the request any more."""
    engine = SimulatedEngine(simulated_layout(60))
    engine.add("r", prompt(0, 17), 8)
    engine.step()
    context = EngineContext(engine.scheduler.kv, SortedRequests(lambda _: (0, 0)))
    request = engine.requests["r"]
    state = RequestState.create(request, chunk_keys(engine.scheduler.kv.layout, 2))
    state.extend_keys()  # as the kernel does when a request ends
    pending = PendingStore.of(state, engine.scheduler.kv.block_ids("r"), 17, context)
    assert pending is not None and pending.unstored(2, context, limit=8)[0].end == 2
    engine.run()


def test_chunks_of_an_ended_request_are_stored_up_to_the_first_block_that_was_reused() -> None:
    engine = SimulatedEngine(simulated_layout(9))
    engine.add("r", prompt(0, 25), 8)
    engine.step()
    kv, request = engine.scheduler.kv, engine.requests["r"]
    context = EngineContext(kv, SortedRequests(lambda _: (0, 0)))
    table = tuple(kv.block_ids("r")[0])
    pool = kv.pool

    def left() -> PendingStore | None:
        state = RequestState.create(request, chunk_keys(kv.layout, 2))
        state.extend_keys()
        return PendingStore.of(state, (table,), 25, context)

    pending = left()
    assert pending is not None
    assert [pending.unstored(2, context, limit)[0].end for limit in (1, 2, 3, 9)] == [1, 2, 3, 3]
    pending.state.note_offered(0, 2)
    rest = PendingStore.of(pending.state, (table,), 25, context)
    pending.state.note_offered(0, 0)
    assert rest is not None and rest.unstored(2, context, 9)[0].end == 0, "nothing is known of what had been offered"
    pool.uncache_block(pool.get_block(table[3]))
    assert pending.unstored(2, context, 9)[0].end == 1, "the other half of its chunk is still there"
    later = left()
    assert later is not None and later.unstored(2, context, 9)[0].end == 1, (
        "what it holds is not known, whatever it was"
    )
    pool.uncache_block(pool.get_block(table[0]))
    assert left() is None
    engine.run()
    engine.add("other", prompt(1, 28), 4)
    engine.run()
    assert pool.get_block(table[2]).prefix is not None, "its block holds something else"
    (state, first) = (pending.state, pending.state.next_chunk[0])
    state.note_offered(0, 1)
    assert (first, pending.unstored(2, context, 9)[0].end) == (0, 1)


def test_chunks_of_an_ended_request_are_dropped_once_their_blocks_are_reused() -> None:
    offloading = SimulatedOffloading(60, max_inflight_fraction=0.1)
    engine = SimulatedEngine(simulated_layout(60), offloading, max_num_batched_tokens=64)
    transfers = offloading.transfers[0]
    transfers.auto = False
    engine.add("r", prompt(0, 49), 1)
    engine.step()
    evict_everything(engine)
    transfers.auto = True
    finish(engine, offloading)
    assert offloading.manager.num_ready == 6, "what was being copied when the request ended"
    assert offloading.manager.lookup_run(keys_of(prompt(0, 49), 12)) == bytes([READY]) * 6


def test_the_manager_hears_how_each_turn_ended_with_the_chunks_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    offloading = SimulatedOffloading(16)
    engine = SimulatedEngine(simulated_layout(24), offloading)
    heard: list[tuple[list[bytes], TurnEnd]] = []
    monkeypatch.setattr(offloading.manager, "end_turn", lambda keys, end: heard.append((list(keys), end)))
    tokens = prompt(1, 12)
    engine.add("whole", tokens, 6)
    finish(engine, offloading)
    engine.add("gone", tokens, 6)
    engine.step()
    engine.abort("gone")
    finish(engine, offloading)
    whole, gone = heard
    assert whole == (keys_of([*tokens, *engine.requests["whole"].output_token_ids], 4), TurnEnd.LENGTH)
    assert gone == (keys_of(tokens, 3), TurnEnd.ABORT)


@pytest.mark.parametrize("mode", ["exclusive", "eager"])
def test_a_connector_that_only_reads_stores_nothing_of_what_runs_or_has_ended(mode: str) -> None:
    offloading = SimulatedOffloading(60, mode=mode, read_only=True)
    engine = SimulatedEngine(simulated_layout(20), offloading, max_num_batched_tokens=64)
    for number in range(3):
        engine.add(f"r{number}", prompt(number, 49), 6)
        finish(engine, offloading)
    assert not offloading.manager.num_ready and not offloading.manager.num_listed
    assert engine.tokens("r2") == alone(prompt(2, 49), 6)
