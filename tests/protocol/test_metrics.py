"""What is counted adds up, travels, and keeps its names and its number of time series within limits."""

from __future__ import annotations

import copy
import pickle
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.protocol import Family, Kind, Stats, Tally, add_stats, level_changes, metrics
from cargohold.protocol.metrics import counter, histogram

SECONDS = st.lists(st.floats(0, 10**6), max_size=20)


@given(st.lists(SECONDS, max_size=4), st.sampled_from([metrics.LOAD, metrics.LIFETIME]))
def test_sums_of_steps_tell_how_many_times_are_in_each_bucket_and_their_sum(
    steps: Sequence[Sequence[float]], family: Family
) -> None:
    total: Stats = {}
    for step in steps:
        counted = Tally()
        for seconds in step:
            family.of("host").note(seconds, counted)
        total = add_stats(total, counted)
    expected: dict[float, list[float]] = {}
    for seconds in (seconds for step in steps for seconds in step):
        expected.setdefault(family.bounds_s[bisect_left(family.bounds_s, seconds)], []).append(seconds)
    parts = {series.bucket: value for series, value in total.items()}
    numbers = {bucket.bound_s: value for bucket, value in parts.items() if bucket and not bucket.is_sum}
    sums = {bucket.bound_s: value for bucket, value in parts.items() if bucket and bucket.is_sum}
    assert numbers == {bound: len(values) for bound, values in expected.items()}
    assert sums == pytest.approx({bound: sum(values) for bound, values in expected.items()})
    assert Tally(total).seconds(family) == pytest.approx(sum(map(sum, expected.values())))


LEVELS = st.dictionaries(st.sampled_from([metrics.TIER_READY.of(tier) for tier in "abc"]), st.integers(0, 5))


@given(st.lists(LEVELS, min_size=1))
def test_changes_of_levels_sum_up_to_the_levels(levels: list[Stats]) -> None:
    told: Stats = {}
    for before, now in pairwise([{}, *levels]):
        told = add_stats(told, level_changes(before, now))
    assert {name: level for name, level in told.items() if level} == {k: v for k, v in levels[-1].items() if v}


def test_a_family_is_one_object_wherever_it_comes_from() -> None:
    assert pickle.loads(pickle.dumps(metrics.STORED)) is metrics.STORED is copy.deepcopy(metrics.STORED)


def test_values_travel_also_to_a_process_that_has_not_imported_who_declared_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = histogram("swap_seconds", "How long swaps took.", "tier", bounds_s=(1.0,))
    tally = Tally({metrics.MOVED.of("disk", "in"): 3, metrics.STORED.of("host")._replace(connector="a.b"): 1})
    own.of("host").note(0.5, tally)
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(metrics.pack(tally)))
    assert metrics.unpack(packed) == tally
    monkeypatch.delitem(metrics._declared, "swap_seconds")
    elsewhere = {series for series in metrics.unpack(packed) if series.family.name == "swap_seconds"}
    (family,) = {series.family for series in elsewhere}
    assert family is not own and family.declaration == own.declaration and len(elsewhere) == 2
    assert family.of("host") in {series._replace(bucket=None) for series in elsewhere}


def test_two_families_of_one_name_are_refused() -> None:
    text = "Times that two chunks changed places."
    assert counter("places", "swaps", text) is counter("places", "swaps", text)
    with pytest.raises(ValueError, match="places is declared already"):
        counter("places", "bytes", text)


def test_labels_are_bounded() -> None:
    family = Family("of_everybody", Kind.COUNTER, "requests", "By whoever asks.", ("who",))
    made = {family.of(str(at)) for at in range(2 * metrics.MAX_SERIES)}
    assert len(made) == metrics.MAX_SERIES + 1 and family.of("other") in made and family.of("7") is family.of("7")
    with pytest.raises(TypeError, match="has the labels"):
        family.of()


@pytest.mark.parametrize(
    ("name", "labels"), [("bad name!", ()), ("9lives", ()), ("Places", ()), ("places_by", ("a b",))]
)
def test_names_that_prometheus_refuses_are_refused_where_they_are_declared(name: str, labels: tuple[str, ...]) -> None:
    """Found by attack: vLLM's API server ended when it was to show such a one."""
    with pytest.raises(ValueError, match="no metric can be named"):
        metrics.counter(name, "x", "Made for this test.", *labels)


def test_labels_are_texts() -> None:
    with pytest.raises(TypeError, match="texts"):
        metrics.PROMPT.of(5)  # type: ignore[arg-type]  # made for this test
