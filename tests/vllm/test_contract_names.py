"""The manual's table of names: all that differ from vLLM's are in it, and no others."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cargohold import protocol

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

if not hasattr(base, "KVConnectorTransferResults"):
    pytest.skip("the table is about vLLM 0.32", allow_module_level=True)

MANUAL = (Path(__file__).parents[2] / "docs" / "api" / "protocol.md").read_text(encoding="utf-8")
ROWS = re.findall(r"(?m)^\| (.*?) \|(.*?)\|.*\|$", MANUAL.split("## Names: ours and vLLM's")[1])[2:]
OURS = {name for ours, _ in ROWS for name in re.findall(r"`(.*?)`", ours)}
THEIRS = {name for _, theirs in ROWS for name in re.findall(r"`(.*?)`", theirs)}


def signatures(kind: type) -> set[str]:
    return {
        f"{name}({', '.join(parameters(method))})"
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def parameters(method: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(method).parameters if name != "self"]


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_all_methods_that_differ_are_listed() -> None:
    ours = signatures(protocol.KVConnectorScheduler) | signatures(protocol.KVConnectorWorker)
    since_33 = {"unregister_kv_caches()", "restore_kv_caches()"}
    same = {"take_events()", *since_33, *(ours & signatures(base.KVConnectorBase_V1))}
    assert {name for name in OURS if name.endswith(")")} - {"extra_keys()", "take_events()"} == ours - same


def test_all_fields_that_differ_are_listed() -> None:
    for ours, theirs in (
        (protocol.KVConnectorTransferResults, base.KVConnectorTransferResults),
        (protocol.KVConnectorOutput, KVConnectorOutput),
    ):
        assert fields(ours) - fields(theirs) - {"expected_finished_count"} <= OURS
        assert fields(theirs) - fields(ours) <= THEIRS
    asked = {name for name in dir(protocol.RequestView) if not name.startswith("_")}
    source = inspect.getsource(Request)
    own = {name for name in asked if not hasattr(Request, name) and f"self.{name}" not in source}
    assert own == OURS & {"adapter", "salt", "tenant", "turn_end"} | {"extra_keys"}


def test_what_the_table_says_of_vllm_is_there() -> None:
    known = signatures(base.KVConnectorBase_V1) | fields(KVConnectorOutput) | {"KVConnectorBase_V1"}
    assert known >= THEIRS
    for name in ("KVConnectorMetadata", "KVConnectorWorkerMetadata", "KVConnectorTransferResults"):
        assert hasattr(base, name) and hasattr(protocol, name) and name not in OURS
