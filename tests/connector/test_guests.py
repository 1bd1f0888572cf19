"""Guests hear what the kernel does, in their order; one that raises is turned off alone, and the connector goes on."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cargohold.connector.kernel.guest import FACTS, Guest, Guests
from cargohold.errors import RequestError

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "request_new": ("state",),
    "request_placed": ("state", ()),
    "request_asked": ("state", True),
    "request_admitted": ("state", "admission"),
    "request_ended": ("state", ()),
    "chunks_used": ("state",),
    "load_ended": ("load", 1.0, "done"),
    "chunks_offered": ((),),
    "store_begins": ("store", ()),
    "store_ended": ("store", 1.0, "done"),
    "stores_abandoned": ("state",),
    "step_begins": ("step",),
    "step_ends": (),
    "reset": (),
    "worker_reported": ("output",),
    "shutdown": (),
}


def listener(name: str, log: list[tuple[str, str, tuple[Any, ...]]], *facts: str, fails: str = "") -> Guest:
    """A guest that overrides some facts, notes them, and raises in one."""

    def hearing(fact: str) -> Any:
        def hear(_: Guest, *args: Any) -> None:
            log.append((name, fact, args))
            if fact == fails:
                raise RuntimeError("made for this test")

        hear.__name__ = fact
        return hear

    kind = type("Listener", (Guest,), {"name": name, **{fact: hearing(fact) for fact in facts}})
    guest = kind()
    assert isinstance(guest, Guest)
    return guest


def test_every_fact_is_in_this_test() -> None:
    assert list(ARGUMENTS) == list(FACTS)


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_reaches_the_guests_that_want_it_in_their_order(fact: str) -> None:
    log: list[tuple[str, str, tuple[Any, ...]]] = []
    others = [other for other in FACTS if other != fact]
    guests = Guests([listener("a", log, fact), listener("deaf", log, *others), listener("b", log, *FACTS)])
    getattr(guests, fact)(*ARGUMENTS[fact])
    assert log == [("a", fact, ARGUMENTS[fact]), ("b", fact, ARGUMENTS[fact])]


@pytest.mark.parametrize("fact", [fact for fact in FACTS if fact != "shutdown"])
def test_one_that_raises_is_turned_off_alone_and_releases_what_it_held(
    fact: str, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[tuple[str, str, tuple[Any, ...]]] = []
    guests = Guests([listener("bad", log, *FACTS, fails=fact), listener("good", log, *FACTS)])
    getattr(guests, fact)(*ARGUMENTS[fact])
    assert [(name, heard) for name, heard, _ in log] == [("bad", fact), ("bad", "shutdown"), ("good", fact)]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert f"guest bad is turned off: it raised in {fact}" in caplog.text
    log.clear()
    getattr(guests, fact)(*ARGUMENTS[fact])
    assert [name for name, _, _ in log] == ["good"], "it hears nothing any more"


def test_one_that_also_raises_while_it_is_released_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Guest):
        name = "bad"

        def reset(self) -> None:
            raise RuntimeError("made for this test")

        shutdown = reset

    log: list[tuple[str, str, tuple[Any, ...]]] = []
    guests = Guests([Bad(), listener("good", log, "reset")])
    guests.reset()
    assert [name for name, _, _ in log] == ["good"]
    assert "raised again while it released what it held" in caplog.text


def test_a_request_may_be_refused_when_it_is_new_and_only_then(caplog: pytest.LogCaptureFixture) -> None:
    class Strict(Guest):
        def request_new(self, state: Any) -> None:
            raise RequestError("no such parameter", "r")

        def request_ended(self, state: Any, block_ids: Any) -> None:
            raise RequestError("too late", "r")

    guests, state = Guests([Strict()]), Any
    with pytest.raises(RequestError, match="no such parameter"):
        guests.request_new(state)  # type: ignore[arg-type]  # never looked at
    assert not caplog.records, "it is the request's fault"
    guests.request_ended(state, ())  # type: ignore[arg-type]  # never looked at
    assert "turned off" in caplog.text


def test_what_ends_the_program_is_passed_on() -> None:
    class Interrupted(Guest):
        def step_ends(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guests([Interrupted()]).step_ends()


@pytest.mark.parametrize(("answers", "expected"), [([], True), ([True, True], True), ([True, False, True], False)])
def test_all_must_agree_before_a_block_is_stored_that_no_request_holds(answers: list[bool], expected: bool) -> None:
    def saying(answer: bool) -> Guest:
        guest = type("Saying", (Guest,), {"may_store": lambda *_: answer})()
        assert isinstance(guest, Guest)
        return guest

    assert Guests([saying(answer) for answer in answers]).may_store(b"key", 1) is expected


def test_one_that_raises_has_no_say(caplog: pytest.LogCaptureFixture) -> None:
    class Bad(Guest):
        def may_store(self, key: bytes, block_id: int) -> bool:
            raise RuntimeError("made for this test")

    guests = Guests([Bad()])
    assert guests.may_store(b"key", 1)
    assert "turned off" in caplog.text
