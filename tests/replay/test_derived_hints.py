"""Replay with derived hints: only what an orchestrator knows is said, and it helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from cargohold.cache.policies import POLICIES
from cargohold.errors import ConfigError
from cargohold.replay.replaying import replay
from cargohold.replay.tiers import GUESSED, HINTED, guess_pauses_s
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


def hits_of(requests: Sequence[tuple[float, int, Sequence[int]]], size: int, session: int) -> list[tuple[int, int]]:
    """Chunks found, and chunks of the prompt, of each request of a session but its first: with LRU and derived hints."""
    requests = sorted(requests)
    workload = load_workload(
        TraceRequest(hash_ids=list(ids), timestamp_ms=1000 * at, session_id=of) for at, of, ids in requests
    )
    (result,) = replay(workload, "lru" + HINTED, [(size,)])
    found = zip(requests, result.run.hits.tolist(), strict=True)
    return [(hits, len(ids)) for (_, of, ids), hits in found if of == session][1:]


@pytest.mark.parametrize("num_left", [1, 4])
def test_what_a_session_leaves_behind_takes_no_place_from_sessions_that_wait(num_left: int) -> None:
    """An end of an answer in other words, or a branch. LRU would keep it, because it was used later."""
    busy = [
        (2.0 * turn, 0, [0, 1, 2, 3, *range(100 + turn * num_left, 100 + (turn + 1) * num_left)]) for turn in range(40)
    ]
    waiting = [(1.0 + 14.0 * turn, 1, list(range(50, 58))) for turn in range(6)]
    assert hits_of([*busy, *waiting], size=4 + num_left + 8, session=1) == [(8, 8)] * 5


def test_a_branch_to_which_its_session_comes_back_is_not_what_it_leaves_behind() -> None:
    """Two agents of one session take turns; another session leaves something behind in each turn."""
    agents = [(5.0 * turn, 0, [0, *range(10 + 10 * (turn % 2), 14 + 10 * (turn % 2))]) for turn in range(12)]
    other = [(1.0 + 5.0 * turn, 1, [50, 51, 52, 53, 100 + 2 * turn, 101 + 2 * turn]) for turn in range(12)]
    assert hits_of([*agents, *other], size=15, session=0)[1:] == [(5, 5)] * 10


def test_a_session_that_is_over_takes_no_place_from_sessions_that_wait() -> None:
    ended = [(2.0 * number, 10 + number, range(100 + 8 * number, 108 + 8 * number)) for number in range(40)]
    waiting = [(1.0 + 14.0 * turn, 1, list(range(50, 58))) for turn in range(6)]
    assert hits_of([*ended, *waiting], size=16, session=1) == [(8, 8)] * 5


def test_a_pause_is_guessed_to_be_of_the_kind_of_most_before_it() -> None:
    """Quick until something else is known; that a session is over stays known."""
    pauses = [5.0, 30.0, 30.0, 30.0, 5.0, np.inf]
    guessed = guess_pauses_s([0] * len(pauses), np.array(pauses))
    assert guessed.tolist() == [15.0, 15.0, 15.0, 60.0, 60.0, np.inf]


def test_a_session_that_was_guessed_to_come_back_soon_loses_its_place_when_it_does_not() -> None:
    """It waits, raised by a wrong guess, while sessions take turns that need its place."""
    away = [(100.0 + 5.0 * turn, 0, list(range(8))) for turn in range(4)] + [(3000.0, 0, list(range(8)))]
    busy = [
        (1.0 + 20 * turn + 5.0 * session, 1 + session, range(100 * session + 50, 100 * session + 58))
        for turn in range(60)
        for session in range(4)
    ]
    requests = sorted([*away, *busy])
    workload = load_workload(
        TraceRequest(hash_ids=list(ids), timestamp_ms=1000 * at, session_id=of) for at, of, ids in requests
    )
    (guessed,) = replay(workload, "lru" + GUESSED, [(36,)])
    late = [hits for (at, of, _), hits in zip(requests, guessed.run.hits.tolist(), strict=True) if of and at > 300]
    assert set(late) == {8}, "four sessions fit when the fifth has gone"
