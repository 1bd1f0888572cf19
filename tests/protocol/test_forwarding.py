"""Wrappers pass on everything there is: a method added to a port must not be answered by the port's own default."""

from __future__ import annotations

from inspect import isfunction, signature
from typing import Any
from unittest.mock import MagicMock

import pytest

from cargohold.cache import ForwardingManager, OffloadManager
from cargohold.connector.multi import MultiConnectorScheduler
from cargohold.connector.multi_worker import MultiConnectorWorker
from cargohold.protocol import (
    ConnectorGuard,
    ForwardingScheduler,
    ForwardingWorker,
    HookDispatcher,
    KVConnectorScheduler,
    KVConnectorWorker,
    NullConnectorScheduler,
    WorkerHookDispatcher,
)
from cargohold.protocol.hooks import HOOKS, WORKER_HOOKS
from cargohold.transfer import ForwardingTransfers, TransferWorker

SAY_THAT_IT_IS_OFF = ("on_hints", "explain", "get_kv_connector_stats", "get_outages")
"""Hooks whose answer says so: ``test_guard.py`` looks at each."""


def members(port: type) -> list[str]:
    """The methods and properties of a port that others may answer."""
    own = {name: value for name, value in vars(port).items() if isfunction(value) or isinstance(value, property)}
    return [name for name, value in own.items() if not getattr(value, "__final__", False)]  # which call the others


@pytest.mark.parametrize(
    ("port", "wrapper"),
    [
        (KVConnectorScheduler, HookDispatcher),
        (KVConnectorWorker, WorkerHookDispatcher),
        (OffloadManager, ForwardingManager),
        (TransferWorker, ForwardingTransfers),
    ],
)
def test_nothing_is_left_to_the_ports_defaults(port: type, wrapper: type) -> None:
    assert len(members(port)) > 4
    assert set(members(port)) <= vars(wrapper).keys()


def test_the_table_has_every_hook_in_the_ports_order() -> None:
    assert list(HOOKS) == members(KVConnectorScheduler)
    assert list(WORKER_HOOKS) == members(KVConnectorWorker)


@pytest.mark.parametrize("name", HOOKS)
def test_a_forwarder_passes_every_hook_on_with_its_arguments(name: str) -> None:
    inner: Any = MagicMock(spec=KVConnectorScheduler)
    inner.name, inner.worker_metadata_type = "inner", dict
    parameters = [
        parameter for parameter in signature(getattr(KVConnectorScheduler, name)).parameters if parameter != "self"
    ]
    given = dict.fromkeys(parameters, "given")
    assert getattr(ForwardingScheduler(inner), name)(**given) is getattr(inner, name).return_value
    getattr(inner, name).assert_called_once_with(*given.values())


@pytest.mark.parametrize("name", WORKER_HOOKS)
def test_so_does_one_of_workers(name: str) -> None:
    inner: Any = MagicMock(spec=KVConnectorWorker)
    inner.name, inner.metadata_type = "inner", dict
    given = {
        parameter: "given"
        for parameter in signature(getattr(KVConnectorWorker, name)).parameters
        if parameter != "self"
    }
    assert getattr(ForwardingWorker(inner), name)(**given) is getattr(inner, name).return_value
    getattr(inner, name).assert_called_once_with(*given.values())


@pytest.mark.parametrize("name", [name for name in HOOKS if name not in SAY_THAT_IT_IS_OFF])
def test_what_is_off_answers_what_keeps_nothing_answers(name: str) -> None:
    """The caller of a guard must be able to go on with every answer: nothing is found, nothing pends, nothing is owed."""
    request = MagicMock(num_tokens=8)
    values = {
        "request": request,
        "num_computed_tokens": 0,
        "num_external_tokens": 0,
        "request_id": "r",
        "context": request,
    }
    parameters = list(signature(getattr(KVConnectorScheduler, name)).parameters)[1:]
    args = [values.get(parameter, ()) for parameter in parameters]
    guard, healthy = (ConnectorGuard(NullConnectorScheduler(), num_blocks=4) for _ in range(2))
    guard.break_off("a rule")
    guard.stop_workers()
    guard.release()
    off, on = getattr(guard, name)(*args), getattr(healthy, name)(*args)
    assert off == on or (list(off), list(on)) == ([], [])


@pytest.mark.parametrize("name", HOOKS)
def test_a_composition_has_an_answer_of_its_own_or_merges(name: str) -> None:
    with_method = name in vars(MultiConnectorScheduler)
    merges = HOOKS[name].merge is not HOOKS["explain"].merge
    assert with_method or merges, f"nothing says what several connectors answer to {name}"


@pytest.mark.parametrize("name", WORKER_HOOKS)
def test_so_has_one_of_workers(name: str) -> None:
    merges = WORKER_HOOKS[name].merge is not HOOKS["explain"].merge
    assert name in vars(MultiConnectorWorker) or merges, f"nothing says what several connectors answer to {name}"
