"""Tiers around tiers change what they say they change, and nothing else."""

from __future__ import annotations

import pytest

from cargohold.errors import TierError
from cargohold.tiers import LoadOutcome, StoreOutcome
from tests.tiers.common import CHUNK, key, load, payload
from tests.wrapped_tiers import CountingTier, FaultyTier, MemoryTier

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


def test_a_memory_tier_refuses_what_is_too_much() -> None:
    tier = MemoryTier(CHUNK, max_chunks=1)
    assert tier.store(key(1), memoryview(payload(1))) is StoreOutcome.STORED
    assert tier.store(key(2), memoryview(payload(2))) is StoreOutcome.REFUSED
    tier.remove([key(1)])
    assert tier.store(key(2), memoryview(payload(2))) is StoreOutcome.STORED
