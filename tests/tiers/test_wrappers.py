"""Tiers around tiers change what they say they change, and nothing else."""

from __future__ import annotations

import pytest

from cargohold.errors import TierError
from cargohold.lab.simulation.faults import VirtualClock
from cargohold.tiers import (
    CountingTier,
    FaultyTier,
    JobKind,
    LoadOutcome,
    MemoryTier,
    NullTier,
    QueueConfig,
    SlowTier,
    StoreOutcome,
    TierJob,
    TierQueue,
)
from tests.tiers.common import CHUNK, key, load, payload

WAIT_S = 30.0


class Closing(MemoryTier):
    """Remembers that it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_calls_bytes_and_outcomes_are_counted() -> None:
    tier = CountingTier(FaultyTier(MemoryTier(CHUNK), lambda operation: "no" if operation == "remove" else None))
    tier.store(key(1), memoryview(payload(1)))
    tier.store(key(1), memoryview(payload(1)))
    assert load(tier, 1) == payload(1) and load(tier, 2) is LoadOutcome.ABSENT
    tier.probe([key(1), key(2)])
    tier.touch([key(1)])
    with pytest.raises(TierError, match="tier memory: no"):
        tier.remove([key(1)])
    assert tier.calls == {"store": 2, "load": 2, "probe": 1, "touch": 1, "remove": 1}
    assert tier.num_bytes == {"store": 2 * CHUNK, "load": 2 * CHUNK, "probe": 0, "touch": 0, "remove": 0}
    assert tier.outcomes == {
        StoreOutcome.STORED: 1,
        StoreOutcome.PRESENT: 1,
        LoadOutcome.LOADED: 1,
        LoadOutcome.ABSENT: 1,
    }
    assert tier.usage() == tier.inner.usage()


@pytest.mark.parametrize("fails", ["reason", "error"])
def test_a_tier_is_closed_whatever_its_faults_say(fails: str) -> None:
    asked: list[str] = []

    def fault(operation: str) -> str:
        asked.append(operation)
        if fails == "error":
            raise OSError
        return "no"

    inner = Closing(CHUNK)
    FaultyTier(inner, fault).close()
    assert asked == ["close"] and inner.is_closed


def test_a_slow_tier_takes_as_long_as_its_latency_and_bandwidth_say() -> None:
    clock = VirtualClock()
    tier = SlowTier(MemoryTier(CHUNK), latency_s=0.5, bytes_per_s=CHUNK / 2.0, sleep=clock.advance)
    queue = TierQueue(tier, clock, QueueConfig(num_threads=1))
    for job_id, kind in enumerate((JobKind.STORE, JobKind.LOAD)):
        buffers = [memoryview(bytearray(payload(number))) for number in range(3)]
        job = TierJob(job_id, kind, [key(number) for number in range(3)], clock() + 100.0, buffers)
        assert queue.submit(job) and queue.drain(WAIT_S)
    assert clock() == pytest.approx(3 * 2.5 + 3 * 2.5 + 0.5), "the touch takes time, too"
    queue.shutdown(WAIT_S)


def test_nothing_is_ever_in_the_null_tier() -> None:
    tier = NullTier(CHUNK)
    assert tier.store(key(1), memoryview(payload(1))) is StoreOutcome.REFUSED
    assert tier.probe([key(1), key(2)]) == [False, False]
    assert load(tier, 1) is LoadOutcome.ABSENT
    tier.touch([key(1)])
    tier.remove([key(1)])
    assert tier.usage().num_chunks == 0
    tier.close()


def test_a_memory_tier_refuses_what_is_too_much() -> None:
    tier = MemoryTier(CHUNK, max_chunks=1)
    assert tier.store(key(1), memoryview(payload(1))) is StoreOutcome.STORED
    assert tier.store(key(2), memoryview(payload(2))) is StoreOutcome.REFUSED
    tier.remove([key(1)])
    assert tier.store(key(2), memoryview(payload(2))) is StoreOutcome.STORED
