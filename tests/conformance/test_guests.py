"""The suite fails for guests that do what a guest must not."""

from __future__ import annotations

from typing import Any

import pytest

from cargohold import ConfigError, OffloadConfig
from cargohold.connector.kernel.guest import Guest, GuestView
from cargohold.connector.kernel.requests import RequestState
from cargohold.lab.conformance import GuestConformance
from cargohold.protocol import StepView


class Quiet(Guest):
    def __init__(self, view: GuestView) -> None:
        pass


class Failing(Quiet):
    name = "failing"

    def reset(self) -> None:
        raise RuntimeError("made for this test")


class Meddling(Guest):
    def __init__(self, view: GuestView) -> None:
        self.states: list[RequestState] = []

    def request_new(self, state: RequestState) -> None:
        self.states.append(state)

    def step_begins(self, step: StepView) -> None:
        for state in self.states:
            state.offer_from([1 << 20] * len(state.keys))  # nothing is stored


class Refusing(Quiet):
    def request_new(self, state: RequestState) -> None:
        raise ValueError("made for this test")


def suite(guest: type[Guest]) -> GuestConformance:
    made: GuestConformance = type("Suite", (GuestConformance,), {"guest": lambda _: f"{__name__}:{guest.__name__}"})()
    return made


def test_one_that_hears_nothing_is_found() -> None:
    with pytest.raises(AssertionError, match="overrides no fact"):
        suite(Quiet).test_it_hears_something()


@pytest.mark.parametrize("guest", [Failing, Refusing])
def test_one_that_raises_is_found(guest: type[Guest], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AssertionError, match="is turned off"):
        suite(guest).test_it_is_never_turned_off(caplog)


def test_one_that_changes_steps_is_found() -> None:
    with pytest.raises(AssertionError):
        suite(Meddling).test_it_changes_no_step()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unused", "must be MODULE:CLASS"),
        ("no_such_module:Guest", "cannot be imported"),
        ("collections:OrderedDict", "derived from"),
        (7, "must be MODULE:CLASS"),
    ],
)
def test_an_option_that_names_no_guest_is_refused_by_name(name: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"guests.*{said}"):
        OffloadConfig(host_bytes="1MiB", guests=[name])
