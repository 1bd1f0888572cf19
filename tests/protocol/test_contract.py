"""The contract in the code and the contract in the documentation are the same."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cargohold import protocol
from cargohold.protocol import (
    KVConnectorScheduler,
    KVConnectorTransferResults,
    KVConnectorWorker,
    NullConnectorScheduler,
    NullConnectorWorker,
    SchedulerContext,
)

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "contract.md").read_text(encoding="utf-8")
DOCUMENT = (DOCS / "api" / "protocol.md").read_text(encoding="utf-8")
SIGNATURE = re.compile(r"^\| `(\w+)\(([^)]*)\)` \|", re.MULTILINE)


def documented(heading: str) -> dict[str, list[str]]:
    """Methods of the table under a heading, with their parameters, in order."""
    section = DOCUMENT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return {name: [part for part in arguments.split(", ") if part] for name, arguments in SIGNATURE.findall(section)}


def in_code(*kinds: type) -> dict[str, list[str]]:
    """Public methods that the classes define, with their parameters, in order."""
    return {
        name: parameters_of(method)
        for kind in kinds
        for name, method in vars(kind).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


def parameters_of(method: Callable[..., object]) -> list[str]:
    """Names, with a star before those that must be named in a call."""
    parameters = [parameter for name, parameter in inspect.signature(method).parameters.items() if name != "self"]
    named = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    return (
        [parameter.name for parameter in parameters if parameter.name not in named] + ["*" for _ in named[:1]] + named
    )


@pytest.mark.parametrize(
    ("heading", "kinds"),
    [
        ("Scheduler side", (KVConnectorScheduler,)),
        ("Worker side", (KVConnectorWorker,)),
        ("The scheduler context", (protocol.BlockPoolView, SchedulerContext)),
    ],
)
def test_the_document_lists_exactly_the_methods_there_are(heading: str, kinds: tuple[type, ...]) -> None:
    assert set(documented(heading)) == set(in_code(*kinds))
    assert documented(heading) == in_code(*kinds)


@pytest.mark.parametrize("heading", ["Scheduler side", "Worker side"])
def test_the_document_keeps_the_order_of_the_code(heading: str) -> None:
    kind = KVConnectorScheduler if heading == "Scheduler side" else KVConnectorWorker
    assert list(documented(heading)) == list(in_code(kind))


@pytest.mark.parametrize(
    "message", ["KVConnectorTransferResults", "KVConnectorOutput", "KVConnectorSchedulerOutput", "CacheReport"]
)
def test_the_document_lists_exactly_the_fields_there_are(message: str) -> None:
    (row,) = re.findall(rf"^\| `{message}` \|.*\| (.*) \|$", DOCUMENT, re.MULTILINE)
    fields = [field.name for field in dataclasses.fields(getattr(protocol, message))]
    assert re.findall(r"`(\w+)`", row) == fields


@pytest.mark.parametrize(
    "shown",
    [
        "SchedulerEnvironment",
        "WorkerEnvironment",
        "KVCacheLayout",
        "KVCacheGroup",
        "RequestView",
        "StepView",
        "ScheduledRequest",
    ],
)
def test_the_document_lists_what_a_connector_is_shown(shown: str) -> None:
    (row,) = re.findall(rf"^\| `{shown}` \| (.*) \|$", DOCUMENT, re.MULTILINE)
    kind = getattr(protocol, shown)
    is_message = dataclasses.is_dataclass(kind)
    fields = (
        [field.name for field in dataclasses.fields(kind)]
        if is_message
        else [name for name, value in vars(kind).items() if isinstance(value, property)]
    )
    assert re.findall(r"`(\w+)`", row) == fields


def test_the_document_names_what_must_be_written() -> None:
    (sentence,) = re.findall(r"^A connector must implement.*?;", PAGE, re.MULTILINE | re.DOTALL)
    scheduler, worker = (set(re.findall(r"`(\w+)`", part)) for part in sentence.split("on the scheduler side"))
    assert scheduler == KVConnectorScheduler.__abstractmethods__
    assert worker == KVConnectorWorker.__abstractmethods__


def test_every_method_says_what_it_means() -> None:
    for kind in (KVConnectorScheduler, KVConnectorWorker):
        for name in in_code(kind):
            assert inspect.getdoc(getattr(kind, name)), f"{kind.__name__}.{name}"


def test_a_connector_needs_to_write_only_what_has_no_safe_default() -> None:
    assert KVConnectorScheduler.__abstractmethods__ == {
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
    }
    assert KVConnectorWorker.__abstractmethods__ == {
        "bind_connector_metadata",
        "start_load_kv",
        "wait_for_save",
        "clear_connector_metadata",
    }


def test_the_defaults_are_safe() -> None:
    scheduler, worker = NullConnectorScheduler(), NullConnectorWorker()
    assert scheduler.report_to_scheduler() is None
    assert not scheduler.has_pending_work()
    assert scheduler.reset_cache()
    assert tuple(scheduler.take_events()) == ()
    assert scheduler.get_finished_count() is None
    assert worker.get_transfer_results(frozenset()) == KVConnectorTransferResults()
    assert worker.get_block_ids_with_load_errors() == frozenset()
    assert worker.build_connector_worker_meta() is None


def test_the_protocol_needs_nothing_but_the_standard_library() -> None:
    import subprocess  # noqa: PLC0415
    import sys  # noqa: PLC0415

    code = (
        "import sys, importlib.util as u\n"
        "import types; package = types.ModuleType('cargohold')\n"
        "package.__path__ = [u.find_spec('cargohold').submodule_search_locations[0]]\n"
        "sys.modules['cargohold'] = package\n"
        "import cargohold.protocol\n"
        "print(sorted(set(m.split('.')[0] for m in sys.modules) - set(sys.stdlib_module_names) - {'cargohold', '__main__'}))"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(protocol.__file__).parents[2])},
    )
    assert result.stdout.strip() == "[]", result.stderr
