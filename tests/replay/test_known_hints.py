"""Replay with hints: only what an orchestrator knows is said, and it helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from cargohold.cache.policies import POLICIES
from cargohold.errors import ConfigError
from cargohold.lab.replay.replaying import HINTED, replay
from cargohold.lab.replay.traces import TraceRequest
from cargohold.lab.replay.workload import Workload, load_workload


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
            hash_ids=list(ids),
            timestamp_ms=1000 * at,
            input_length=16 * len(ids),
            session_id=session_id,
            stop="answer" if (session + turn) % 3 == 2 else "tool_call",
        )


@pytest.fixture(scope="module")
def workload() -> Workload:
    return load_workload(turns())


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_hints_bring_more_hits_and_never_more_than_the_optimum(workload: Workload, policy: str) -> None:
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


def test_hints_say_nothing_where_all_sessions_that_wait_fit(workload: Workload) -> None:
    """Only that a session is over: so nothing that comes back is lost for it."""
    size = [(300,)]
    (plain,), (hinted,) = replay(workload, "lru", size), replay(workload, "lru" + HINTED, size)
    assert hinted.num_prefix_hits == plain.num_prefix_hits


def hits_of(requests: Sequence[tuple[float, int, Sequence[int]]], size: int, session: int) -> list[tuple[int, int]]:
    """Chunks found, and chunks of the prompt, of each request of a session but its first: with LRU and hints."""
    requests = sorted(requests)
    workload = load_workload(
        TraceRequest(hash_ids=list(ids), timestamp_ms=1000 * at, session_id=of) for at, of, ids in requests
    )
    (result,) = replay(workload, "lru" + HINTED, [(size,)])
    found = zip(requests, result.run.hits.tolist(), strict=True)
    return [(hits, len(ids)) for (_, of, ids), hits in found if of == session][1:]


def test_what_the_last_request_of_a_session_has_is_over_with_it() -> None:
    """LRU would keep it, because it was used later."""
    waiting = [(at, 1, list(range(8))) for at in (0.0, 100.0)]
    ended = [(10.0, 2, [100, 101, 102]), (20.0, 2, [100, 101, 102, 103, 104])]
    newcomer = [(30.0, 3, list(range(200, 205)))]
    assert hits_of([*waiting, *ended, *newcomer], size=13, session=1) == [(8, 8)]


def test_what_an_open_session_shares_with_one_that_is_over_stays() -> None:
    system = list(range(6))
    over, waiting = [(0.0, 2, [*system, 100])], [(10.0, 3, list(range(200, 206))), (100.0, 3, [200])]
    newcomer = [(30.0, 4, list(range(300, 304)))]
    again = [(20.0, 1, system), (40.0, 1, system)]
    assert hits_of([*over, *waiting, *again, *newcomer], size=13, session=1) == [(6, 6)]


def test_a_session_that_is_over_takes_no_place_from_sessions_that_wait() -> None:
    ended = [(2.0 * number, 10 + number, range(100 + 8 * number, 108 + 8 * number)) for number in range(40)]
    waiting = [(1.0 + 14.0 * turn, 1, list(range(50, 58))) for turn in range(6)]
    assert hits_of([*ended, *waiting], size=16, session=1) == [(8, 8)] * 5
