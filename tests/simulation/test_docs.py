"""The documents list what there is, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from cargohold.lab.simulation.connectors import CONNECTORS
from cargohold.lab.simulation.faults import Fault
from cargohold.lab.simulation.workloads import WORKLOADS
from tests.simulation.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def text() -> str:
    return (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def played() -> str:
    return (ROOT / "docs" / "api" / "testing.md").read_text(encoding="utf-8")


def rows(text: str, heading: str) -> list[str]:
    """First cells of the table under a heading."""
    lines = text.split(f"\n| {heading} |", 1)[1].splitlines()[2:]
    return [line.split("`")[1] for line in lines[: lines.index("")]]


def test_workloads_and_faults_are_those_of_the_code(text: str, played: str) -> None:
    assert rows(played, "workload") == list(WORKLOADS)
    assert rows(played, "fault") == [fault.value for fault in Fault]
    assert f"[{len(WORKLOADS)} workloads and {len(Fault)} kinds of fault]" in text


def test_every_connector_is_named(played: str) -> None:
    assert all(f"`{name}`" in played for name in CONNECTORS)


def test_mutants_are_counted(text: str) -> None:
    assert f" {len(MUTANTS)} mutants" in text


def test_the_connector_in_the_document_is_the_one_that_is_tested() -> None:
    shelf = (ROOT / "examples" / "own_connector" / "shelf.py").read_text(encoding="utf-8")
    assert "examples/own_connector" in (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in shelf.splitlines()) < 100
