"""Mutants: deliberately broken code, with the scenarios in which an oracle should find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from cargohold.lab.simulation.campaign import Recipe, play_seed
from cargohold.lab.simulation.faults import parse_faults

Patch = pytest.MonkeyPatch
Breaks = Callable[[Patch], None]


@dataclass(frozen=True)
class Mutant:
    """One piece of broken code.

    Attributes:
        what: what is broken, for people.
        apply: breaks it.
        recipe: the scenarios in which an oracle should find it.
        first_seed: the seed to begin with: one that found it, where the first ones do not.
    """

    what: str
    apply: Breaks
    recipe: Recipe
    first_seed: int = 0


def registrar(mutants: list[Mutant], recipe_class: type[Recipe]) -> Callable[..., Callable[[Breaks], Breaks]]:
    """A decorator for functions that break something: each is added to ``mutants``, with a recipe of ``recipe_class``."""

    def mutant(
        connector: str = "eager", workload: str = "shared-prefix", faults: str = "none", first_seed: int = 0
    ) -> Callable[[Breaks], Breaks]:
        def register(apply: Breaks) -> Breaks:
            recipe = recipe_class(workload, connector, parse_faults(faults))
            mutants.append(Mutant(apply.__name__.replace("_", " "), apply, recipe, first_seed))
            return apply

        return register

    return mutant


def assert_caught(mutant: Mutant, patch: Patch, max_seeds: int) -> None:
    """Break the code, and play until an oracle finds it. That the broken code itself cannot run would prove nothing."""
    mutant.apply(patch)
    reports = (play_seed(mutant.recipe, seed) for seed in range(mutant.first_seed, mutant.first_seed + max_seeds))
    failure = next((report.failure for report in reports if report.failure is not None), None)
    assert failure is not None
    assert "AttributeError" not in failure, failure
