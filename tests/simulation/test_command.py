from __future__ import annotations

import sys

import pytest

from cargohold.cli import main
from cargohold.cli import simulate as simulate_module
from cargohold.lab.simulation import campaign
from cargohold.process import WorkerPool
from tests.simulation import careless


def simulate(monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["cargohold", "simulate", *options])
    return main()


def test_it_counts_what_was_played(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(monkeypatch, "--seeds", "3", "--jobs", "1", "--workload", "small", "--connector", "eager") == 0
    assert capsys.readouterr().out.startswith("3 seeds, ")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_more_seeds_than_could_ever_be_played_are_played_while_there_is_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], jobs: str
) -> None:
    options = ("--seeds", "9" * 20, "--minutes", "0.001", "--jobs", jobs, "--workload", "small", "--connector", "eager")
    assert simulate(monkeypatch, *options) == 0
    assert int(capsys.readouterr().out.split(" seed")[0]) > 0


def test_seeds_are_played_by_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = []

    class CountedPool(WorkerPool):
        def __init__(self, num_processes: int) -> None:
            super().__init__(num_processes)
            sizes.append(num_processes)

    monkeypatch.setattr(campaign, "WorkerPool", CountedPool)
    told = []
    for jobs in ("1", "2"):
        options = ("--seeds", "6", "--jobs", jobs, "--workload", "small", "--faults", "failed,late")
        assert simulate(monkeypatch, *options) == 0
        first, *rest = capsys.readouterr().out.splitlines()
        told.append((first.partition(" in ")[0], rest))
    assert told[0] == told[1] and told[0][0].startswith("6 seeds, ")
    assert sizes == [2]


def test_a_failure_is_shown_as_short_as_possible(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    connector = f"{careless.__name__}:{careless.factory.__name__}"
    options = ("--jobs", "1", "--connector", connector, "--faults", "none", "--workload", "small", "--first-seed", "6")
    status = simulate(monkeypatch, *options)
    assert status == 1
    shown = capsys.readouterr().out
    assert "small, 2 actions" in shown  # one request to store something, one to be told of it too early
    assert "WrongTokenError" in shown
    assert "| r3 " in shown.split("here it failed:")[1]  # the step that failed is part of the timeline
    assert f"cargohold simulate --replay 6 --workload small --connector {connector} --faults none" in shown


def test_a_seed_can_be_replayed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(monkeypatch, "--replay", "5", "--workload", "multi-turn", "--lines", "7") == 0
    shown = capsys.readouterr().out
    assert "seed 5, workload multi-turn" in shown
    assert "ended well" in shown


@pytest.mark.parametrize(
    ("option", "wrong", "accepted"),
    [
        ("--faults", "rain", "torn"),
        ("--workload", "rain", "agents"),
        ("--connector", "rain", "MODULE:FACTORY"),
        ("--engine", "rain", "vllm"),
        ("--connector", "vllm:any.module:Class", "add --engine vllm"),
    ],
)
def test_what_is_not_known_is_refused_with_what_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, wrong: str, accepted: str
) -> None:
    assert simulate(monkeypatch, option, wrong) == 2
    assert accepted in capsys.readouterr().err


def test_without_vllm_its_engine_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate_module, "find_spec", lambda name: None)
    assert simulate(monkeypatch, "--engine", "vllm") == 2
    assert "make test-vllm" in capsys.readouterr().err
