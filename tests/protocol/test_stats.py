"""Times in histograms and levels are plain numbers that add up."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cargohold.protocol import AGES_MS, WAITS_MS, Stats, Times, add_stats, level_changes, times_part

SECONDS = st.lists(st.floats(0, 10**6), max_size=20)


@given(st.lists(SECONDS, max_size=4), st.sampled_from([WAITS_MS, AGES_MS]))
def test_sums_of_steps_tell_how_many_times_are_in_each_bucket_and_their_sum(
    steps: list[list[float]], bounds_ms: tuple[int, ...]
) -> None:
    times = Times("host_load", bounds_ms)
    total: Stats = {}
    for step in steps:
        counted: Counter[str] = Counter()
        for seconds in step:
            times.note(seconds, counted)
        total = add_stats(total, counted)
    bounds_s = [*(bound / 1000 for bound in bounds_ms), float("inf")]
    expected: dict[float, list[float]] = {}
    for seconds in (seconds for step in steps for seconds in step):
        expected.setdefault(bounds_s[bisect_left(bounds_s, seconds)], []).append(seconds)
    parts = {counter: part for counter in total if (part := times_part(counter)) is not None}
    assert parts.keys() == total.keys() and {part.name for part in parts.values()} <= {"host_load"}
    numbers = {part.bound_s: counter for counter, part in parts.items() if part.sum_counter is not None}
    assert {bound: total[counter] for bound, counter in numbers.items()} == {b: len(v) for b, v in expected.items()}
    for bound, counter in numbers.items():
        part = parts[counter]
        assert part.sum_counter is not None and abs(total[part.sum_counter] - sum(expected[bound])) < 1e-3


def test_names_that_only_look_like_a_histograms_are_none() -> None:
    assert [times_part(name) for name in ("removed_chunks", "table_le_", "host_le_soon", "num_host_bytes")] == [
        None
    ] * 4


LEVELS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 5))


@given(st.lists(LEVELS, min_size=1))
def test_changes_of_levels_sum_up_to_the_levels(levels: list[dict[str, int]]) -> None:
    told: Stats = {}
    for before, now in pairwise([{}, *levels]):
        told = add_stats(told, level_changes(before, now))
    assert {name: level for name, level in told.items() if level} == {k: v for k, v in levels[-1].items() if v}
