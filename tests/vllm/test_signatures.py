"""What is told from signatures alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm.compat import changed_hooks, refused_call


class Theirs(ABC):
    @property
    def wants(self) -> bool:
        return True

    @classmethod
    def make(cls, config: dict[str, Any]) -> None:
        raise NotImplementedError

    @abstractmethod
    def load(self, context: object, **kwargs: object) -> None: ...

    def finish(self, ids: set[str]) -> None:
        raise NotImplementedError

    def unused(self, anything: object) -> None:
        raise NotImplementedError


class Ours(Theirs):
    @property
    def wants(self) -> bool:
        return False

    @classmethod
    def make(cls, config: dict[str, Any]) -> None: ...

    def load(self, context: object, **kwargs: object) -> None: ...

    def finish(self, ids: set[str]) -> None: ...

    def _inside(self) -> None: ...


def test_hooks_as_they_are_called_are_fine() -> None:
    assert changed_hooks(Ours) == []


def annotated_otherwise(self: object, ids: list[str] | None) -> object: ...
def one_more(self: object, ids: set[str], step: int = 0) -> None: ...
def one_less(self: object) -> None: ...
def another_name(self: object, req_ids: set[str]) -> None: ...
def by_name_only(self: object, *, ids: set[str]) -> None: ...
def another_by_name(self: object, ids: set[str], *, step: int = 0) -> None: ...
def anything(self: object, *args: object, **kwargs: object) -> None: ...


@pytest.mark.parametrize(
    ("finish", "sentences"),
    [
        (annotated_otherwise, []),
        (by_name_only, []),
        (one_more, ["vLLM's hook finish has a parameter step at place 2"]),
        (another_by_name, ["vLLM's hook finish has a parameter step at place 2"]),
        (another_name, ["vLLM's hook finish has a parameter req_ids at place 1"]),
        (one_less, ["vLLM's hook finish has no parameter ids any more"]),
        (anything, ["vLLM's hook finish has a parameter args at place 1"]),
        (property(one_less), ["vLLM's hook finish is a property now"]),
        (classmethod(one_less), ["vLLM's hook finish is a classmethod now"]),
    ],
)
def test_a_hook_that_is_called_otherwise_is_told(
    finish: Any, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Theirs, "finish", finish)
    assert changed_hooks(Ours) == sentences


def test_a_hook_that_takes_anything_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ours, "finish", anything)
    for finish in (one_more, another_name, by_name_only, anything):
        monkeypatch.setattr(Theirs, "finish", finish)
        assert changed_hooks(Ours) == []


def test_a_hook_that_is_gone_is_told_unless_it_came_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Theirs, "finish")
    assert changed_hooks(Ours) == ["vLLM has no hook finish"]
    assert changed_hooks(Ours, later=["finish"]) == []


def test_a_hook_that_came_later_must_fit_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Theirs, "finish", one_more)
    assert changed_hooks(Ours, later=["finish"]) == ["vLLM's hook finish has a parameter step at place 2"]


def test_a_hook_that_is_demanded_and_is_not_there_is_told() -> None:
    class Wants(ABC):
        @abstractmethod
        def teleport(self) -> int | None: ...

    class Lacks(Wants):
        pass

    assert changed_hooks(Lacks) == ["vLLM demands a hook teleport"]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda blocks: blocks, None),
        (lambda blocks, prepend=False: blocks, None),
        (lambda: None, "too many positional arguments"),
        (lambda blocks, prepend: blocks, "missing a required argument: 'prepend'"),
    ],
)
def test_a_call_that_does_not_fit_is_told_and_not_made(function: Callable[..., object], sentence: str | None) -> None:
    expected = [] if sentence is None else [f"the pool's touch wants other arguments: {sentence}"]
    assert refused_call("the pool's touch", function, 1) == expected


def test_arguments_by_name_are_looked_at_too() -> None:
    assert refused_call("it", one_more, 2, ["step"]) == []
    assert refused_call("it", one_more, 2, ["stop"]) == [
        "it wants other arguments: got an unexpected keyword argument 'stop'"
    ]
