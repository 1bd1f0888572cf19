"""How long requests wait for the connector's answer, and for nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm.loads import Deferrals
from cargohold.integrations.vllm.records import RequestRecord
from cargohold.integrations.vllm.request_view import SeenRequest

LIMIT_S = 10.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def record_of(name: str) -> RequestRecord:
    return RequestRecord(SeenRequest(SimpleNamespace(request_id=name)))


def accused(asks: str, seconds: float = 1.0) -> set[str | None]:
    """Who has waited too long: a letter is a step in which that request is told to ask again, a dot one without questions."""
    clock = Clock()
    deferrals, records = Deferrals(clock), {name: record_of(name) for name in asks}
    said = set()
    for name in asks:
        clock.now += seconds
        if name != ".":
            deferrals.note(records[name])
        said.add(deferrals.note_step(LIMIT_S))
    return said - {None}


@pytest.mark.parametrize("asks", ["a" * 20, "a." * 20, "a..." * 20])
def test_who_is_asked_for_again_and_again_has_waited(asks: str) -> None:
    assert accused(asks) == {"a"}


@pytest.mark.parametrize("asks", ["aaa" + "." * 1000 + "aaa", "ab" + "b" * 5 + "." * 500 + "ab", "a" * 10])
def test_who_had_no_place_has_not_waited(asks: str) -> None:
    assert accused(asks) == set()


def test_a_pause_is_nobodys_fault() -> None:
    assert accused("aa", seconds=1000.0) == set()
    assert accused("aaaaaaa", seconds=1000.0) == {"a"}


def test_those_that_are_asked_for_in_turns_have_waited_too() -> None:
    assert accused("ab" * 20) == {"a", "b"}


def test_an_answer_ends_the_wait() -> None:
    clock = Clock()
    deferrals, record = Deferrals(clock), record_of("a")
    assert deferrals.note(record)
    assert not deferrals.note(record)
    deferrals.note_step(LIMIT_S)
    assert not deferrals.note(record)
    record.patience = None
    assert deferrals.note(record)
    clock.now += 2 * LIMIT_S
    assert deferrals.note_step(LIMIT_S) is None, "it waits anew"
