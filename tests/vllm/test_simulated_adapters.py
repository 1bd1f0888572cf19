"""Adapters in the simulation, over vLLM's own scheduler: files change under old names, and nothing of others is ever read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

# Something that vLLM has since 0.32, whose inside the simulation follows.
pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

from cargohold.integrations.vllm.adapters import AdapterWeights, HeldAdapters
from cargohold.lab.simulation.fingerprints import WrongTokenError
from cargohold.lab.simulation.run import RunResult
from cargohold.lab.vllm.recipe import VllmRecipe

FIRST_SEED = 1000
NUM_SEEDS = 12


def play(seed: int) -> RunResult:
    recipe = VllmRecipe(workload="adapters")
    return recipe.run(recipe.scenario(seed)).play()


def test_no_kv_of_other_adapters_is_read_and_much_is_restored() -> None:
    results = [play(seed) for seed in range(FIRST_SEED, FIRST_SEED + NUM_SEEDS)]
    assert [result.error for result in results] == [None] * NUM_SEEDS
    assert sum(result.tallies["restored tokens"] for result in results) > 100
    assert sum(result.tallies["restarts"] for result in results) > 5


def keys_by_name_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdapterWeights, "key_of", lambda _, block_hash: block_hash)


def looks_on_the_first_rank_only(patch: pytest.MonkeyPatch) -> None:
    take = HeldAdapters._taken

    def take_there(held: Any, number: int, model: Any) -> str:
        return take(held, number, model) if held._worker.rank == 0 else "not looked"

    patch.setattr(HeldAdapters, "_taken", take_there)


@pytest.mark.parametrize(
    "mutant", [keys_by_name_only, looks_on_the_first_rank_only], ids=lambda mutant: mutant.__name__
)
def test_mutants_read_it(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    errors = (play(seed).error for seed in range(FIRST_SEED + 9, FIRST_SEED + 39))  # the first of them shows both
    assert any(isinstance(error, WrongTokenError) for error in errors)
