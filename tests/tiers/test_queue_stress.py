"""A queue under random jobs, faults, delays, cancellations and deadlines: every job ends once, and buffers are safe."""

from __future__ import annotations

import threading
from collections import Counter
from random import Random

import pytest

from cargohold.lab.simulation.faults import VirtualClock
from cargohold.tiers import BreakerConfig, JobKind, JobStatus, LoadOutcome, QueueConfig, TierJob, TierQueue
from tests.wrapped_tiers import FaultyTier, MemoryTier

CHUNK = 64
NUM_KEYS = 12
NUM_STEPS = 400
WAIT_S = 30.0


def contents(number: int) -> bytes:
    return bytes([number + 1]) * CHUNK


class Weather:
    """Faults of a medium: some calls fail, some wait for another thread."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._lock = threading.Lock()
        self._turn = threading.Condition()
        self.is_over = False

    def __call__(self, operation: str) -> str | None:
        with self._lock:
            dice = self._random.random()
        if dice < 0.1:
            return "bad weather"
        if dice < 0.5 and not self.is_over:
            with self._turn:
                self._turn.wait(timeout=0.002)
        return None


class Run:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.clock = VirtualClock()
        self.weather = Weather(seed)
        config = QueueConfig(3, max_urgent_chunks=20, max_store_chunks=10, breaker=BreakerConfig(10, 0.5, 1.0))
        self.queue = TierQueue(FaultyTier(MemoryTier(CHUNK), self.weather), self.clock, config)
        self.live: dict[int, tuple[list[int], list[bytearray]]] = {}
        self.given_back: list[tuple[bytearray, bytes]] = []
        self.num_taken = 0
        self.statuses: Counter[JobStatus] = Counter()

    def step(self, job_id: int) -> None:
        match self.random.randrange(9):
            case 0:
                self.clock.advance(self.random.uniform(0.0, 0.3))
            case 1:
                self.queue.drain(0.02)
            case 2 | 3:
                for result in self.queue.poll():
                    self.finish(result)
            case 4 if self.live:
                self.queue.cancel(self.random.choice(list(self.live)))
            case _:
                self.submit(job_id)

    def submit(self, job_id: int) -> None:
        kind = self.random.choice(
            [JobKind.PROBE, JobKind.LOAD, JobKind.LOAD, JobKind.STORE, JobKind.STORE, JobKind.REMOVE]
        )
        numbers = self.random.sample(range(NUM_KEYS), self.random.randrange(1, 5))
        buffers = [bytearray(contents(number) if kind is JobKind.STORE else bytes(CHUNK)) for number in numbers]
        job = TierJob(
            job_id,
            kind,
            [bytes([number]) for number in numbers],
            self.clock() + self.random.uniform(0.2, 2.0),
            [memoryview(buffer) for buffer in buffers] if kind in {JobKind.LOAD, JobKind.STORE} else [],
        )
        if self.queue.submit(job):
            self.live[job_id] = (numbers, buffers)
            self.num_taken += 1

    def finish(self, result: TierJob) -> None:
        numbers, buffers = self.live.pop(result.job_id)  # an unknown or second result fails here
        assert result.status is not None
        self.statuses[result.status] += 1
        if result.status is JobStatus.DONE:
            assert None not in result.answers
        for number, buffer, answer in zip(numbers, buffers, result.answers, strict=True):
            if answer is LoadOutcome.LOADED:
                assert buffer == contents(number)
            # The owner uses it for something else from now on.
            buffer[:] = b"\xff" * CHUNK
            self.given_back.append((buffer, bytes(buffer)))

    def end(self) -> None:
        self.weather.is_over = True
        self.clock.advance(2.0)
        assert self.queue.drain(WAIT_S)
        self.queue.shutdown(WAIT_S)
        for result in self.queue.poll():
            self.finish(result)


@pytest.mark.parametrize("seed", range(6))
def test_every_job_ends_once_and_no_buffer_is_touched_after_that(seed: int) -> None:
    run = Run(seed)
    for job_id in range(NUM_STEPS):
        run.step(job_id)
    run.end()
    assert not run.live
    assert sum(run.statuses.values()) == run.num_taken
    assert all(buffer == expected for buffer, expected in run.given_back), "a thread wrote too late"
    assert run.statuses[JobStatus.DONE] and len(run.statuses) > 1
