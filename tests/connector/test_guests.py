"""Guests are called in their order; one that options name and that raises is turned off alone, and the connector goes on."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cargohold.connector.kernel.guest import PORT, ContainedGuest, Guest, Guests, GuestView, Worth, counted_by_guests
from cargohold.errors import RequestError
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.protocol import metrics
from tests.connector.common import alone, prompt

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "request_new": ("state",),
    "request_admitted": ("state", "admission"),
    "request_ended": ("state", ()),
    "load_ended": ("load", 1.0, "done"),
    "chunks_listed": ((),),
    "store_begins": ("store", ()),
    "store_ended": ("store", 1.0, "done"),
    "step_begins": ("step",),
    "reset": (),
    "shutdown": (),
    "worth": ("state",),
    "is_busy": (),
}
ANSWERS = {"worth": Worth(80), "is_busy": False}


def listener(name: str, log: list[tuple[str, str, tuple[Any, ...]]], *methods: str, fails: str = "") -> Guest:
    """A guest that overrides some methods, notes their calls, and raises in one."""

    def hearing(method: str) -> Any:
        def hear(_: Guest, *args: Any) -> Any:
            log.append((name, method, args))
            if method == fails:
                raise RuntimeError("made for this test")
            return ANSWERS.get(method)

        return hear

    guest = type("Listener", (Guest,), {"name": name, **{method: hearing(method) for method in methods}})()
    assert isinstance(guest, Guest)
    return guest


def test_the_whole_port_is_in_this_test() -> None:
    assert tuple(ARGUMENTS) == PORT


@pytest.mark.parametrize("method", PORT)
def test_a_call_reaches_the_guests_that_override_the_method_in_their_order(method: str) -> None:
    log: list[tuple[str, str, tuple[Any, ...]]] = []
    others = [other for other in PORT if other != method]
    guests = Guests([listener("a", log, method), listener("deaf", log, *others), listener("b", log, *PORT)])
    assert getattr(guests, method)(*ARGUMENTS[method]) == ANSWERS.get(method)
    assert log == [("a", method, ARGUMENTS[method]), ("b", method, ARGUMENTS[method])]


@pytest.mark.parametrize("method", PORT)
def test_without_guests_nothing_is_called(method: str) -> None:
    assert getattr(Guests(), method)(*ARGUMENTS[method]) == getattr(Guest(), method)(*ARGUMENTS[method])


@pytest.mark.parametrize("method", PORT)
def test_a_stranger_that_raises_is_turned_off_alone_and_releases_what_it_held(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[tuple[str, str, tuple[Any, ...]]] = []
    bad = ContainedGuest(listener("bad", log, *PORT, fails=method))
    guests = Guests([bad, listener("good", log, *PORT)])
    getattr(guests, method)(*ARGUMENTS[method])
    heard_by_bad = dict.fromkeys([method, "shutdown"])  # each once
    assert [(name, heard) for name, heard, _ in log] == [*(("bad", one) for one in heard_by_bad), ("good", method)]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert f"guest bad is turned off: it raised in {method}" in caplog.text
    log.clear()
    getattr(guests, method)(*ARGUMENTS[method])
    assert [name for name, _, _ in log] == ["good"], "it is called no more"


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("worth", 5),
        ("worth", None),
        ("worth", Worth(10**9)),
        ("worth", Worth(-5)),
        ("worth", Worth(None)),  # type: ignore[arg-type]  # made for this test
        ("worth", Worth(2.5)),  # type: ignore[arg-type]  # made for this test
        ("is_busy", "yes"),
        ("is_busy", None),
    ],
)
def test_a_stranger_that_answers_what_is_refused_later_is_turned_off_alone(
    method: str, answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by attack: the whole connector was turned off, by code that had taken the answer for a good one."""
    bad = type("Bad", (Guest,), {"name": "bad", method: lambda *_: answer})()
    guests = Guests([ContainedGuest(bad)])
    expected = getattr(Guest(), method)(*ARGUMENTS[method])
    assert getattr(guests, method)(*ARGUMENTS[method]) == expected
    assert f"guest bad is turned off: it raised in {method}" in caplog.text


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf"), "x", None, 1j])
def test_a_stranger_that_counts_what_cannot_be_shown_is_turned_off_alone(
    amount: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by attack: a negative count ended vLLM's API server, to which nobody had said whose it was."""
    tally = metrics.Tally()
    count = counted_by_guests(lambda series, more: tally.update({series: more}))
    series = metrics.PROMPT.of("device")

    class Bad(Guest):
        def reset(self) -> None:
            count(series, 1)
            count(series, amount)

    guests = Guests([ContainedGuest(Bad())])
    guests.reset()
    assert tally == {series: 1}
    assert "is turned off: it raised in reset" in caplog.text
    with pytest.raises(ValueError, match="cannot be added"):
        count("no series", 1)  # type: ignore[arg-type]  # made for this test


class Panic(BaseException):
    """As libraries in Rust raise it: no ``Exception``."""


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_a_stranger_that_also_raises_while_it_is_released_stops_nothing(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    class Bad(Guest):
        name = "bad"

        def reset(self) -> None:
            raise error

        shutdown = reset

    log: list[tuple[str, str, tuple[Any, ...]]] = []
    guests = Guests([ContainedGuest(Bad()), listener("good", log, "reset")])
    guests.reset()
    assert [name for name, _, _ in log] == ["good"]
    assert "raised again while it released what it held" in caplog.text


def test_a_request_may_be_refused_when_it_is_new_and_only_then(caplog: pytest.LogCaptureFixture) -> None:
    class Strict(Guest):
        def request_new(self, state: Any) -> None:
            raise RequestError("no such parameter", "r")

        def request_ended(self, state: Any, block_ids: Any) -> None:
            raise RequestError("too late", "r")

    guests, state = Guests([ContainedGuest(Strict())]), Any
    with pytest.raises(RequestError, match="no such parameter"):
        guests.request_new(state)  # type: ignore[arg-type]  # never looked at
    assert not caplog.records, "it is the request's fault"
    guests.request_ended(state, ())  # type: ignore[arg-type]  # never looked at
    assert "turned off" in caplog.text


def test_what_ends_the_program_is_passed_on() -> None:
    class Interrupted(Guest):
        def reset(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guests([ContainedGuest(Interrupted())]).reset()


def test_of_several_worths_the_highest_level_counts_and_every_must_be_kept() -> None:
    def saying(worth: Worth) -> Guest:
        guest = type("Saying", (Guest,), {"worth": lambda *_: worth})()
        assert isinstance(guest, Guest)
        return guest

    guests = Guests([saying(Worth(60)), saying(Worth(40, must_keep=True))])
    assert guests.worth("state") == Worth(60, must_keep=True)  # type: ignore[arg-type]  # never looked at


class Failing(Guest):
    """Raises in the method ``fails``, as options name it."""

    name = "failing"
    fails = ""

    def __init__(self, view: GuestView) -> None:
        del view

    def __getattribute__(self, name: str) -> Any:
        if name == type(self).fails and name in PORT:
            return _Failure()
        return super().__getattribute__(name)


class _Failure:
    def __call__(self, *_: object) -> None:
        raise RuntimeError("made for this test")


@pytest.mark.parametrize("method", PORT)
def test_requests_are_served_on_whatever_raises(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Failing, "fails", method)
    tier = SimulatedOffloading(8, mode="exclusive", guests=[f"{__name__}:Failing"])
    engine = SimulatedEngine(simulated_layout(60), tier)
    for name in ("first", "again"):
        engine.add(name, prompt(0, 41), 3)
        engine.run()
        engine.scheduler.kv.pool.reset_cache()
        assert engine.tokens(name) == alone(prompt(0, 41), 3)
    assert engine.scheduler.reset_cache()
    engine.shutdown()
    assert f"guest failing is turned off: it raised in {method}" in caplog.text
