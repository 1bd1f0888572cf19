"""Hit counts of every policy on a small trace: whoever changes a policy sees what it costs."""

from __future__ import annotations

import pytest

from cargohold.cache.policies import POLICIES
from cargohold.lab.replay.replaying import OfflineTrace
from cargohold.lab.replay.traces import read_trace
from tests.cache.common import hits_of, numbered
from tests.data.make_trace import TRACE, make_trace

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
NUM_LOOKUPS = 25_928
HITS = {
    "fifo": (3110, 6195, 10679, 15052, 18007, 19582, 19887, 19904),
    "lru": (3110, 6213, 10777, 15245, 18023, 19582, 19887, 19904),
    "arc": (3259, 6872, 12193, 15945, 17619, 19188, 19561, 19626),
    "reuse-index": (5144, 9894, 14332, 16458, 18052, 19610, 19889, 19896),
    "optimum": (6854, 11780, 16228, 18570, 19836, 19904, 19904, 19904),
}
TOLERANCES = {"reuse-index": NUM_LOOKUPS // 500}
"""Its choices hang on floating-point numbers, whose last bits differ between processors."""


Requests = list[list[bytes]]


@pytest.fixture(scope="module")
def requests() -> Requests:
    return [numbered(*request.hash_ids) for request in read_trace([TRACE])]


def test_the_trace_is_what_its_script_makes(requests: Requests) -> None:
    assert TRACE.read_text(encoding="utf-8") == make_trace()
    assert sum(map(len, requests)) == NUM_LOOKUPS


def test_every_policy_has_its_counts() -> None:
    assert HITS.keys() == {*POLICIES, "optimum"}


def test_hits_of_the_optimum(requests: Requests) -> None:
    trace = OfflineTrace(requests)
    assert tuple(sum(trace.optimal_hits(size)) for size in SIZES) == HITS["optimum"]


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(at, id=str(size), marks=() if size in {32, 256} else pytest.mark.long)
        for at, size in enumerate(SIZES)
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_hits(policy: str, at: int, requests: Requests) -> None:
    hits = hits_of(policy, requests, SIZES[at])
    assert hits == pytest.approx(HITS[policy][at], abs=TOLERANCES.get(policy, 0))
    assert hits <= HITS["optimum"][at]


def test_the_default_is_never_far_behind_lru_and_well_ahead_where_room_is_scarce() -> None:
    default, lru = HITS["reuse-index"], HITS["lru"]
    assert all(ours > floor - 0.01 * NUM_LOOKUPS for ours, floor in zip(default, lru, strict=True))
    assert all(ours > 1.3 * floor for ours, floor in zip(default[:3], lru[:3], strict=True))
