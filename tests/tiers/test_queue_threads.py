"""Threads of a queue that die, hang or cannot be started, and its shutdown."""

from __future__ import annotations

import threading
import time

import pytest

from cargohold.lab.simulation.faults import VirtualClock
from cargohold.tiers import BreakerConfig, JobKind, JobStatus, QueueConfig, Tier, TierJob, TierQueue
from cargohold.tiers.memory import Pieces
from cargohold.tiers.queue import IoThread
from tests.tiers.common import in_thread
from tests.tiers.queues import CHUNK, WAIT_S, Gate, Setup, chunk, faulty, queue_on
from tests.wrapped_tiers import FaultyTier, MemoryTier


def dying(operation: str) -> None:
    if operation == "load":
        raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_is_noticed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with queue_on(faulty(dying), QueueConfig(num_threads=1)) as setup:
        setup.submit(JobKind.LOAD, [b"a"], [bytearray(CHUNK)])
        setup.await_death()
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
            setup.await_death()
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

    def __call__(self, work: TierQueue, tier: Tier) -> IoThread:
        if len(self.started) == self.num_allowed:
            raise RuntimeError("can't start new thread")
        self.started.append(IoThread(work, tier))
        return self.started[-1]


def test_a_queue_that_cannot_be_made_leaves_no_thread_and_no_open_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: the threads that could be started waited for ever, and a directory stayed locked."""
    threads, tier = NoMoreThreads(2), Closing(CHUNK)
    monkeypatch.setattr("cargohold.tiers.queue.IoThread", threads)
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
    monkeypatch.setattr("cargohold.tiers.queue.IoThread", threads)
    with queue_on(faulty(dying), QueueConfig(num_threads=1, max_thread_deaths=3)) as setup:
        setup.submit(JobKind.LOAD, [b"a"], [bytearray(CHUNK)])
        setup.await_death()
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


def test_several_threads_may_each_wait_for_a_job_of_their_own() -> None:
    queue = TierQueue(MemoryTier(CHUNK), time.monotonic, QueueConfig(num_threads=2))
    loaded: dict[int, bytearray] = {}

    def use(at: int) -> None:
        key, deadline = b"%d" % at, time.monotonic() + WAIT_S
        assert queue.perform(TierJob(2 * at, JobKind.STORE, [key], deadline, [memoryview(chunk(at))]))
        loaded[at] = bytearray(CHUNK)
        load = TierJob(
            2 * at + 1, JobKind.LOAD, [key, b"absent"], deadline, [memoryview(loaded[at]), memoryview(bytearray(9))]
        )
        assert queue.perform(load) and load.succeeded == [True, False]

    threads = [threading.Thread(target=use, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert loaded == {at: chunk(at) for at in range(8)}
    assert queue.poll() == []
    queue.shutdown(WAIT_S)


def test_who_waits_for_a_hanging_medium_waits_until_the_deadline_and_owns_the_buffer_again() -> None:
    gate = Gate("load")
    queue = TierQueue(faulty(gate), time.monotonic, QueueConfig(num_threads=1))
    into = bytearray(CHUNK)
    job = TierJob(1, JobKind.LOAD, [b"a"], time.monotonic() + 0.01, [memoryview(into)])
    assert queue.perform(job)
    assert job.status is JobStatus.EXPIRED and job.succeeded == [False]
    gate.opened.set()
    queue.shutdown(WAIT_S)
    assert into == bytearray(CHUNK)
    assert not queue.perform(TierJob(2, JobKind.LOAD, [b"a"], time.monotonic() + WAIT_S, [memoryview(into)]))
    assert queue.poll() == []


def test_a_chunk_may_lie_in_several_places() -> None:
    with queue_on(MemoryTier(CHUNK)) as setup:
        source, target = bytearray(chunk(3)), bytearray(CHUNK)
        cuts = [(0, 10), (10, 10), (10, 4000), (4000, CHUNK)]
        pieces = [Pieces([memoryview(of)[begin:end] for begin, end in cuts]) for of in (source, target)]
        for at, kind in enumerate((JobKind.STORE, JobKind.LOAD)):
            assert setup.queue.submit(TierJob(at, kind, [b"a"], WAIT_S, [pieces[at]]))
            assert setup.finish().succeeded == [True]
        assert len(pieces[0]) == CHUNK and target == source
