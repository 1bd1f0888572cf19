"""Queues over tiers that tests hold in their hands."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cargohold.lab.simulation.faults import VirtualClock
from cargohold.tiers import BreakerState, JobKind, QueueConfig, Tier, TierJob, TierQueue
from tests.wrapped_tiers import FaultyTier, MemoryTier

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


class Setup:
    def __init__(self, tier: Tier, config: QueueConfig) -> None:
        self._strangers = set(threading.enumerate())
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

    def await_death(self) -> None:
        """Wait until no thread of the queue lives, or some hang."""
        for thread in set(threading.enumerate()) - self._strangers:
            thread.join(WAIT_S)

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
