"""What all tiers have of a request's chunks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cargohold.blocks import ABSENT, NOT_YET, READY
from cargohold.cache import ForwardingManager, OffloadKey, make_manager
from cargohold.cache.manager import ChunkKeys
from cargohold.lab.simulation import VirtualClock
from cargohold.protocol import AttentionKind, KVCacheGroup
from cargohold.tiers.scheduler_side import LowerTiers, TieringConfig, TierOptions
from cargohold.tiers.scheduler_side.plan import DeepStates

HOST, DISK, NOWHERE, UNASKED = "host", "disk", "nowhere", "unasked"


class CountingManager(ForwardingManager):
    """Counts the chunks that it is asked for."""

    num_asked = 0

    def lookup(self, keys: Sequence[OffloadKey]) -> bytes:
        self.num_asked += len(keys)
        return self.inner.lookup(keys)

    def lookup_run(self, keys: Sequence[OffloadKey]) -> bytes:
        self.num_asked += len(keys)
        return self.inner.lookup_run(keys)


def states_of(places: Sequence[str], unknown: list[OffloadKey] | None = None) -> tuple[DeepStates, CountingManager]:
    keys = ChunkKeys(KVCacheGroup(0, AttentionKind.FULL, 1, ("0",)), 1, 1)
    keys.extend([at.to_bytes(32, "big") for at in range(len(places))])
    host = CountingManager(make_manager("lru", len(places) + 1))
    lower = LowerTiers(host, [TierOptions(name="disk")], VirtualClock(), TieringConfig())
    for at, (key, place) in enumerate(zip(keys.keys, places, strict=True)):
        if place == HOST:
            handle = host.prepare_store([key], keys.keys[at - 1] if at else None)
            handle.commit()
    asked = [(key, place == DISK) for key, place in zip(keys.keys, places, strict=True) if place != UNASKED]
    lower.tiers[0].note_presence([key for key, _ in asked], [is_there for _, is_there in asked])
    return DeepStates(host, lower, keys, [] if unknown is None else unknown), host


@given(
    runs=st.lists(st.tuples(st.sampled_from([HOST, DISK, DISK, HOST, NOWHERE]), st.integers(1, 90)), max_size=12),
    first=st.integers(0, 40),
    cut=st.integers(0, 40),
)
def test_a_run_goes_to_the_first_chunk_that_is_nowhere(runs: list[tuple[str, int]], first: int, cut: int) -> None:
    places = [place for place, count in runs for _ in range(count)]
    first, end = min(first, len(places)), max(0, len(places) - cut)
    states, _ = states_of(places)
    part = [*places[first:end], NOWHERE]
    assert states.run(first, end) == bytes([READY]) * part.index(NOWHERE)
    assert states.window(first, end) == bytes(ABSENT if place == NOWHERE else READY for place in places[first:end])


@given(
    runs=st.lists(st.tuples(st.sampled_from([HOST, DISK, UNASKED, NOWHERE]), st.integers(1, 40)), max_size=9),
    first=st.integers(0, 20),
)
def test_what_no_tier_was_asked_about_counts_as_not_yet_and_is_named(runs: list[tuple[str, int]], first: int) -> None:
    places = [place for place, count in runs for _ in range(count)]
    first = min(first, len(places))
    meaning = {HOST: READY, DISK: READY, UNASKED: NOT_YET, NOWHERE: ABSENT}
    expected = bytes(meaning[place] for place in places[first:])
    unasked = [at.to_bytes(32, "big") for at in range(first, len(places)) if places[at] == UNASKED]

    named: list[OffloadKey] = []
    states, _ = states_of(places, named)
    assert states.window(first, len(places)) == expected
    assert [key[:32] for key in named] == unasked

    named.clear()
    length = [*places[first:], NOWHERE].index(NOWHERE)
    assert states.run(first, len(places)) == expected[:length]
    assert [key[:32] for key in named] == [key for key in unasked if int.from_bytes(key, "big") < first + length]


def test_chunks_in_turn_here_and_there_are_looked_up_a_few_times_each() -> None:
    """Found by measuring: 2000 of them, of which host memory had every second, took the scheduler a quarter of a second."""
    states, host = states_of([HOST, DISK] * 1000)
    assert states.run(0, 2000) == bytes([READY]) * 2000
    assert host.num_asked <= 40 * 2000
