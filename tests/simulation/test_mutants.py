from __future__ import annotations

import pytest

from cargohold.simulation.campaign import play_seed
from tests.simulation.mutants import MUTANTS, Mutant

MAX_SEEDS = 100


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_every_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    assert any(play_seed(mutant.recipe, seed).failure is not None for seed in range(MAX_SEEDS))
