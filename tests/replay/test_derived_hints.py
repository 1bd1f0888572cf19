"""Replay with derived hints: only what an orchestrator knows is said, and it helps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cargohold.cache.policies import POLICIES
from cargohold.errors import ConfigError
from cargohold.replay.replaying import replay
from cargohold.replay.tiers import HINTED
from cargohold.replay.traces import TraceRequest
from cargohold.replay.workload import Workload, load_workload


def turns(num_sessions: int = 12, num_turns: int = 12, *, with_sessions: bool = True) -> Iterator[TraceRequest]:
    """Sessions whose tools are quick or slow, turn about, and that come back after a long time or never."""
    events = []
    for session in range(num_sessions):
        now = session * 3.0
        for turn in range(num_turns):
            events.append((now, session, turn))
            now += (5.0, 8.0, 200.0)[(session + turn) % 3]
    for at, session, turn in sorted(events):
        ids = tuple(1000 * session + number for number in range(8 + turn))
        session_id = session if with_sessions else None
        yield TraceRequest(
            hash_ids=list(ids), timestamp_ms=1000 * at, input_length=16 * len(ids), session_id=session_id
        )


@pytest.fixture(scope="module")
def workload() -> Workload:
    return load_workload(turns())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_derived_hints_bring_more_hits_and_never_more_than_the_optimum(workload: Workload, policy: str) -> None:
    sizes = [(size,) for size in (20, 40, 80, 400)]
    plain = list(replay(workload, policy, sizes))
    hinted = list(replay(workload, policy + HINTED, sizes))
    best = list(replay(workload, "optimum", sizes))
    for with_hints, optimum in zip(hinted, best, strict=True):
        assert with_hints.num_prefix_hits <= optimum.num_prefix_hits
    assert sum(r.num_prefix_hits for r in hinted) > sum(r.num_prefix_hits for r in plain)
    assert hinted[-1].num_prefix_hits == plain[-1].num_prefix_hits, "where all fits, hints change nothing"


def test_a_trace_without_sessions_gives_no_hints() -> None:
    with pytest.raises(ConfigError, match="session"):
        next(replay(load_workload(turns(with_sessions=False)), "lru" + HINTED, [(20,)]))


def test_what_is_said_does_not_depend_on_when_the_next_turn_comes_within_its_kind() -> None:
    """Else the hints would know the future."""

    def stretched(factor: float) -> Workload:
        requests = [
            TraceRequest(hash_ids=[number, number + 1], timestamp_ms=1000 * factor * number, session_id=0)
            for number in range(5)
        ]
        return load_workload(requests)

    few, many = (next(replay(stretched(factor), "lru" + HINTED, [(4,)])) for factor in (2.0, 14.0))
    assert few.num_prefix_hits == many.num_prefix_hits


def test_hints_say_nothing_where_all_sessions_that_wait_fit(workload: Workload) -> None:
    """Only that a session is over: so nothing that comes back is lost for it."""
    size = [(300,)]
    (plain,), (hinted,) = replay(workload, "lru", size), replay(workload, "lru" + HINTED, size)
    assert hinted.num_prefix_hits == plain.num_prefix_hits
