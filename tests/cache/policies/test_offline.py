"""The offline optimum against a search through everything that could be done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.cache.policies import POLICIES
from cargohold.lab.replay.replaying import OfflineTrace
from tests.cache.common import chain, hits_of
from tests.effort import examples

Requests = Sequence[Sequence[bytes]]
paths = st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple)


def best_by_search(requests: Requests, capacity: int, num_asked: Sequence[int]) -> int:
    """Hits of the best possible choice of what to keep after each request, of which the first chunks are looked up."""

    @cache
    def best(at: int, tier: frozenset[bytes]) -> int:
        if at == len(requests):
            return 0
        request = requests[at]
        asked = request[: num_asked[at]]
        hits = next((place for place, name in enumerate(asked) if name not in tier), len(asked))
        at_hand = sorted(tier | set(request))
        keeps = combinations(at_hand, min(capacity, len(at_hand)))
        return hits + max(best(at + 1, frozenset(kept)) for kept in keeps)

    return best(0, frozenset())


@examples(25)
@given(requests=st.lists(paths.map(chain), max_size=6), capacity=st.integers(1, 4))
def test_no_choice_whatever_gives_more_hits(requests: Requests, capacity: int) -> None:
    assert sum(OfflineTrace(requests).optimal_hits(capacity)) == best_by_search(
        requests, capacity, [*map(len, requests)]
    )


@examples(40)
@given(requests=st.lists(st.tuples(paths.map(chain), st.integers(0, 3)), max_size=6), capacity=st.integers(1, 4))
def test_the_optimum_counts_only_chunks_that_are_looked_up(
    requests: Sequence[tuple[Sequence[bytes], int]], capacity: int
) -> None:
    keys = [path for path, _ in requests]
    num_asked = [min(asked, len(path)) for path, asked in requests]
    hits = OfflineTrace(keys, num_asked).optimal_hits(capacity)
    assert sum(hits) == best_by_search(keys, capacity, num_asked)
    assert all(found <= asked for found, asked in zip(hits, num_asked, strict=True))


@examples(16)
@given(requests=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), max_size=30))
def test_no_policy_gives_more_and_more_room_never_gives_less(requests: list[tuple[int, ...]]) -> None:
    keys = [chain(path) for path in requests]
    trace = OfflineTrace(keys)
    optimum = [sum(trace.optimal_hits(capacity)) for capacity in range(1, 14)]
    assert optimum == sorted(optimum)
    assert optimum[-1] <= sum(trace.optimal_hits(trace.num_chunks))
    for policy in POLICIES:
        assert hits_of(policy, keys, 4) <= optimum[3]


def test_without_eviction_what_was_used_before_is_a_hit() -> None:
    trace = OfflineTrace([chain((0, 0)), chain((0, 1)), chain((0, 0, 0)), []])
    assert trace.optimal_hits(trace.num_chunks) == [0, 1, 2, 0]
    assert (trace.num_chunks, trace.num_lookups) == (4, 7)


def test_an_empty_trace_has_no_hits() -> None:
    assert OfflineTrace([]).optimal_hits(3) == []


@pytest.mark.parametrize("requests", [[["a", "b"], ["b"]], [["a", "b"], ["c", "b"]], [["a", "a"]]])
def test_names_that_do_not_stand_for_their_prefix_are_refused(requests: list[list[str]]) -> None:
    with pytest.raises(ValueError, match="do not form a trie"):
        OfflineTrace(requests)
