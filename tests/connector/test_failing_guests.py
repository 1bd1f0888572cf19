"""A guest of ours that raises, wherever that is, is turned off alone: requests are served on, and what it held is released."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cargohold.connector.guests.events import TierEvents
from cargohold.connector.guests.handoff import HANDOFF, HandingOff
from cargohold.connector.guests.hints import Hints
from cargohold.connector.guests.lower_tiers import LowerTierGuest
from cargohold.connector.guests.meters import Meters
from cargohold.connector.kernel.guest import FACTS, QUESTIONS, Guest
from cargohold.lab.simulation import SimulatedEngine
from cargohold.protocol import Hint, HintKind, StepView
from cargohold.tiers import JobKind
from cargohold.tiers.scheduler_side import TierOptions
from tests.connector.common import alone, evict_everything, prompt
from tests.connector.tiering import DISK, finish, make_engine, restored, serve
from tests.held_tiers import SimulatedTiering

GUESTS: tuple[type[Guest], ...] = (TierEvents, Meters, HandingOff, Hints, LowerTierGuest)
METHODS = [
    (guest, method)
    for guest in GUESTS
    for method in (*FACTS, *QUESTIONS)
    if method not in {"shutdown", "may_store"} and getattr(guest, method) is not getattr(Guest, method)
]
"""All that this scene comes by: whether a free block may be stored, only lazy offloading asks."""
METHODS += [
    (Meters, "take_stats"),
    (Hints, "take_stats"),
    (Hints, "take_events"),
    (Hints, "pins"),
    (TierEvents, "take"),
]
"""And what the connector takes from them for the engine."""
NUM_SLOTS = 7
REMOTE = TierOptions(name="shared", locality="REMOTE")


def fail(patch: pytest.MonkeyPatch, guest: type[Guest], method: str, at: int) -> list[int]:
    """Let a method raise in its call number ``at``; return the numbers of its calls."""
    calls: list[int] = []
    real = getattr(guest, method)

    def failing(self: Guest, *args: Any) -> Any:
        calls.append(len(calls))
        if calls[-1] == at:
            raise RuntimeError("made for this test")
        return real(self, *args)

    failing.__name__ = method
    patch.setattr(guest, method, failing)
    return calls


def play(engine: SimulatedEngine, tiering: SimulatedTiering) -> None:
    """Serve requests that need all guests; verify tokens, and that nothing is left behind."""
    pin, prefetch = Hint(kind=HintKind.PIN), Hint(kind=HintKind.PREFETCH)
    engine.hint(prompt(0, 41), None, [prefetch])
    asked: dict[str, tuple[list[int], dict[str, Any]]] = {
        "from disk": (prompt(0, 41), {}),
        "new": (prompt(7, 41), {"hints": [pin]}),
        "for another": (prompt(8, 81), {"kv_transfer_params": {"do_remote_decode": True}}),
        "from another": (prompt(1, 41), {"kv_transfer_params": {HANDOFF: {"num_tokens": 40}}}),
    }
    for name, (tokens, options) in asked.items():
        engine.add(name, tokens, 3, **options)
        engine.step()
    engine.add("aborted", prompt(2, 41), 3)
    engine.step()
    engine.abort("aborted")
    finish(engine, tiering)
    evict_everything(engine)
    engine.scheduler.reset_cache()
    engine.add("again", prompt(7, 41), 3)
    finish(engine, tiering)
    list(engine.scheduler.take_events())
    list(engine.connector.take_hint_events())
    engine.connector.get_kv_connector_stats()
    engine.connector.get_contents()
    for name, (tokens, _) in asked.items():
        assert engine.tokens(name) == alone(tokens, 3), name
    assert engine.tokens("again") == alone(prompt(7, 41), 3)
    pool = engine.scheduler.kv.pool
    assert pool.num_free_blocks == pool.num_usable_blocks


def filled() -> SimulatedTiering:
    """Tiers in which an earlier engine has left a few prompts."""
    tiering = SimulatedTiering(NUM_SLOTS, [DISK, REMOTE])
    first = make_engine(tiering)
    for at in range(3):
        serve(first, tiering, str(at), prompt(at, 41))
    return tiering


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(("guest", "method"), METHODS, ids=[f"{guest.name}-{method}" for guest, method in METHODS])
def test_whatever_raises_requests_are_served_and_blocks_given_back(
    guest: type[Guest], method: str, at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tiering = filled()
    calls = fail(monkeypatch, guest, method, at)
    engine = make_engine(tiering, emit_events=True)
    play(engine, tiering)
    has_raised = len(calls) > at
    assert has_raised or at, "the scene does not come by there"
    assert (f"guest {guest.name} is turned off: it raised in {method}" in caplog.text) is has_raised
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR and "is turned off" in record.msg]
    assert len(errors) == has_raised, "another one was turned off, too"


def test_host_memory_goes_on_without_lower_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    tiering = SimulatedTiering(60, [DISK])
    fail(monkeypatch, LowerTierGuest, "step_ends", 3)
    engine = make_engine(tiering)
    serve(engine, tiering, "before", prompt(0, 41))
    evict_everything(engine)
    serve(engine, tiering, "after", prompt(0, 41))
    assert restored(engine, "after") == {"host": 40}
    (outage,) = engine.connector.get_outages()
    assert (outage.tier, outage.what) == ("disk", "everything")


@pytest.mark.parametrize("kind", [JobKind.LOAD, JobKind.STORE])
def test_slots_of_jobs_in_flight_are_held_until_workers_report_them(
    kind: JobKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiering = filled()
    is_failing: list[bool] = []

    step_begins = LowerTierGuest.step_begins

    def failing(self: LowerTierGuest, step: StepView) -> None:
        if is_failing:
            raise RuntimeError("made for this test")
        step_begins(self, step)

    monkeypatch.setattr(LowerTierGuest, "step_begins", failing)
    engine = make_engine(tiering)
    for queue in tiering.all_queues():
        queue.held = frozenset({kind})
    if kind is JobKind.STORE:
        engine.add("new", prompt(9, 41), 3)
    else:
        engine.add("known", prompt(2, 41), 3)
    while not any(job.kind is kind for queue in tiering.all_queues() for job in queue.pending):
        engine.step()
    is_failing.append(True)
    for _ in range(4):
        engine.step()
    manager = tiering.manager
    assert manager.num_writing if kind is JobKind.LOAD else manager.num_pins, "workers may still use the slots"
    for queue in tiering.all_queues():
        queue.held = frozenset()
    finish(engine, tiering)
