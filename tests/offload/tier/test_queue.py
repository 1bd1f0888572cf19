"""The asynchronous front of a tier: whatever the medium does, nobody waits and no buffer is touched too late."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from cargohold.errors import ConfigError, TierError
from cargohold.offload.tier import (
    BreakerConfig,
    BreakerState,
    FaultyTier,
    JobKind,
    JobStatus,
    LoadOutcome,
    MemoryTier,
    QueueConfig,
    StoreOutcome,
    Tier,
    TierHealth,
    TierJob,
    TierQueue,
)
from cargohold.offload.tier.io_thread import IoThread, Work
from cargohold.offload.tier.jobs import JobLedger
from cargohold.simulation.clock import VirtualClock
from tests.offload.tier.common import in_thread

CHUNK = 5000
WAIT_S = 30.0  # a bound on hangs, not a measure


def chunk(seed: int) -> bytearray:
    return bytearray(bytes([seed % 251, (seed * 7) % 251]) * (CHUNK // 2))


class Gate:
    """A fault that blocks every call of some kind until it is opened, and says when one has arrived."""

    def __init__(self, *operations: str) -> None:
        self.operations = operations
        self.arrived = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self, operation: str) -> None:
        if operation in self.operations:
            self.arrived.release()
            assert self.opened.wait(WAIT_S)

    def wait_for_arrival(self) -> None:
        assert self.arrived.acquire(timeout=WAIT_S)


class Turnstile:
    """A fault that lets one call of some kind pass at a time, and says when one has arrived."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self._arrived, self._passes = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, operation: str) -> None:
        if operation == self.operation:
            self._arrived.release()
            assert self._passes.acquire(timeout=WAIT_S)

    def wait_for_arrival(self) -> None:
        assert self._arrived.acquire(timeout=WAIT_S)

    def let_pass(self) -> None:
        self._passes.release()


class Setup:
    def __init__(self, tier: Tier, config: QueueConfig) -> None:
        self.clock = VirtualClock()
        self.queue = TierQueue(tier, self.clock, config)
        self.num_jobs = 0

    def submit(
        self,
        kind: JobKind,
        keys: Sequence[bytes],
        buffers: Sequence[bytearray] = (),
        *,
        timeout_s: float = 10.0,
    ) -> TierJob | None:
        self.num_jobs += 1
        views = [memoryview(buffer) for buffer in buffers]
        job = TierJob(self.num_jobs, kind, keys, self.clock() + timeout_s, views)
        return job if self.queue.submit(job) else None

    def run(self, kind: JobKind, keys: Sequence[bytes], buffers: Sequence[bytearray] = ()) -> TierJob:
        assert self.submit(kind, keys, buffers)
        return self.finish()

    def state(self) -> BreakerState:
        return self.queue.health().worst

    def finish(self) -> TierJob:
        assert self.queue.drain(WAIT_S)
        (result,) = self.queue.poll()
        return result


@contextmanager
def queue_on(tier: Tier, config: QueueConfig | None = None, gate: Gate | None = None) -> Iterator[Setup]:
    setup = Setup(tier, config or QueueConfig(num_threads=2))
    yield setup
    if gate is not None:
        gate.opened.set()
    setup.queue.shutdown(WAIT_S)


def faulty(fault: Callable[[str], str | None]) -> FaultyTier:
    return FaultyTier(MemoryTier(CHUNK), fault)


def test_what_is_stored_is_found_and_loaded() -> None:
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
        def store(self, key: bytes, payload: memoryview, parent: bytes | None = None) -> StoreOutcome:
            parents[key] = parent
            return super().store(key, payload, parent)

    with queue_on(Noting(CHUNK)) as setup:
        buffers = [memoryview(chunk(at)) for at in range(4)]
        job = TierJob(1, JobKind.STORE, [b"b", b"c", b"z", b"n"], 1.0, buffers, [b"a", b"b", b"y", None])
        assert setup.queue.submit(job)
        setup.finish()
        assert setup.queue.submit(TierJob(2, JobKind.STORE, [b"m"], 1.0, [memoryview(chunk(4))]))
        setup.finish()
    assert parents == {b"b": b"a", b"c": b"b", b"z": b"y", b"n": None, b"m": None}


def test_what_is_asked_for_or_loaded_counts_as_used() -> None:
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
def test_of_jobs_that_have_ended_nothing_more_is_begun(kind: JobKind) -> None:
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


def test_what_a_late_thread_answers_says_nothing_of_the_medium() -> None:
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


def test_a_failing_medium_is_left_alone_and_found_again() -> None:
    trouble: list[str | None] = ["cable unplugged"]
    calls: list[str] = []

    def fault(operation: str) -> str | None:
        calls.append(operation)
        return trouble[0]

    config = QueueConfig(num_threads=1, breaker=BreakerConfig(failures_to_open=3, cooldown_s=1.0, max_cooldown_s=3.0))
    with queue_on(faulty(fault), config) as setup:
        for _ in range(3):
            result = setup.run(JobKind.PROBE, [b"a"])
            assert (result.status, result.reason) == (JobStatus.FAILED, "cable unplugged")
        assert setup.queue.health() == TierHealth(look_up=BreakerState.OPEN, reason="cable unplugged")
        assert not setup.submit(JobKind.PROBE, [b"a"])
        for cooldown in (1.0, 2.0, 3.0, 3.0):
            setup.clock.advance(cooldown - 0.1)
            assert setup.state() is BreakerState.OPEN
            setup.clock.advance(0.1)
            assert setup.state() is BreakerState.HALF_OPEN
            assert setup.run(JobKind.PROBE, [b"a"]).status is JobStatus.FAILED
        assert len(calls) == 7
        trouble[0] = None
        setup.clock.advance(3.0)
        assert setup.run(JobKind.PROBE, [b"a"]).status is JobStatus.DONE
        assert setup.state() is BreakerState.CLOSED
        assert setup.queue.health().reason == ""


def test_a_medium_that_stays_bad_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Found by review: each failed trial was told, one a minute for look-ups, loads and writes each, for days."""
    trouble: list[str | None] = ["cable unplugged"]
    config = QueueConfig(num_threads=1, breaker=BreakerConfig(failures_to_open=1, cooldown_s=1.0, max_cooldown_s=1.0))
    with queue_on(faulty(lambda _: trouble[0]), config) as setup:
        for _ in range(1 + 100):
            assert setup.run(JobKind.PROBE, [b"a"]).status is JobStatus.FAILED
            setup.clock.advance(1.0)
        assert (
            caplog.text.count("tier memory: look-ups are suspended after several failures in a row; the last: cable")
            == 1
        )
        assert caplog.text.count("tier memory: look-ups stay suspended: a trial failed") == 7 + 4
        setup.run(JobKind.STORE, [b"a"], [chunk(1)])
        trouble[0] = None
        setup.run(JobKind.PROBE, [b"a"])
        trouble[0] = "cable unplugged again"
        setup.run(JobKind.PROBE, [b"a"])
        assert caplog.text.count("are suspended") == 3, "of writes, and of look-ups after they had worked"


class BadSpots(MemoryTier):
    """Some chunks cannot be written."""

    bad: frozenset[bytes] = frozenset()

    def store(self, key: bytes, payload: Any, parent: bytes | None = None) -> StoreOutcome:
        if key in self.bad:
            raise TierError(self.name, "bad spot")
        return super().store(key, payload, parent)


@pytest.mark.parametrize("bad", [[0], [5], [7], [0, 7]])
def test_a_chunk_that_cannot_be_written_costs_the_others_of_its_job_nothing(bad: list[int]) -> None:
    """Found by a review: a job is of several prefixes, and ended with its first bad chunk."""
    keys = [bytes([at]) for at in range(8)]
    tier = BadSpots(CHUNK)
    tier.bad = frozenset(keys[at] for at in bad)
    with queue_on(tier, QueueConfig(num_threads=1, breaker=BreakerConfig(failures_to_open=3))) as setup:
        for _ in range(3):
            result = setup.run(JobKind.STORE, keys, [chunk(at) for at in range(8)])
            assert result.status is JobStatus.DONE
            assert result.succeeded == [at not in bad for at in range(8)]
            assert all(result.answers[at] is StoreOutcome.FAILED for at in bad)
        assert setup.state() is BreakerState.CLOSED


def test_a_job_none_of_whose_chunks_can_be_written_has_failed_and_so_has_one_with_many() -> None:
    keys = [bytes([at]) for at in range(8)]
    tier = BadSpots(CHUNK)
    with queue_on(tier, QueueConfig(num_threads=1, breaker=BreakerConfig(failures_to_open=3))) as setup:
        tier.bad = frozenset(keys[:2])
        result = setup.run(JobKind.STORE, keys[:2], [chunk(at) for at in range(2)])
        assert (result.status, result.reason) == (JobStatus.FAILED, "bad spot")
        tier.bad = frozenset(keys[2:6])
        result = setup.run(JobKind.STORE, keys, [chunk(at) for at in range(8)])
        assert (result.status, result.succeeded) == (JobStatus.FAILED, [True] * 2 + [False] * 6), "three are too many"


def test_a_trial_fails_with_its_first_bad_chunk() -> None:
    keys = [bytes([at]) for at in range(8)]
    tier = BadSpots(CHUNK)
    tier.bad = frozenset(keys[:3])
    config = QueueConfig(num_threads=1, breaker=BreakerConfig(failures_to_open=3))
    with queue_on(tier, config) as setup:
        for key in keys[:3]:
            setup.run(JobKind.STORE, [key], [chunk(1)])
        setup.clock.advance(1.0)
        assert setup.state() is BreakerState.HALF_OPEN
        result = setup.run(JobKind.STORE, keys[2:], [chunk(at) for at in range(6)])
        assert (result.status, setup.state()) == (JobStatus.FAILED, BreakerState.OPEN)


def test_a_load_fails_with_its_first_bad_chunk() -> None:
    """Each is of one prefix: behind a chunk that is missing the others are of no use."""
    num_loads = 0

    def fault(operation: str) -> str | None:
        nonlocal num_loads
        num_loads += operation == "load"
        return "bad spot" if operation == "load" and num_loads == 2 else None

    with queue_on(faulty(fault), QueueConfig(num_threads=1)) as setup:
        keys = [bytes([at]) for at in range(4)]
        setup.run(JobKind.STORE, keys, [chunk(at) for at in range(4)])
        result = setup.run(JobKind.LOAD, keys, [bytearray(CHUNK) for _ in keys])
        assert (result.status, result.reason) == (JobStatus.FAILED, "bad spot")
        assert (result.succeeded, num_loads) == ([True, False, False, False], 2)


def test_a_touch_is_no_trial_and_proves_nothing() -> None:
    trouble: list[str | None] = [None]
    with queue_on(faulty(lambda _: trouble[0]), QueueConfig(breaker=BreakerConfig(failures_to_open=3))) as setup:
        for _ in range(3):
            trouble[0] = None
            assert setup.run(JobKind.TOUCH, [b"a"]).status is JobStatus.DONE
            trouble[0] = "gone"
            assert setup.run(JobKind.TOUCH, [b"a"]).status is JobStatus.FAILED
            assert setup.state() is BreakerState.CLOSED
            assert setup.run(JobKind.PROBE, [b"a"]).status is JobStatus.FAILED
        assert setup.state() is BreakerState.OPEN, "three failures in a row, for touches do not count"
        setup.clock.advance(1.0)
        assert not setup.submit(JobKind.TOUCH, [b"a"])
        assert setup.state() is BreakerState.HALF_OPEN


def test_a_probe_answered_from_an_index_is_no_trial_either() -> None:
    trouble = ["gone"]

    def fault(operation: str) -> str | None:
        return trouble[0] if trouble and operation == "load" else None

    tier = faulty(fault)
    tier.has_index = True
    with queue_on(tier, QueueConfig(breaker=BreakerConfig(failures_to_open=2))) as setup:
        setup.run(JobKind.STORE, [b"a"], [chunk(1)])
        for _ in range(2):
            assert setup.run(JobKind.PROBE, [b"a"]).status is JobStatus.DONE
            assert setup.run(JobKind.LOAD, [b"a"], [chunk(1)]).status is JobStatus.FAILED
        assert setup.state() is BreakerState.OPEN, "two failures in a row, for probes do not count"
        assert not setup.submit(JobKind.LOAD, [b"a"], [chunk(1)])
        assert setup.run(JobKind.STORE, [b"b"], [chunk(1)]).status is JobStatus.DONE
        setup.clock.advance(1.0)
        assert setup.run(JobKind.PROBE, [b"a"]).status is JobStatus.DONE, "or no load would ever be tried"
        assert setup.state() is BreakerState.HALF_OPEN
        trouble.clear()
        assert setup.run(JobKind.LOAD, [b"a"], [chunk(1)]).status is JobStatus.DONE
        assert setup.state() is BreakerState.CLOSED


@pytest.mark.parametrize("has_index", [True, False])
def test_what_an_index_answers_for_the_medium_ends_no_trial(has_index: bool) -> None:
    """Found by reading: a store of what was there already, and a load of what was not, closed a disk's breaker."""
    trouble: list[str] = []

    tier = faulty(lambda _: trouble[0] if trouble else None)
    tier.has_index = has_index
    with queue_on(tier, QueueConfig(num_threads=1, breaker=BreakerConfig(failures_to_open=1))) as setup:
        setup.run(JobKind.STORE, [b"a"], [chunk(1)])
        for kind, key in ((JobKind.LOAD, b"a"), (JobKind.STORE, b"c")):
            trouble[:] = ["gone"]
            setup.run(kind, [key], [chunk(1)])
            trouble.clear()
            setup.clock.advance(1.0)
            assert setup.state() is BreakerState.HALF_OPEN
            if kind is JobKind.LOAD:
                assert setup.run(kind, [b"b"], [chunk(1)]).answers == [LoadOutcome.ABSENT]
            else:
                assert setup.run(kind, [b"a"], [chunk(1)]).answers == [StoreOutcome.PRESENT]
            expected = BreakerState.HALF_OPEN if has_index else BreakerState.CLOSED
            assert setup.state() is expected, "who has no index asked the medium"
            assert setup.run(kind, [key], [chunk(1)]).status is JobStatus.DONE
            assert setup.state() is BreakerState.CLOSED


def test_writes_that_fail_beside_chunks_that_are_there_are_failures_in_a_row() -> None:
    """Found by reading: the chunks that were there counted as successes of a disk that could write none."""
    tier = BadSpots(CHUNK)
    tier.has_index = True
    keys = [bytes([at]) for at in range(4)]
    with queue_on(tier, QueueConfig(num_threads=1, breaker=BreakerConfig(failures_to_open=2))) as setup:
        setup.run(JobKind.STORE, keys[:3], [chunk(at) for at in range(3)])
        tier.bad = frozenset(keys[3:])
        for expected in (BreakerState.CLOSED, BreakerState.OPEN):
            result = setup.run(JobKind.STORE, keys, [chunk(at) for at in range(4)])
            assert (result.status, result.succeeded) == (JobStatus.DONE, [True, True, True, False])
            assert setup.state() is expected


def test_one_trial_at_a_time() -> None:
    gate = Gate("probe")
    trouble: list[str | None] = ["gone"]

    def fault(operation: str) -> str | None:
        gate(operation)
        return trouble[0]

    config = QueueConfig(num_threads=1, breaker=BreakerConfig(failures_to_open=1))
    with queue_on(faulty(fault), config, gate) as setup:
        setup.run(JobKind.REMOVE, [b"a"])
        setup.clock.advance(1.0)
        assert setup.submit(JobKind.PROBE, [b"a"])
        gate.wait_for_arrival()
        trial = setup.submit(JobKind.STORE, [b"a"], [chunk(1)])
        assert trial
        assert not setup.submit(JobKind.REMOVE, [b"a"])
        setup.queue.cancel(trial.job_id)  # says nothing of the medium: another may try
        trouble[0] = None
        gate.opened.set()
        assert setup.submit(JobKind.REMOVE, [b"a"])
        assert setup.queue.drain(WAIT_S)
        assert setup.state() is BreakerState.CLOSED


def test_a_job_without_chunks_is_no_trial() -> None:
    """Found by reading: it was taken for one that had not ended, so the tier was never tried again."""
    trouble: list[str | None] = ["gone"]
    config = QueueConfig(breaker=BreakerConfig(failures_to_open=1))
    with queue_on(faulty(lambda _: trouble[0]), config) as setup:
        setup.run(JobKind.REMOVE, [b"a"])
        setup.clock.advance(1.0)
        assert setup.run(JobKind.REMOVE, []).status is JobStatus.DONE
        assert setup.state() is BreakerState.HALF_OPEN, "it proves nothing"
        trouble[0] = None
        assert setup.run(JobKind.REMOVE, [b"a"]).status is JobStatus.DONE
        assert setup.state() is BreakerState.CLOSED


def test_what_is_no_trial_does_not_end_one_when_it_is_cancelled() -> None:
    gate = Gate("probe")

    def fault(operation: str) -> str | None:
        gate(operation)
        return "gone" if operation == "load" else None

    tier = faulty(fault)
    tier.has_index = True
    with queue_on(tier, QueueConfig(num_threads=1, breaker=BreakerConfig(failures_to_open=1)), gate) as setup:
        assert setup.run(JobKind.LOAD, [b"a"], [bytearray(CHUNK)]).status is JobStatus.FAILED
        setup.clock.advance(1.0)
        probe = setup.submit(JobKind.PROBE, [b"a"])
        trial = setup.submit(JobKind.LOAD, [b"a"], [bytearray(CHUNK)])
        assert probe and trial
        setup.queue.cancel(probe.job_id)
        assert not setup.submit(JobKind.LOAD, [b"a"], [bytearray(CHUNK)])
        setup.queue.cancel(trial.job_id)
        assert setup.submit(JobKind.LOAD, [b"a"], [bytearray(CHUNK)])


def test_what_is_queued_fails_when_its_breaker_opens(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("probe")
    trouble: list[str | None] = ["gone"]

    def fault(operation: str) -> str | None:
        gate(operation)
        return trouble.pop() if trouble else None

    config = QueueConfig(num_threads=1, breaker=BreakerConfig(failures_to_open=1))
    with queue_on(faulty(fault), config, gate) as setup:
        setup.submit(JobKind.PROBE, [b"a"])
        setup.submit(JobKind.PROBE, [b"b"])  # which nothing else would keep from succeeding
        setup.submit(JobKind.STORE, [b"b"], [chunk(1)])
        gate.opened.set()
        assert setup.queue.drain(WAIT_S)
        assert [(result.kind, result.status) for result in setup.queue.poll()] == [
            (JobKind.PROBE, JobStatus.FAILED),
            (JobKind.PROBE, JobStatus.FAILED),
            (JobKind.STORE, JobStatus.DONE),
        ]
        told = "look-ups are suspended after several failures in a row; the last: gone"
        assert told in caplog.text


def test_hanging_threads_open_the_breaker() -> None:
    gate = Gate("probe")
    with queue_on(faulty(gate), QueueConfig(num_threads=1), gate) as setup:
        for _ in range(3):
            setup.submit(JobKind.PROBE, [b"a"], timeout_s=1.0)
        setup.clock.advance(2.0)
        assert [result.status for result in setup.queue.poll()] == [JobStatus.EXPIRED] * 3
        assert setup.state() is BreakerState.OPEN


def test_a_medium_that_works_and_is_busy_is_not_suspended() -> None:
    """Found by a review: one long load kept a disk busy, and the jobs behind it, which came too late, counted as failures."""
    loads = Turnstile("load")
    with queue_on(faulty(loads), QueueConfig(num_threads=1)) as setup:
        setup.run(JobKind.STORE, [b"a", b"b"], [chunk(1), chunk(2)])
        setup.submit(JobKind.LOAD, [b"a"], [bytearray(CHUNK)])
        loads.wait_for_arrival()
        for _ in range(3):
            setup.submit(JobKind.LOAD, [b"b"], [bytearray(CHUNK)], timeout_s=1.0)
        setup.clock.advance(0.5)
        loads.let_pass()
        loads.wait_for_arrival()  # the first load has ended, and the next one has begun
        setup.clock.advance(1.0)
        statuses = [result.status for result in setup.queue.poll()]
        assert statuses == [JobStatus.DONE, *[JobStatus.EXPIRED] * 3]
        assert setup.state() is BreakerState.CLOSED
        loads.let_pass()


@pytest.mark.parametrize(("num_done", "state"), [(1, BreakerState.OPEN), (2, BreakerState.CLOSED)])
def test_a_medium_that_hangs_in_each_job_is_suspended_unless_it_does_most_of_it(
    num_done: int, state: BreakerState
) -> None:
    loads = Turnstile("load")
    with queue_on(faulty(loads), QueueConfig(num_threads=1)) as setup:
        keys = [b"a", b"b", b"c", b"d"]
        setup.run(JobKind.STORE, keys, [chunk(at) for at in range(4)])
        for _ in range(3):
            setup.submit(JobKind.LOAD, keys, [bytearray(CHUNK) for _ in keys], timeout_s=1.0)
            for _ in range(num_done):
                loads.wait_for_arrival()
                loads.let_pass()
            loads.wait_for_arrival()  # the next chunk has been begun, so those before it are done
            setup.clock.advance(2.0)
            assert [result.status for result in setup.queue.poll()] == [JobStatus.EXPIRED]
            loads.let_pass()  # too late: that says nothing
        assert setup.state() is state


def test_an_unforeseen_error_is_a_failed_job_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fault(operation: str) -> str | None:
        if operation == "load":
            raise ZeroDivisionError("our own bug")
        return None

    with queue_on(faulty(fault)) as setup:
        result = setup.run(JobKind.LOAD, [b"a"], [bytearray(CHUNK)])
        assert (result.status, result.reason) == (JobStatus.FAILED, "our own bug")
        assert "ZeroDivisionError" in caplog.text
        assert setup.run(JobKind.PROBE, [b"a"]).status is JobStatus.DONE


def dying(operation: str) -> None:
    if operation == "load":
        raise SystemExit


def _await_death(setup: Setup) -> None:
    for thread in setup.queue._threads:
        thread.join(WAIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_noticed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with queue_on(faulty(dying), QueueConfig(num_threads=1)) as setup:
        setup.submit(JobKind.LOAD, [b"a"], [bytearray(CHUNK)])
        _await_death(setup)
        (result,) = setup.queue.poll()
        assert (result.status, result.reason) == (JobStatus.FAILED, "the I/O thread died")
        assert "an I/O thread died" in caplog.text
        assert setup.run(JobKind.PROBE, [b"a"]).status is JobStatus.DONE


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_that_keep_dying_turn_the_tier_off(caplog: pytest.LogCaptureFixture) -> None:
    config = QueueConfig(num_threads=1, max_thread_deaths=1, breaker=BreakerConfig(failures_to_open=100))
    with queue_on(faulty(dying), config) as setup:
        ended = []
        for _ in range(2):
            setup.submit(JobKind.LOAD, [b"a"], [bytearray(CHUNK)])
            setup.submit(JobKind.STORE, [b"b"], [chunk(1)])
            _await_death(setup)
            ended += setup.queue.poll()
        assert setup.queue.drain(WAIT_S)
        ended += setup.queue.poll()
        assert sorted(result.job_id for result in ended) == [1, 2, 3, 4], "nobody will carry out the last one"
        assert setup.queue.health().is_off
        assert not setup.submit(JobKind.PROBE, [b"a"])
        assert "off for good" in caplog.text


class Closing(MemoryTier):
    """Counts how often it was closed."""

    num_closes = 0

    def close(self) -> None:
        self.num_closes += 1


class NoMoreThreads:
    """Threads that a machine allows so many of."""

    def __init__(self, num_allowed: int) -> None:
        self.num_allowed = num_allowed
        self.started: list[IoThread] = []

    def __call__(self, work: Work, tier: Tier) -> IoThread:
        if len(self.started) == self.num_allowed:
            raise RuntimeError("can't start new thread")
        self.started.append(IoThread(work, tier))
        return self.started[-1]


def test_a_queue_that_cannot_be_made_leaves_no_thread_and_no_open_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: the threads that could be started waited for ever, and a directory stayed locked."""
    threads, tier = NoMoreThreads(2), Closing(CHUNK)
    monkeypatch.setattr("cargohold.offload.tier.queue.IoThread", threads)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        TierQueue(tier, VirtualClock(), QueueConfig(num_threads=3))
    assert tier.num_closes == 1
    assert len(threads.started) == 2 and not any(thread.is_alive() for thread in threads.started)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_cannot_be_replaced_is_no_error_of_the_owner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by reading: whoever polled got the error, and with it the engine."""
    threads = NoMoreThreads(1)
    monkeypatch.setattr("cargohold.offload.tier.queue.IoThread", threads)
    with queue_on(faulty(dying), QueueConfig(num_threads=1, max_thread_deaths=3)) as setup:
        setup.submit(JobKind.LOAD, [b"a"], [bytearray(CHUNK)])
        _await_death(setup)
        assert [result.reason for result in setup.queue.poll()] == ["the I/O thread died"]
        assert "could not be replaced" in caplog.text
        threads.num_allowed = 2
        assert setup.queue.poll() == []
        assert setup.run(JobKind.PROBE, [b"a"]).status is JobStatus.DONE


def test_a_shutdown_that_is_to_wait_for_no_writes_does_not_complain_of_them(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("store")
    with queue_on(faulty(gate), gate=gate) as setup:
        setup.submit(JobKind.STORE, [b"a"], [chunk(1)])
        gate.wait_for_arrival()
        gate.opened.set()
        setup.queue.shutdown(WAIT_S)
        assert caplog.text == ""


def test_shutdown_cancels_what_is_left_and_closes_the_tier() -> None:
    gate, tier = Gate("probe"), Closing(CHUNK)
    setup = Setup(FaultyTier(tier, gate), QueueConfig(num_threads=1))
    setup.submit(JobKind.PROBE, [b"a"])
    gate.wait_for_arrival()
    setup.submit(JobKind.STORE, [b"a"], [chunk(1)])
    setup.queue.shutdown(0.0)
    assert [result.status for result in setup.queue.poll()] == [JobStatus.CANCELLED] * 2
    assert tier.num_closes == 0, "a thread may still use it"
    gate.opened.set()
    setup.queue.shutdown(WAIT_S)
    assert tier.num_closes == 1
    assert not setup.submit(JobKind.PROBE, [b"a"])
    assert not setup.queue.poll()


def test_a_tier_is_left_open_while_one_thread_of_several_hangs_in_it(caplog: pytest.LogCaptureFixture) -> None:
    gate, tier = Gate("probe"), Closing(CHUNK)
    setup = Setup(FaultyTier(tier, gate), QueueConfig(num_threads=3))
    setup.submit(JobKind.PROBE, [b"a"])
    gate.wait_for_arrival()
    setup.queue.shutdown(0.05)
    assert tier.num_closes == 0 and "hangs in its medium" in caplog.text
    gate.opened.set()
    setup.queue.shutdown(WAIT_S)
    assert tier.num_closes == 1


def test_shutdown_waits_no_longer_for_a_medium_that_hangs_when_it_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    """Found by freezing a file system while the engine was idle: closing it did not end."""
    gate, tier = Gate("close"), Closing(CHUNK)
    setup = Setup(FaultyTier(tier, gate), QueueConfig(num_threads=2))
    in_thread(lambda: setup.queue.shutdown(0.05), WAIT_S, "it waits for the medium")
    assert tier.num_closes == 0 and "its medium hangs, so the tier is not closed" in caplog.text
    gate.opened.set()
    setup.queue.shutdown(WAIT_S)
    assert tier.num_closes == 1, "once, though it was asked for twice"


def test_a_tier_is_closed_though_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Closing(CHUNK)
    setup = Setup(tier, QueueConfig(num_threads=2))

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    setup.queue.shutdown(WAIT_S)
    assert tier.num_closes == 1


@pytest.mark.parametrize("timeout_s", [WAIT_S, 0.0])
def test_shutdown_lets_writes_end_that_were_taken(timeout_s: float, caplog: pytest.LogCaptureFixture) -> None:
    """Found by reading: what was stored just before an engine stopped was not on the disk after its restart."""
    gate = Gate("store")
    memory = MemoryTier(CHUNK)
    setup = Setup(FaultyTier(memory, gate), QueueConfig(num_threads=1, finish_s=WAIT_S))
    setup.submit(JobKind.STORE, [b"a", b"b"], [chunk(1), chunk(2)])
    setup.submit(JobKind.STORE, [b"c"], [chunk(3)])
    gate.wait_for_arrival()
    setup.submit(JobKind.PROBE, [b"a"])
    stopping = threading.Thread(target=setup.queue.shutdown, args=(timeout_s,))
    stopping.start()
    end = time.monotonic() + WAIT_S
    results: list[TierJob] = []
    while not results and time.monotonic() < end:
        results = setup.queue.poll()
    assert [(result.kind, result.status) for result in results] == [(JobKind.PROBE, JobStatus.CANCELLED)]
    gate.opened.set()
    stopping.join(WAIT_S)
    assert [result.status for result in setup.queue.poll()] == [JobStatus.DONE] * 2
    assert memory.probe([b"a", b"b", b"c"]) == [True] * 3
    assert caplog.text == "", "nor is the tier left open"


def test_shutdown_waits_for_writes_no_longer_than_it_may(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("store")
    setup = Setup(FaultyTier(MemoryTier(CHUNK), gate), QueueConfig(num_threads=1, finish_s=0.01))
    setup.submit(JobKind.STORE, [b"a"], [chunk(1)])
    gate.wait_for_arrival()
    setup.queue.shutdown(0.02)
    assert [result.status for result in setup.queue.poll()] == [JobStatus.CANCELLED]
    assert "not everything was written within 0.01 s" in caplog.text
    gate.opened.set()
    setup.queue.shutdown(WAIT_S)


def test_an_interrupt_ends_the_wait_for_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate("store")
    setup = Setup(FaultyTier(MemoryTier(CHUNK), gate), QueueConfig(num_threads=1, finish_s=WAIT_S))
    setup.submit(JobKind.STORE, [b"a"], [chunk(1)])
    gate.wait_for_arrival()

    def interrupted(_: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(setup.queue, "drain", interrupted)
        with pytest.raises(KeyboardInterrupt):
            setup.queue.shutdown(WAIT_S)
    assert [result.status for result in setup.queue.poll()] == [JobStatus.CANCELLED]
    gate.opened.set()
    setup.queue.shutdown(WAIT_S)


@pytest.mark.parametrize("config", [{"num_threads": 0}, {"max_urgent_chunks": 0}, {"max_store_chunks": 0}])
def test_impossible_limits_are_refused_by_name(config: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(config))):
        QueueConfig(**config)  # type: ignore[arg-type]  # the other options are not integers


def test_impossible_breakers_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="failures_to_open"):
        BreakerConfig(failures_to_open=0)
    with pytest.raises(ConfigError, match="cooldown_s"):
        BreakerConfig(cooldown_s=2.0, max_cooldown_s=1.0)
    with pytest.raises(ConfigError, match="cooldown_s"):
        BreakerConfig(cooldown_s=0.0)
