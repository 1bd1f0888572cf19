"""Whatever a connector raises is contained on both sides, also what is no ``Exception`` and what cannot describe itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cargohold.protocol import (
    ConnectorGuard,
    EmptyMetadata,
    KVConnectorOutput,
    NullConnectorScheduler,
    NullConnectorWorker,
    WorkerConnectorGuard,
)


class Panic(BaseException):
    """As raised by libraries in Rust: pyo3's ``PanicException``."""


class SpeechlessError(Exception):
    """Its description fails."""

    def __repr__(self) -> str:
        raise AttributeError("detail")

    __str__ = __repr__


class SpeechlessPanic(Panic):
    """Its description panics too."""

    def __repr__(self) -> str:
        raise Panic

    __str__ = __repr__


CONTAINED = (Panic, SpeechlessError, SpeechlessPanic)
PASSED_ON = (KeyboardInterrupt, SystemExit, GeneratorExit)

SCHEDULER_CALLS: dict[str, Callable[[ConnectorGuard], Any]] = {
    "update_connector_output": lambda guard: guard.update_connector_output(KVConnectorOutput()),
    "report_to_scheduler": lambda guard: guard.report_to_scheduler(),
    "has_pending_work": lambda guard: guard.has_pending_work(),
    "take_events": lambda guard: guard.take_events(),
    "explain": lambda guard: guard.explain("r"),
    "shutdown": lambda guard: guard.shutdown(),
}

WORKER_CALLS: dict[str, Callable[[WorkerConnectorGuard], Any]] = {
    "register_kv_caches": lambda guard: guard.register_kv_caches([]),
    "bind_connector_metadata": lambda guard: guard.bind_connector_metadata(EmptyMetadata()),
    "start_load_kv": lambda guard: guard.begin(EmptyMetadata()),
    "save_kv_layer": lambda guard: guard.save_kv_layer("layers.0"),
    "wait_for_save": lambda guard: guard.wait_for_save(),
    "get_transfer_results": lambda guard: guard.collect(frozenset()),
    "clear_connector_metadata": lambda guard: guard.clear_connector_metadata(),
}


def raising(side: type, method: str, error: type[BaseException]) -> Any:
    """A side of a connector with a method that raises."""

    def fail(*_: object) -> None:
        raise error

    return type("Raising", (side,), {"name": "raising", method: fail})()


@pytest.mark.parametrize("method", SCHEDULER_CALLS)
@pytest.mark.parametrize("error", CONTAINED)
def test_the_scheduler_side_is_turned_off(method: str, error: type[BaseException]) -> None:
    guard = ConnectorGuard(raising(NullConnectorScheduler, method, error), num_blocks=4)
    SCHEDULER_CALLS[method](guard)
    assert guard.broken is not None and f"{method} raised {error.__name__}" in guard.broken.rule


@pytest.mark.parametrize("method", SCHEDULER_CALLS)
@pytest.mark.parametrize("error", PASSED_ON)
def test_what_ends_the_program_passes_the_scheduler_side(method: str, error: type[BaseException]) -> None:
    guard = ConnectorGuard(raising(NullConnectorScheduler, method, error), num_blocks=4)
    with pytest.raises(error):
        SCHEDULER_CALLS[method](guard)
    assert guard.broken is None


@pytest.mark.parametrize("method", WORKER_CALLS)
@pytest.mark.parametrize("error", CONTAINED)
def test_the_worker_side_is_stopped(method: str, error: type[BaseException]) -> None:
    guard = WorkerConnectorGuard(raising(NullConnectorWorker, method, error))
    WORKER_CALLS[method](guard)
    told = guard.take_error()
    assert told is not None and f"raised {error.__name__}" in told
    assert guard.collect(frozenset()).step_failed or method == "get_transfer_results"


@pytest.mark.parametrize("error", CONTAINED)
def test_a_worker_side_that_raises_while_it_is_stopped_is_let_go(error: type[BaseException]) -> None:
    WorkerConnectorGuard(raising(NullConnectorWorker, "shutdown", error)).stop()


@pytest.mark.parametrize("method", [*WORKER_CALLS, "shutdown"])
@pytest.mark.parametrize("error", PASSED_ON)
def test_what_ends_the_program_passes_the_worker_side(method: str, error: type[BaseException]) -> None:
    guard = WorkerConnectorGuard(raising(NullConnectorWorker, method, error))
    call = WORKER_CALLS.get(method, WorkerConnectorGuard.stop)
    with pytest.raises(error):
        call(guard)
    assert guard.take_error() is None
