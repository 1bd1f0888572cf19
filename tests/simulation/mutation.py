"""Deliberately broken code, and where somebody should notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from cargohold.simulation.campaign import Recipe
from cargohold.simulation.faults import parse_faults

Patch = pytest.MonkeyPatch
Breaks = Callable[[Patch], None]


@dataclass(frozen=True)
class Mutant:
    """One thing broken.

    Attributes:
        what: what is broken, for people.
        apply: breaks it.
        recipe: where somebody should notice.
    """

    what: str
    apply: Breaks
    recipe: Recipe


def registrar(mutants: list[Mutant], recipe_class: type[Recipe]) -> Callable[..., Callable[[Breaks], Breaks]]:
    """A decorator for functions that break something: each becomes one of ``mutants``, whose recipe is of that class."""

    def mutant(
        connector: str = "eager", workload: str = "shared-prefix", faults: str = "none"
    ) -> Callable[[Breaks], Breaks]:
        def register(apply: Breaks) -> Breaks:
            recipe = recipe_class(workload, connector, parse_faults(faults))
            mutants.append(Mutant(apply.__name__.replace("_", " "), apply, recipe))
            return apply

        return register

    return mutant
