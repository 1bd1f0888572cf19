"""A connector written for vLLM runs in the embedded engine and under the kit; what is wrong is caught, by kit and by seeds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cargohold.cli import main
from cargohold.errors import ConfigError

pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

from cargohold.lab.conformance import ConnectorConformance
from cargohold.lab.conformance.strict import Failure
from cargohold.lab.vllm.bridge import Bridge
from cargohold.lab.vllm.others.recipe import StrangerRecipe, kind_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_vllm_connector"
SHELF = "examples.own_vllm_connector.vllm_shelf:ShelfConnector"


class TestShelf(ConnectorConformance):
    def factory(self) -> Bridge:
        return Bridge(SHELF, {"num_places": 100})


class TestAsyncShelf(ConnectorConformance):
    num_seeds = 2

    def factory(self) -> Bridge:
        return Bridge("tests.vllm.bridged:AsyncShelf", {"num_places": 100})


class TestGroupsShelf(ConnectorConformance):
    num_seeds = 2

    def factory(self) -> Bridge:
        return Bridge("tests.vllm.bridged:GroupsShelf", {"num_places": 100})


@pytest.fixture
def beside_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's modules can be imported, as from their own folder."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("vllm_shelf", "forgetful"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def suite(name: str) -> ConnectorConformance:
    class Suite(ConnectorConformance):
        def factory(self) -> Bridge:
            return Bridge(name, {"num_places": 100})

    return Suite()


def errors(name: str, workload: str, num_seeds: int) -> set[str | None]:
    recipe = StrangerRecipe(workload, f"vllm:{name}", frozenset(), {})
    return {kind_of(recipe.run(recipe.scenario(seed)).play().error) for seed in range(num_seeds)}


@pytest.mark.usefixtures("beside_the_example")
def test_the_examples_wrong_connector_is_caught_by_the_kit_and_by_seeds() -> None:
    with pytest.raises(AssertionError, match="does not hold the KV"):
        suite("forgetful:ForgetfulShelf").test_tokens_blocks_and_endings_are_right("shared-prefix")
    assert errors("forgetful:ForgetfulShelf", "any", 4) == {None, "WrongTokenError"}
    assert errors("vllm_shelf:ShelfConnector", "any", 24) == {None}


def test_a_class_that_forgets_all_groups_but_the_first_is_caught_by_the_kit_and_by_seeds() -> None:
    with pytest.raises(AssertionError, match=r"group 1: block \d+ does not hold the KV"):
        suite("tests.vllm.bridged:FirstGroup").test_tokens_blocks_and_endings_are_right("mixed-groups")
    assert errors("tests.vllm.bridged:FirstGroup", "windows", 8) >= {"WrongTokenError"}
    assert errors("tests.vllm.bridged:GroupsShelf", "windows", 8) == {None}


@pytest.mark.parametrize(
    ("name", "status", "told"), [("FirstGroup", 1, "does not hold the KV"), ("GroupsShelf", 0, "")]
)
def test_the_command_plays_a_class_in_the_embedded_engine(
    name: str, status: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--connector", f"vllm:tests.vllm.bridged:{name}", "--connector-config", '{"num_places": 50}']
    played = ["--workload", "mixed-groups", "--seeds", "12", "--jobs", "1", "--no-shrink"]
    monkeypatch.setattr(sys, "argv", ["cargohold", "simulate", *options, *played])
    assert main() == status
    assert told in capsys.readouterr().out


def test_the_kit_catches_a_class_that_keeps_what_a_failed_step_has_computed() -> None:
    with pytest.raises(AssertionError, match="does not hold the KV"):
        suite("tests.vllm.bridged:Trusting").test_what_a_failed_step_computed_is_never_found(Failure.BLOCKS)


def test_the_kit_catches_a_class_that_takes_a_resumed_requests_blocks_for_more_of_the_old_ones() -> None:
    with pytest.raises(AssertionError, match="does not hold the KV"):
        suite("tests.vllm.bridged:Appending").test_tokens_blocks_and_endings_are_right("preemption")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tests.vllm.bridged:Pooling", "bind_gpu_block_pool, so it needs vLLM's block pool"),
        ("SimpleCPUOffloadConnector", "bind_gpu_block_pool"),
        ("OffloadingConnector", "copies with CUDA's streams"),
        ("NixlConnector", "needs another engine and NIXL's agent"),
        ("nowhere:Class", "No module named 'nowhere'"),
    ],
)
def test_what_the_embedded_engine_cannot_give_is_refused_by_name(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Bridge(name)
