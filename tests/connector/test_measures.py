"""How long chunks are kept and not asked for: sampled, bounded, and told as it was."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from cargohold.cache import make_manager
from cargohold.connector.guests.meters import LOOK_S, MAX_KEPT, MAX_USED, ChunkAges
from cargohold.lab.simulation import VirtualClock
from cargohold.protocol import Family, Tally, metrics


def keys(first: int, num: int) -> list[bytes]:
    return [sha256(at.to_bytes(4)).digest() + bytes(4) for at in range(first, first + num)]


class Setup:
    """A host memory, and the ages of its chunks."""

    def __init__(self, capacity: int = 1000) -> None:
        self.clock = VirtualClock()
        self.manager = make_manager("lru", capacity)
        self.stats = Tally()
        self.ages = ChunkAges(self.manager, "host", self.clock, self.stats)

    def store(self, chunks: list[bytes]) -> None:
        handle = self.manager.prepare_store(chunks)
        handle.commit()
        self.ages.note_stored(handle.keys)

    def look(self, after_s: float = LOOK_S) -> None:
        self.clock.advance(after_s)
        self.ages.look()

    def told(self, family: Family) -> tuple[float, float]:
        """The number of times in a histogram, and their sum."""
        numbers = (n for series, n in self.stats.items() if series.family is family and not series.bucket[1])  # type: ignore[index]  # histograms have buckets
        return sum(numbers), self.stats.seconds(family)


def test_lifetimes_run_from_the_copy_to_the_eviction() -> None:
    setup = Setup(capacity=10)
    setup.store(keys(0, 10))
    setup.look(100)
    assert setup.told(metrics.LIFETIME) == (0, 0), "all are still there"
    setup.store(keys(10, 4))
    setup.look()
    assert setup.told(metrics.LIFETIME) == (4, 4 * (100 + LOOK_S))


def test_chunks_that_a_reset_drops_have_no_lifetime() -> None:
    setup = Setup()
    setup.store(keys(0, 10))
    assert setup.manager.reset()
    setup.ages.forget()
    setup.look(100)
    assert setup.told(metrics.LIFETIME) == (0, 0)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12))
def test_of_many_chunks_evenly_spread_ones_are_followed(sizes: list[int]) -> None:
    setup = Setup(capacity=10_000)
    stored: list[bytes] = []
    for size in sizes:
        setup.store(keys(len(stored), size))
        stored += keys(len(stored), size)
    setup.manager.remove(stored)
    setup.look()
    number, _ = setup.told(metrics.LIFETIME)
    assert min(len(stored), MAX_KEPT // 4) <= number <= MAX_KEPT


def test_a_gap_is_the_time_between_two_uses_whether_the_chunk_was_there_or_not() -> None:
    setup = Setup()
    prompt = keys(0, 8)
    setup.ages.note_used(prompt)
    setup.clock.advance(30)
    setup.ages.note_used(prompt)
    assert setup.told(metrics.REUSE_GAP) == (4, 4 * 30.0), "of the first, second, fourth and eighth chunk"
    setup.clock.advance(5)
    setup.ages.note_used([*prompt[:3], *keys(100, 5)])
    assert setup.told(metrics.REUSE_GAP) == (6, 4 * 30.0 + 2 * 5.0)


def test_memory_for_uses_is_bounded_and_the_sample_stays_the_same_chunks() -> None:
    setup = Setup()
    for at in range(3 * MAX_USED):
        setup.ages.note_used(keys(at, 1))
    assert len(setup.ages._used) <= MAX_USED
    setup.clock.advance(7)
    for at in range(3 * MAX_USED):
        setup.ages.note_used(keys(at, 1))
    number, total_s = setup.told(metrics.REUSE_GAP)
    assert number > MAX_USED // 4 and total_s == 7.0 * number, "what is in the sample is seen at each of its uses"
