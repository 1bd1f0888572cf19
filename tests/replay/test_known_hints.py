"""Replay with hints: only what an orchestrator knows is said, and it helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from cargohold.cache import OffloadManager
from cargohold.cache.manager import ForwardingManager
from cargohold.cache.policies import POLICIES
from cargohold.errors import ConfigError
from cargohold.lab.replay.hints import OrchestratorHints
from cargohold.lab.replay.replaying import HINTED, replay
from cargohold.lab.replay.tiers import run_tiers
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


LAST_TURN_S = 171.0


def with_pauses(
    last_pauses_s: Sequence[float], *, comes_back: bool, last_stop: str = "tool_call"
) -> list[TraceRequest]:
    """Two agents of one session take turns, beside sessions that need their place; the first may come back at the end.

    The pauses before the last turns are given, and how the turn before the last of them ended.
    """
    first, second = [0, *range(10, 18)], [0, *range(20, 28)]
    turns = [(9.0 * turn, 0, first if turn % 2 else second) for turn in range(20)]
    assert turns[-1][0] == LAST_TURN_S
    others = [
        (1.0 + 4.0 * turn, 1 + turn % 5, range(100 * (turn % 5) + 100, 100 * (turn % 5) + 106)) for turn in range(90)
    ]
    now = turns[-1][0]
    for pause_s in last_pauses_s:
        now += pause_s
        turns.append((now, 0, second))
    turns.append((now + 100.0, 0, first if comes_back else second))
    unlike = turns[-3][0]
    return [
        TraceRequest(
            hash_ids=list(ids),
            timestamp_ms=1000 * at,
            session_id=of,
            stop=last_stop if of == 0 and at == unlike else "tool_call",
        )
        for at, of, ids in sorted([*turns, *others])
    ]


class Listener(ForwardingManager):
    """Notes what is said of which chunks."""

    def __init__(self, inner: OffloadManager) -> None:
        super().__init__(inner)
        self.said: list[tuple[list[bytes], int]] = []

    def rank(self, keys: Sequence[bytes], level: int, tenant: str | None = None) -> int:
        self.said.append((list(keys), level))
        return super().rank(keys, level, tenant)


class TimedHints(OrchestratorHints):
    """Hints up to a moment."""

    end_s = 0.0

    def before(self, request: int, prompt: Sequence[bytes]) -> None:
        if self._arrivals_s[request] < self.end_s:
            super().before(request, prompt)

    def after(self, request: int, keys: Sequence[bytes]) -> None:
        if self._arrivals_s[request] < self.end_s:
            super().after(request, keys)


def said_until(requests: Sequence[TraceRequest], end_s: float) -> list[tuple[list[bytes], int]]:
    workload = load_workload(requests)
    listeners: list[Listener] = []

    def give_hints(manager: OffloadManager) -> OrchestratorHints:
        listeners.append(Listener(manager))
        hints = TimedHints(workload, listeners[0])
        hints.end_s = end_s
        return hints

    run_tiers(workload, "lru", (20,), give_hints=give_hints)
    return listeners[0].said


def test_what_is_said_does_not_depend_on_whether_a_session_comes_back_to_what_it_left() -> None:
    """Else the hints would know the future."""
    back, gone = (with_pauses([12.0, 40.0, 12.0], comes_back=comes_back) for comes_back in (True, False))
    end_s = LAST_TURN_S + 64.0 + 100.0
    said = said_until(back, end_s)
    assert said == said_until(gone, end_s)
    assert len(said) > 100


@pytest.mark.parametrize("late_s", [30.0, 110.0, 1000.0])
def test_what_is_said_does_not_depend_on_when_the_next_turn_comes(late_s: float) -> None:
    soon, late = (with_pauses([12.0, pause_s], comes_back=True) for pause_s in (10.0, late_s))
    end_s = LAST_TURN_S + 12.0 + 10.0
    assert said_until(soon, end_s) == said_until(late, end_s)


def test_what_is_said_depends_on_how_the_turn_ended() -> None:
    tool, person = (with_pauses([12.0, 40.0], comes_back=True, last_stop=stop) for stop in ("tool_call", "answer"))
    end_s = LAST_TURN_S + 12.0 + 40.0
    assert said_until(tool, end_s) != said_until(person, end_s)


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


@pytest.mark.parametrize("num_left", [1, 4])
def test_what_a_session_leaves_behind_takes_no_place_from_sessions_that_wait(num_left: int) -> None:
    """An end of an answer in other words, or a branch. LRU would keep it, because it was used later."""
    busy = [
        (2.0 * turn, 0, [0, 1, 2, 3, *range(100 + turn * num_left, 100 + (turn + 1) * num_left)]) for turn in range(40)
    ]
    waiting = [(1.0 + 14.0 * turn, 1, list(range(50, 58))) for turn in range(6)]
    assert hits_of([*busy, *waiting], size=4 + num_left + 8, session=1)[1:] == [(8, 8)] * 4, "once that is known"


def test_a_branch_to_which_its_session_comes_back_is_not_what_it_leaves_behind() -> None:
    """Two agents of one session take turns; another session leaves something behind in each turn."""
    agents = [(5.0 * turn, 0, [0, *range(10 + 10 * (turn % 2), 14 + 10 * (turn % 2))]) for turn in range(12)]
    other = [(1.0 + 5.0 * turn, 1, [50, 51, 52, 53, 100 + 2 * turn, 101 + 2 * turn]) for turn in range(12)]
    assert hits_of([*agents, *other], size=15, session=0)[3:] == [(5, 5)] * 8, "once that is known"


def test_a_session_that_is_over_takes_no_place_from_sessions_that_wait() -> None:
    ended = [(2.0 * number, 10 + number, range(100 + 8 * number, 108 + 8 * number)) for number in range(40)]
    waiting = [(1.0 + 14.0 * turn, 1, list(range(50, 58))) for turn in range(6)]
    assert hits_of([*ended, *waiting], size=16, session=1) == [(8, 8)] * 5
