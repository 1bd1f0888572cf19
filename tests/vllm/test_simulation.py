"""vLLM's own scheduler with the adapter, under simulated workers, links, tiers and faults: no model, no forward pass."""

from __future__ import annotations

import sys
from zlib import crc32

import pytest

from cargohold.cli import main
from cargohold.errors import ConfigError
from cargohold.simulation.faults import Fault, parse_faults
from cargohold.simulation.run import RunResult
from cargohold.simulation.workloads import WORKLOADS

# Something that vLLM has since 0.32, whose inside the simulation follows.
pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

from cargohold.integrations.vllm.simulation.configuration import ASYNC
from cargohold.integrations.vllm.simulation.recipe import APPLICABLE, VllmRecipe


def play(seed: int, workload: str = "any", connector: str = "any", faults: str = "all") -> RunResult:
    recipe = VllmRecipe(workload, connector, parse_faults(faults))
    result = recipe.run(recipe.scenario(seed)).play()
    options = f"--workload {workload} --connector {connector} --faults {faults}"
    assert result.error is None, f"cargohold simulate --engine vllm --replay {seed} {options}: {result.error!r}"
    return result


@pytest.mark.parametrize("connector", APPLICABLE)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_nothing_goes_wrong_in_vllm_whatever_goes_wrong(workload: str, connector: str) -> None:
    assert play(crc32(f"{workload} {connector}".encode()) % 100_000, workload, connector).num_steps > 0


def test_loads_preemptions_and_resets_happen() -> None:
    results = [play(seed, workload, "eager", "none") for workload in ("preemption", "stops") for seed in range(5)]
    for what in ("restored tokens", "device tokens", "preemptions", "resets"):
        assert sum(result.tallies[what] for result in results) > 0, f"no {what}: this proves little"


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.value)
def test_every_fault_strikes(fault: Fault) -> None:
    for seed in range(200):
        result = play(seed, "shared-prefix", "eager", fault.value)
        if result.struck[fault] or result.tallies["restarts"]:
            return
    raise AssertionError("it never strikes")


def test_half_of_the_engines_schedule_ahead() -> None:
    ahead = [VllmRecipe("small").scenario(seed).shape.scheduler[ASYNC] for seed in range(40)]
    assert 8 < sum(ahead) < 32


def test_a_seed_is_the_same_run_every_time() -> None:
    first, second = (play(7) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("connector", ["eager-locks", "eager-requests", "tiered-requests"])
def test_connectors_without_a_view_of_the_pool_are_refused_by_name(connector: str) -> None:
    with pytest.raises(ConfigError, match=connector):
        VllmRecipe("any", connector)


def test_the_command_plays_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--engine", "vllm", "--replay", "3", "--workload", "multi-turn", "--connector", "eager"]
    monkeypatch.setattr(sys, "argv", ["cargohold", "simulate", *options])
    assert main() == 0
    shown = capsys.readouterr().out
    assert f"{ASYNC}=" in shown
    assert "ended well" in shown
