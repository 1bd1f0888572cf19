"""Chunks that an earlier engine has left on a disk are announced at the start, with what it knew of them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.cache.manager import offload_key
from cargohold.connector.guests.events import Contents, contents_in
from cargohold.lab.simulation import SimulatedEngine, VirtualClock
from cargohold.protocol import MEDIUM_STORAGE, Adapter, BlockRemoved, BlockStored, ExtraKey, TransferOutcome
from cargohold.tiers import JobKind, JobStatus
from cargohold.tiers.chunk_format import TOKEN_TYPE, Details
from cargohold.tiers.health import HEALTHY
from cargohold.tiers.messages import TierCommand
from cargohold.tiers.port import DONE, LISTED_AT_ONCE, OPEN
from cargohold.tiers.scheduler_side import TierOptions
from cargohold.tiers.scheduler_side.listing import MAX_RETRIES, RETRY_S
from cargohold.tiers.worker import TierWorker
from tests.connector.common import evict_everything, prompt
from tests.connector.test_events import RouterIndex, blocks_of, finish_all
from tests.connector.tiering import lose_host_memory, make_engine, restored, serve
from tests.effort import examples
from tests.held_tiers import HeldMedium, HeldQueue, SimulatedTiering

LISTED = TierOptions(name="disk", is_listed=True)


def first_engine(
    tiering: SimulatedTiering, num_prompts: int = 1, salt: str | None = None, *, salted: bool = False
) -> SimulatedEngine:
    engine = make_engine(tiering, emit_events=True, emit_salted_events=salted)
    for number in range(num_prompts):
        engine.add(f"first {number}", prompt(number, 45), 1, salt=salt)
        finish_all(engine, tiering)
    return engine


def announced_after_restart(tiering: SimulatedTiering, *, salted: bool = False) -> set[tuple[bytes, int]]:
    """The blocks that an engine announces at its start, before it has any request."""
    engine = make_engine(tiering, emit_events=True, emit_salted_events=salted)
    index = RouterIndex()
    finish_all(engine, tiering)
    index.follow(engine.scheduler.take_events())
    return index.blocks[MEDIUM_STORAGE]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_an_engine_announces_what_an_earlier_one_has_left_on_disk(blocks_per_chunk: int, world_size: int) -> None:
    tiering = SimulatedTiering(60, [LISTED], world_size, blocks_per_chunk=blocks_per_chunk)
    first = first_engine(tiering, 3)
    on_disk = blocks_of(tiering.media[0][0].chunks, first, blocks_per_chunk)
    assert len(on_disk) > 20
    assert announced_after_restart(tiering) == on_disk
    lost = next(iter(tiering.media[0][-1].chunks))
    del tiering.media[0][-1].chunks[lost]  # one worker has lost its shard
    there = set(tiering.media[0][0].chunks) - {lost}
    assert announced_after_restart(tiering) == blocks_of(there, first, blocks_per_chunk)


def test_the_next_request_finds_what_was_announced_and_announces_nothing_twice() -> None:
    tiering = SimulatedTiering(60, [LISTED], blocks_per_chunk=2)
    first_engine(tiering)
    engine = make_engine(tiering, emit_events=True)
    index = RouterIndex()
    serve(engine, tiering, "second", prompt(0, 45))
    finish_all(engine, tiering)
    index.follow(engine.scheduler.take_events())  # it refuses what it has
    assert engine.outputs["second"].cache_report.restored_tokens["disk"] == 40
    evict_everything(engine)
    index.follow(engine.scheduler.take_events())


def test_each_step_announces_a_bounded_number() -> None:
    tiering = SimulatedTiering(400, [LISTED])
    first_engine(tiering, 20)
    assert len(tiering.media[0][0].chunks) > 3 * LISTED_AT_ONCE[JobKind.DESCRIBE]
    engine = make_engine(tiering, emit_events=True)
    counts = []
    while engine.scheduler.has_work():
        engine.step()
        counts.append(sum(isinstance(event, BlockStored) for event in engine.scheduler.take_events()))
    assert max(counts) == LISTED_AT_ONCE[JobKind.DESCRIBE] and sum(counts) == len(tiering.media[0][0].chunks)


def test_a_listing_is_no_use_of_the_chunks_and_nobody_waits_for_it() -> None:
    tiering = SimulatedTiering(60, [LISTED])
    first_engine(tiering)
    engine = make_engine(tiering, emit_events=True)
    (queue,) = tiering.all_queues()
    kinds: list[JobKind] = []
    queue.on_job = lambda job: kinds.append(job.kind)
    finish_all(engine, tiering)
    assert set(kinds) == {JobKind.LIST, JobKind.DESCRIBE, JobKind.CHECK}
    queue.held = frozenset({JobKind.LIST})
    other = make_engine(tiering, emit_events=True)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.LIST})
    other.add("r", prompt(0, 45), 1)
    for _ in range(100):
        other.step()
    assert "r" in other.outputs and queue.pending, "it hangs, and the request was served"


@pytest.mark.parametrize("kind", [JobKind.LIST, JobKind.DESCRIBE, JobKind.CHECK])
def test_a_list_that_fails_is_read_again_after_pauses_and_says_nothing_of_the_medium(kind: JobKind) -> None:
    tiering = SimulatedTiering(60, [LISTED], 2)
    first = first_engine(tiering)
    engine, index = make_engine(tiering, emit_events=True), RouterIndex()
    times = fail_jobs(engine, tiering, {kind}, MAX_RETRIES)
    assert [after - before > RETRY_S * 2**at for at, (before, after) in enumerate(pairwise(times))] == [True, True]
    assert tiering.lower.tiers[0].health == HEALTHY
    finish_all(engine, tiering)
    index.follow(engine.scheduler.take_events())
    assert index.blocks[MEDIUM_STORAGE] == blocks_of(tiering.media[0][0].chunks, first, 1)
    assert tiering.lower.tiers[0].knows_all and not tiering.lower.tiers[0].list_failed


def test_a_list_that_fails_again_and_again_is_given_up_and_the_disk_is_asked() -> None:
    tiering = SimulatedTiering(60, [LISTED], 2)
    first_engine(tiering)
    engine = make_engine(tiering, emit_events=True)
    kinds = {JobKind.LIST, JobKind.DESCRIBE}
    assert len(fail_jobs(engine, tiering, kinds, 100)) == 2 * (MAX_RETRIES + 1), "details are tried all the same"
    assert not engine.scheduler.has_work(), "an idle engine does not step on for ever"
    assert tiering.lower.tiers[0].health == HEALTHY and tiering.lower.tiers[0].list_failed
    serve(engine, tiering, "again", prompt(0, 45))
    assert restored(engine, "again") == {"disk": 44}
    index = RouterIndex()
    index.follow(engine.scheduler.take_events())
    assert len(index.blocks[MEDIUM_STORAGE]) == 11, "they were announced when they were found"


def fail_jobs(engine: SimulatedEngine, tiering: SimulatedTiering, kinds: set[JobKind], most: int) -> list[float]:
    """Let the first ``most`` jobs of these kinds fail on the last worker while there is work; return when they did."""
    (queue,) = tiering.queues[-1]
    queue.held = frozenset(kinds)
    times: list[float] = []
    while len(times) < most and engine.scheduler.has_work():
        engine.step()
        for job in [job for job in queue.pending if job.kind in kinds]:
            queue.complete(job, JobStatus.FAILED)
            times.append(engine.clock())
    queue.held = frozenset()
    return times


def test_salted_chunks_are_announced_only_where_that_is_wanted() -> None:
    tiering = SimulatedTiering(60, [LISTED])
    first_engine(tiering, 1, "mine")
    assert announced_after_restart(tiering, salted=True) == set(), "they were written without tokens"
    tiering = SimulatedTiering(60, [LISTED])
    first_engine(tiering, 1, "mine", salted=True)
    assert announced_after_restart(tiering) == set()
    assert len(announced_after_restart(tiering, salted=True)) == 11


def test_after_a_reset_nothing_is_listed() -> None:
    tiering = SimulatedTiering(60, [LISTED])
    first_engine(tiering)
    engine = make_engine(tiering, emit_events=True)
    (queue,) = tiering.all_queues()
    queue.held = frozenset({JobKind.LIST})
    engine.step()
    assert engine.scheduler.reset_cache()
    queue.held = frozenset()
    index = RouterIndex()
    serve(engine, tiering, "r", prompt(0, 45))
    index.follow(engine.scheduler.take_events())
    assert len(index.blocks[MEDIUM_STORAGE]) == 11, "its own chunks, under other names"
    assert not [job for job in queue.pending if job.kind is JobKind.LIST]


def test_a_disk_that_works_again_is_listed_again() -> None:
    tiering = SimulatedTiering(60, [LISTED])
    engine = first_engine(tiering, 2)
    index = RouterIndex()
    index.follow(engine.scheduler.take_events())
    before = set(index.blocks[MEDIUM_STORAGE])
    lose_disk(engine, tiering)
    index.follow(engine.scheduler.take_events())
    assert index.blocks[MEDIUM_STORAGE] == set()
    tiering.media[0][0].is_gone = False
    engine.clock.advance(1000.0)  # type: ignore[attr-defined]  # virtual
    for at in range(2):  # the first step tells the scheduler side that the tier may be tried again
        lose_host_memory(engine, tiering)
        serve(engine, tiering, f"asks {at}", prompt(1, 45))
    index.follow(engine.scheduler.take_events())
    assert before <= index.blocks[MEDIUM_STORAGE]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@examples(10)
@given(data=st.data())
def test_what_is_announced_equals_what_is_on_disk_also_where_the_disk_evicts_and_engines_restart(
    blocks_per_chunk: int, world_size: int, data: st.DataObject
) -> None:
    tiering = SimulatedTiering(data.draw(st.integers(8, 24)), [LISTED], world_size, blocks_per_chunk=blocks_per_chunk)
    for rank, medium in enumerate(tiering.media[0]):
        medium.max_chunks = data.draw(st.integers(3, 30), label=f"chunks of worker {rank}")
    index = RouterIndex()
    engine = make_engine(tiering, emit_events=True)
    known: dict[bytes, list[bytes]] = {}
    for at in range(data.draw(st.integers(1, 10))):
        tokens = prompt(data.draw(st.integers(0, 4)), data.draw(st.integers(1, 44)))
        engine.add(f"r{at}", tokens, 3)
        for _ in range(data.draw(st.integers(0, 6))):
            if engine.scheduler.has_work():
                engine.step()
        known |= {
            request.block_hashes[-1]: request.block_hashes
            for request in engine.requests.values()
            if request.block_hashes
        }
        match data.draw(st.sampled_from(("nothing", "abort", "evict", "reset", "restart", "compare"))):
            case "abort":
                engine.abort(f"r{at}")
            case "evict":
                finish_all(engine, tiering)
                evict_everything(engine)
            case "reset":
                finish_all(engine, tiering)
                assert engine.scheduler.reset_cache()
            case "restart":
                finish_all(engine, tiering)
                known |= {r.block_hashes[-1]: r.block_hashes for r in engine.requests.values() if r.block_hashes}
                engine, index = make_engine(tiering, emit_events=True), RouterIndex()
            case "compare":
                finish_all(engine, tiering)
                known |= {r.block_hashes[-1]: r.block_hashes for r in engine.requests.values() if r.block_hashes}
                index.follow(engine.scheduler.take_events())
                assert index.blocks[MEDIUM_STORAGE] == on_disk(tiering, known.values(), blocks_per_chunk)
        index.follow(engine.scheduler.take_events())
    finish_all(engine, tiering)
    known |= {r.block_hashes[-1]: r.block_hashes for r in engine.requests.values() if r.block_hashes}
    index.follow(engine.scheduler.take_events())
    assert index.blocks[MEDIUM_STORAGE] == on_disk(tiering, known.values(), blocks_per_chunk)


def on_disk(tiering: SimulatedTiering, known: Iterable[list[bytes]], blocks_per_chunk: int) -> set[tuple[bytes, int]]:
    """The blocks of these prompts that all workers have on disk, under the names that the engine uses now."""
    found = set()
    for hashes in known:
        for end in range(blocks_per_chunk, len(hashes) + 1, blocks_per_chunk):
            (name,) = tiering.lower.tasks.names([offload_key(hashes[end - 1], 0)])
            if all(name in medium.chunks for medium in tiering.media[0]):
                found |= {(block_hash, 0) for block_hash in hashes[end - blocks_per_chunk : end]}
    return found


def test_what_a_disk_evicts_is_taken_back_once() -> None:
    tiering = SimulatedTiering(60, [LISTED])
    tiering.media[0][0].max_chunks = 11
    engine = first_engine(tiering)
    events = list(engine.scheduler.take_events())
    engine.add("other", prompt(1, 13), 1)
    finish_all(engine, tiering)
    removed = [event for event in engine.scheduler.take_events() if isinstance(event, BlockRemoved)]
    gone = [block_hash for event in removed if event.medium == MEDIUM_STORAGE for block_hash in event.block_hashes]
    first = [
        h
        for event in events
        if isinstance(event, BlockStored) and event.medium == MEDIUM_STORAGE
        for h in event.block_hashes
    ]
    assert sorted(gone) == sorted(first[:3])
    tiering.media[0][0].stalls = False
    lose_disk(engine, tiering)
    removed = [event for event in engine.scheduler.take_events() if isinstance(event, BlockRemoved)]
    counts = Counter(h for event in removed if event.medium == MEDIUM_STORAGE for h in event.block_hashes)
    assert set(first[3:]) <= counts.keys() and max(counts.values()) == 1


def test_a_chunk_that_is_lost_while_its_job_goes_on_with_others_is_not_announced_for_good() -> None:
    """The job says that it was stored, but only after the tier has said that it was lost."""
    medium = HeldMedium()
    queue = HeldQueue(medium, VirtualClock(), auto=False, is_listed=True)
    worker = TierWorker({"disk": queue}, np.zeros((4, 8), np.uint8), 1, VirtualClock())
    names = (b"a" * 36, b"b" * 36)
    worker.start(TierCommand(1, 0, JobKind.STORE, names, (0, 1), (None, None), 10.0))
    (job,) = queue.pending
    job.answers[0] = medium.access(job, 0, 0.0)
    medium.lose(names[0])
    worker.poll()
    report = worker.take_report()
    assert report is not None and report.losses[0].keys == names[:1]
    job.answers[1] = medium.access(job, 1, 0.0)
    queue.pending.remove(job)
    job.status = JobStatus.DONE
    queue._ended.append(job)
    assert worker.poll() == {1: TransferOutcome.DONE}
    report = worker.take_report()
    assert report is not None and report.answers[1] == (bytes([DONE | OPEN] * 2), 1)
    assert report.losses[0].keys == names[:1], "to be applied after the answers"
    worker.poll()
    assert worker.take_report() is None


def lose_disk(engine: SimulatedEngine, tiering: SimulatedTiering) -> None:
    """The disk is gone, and requests for what was there notice it."""
    tiering.media[0][0].is_gone = True
    for at in range(6):
        lose_host_memory(engine, tiering)
        engine.add(f"lost {at}", prompt(1, 45), 1)
        finish_all(engine, tiering)


extra_key: st.SearchStrategy[ExtraKey] = st.one_of(st.text(), st.binary(), st.tuples(st.text(), st.integers(0, 2**40)))


@st.composite
def contents(draw: st.DrawFn) -> Contents:
    num_blocks = draw(st.integers(1, 4))
    return Contents(
        draw(st.none() | st.binary(min_size=32, max_size=32)),
        array(TOKEN_TYPE, draw(st.lists(st.integers(0, 2**32 - 1), min_size=4 * num_blocks, max_size=4 * num_blocks))),
        tuple(draw(st.lists(st.binary(min_size=32, max_size=32), min_size=num_blocks - 1, max_size=num_blocks - 1))),
        tuple(
            tuple(keys)
            for keys in draw(st.lists(st.lists(extra_key, max_size=2), min_size=num_blocks, max_size=num_blocks))
        ),
        draw(st.none() | st.builds(Adapter, st.text(), st.integers(0, 1000))),
        draw(st.booleans()),
    )


@given(contents())
def test_contents_come_back_as_they_were(known: Contents) -> None:
    assert contents_in(known.details(), 4) == known


@given(st.binary(max_size=80), st.binary(max_size=60))
def test_whatever_a_disk_has_in_their_place_is_no_error(tokens: bytes, extras: bytes) -> None:
    found = contents_in(Details(tokens, extras), 4)
    assert found is None or len(found.tokens) == 4 * len(found.extra_keys)


def test_contents_of_another_size_are_not_taken() -> None:
    known = Contents(None, array(TOKEN_TYPE, range(8)), (bytes(32),), ((), ()))
    assert contents_in(known.details(), 4) == known
    assert contents_in(known.details(), 8) is None
