"""What is fetched for a hit, and where each token of it is said to come from, against plain definitions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.cache import OffloadKey, OffloadManager, make_manager
from cargohold.cache.manager import ChunkKeys
from cargohold.lab.simulation import SimulatedEngine, VirtualClock, simulated_layout
from cargohold.tiers.scheduler_side import LowerTiers, TieringConfig, TierOptions, Wanted, sources_per_token
from cargohold.tiers.scheduler_side.plan import chains_to_fetch, num_tokens_in_time, soonest
from tests.connector.common import prompt

HOST, DISK, SHARED, NOWHERE = "host", "disk", "shared", "nowhere"
CHUNK = 8
NUM_CHUNKS = 9
WINDOWS: list[tuple[int | None, ...]] = [(None,), (11,), (None, 9), (3, 30)]


def wanted_of(windows: tuple[int | None, ...], num_computed_tokens: int = 0, num_more: int = 0) -> Wanted:
    layout = simulated_layout(60, windows=windows)
    request = SimulatedEngine(layout).add("r", prompt(0, CHUNK * NUM_CHUNKS + num_more), 1)
    keys = [ChunkKeys(group, CHUNK // layout.hash_block_tokens, layout.hash_block_tokens) for group in layout.groups]
    for of_group in keys:
        of_group.extend(request.block_hashes)
    return Wanted(keys, request.num_tokens, num_computed_tokens, request.num_tokens)


def needed(wanted: Wanted, group: int, first: int, end: int) -> list[int]:
    """Chunks of a group with a token that is not computed and that the first query behind the hit still sees."""
    window = wanted.keys[group].group.window_tokens
    query = min(CHUNK * end, wanted.num_tokens - 1)
    seen = 0 if window is None else query - window + 1
    return [chunk for chunk in range(first, end) if CHUNK * (chunk + 1) > seen]


def put(wanted: Wanted, places: Sequence[Sequence[str]]) -> tuple[OffloadManager, LowerTiers]:
    host = make_manager("lru", 100)
    lower = LowerTiers(host, [TierOptions(name=DISK), TierOptions(name=SHARED)], VirtualClock(), TieringConfig())
    for keys, of_group in zip(wanted.keys, places, strict=True):
        for at, (key, place) in enumerate(zip(keys.keys, of_group, strict=True)):
            if place == HOST:
                host.prepare_store([key], keys.keys[at - 1] if at else None).commit()
        for tier in lower.tiers:
            tier.note_presence(keys.keys, [place == tier.name for place in of_group])
    return host, lower


@st.composite
def spans(draw: st.DrawFn) -> tuple[int, int]:
    first = draw(st.integers(0, NUM_CHUNKS - 1))
    return first, draw(st.integers(first + 1, NUM_CHUNKS))


@pytest.mark.parametrize("windows", WINDOWS)
@given(span=spans(), data=st.data())
def test_what_host_memory_lacks_is_brought_up_in_pieces_of_one_prefix_and_one_tier(
    windows: tuple[int | None, ...], span: tuple[int, int], data: st.DataObject
) -> None:
    first, end = span
    wanted = wanted_of(windows, CHUNK * first, num_more=data.draw(st.integers(0, 1)))
    of_chunk = st.sampled_from([HOST, DISK, DISK, SHARED, NOWHERE])
    places = [data.draw(st.lists(of_chunk, min_size=NUM_CHUNKS, max_size=NUM_CHUNKS)) for _ in windows]
    host, lower = put(wanted, places)
    asked = [(group, chunk) for group in range(len(windows)) for chunk in needed(wanted, group, first, end)]
    key_of = {(group, chunk): wanted.keys[group].keys[chunk] for group, chunk in asked}
    assert wanted.needed_keys(CHUNK * end) == list(key_of.values())

    chains = list(chains_to_fetch(wanted, host, lower, CHUNK * end))
    names = [[lower.tiers[chain.tier].name] * len(chain.keys) for chain in chains]
    brought = {
        key: name
        for chain, of_chain in zip(chains, names, strict=True)
        for key, name in zip(chain.keys, of_chain, strict=True)
    }
    assert brought == {
        key: places[group][chunk] for (group, chunk), key in key_of.items() if places[group][chunk] in (DISK, SHARED)
    }
    at_of = {key: at for at, key in key_of.items()}
    for chain in chains:
        group, chunk = at_of[chain.keys[0]]
        assert [at_of[key] for key in chain.keys] == [(group, chunk + at) for at in range(len(chain.keys))]
        assert chain.parent == (wanted.keys[group].keys[chunk - 1] if chunk else None)
        assert chain.first_token == CHUNK * chunk
    for one, other in pairwise(chains):
        (group, chunk), after = at_of[one.keys[-1]], at_of[other.keys[0]]
        assert one.tier != other.tier or after != (group, chunk + 1), "two pieces where one would do"


@pytest.mark.parametrize("windows", WINDOWS)
@given(span=spans(), computed_more=st.integers(0, CHUNK - 1), data=st.data())
def test_a_token_comes_from_the_slowest_tier_that_any_group_needs_for_it(
    windows: tuple[int | None, ...], span: tuple[int, int], computed_more: int, data: st.DataObject
) -> None:
    first, end = span
    num_computed = CHUNK * first + computed_more
    wanted = wanted_of(windows, num_computed, num_more=data.draw(st.integers(0, 1)))
    brought = st.dictionaries(
        st.sampled_from([key for keys in wanted.keys for key in keys.keys]), st.integers(0, 1), max_size=12
    )
    sources: dict[OffloadKey, int] = data.draw(brought)
    expected: list[int | None] = []
    for token in range(num_computed, CHUNK * end):
        tiers = [
            sources.get(keys.keys[token // CHUNK], -1) + 1
            for group, keys in enumerate(wanted.keys)
            if token // CHUNK in needed(wanted, group, first, end)
        ]
        expected.append(max(tiers, default=None))
    known = [source for source in expected if source is not None]
    filled = [known[0] if source is None else source for source in expected]
    assert list(sources_per_token(wanted, sources, CHUNK * end)) == filled


def test_where_nothing_is_read_host_memory_is_named() -> None:
    wanted = wanted_of((None,), CHUNK)
    assert sources_per_token(wanted, {}, CHUNK) == b""


TIMES = st.one_of(st.sampled_from([0.0, 5e-324, 1e-300, 1e300, float("inf")]), st.floats(0, allow_nan=False))


@given(
    num_tokens=st.integers(0, 10**9),
    load_s=TIMES,
    limit_s=st.one_of(TIMES, st.floats(max_value=0, allow_nan=False)),
)
def test_no_more_tokens_are_loaded_than_come_in_time(num_tokens: int, load_s: float, limit_s: float) -> None:
    num = num_tokens_in_time(num_tokens, load_s, limit_s)
    assert 0 <= num <= num_tokens
    if limit_s <= 0:
        assert num == 0, "the deadline has passed"
    elif load_s <= limit_s:
        assert num == num_tokens, "all of them come in time, or nothing is known"
    else:
        assert num <= limit_s / load_s * num_tokens


ANY_TIME = st.one_of(TIMES, st.floats(max_value=0, allow_nan=False, allow_infinity=False))


@given(load_s=ANY_TIME, others=st.lists(st.tuples(ANY_TIME, st.none() | ANY_TIME), max_size=4))
def test_the_way_that_takes_least_time_is_taken_and_of_several_the_first(
    load_s: float, others: list[tuple[float, float | None]]
) -> None:
    ways = [(load_s, 0.0), *others]
    best = soonest(ways)
    took = [load_s + rest_s for load_s, rest_s in ways if rest_s is not None]
    assert ways[best][1] is not None or took[0] == float("inf"), "a rest of unknown length was taken for a short one"
    best_load_s, best_rest_s = ways[best]
    if best_rest_s is not None:
        assert best_load_s + best_rest_s == min(took)
        assert all(load_s + rest_s > min(took) for load_s, rest_s in ways[:best] if rest_s is not None)


@given(load_s=ANY_TIME, rests=st.lists(ANY_TIME, max_size=4))
def test_where_no_time_is_known_of_the_rest_all_is_loaded(load_s: float, rests: list[float]) -> None:
    assert soonest([(load_s, 0.0), *((rest, None) for rest in rests)]) == 0
