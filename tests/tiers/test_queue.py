"""The queue of a tier: order, limits, deadlines, cancels."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import pytest

from cargohold.lab.simulation.faults import VirtualClock
from cargohold.tiers import (
    BreakerConfig,
    BreakerState,
    JobKind,
    JobStatus,
    LoadOutcome,
    QueueConfig,
    StoreOutcome,
    TierHealth,
    TierJob,
)
from cargohold.tiers.chunk_format import NO_NOTE, Note
from cargohold.tiers.port import JobLedger
from tests.tiers.queues import CHUNK, WAIT_S, Gate, chunk, faulty, queue_on
from tests.wrapped_tiers import FaultyTier, MemoryTier


def test_a_stored_chunk_is_found_and_loaded() -> None:
    with queue_on(MemoryTier(CHUNK)) as setup:
        keys = [b"a", b"b", b"c"]
        stored = setup.run(JobKind.STORE, keys[:2], [chunk(1), chunk(2)])
        assert stored.status is JobStatus.DONE and stored.answers == [StoreOutcome.STORED] * 2
        assert setup.run(JobKind.PROBE, keys).answers == [True, True, False]
        into = [bytearray(CHUNK) for _ in keys]
        loaded = setup.run(JobKind.LOAD, keys, into)
        assert loaded.succeeded == [True, True, False]
        assert into == [chunk(1), chunk(2), bytearray(CHUNK)]
        assert setup.run(JobKind.STORE, [b"a"], [chunk(1)]).answers == [StoreOutcome.PRESENT]
        assert setup.run(JobKind.REMOVE, [b"a"]).succeeded == [True]
        assert setup.run(JobKind.PROBE, keys).succeeded == [False, True, False]
        assert setup.queue.health() == TierHealth()


def test_a_damaged_chunk_says_nothing_against_its_medium() -> None:
    class Damaged(MemoryTier):
        def load(self, key: bytes, into: memoryview) -> LoadOutcome:
            return LoadOutcome.CORRUPT if key == b"damaged" else super().load(key, into)

    with queue_on(Damaged(CHUNK)) as setup:
        keys = [b"a", b"damaged", b"b"]
        setup.run(JobKind.STORE, keys, [chunk(at) for at in range(3)])
        result = setup.run(JobKind.LOAD, keys, [bytearray(CHUNK) for _ in keys])
        assert (result.status, result.answers) == (
            JobStatus.DONE,
            [LoadOutcome.LOADED, LoadOutcome.CORRUPT, LoadOutcome.LOADED],
        )
        assert setup.queue.health() == TierHealth()


def test_a_job_without_chunks_is_done() -> None:
    with queue_on(MemoryTier(CHUNK)) as setup:
        assert setup.run(JobKind.PROBE, []).status is JobStatus.DONE


def test_parents_of_chunks_reach_the_tier() -> None:
    parents: dict[bytes, bytes | None] = {}

    class Noting(MemoryTier):
        def store(
            self, key: bytes, payload: memoryview, parent: bytes | None = None, note: Note = NO_NOTE
        ) -> StoreOutcome:
            parents[key] = parent
            return super().store(key, payload, parent, note)

    with queue_on(Noting(CHUNK)) as setup:
        buffers = [memoryview(chunk(at)) for at in range(4)]
        job = TierJob(1, JobKind.STORE, [b"b", b"c", b"z", b"n"], 1.0, buffers, [b"a", b"b", b"y", None])
        assert setup.queue.submit(job)
        setup.finish()
        assert setup.queue.submit(TierJob(2, JobKind.STORE, [b"m"], 1.0, [memoryview(chunk(4))]))
        setup.finish()
    assert parents == {b"b": b"a", b"c": b"b", b"z": b"y", b"n": None, b"m": None}


def test_a_probe_or_load_touches_its_chunks() -> None:
    used: list[Sequence[bytes]] = []

    class Noting(MemoryTier):
        def touch(self, keys: Sequence[bytes]) -> None:
            used.append(list(keys))

    with queue_on(Noting(CHUNK)) as setup:
        setup.run(JobKind.STORE, [b"a", b"b"], [chunk(1), chunk(2)])
        assert used == []
        setup.run(JobKind.PROBE, [b"a", b"b"])
        assert used == [[b"a", b"b"]]
        setup.run(JobKind.LOAD, [b"a", b"b"], [bytearray(CHUNK), bytearray(CHUNK)])
        assert used == [[b"a", b"b"]] * 2
        assert setup.run(JobKind.TOUCH, [b"b", b"c"]).answers == [True, False]
    assert used[2:] == [[b"b", b"c"]]


def test_look_ups_and_loads_take_turns_and_writes_come_after_both() -> None:
    """Found by simulation: prompts of which nothing was there waited until all that others wanted was loaded."""
    ledger, _ = ledger_with(JobKind.STORE, 2)
    keys = [bytes([at]) for at in range(3)]
    ledger.add(TierJob(2, JobKind.LOAD, keys, 10.0, [memoryview(chunk(0)) for _ in keys]))
    first = ledger.take()
    for job_id in (3, 4, 5):
        ledger.add(TierJob(job_id, JobKind.PROBE if job_id < 5 else JobKind.TOUCH, keys, 10.0))
    taken = [work[0].job_id for work in (first, *iter(ledger.take, None)) if work is not None]
    assert taken == [2, 3, 2, 4, 2, 5, 1, 1]


def test_loads_go_before_stores() -> None:
    order: deque[str] = deque()
    gate = Gate("probe")

    def fault(operation: str) -> None:
        gate(operation)
        order.append(operation)

    with queue_on(faulty(fault), QueueConfig(num_threads=1), gate) as setup:
        setup.submit(JobKind.PROBE, [b"x"])
        gate.wait_for_arrival()  # the only thread is busy, so the others queue up
        setup.submit(JobKind.STORE, [b"a", b"b"], [chunk(1), chunk(2)])
        setup.submit(JobKind.LOAD, [b"c"], [bytearray(CHUNK)])
        gate.opened.set()
        assert setup.queue.drain(WAIT_S)
        assert [operation for operation in order if operation != "touch"] == ["probe", "load", "store", "store"]


def test_a_full_queue_refuses_at_once_and_kinds_do_not_crowd_each_other_out() -> None:
    gate = Gate("store")
    config = QueueConfig(num_threads=1, max_store_chunks=2, max_urgent_chunks=3)
    with queue_on(faulty(gate), config, gate) as setup:
        assert setup.submit(JobKind.STORE, [b"a", b"b"], [chunk(1), chunk(2)])
        assert not setup.submit(JobKind.STORE, [b"c"], [chunk(3)])
        assert not setup.submit(JobKind.PROBE, [b"a", b"b", b"c", b"d"])
        assert setup.submit(JobKind.PROBE, [b"a", b"b", b"c"])
        gate.opened.set()
        assert setup.queue.drain(WAIT_S)
        assert setup.submit(JobKind.STORE, [b"c"], [chunk(3)])


def test_a_hanging_load_ends_at_its_deadline_and_never_writes_to_its_buffer_afterwards() -> None:
    gate = Gate("load")
    inner = MemoryTier(CHUNK)
    inner.store(b"a", memoryview(chunk(1)))
    with queue_on(FaultyTier(inner, gate), QueueConfig(num_threads=1), gate) as setup:
        buffer = bytearray(CHUNK)
        setup.submit(JobKind.LOAD, [b"a"], [buffer], timeout_s=1.0)
        gate.wait_for_arrival()
        assert setup.queue.poll() == []
        setup.clock.advance(1.5)
        (result,) = setup.queue.poll()
        assert (result.status, result.succeeded) == (JobStatus.EXPIRED, [False])
        gate.opened.set()
        # The thread is free again when it has served the next job; what it brought late was thrown away.
        assert setup.run(JobKind.PROBE, [b"a"]).succeeded == [True]
        assert buffer == bytearray(CHUNK)


def ledger_with(kind: JobKind, num_chunks: int) -> tuple[JobLedger, TierJob]:
    ledger = JobLedger(VirtualClock())
    keys = [bytes([at]) for at in range(num_chunks)]
    ledger.add(TierJob(1, kind, keys, 10.0, [memoryview(chunk(0)) for _ in keys]))
    live = ledger.find(1)
    assert live is not None
    return ledger, live


def test_a_job_ends_once_and_not_before_all_have_let_go_of_its_buffers() -> None:
    ledger, job = ledger_with(JobKind.LOAD, 2)
    assert [ledger.take() for _ in range(3)] == [(job, 0), (job, 1), None]
    assert [ledger.begin_copy(job) for _ in range(2)] == [True, True]
    assert ledger.end(job, JobStatus.CANCELLED)
    assert not ledger.end(job, JobStatus.EXPIRED, "too late for that")
    assert not ledger.begin_copy(job)
    assert ledger.ended == [] and ledger.num_chunks[True] == 2, "its buffers are still written to"
    assert not ledger.end_copy(job) and ledger.ended == []
    assert not ledger.answer(job, 0, [LoadOutcome.LOADED])
    assert ledger.end_copy(job)
    assert ledger.ended == [job] and (job.status, job.answers) == (JobStatus.CANCELLED, [None, None])
    assert not ledger.answer(job, 1, [LoadOutcome.LOADED]) and len(ledger) == ledger.num_chunks[True] == 0


def test_a_job_is_done_with_the_last_answer() -> None:
    ledger, job = ledger_with(JobKind.LOAD, 2)
    assert not ledger.answer(job, 1, [LoadOutcome.ABSENT])
    assert ledger.answer(job, 0, [LoadOutcome.LOADED])
    assert ledger.ended == [job]
    assert (job.status, job.answers) == (JobStatus.DONE, [LoadOutcome.LOADED, LoadOutcome.ABSENT])


@pytest.mark.parametrize("kind", [JobKind.LOAD, JobKind.PROBE])
def test_an_ended_job_begins_no_further_chunk(kind: JobKind) -> None:
    ledger, job = ledger_with(kind, 3)
    other = TierJob(2, kind, [b"other"], 10.0)
    ledger.add(other)
    assert kind is JobKind.PROBE or ledger.take() is not None
    ledger.end(job, JobStatus.CANCELLED)
    assert ledger.take() == (other, 0)
    assert ledger.take() is None


class Watched(list[bytes]):
    """Keys of a job, of which can be told whether anybody still has them."""


def test_jobs_that_have_ended_are_forgotten_though_every_thread_hangs() -> None:
    gate = Gate("load")
    with queue_on(FaultyTier(MemoryTier(CHUNK), gate), QueueConfig(num_threads=1), gate) as setup:
        setup.submit(JobKind.LOAD, [b"a"], [bytearray(CHUNK)])
        gate.wait_for_arrival()
        jobs = []
        for _ in range(10):
            keys = Watched([b"b"])
            jobs.append(weakref.ref(keys))
            assert setup.submit(JobKind.LOAD, keys, [bytearray(CHUNK)])
            setup.queue.cancel(setup.num_jobs)
            setup.queue.poll()
            del keys
        assert sum(job() is not None for job in jobs) <= 1


def test_an_answer_after_the_deadline_does_not_count_for_the_medium() -> None:
    gate = Gate("remove")

    def fault(operation: str) -> str | None:
        gate(operation)
        return "gone" if operation == "store" else None

    config = QueueConfig(num_threads=1, breaker=BreakerConfig(failures_to_open=2))
    with queue_on(faulty(fault), config, gate) as setup:
        setup.submit(JobKind.REMOVE, [b"a"], timeout_s=1.0)
        gate.wait_for_arrival()
        setup.clock.advance(2.0)
        assert [result.status for result in setup.queue.poll()] == [JobStatus.EXPIRED]
        gate.opened.set()
        assert setup.run(JobKind.STORE, [b"a"], [chunk(1)]).status is JobStatus.FAILED
        assert setup.state() is BreakerState.OPEN, "two failures in a row: what came between was not asked for any more"


def test_a_late_store_writes_what_the_buffer_held_while_the_job_was_live() -> None:
    gate = Gate("store")
    inner = MemoryTier(CHUNK)
    with queue_on(FaultyTier(inner, gate), QueueConfig(num_threads=1), gate) as setup:
        buffer = chunk(1)
        setup.submit(JobKind.STORE, [b"a"], [buffer], timeout_s=1.0)
        gate.wait_for_arrival()
        setup.clock.advance(2.0)
        assert setup.queue.poll()[0].status is JobStatus.EXPIRED
        buffer[:] = chunk(9)  # the slot belongs to another chunk now
        gate.opened.set()
        into = bytearray(CHUNK)
        setup.run(JobKind.LOAD, [b"a"], [into])
        assert into == chunk(1)


def test_a_job_that_was_queued_too_long_is_never_begun() -> None:
    gate = Gate("probe")
    calls: list[str] = []

    def fault(operation: str) -> None:
        calls.append(operation)
        gate(operation)

    with queue_on(faulty(fault), QueueConfig(num_threads=1), gate) as setup:
        setup.submit(JobKind.PROBE, [b"a"])
        gate.wait_for_arrival()
        setup.submit(JobKind.STORE, [b"a"], [chunk(1)], timeout_s=1.0)
        setup.clock.advance(2.0)
        gate.opened.set()
        assert setup.queue.drain(WAIT_S)
        assert {result.kind: result.status for result in setup.queue.poll()} == {
            JobKind.PROBE: JobStatus.DONE,
            JobKind.STORE: JobStatus.EXPIRED,
        }
    assert "store" not in calls


def test_a_cancelled_job_ends_at_once_and_its_rest_is_not_carried_out() -> None:
    gate = Gate("store")
    inner = MemoryTier(CHUNK)
    with queue_on(FaultyTier(inner, gate), QueueConfig(num_threads=1), gate) as setup:
        job = setup.submit(JobKind.STORE, [b"a", b"b"], [chunk(1), chunk(2)])
        assert job
        gate.wait_for_arrival()
        setup.queue.cancel(job.job_id)
        (result,) = setup.queue.poll()
        assert result.status is JobStatus.CANCELLED and result.answers == [None, None]
        setup.queue.cancel(job.job_id)  # too late, and harmless
        assert setup.queue.poll() == []
        gate.opened.set()
        assert setup.run(JobKind.PROBE, [b"b"]).succeeded == [False]
        assert setup.state() is BreakerState.CLOSED
