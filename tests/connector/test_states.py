"""What all tiers have of a request's chunks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cargohold.blocks import ABSENT, READY
from cargohold.connector.offloading.states import DeepStates
from cargohold.offload.keys import ChunkKeys
from cargohold.offload.manager import ForwardingManager, OffloadKey, make_manager
from cargohold.offload.tiering import LowerTiers, TieringConfig, TierOptions
from cargohold.protocol import AttentionKind, KVCacheGroup
from cargohold.simulation import VirtualClock

HOST, DISK, NOWHERE = "host", "disk", "nowhere"


class CountingManager(ForwardingManager):
    """Counts the chunks that it is asked for."""

    num_asked = 0

    def lookup(self, keys: Sequence[OffloadKey]) -> bytes:
        self.num_asked += len(keys)
        return self.inner.lookup(keys)

    def lookup_run(self, keys: Sequence[OffloadKey]) -> bytes:
        self.num_asked += len(keys)
        return self.inner.lookup_run(keys)


def states_of(places: Sequence[str]) -> tuple[DeepStates, CountingManager]:
    keys = ChunkKeys(KVCacheGroup(0, AttentionKind.FULL, 1, ("0",)), 1, 1)
    keys.extend([at.to_bytes(32, "big") for at in range(len(places))])
    host = CountingManager(make_manager("lru", len(places) + 1))
    lower = LowerTiers(host, [TierOptions(name="disk")], VirtualClock(), TieringConfig())
    for at, (key, place) in enumerate(zip(keys.keys, places, strict=True)):
        if place == HOST:
            handle = host.prepare_store([key], keys.keys[at - 1] if at else None)
            handle.commit()
    lower.tiers[0].note_presence(keys.keys, [place == DISK for place in places])
    return DeepStates(host, lower, keys, []), host


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


def test_chunks_in_turn_here_and_there_are_looked_up_a_few_times_each() -> None:
    """Found by measuring: 2000 of them, of which host memory had every second, took the scheduler a quarter of a second."""
    states, host = states_of([HOST, DISK] * 1000)
    assert states.run(0, 2000) == bytes([READY]) * 2000
    assert host.num_asked <= 40 * 2000
