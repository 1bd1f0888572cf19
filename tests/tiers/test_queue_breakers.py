"""The queue of a tier that fails or hangs: failures, breakers, trials."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cargohold.errors import TierError
from cargohold.tiers import (
    BreakerConfig,
    BreakerState,
    JobKind,
    JobStatus,
    LoadOutcome,
    QueueConfig,
    StoreOutcome,
    TierHealth,
)
from cargohold.tiers.chunk_format import NO_NOTE, Note
from tests.tiers.queues import CHUNK, WAIT_S, Gate, chunk, faulty, queue_on
from tests.wrapped_tiers import MemoryTier


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


def test_a_failing_medium_is_suspended_and_tried_again() -> None:
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
        assert setup.queue.health() == TierHealth(look_up=BreakerState.OPEN, reason="cable unplugged", retry_s=1.0)
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
    """Found by use: each failed trial was a warning, one a minute for look-ups, loads and writes each, for days."""
    caplog.set_level("INFO", "cargohold")
    trouble: list[str | None] = ["cable unplugged"]
    config = QueueConfig(num_threads=1, breaker=BreakerConfig(failures_to_open=1, cooldown_s=1.0, max_cooldown_s=1.0))
    with queue_on(faulty(lambda _: trouble[0]), config) as setup:
        for _ in range(1 + 100):
            assert setup.run(JobKind.PROBE, [b"a"]).status is JobStatus.FAILED
            setup.clock.advance(1.0)
        (warned,) = [line.message for line in caplog.records if line.levelname == "WARNING"]
        assert warned.startswith(
            "tier memory: look-ups are suspended after several failures in a row, until a trial succeeds;"
        )
        assert caplog.text.count("tier memory: look-ups stay suspended: a trial failed") == 100
        setup.run(JobKind.STORE, [b"a"], [chunk(1)])
        trouble[0] = None
        setup.run(JobKind.PROBE, [b"a"])
        trouble[0] = "cable unplugged again"
        setup.run(JobKind.PROBE, [b"a"])
        assert caplog.text.count("are suspended") == 3, "of writes, and of look-ups after they had worked"
        assert caplog.text.count("tier memory: look-ups work again") == 1


class BadSpots(MemoryTier):
    """Some chunks cannot be written."""

    bad: frozenset[bytes] = frozenset()

    def store(self, key: bytes, payload: Any, parent: bytes | None = None, note: Note = NO_NOTE) -> StoreOutcome:
        if key in self.bad:
            raise TierError(self.name, "bad spot")
        return super().store(key, payload, parent, note)


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
def test_an_answer_from_an_index_ends_no_trial(has_index: bool) -> None:
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


def test_a_cancelled_job_that_is_no_trial_does_not_end_one() -> None:
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


def test_queued_jobs_fail_when_their_breaker_opens(caplog: pytest.LogCaptureFixture) -> None:
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
        told = "look-ups are suspended after several failures in a row, until a trial succeeds; the last: gone"
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
