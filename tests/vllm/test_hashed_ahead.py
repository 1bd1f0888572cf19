"""Hashes that cover tokens behind their block, too, as vLLM 0.33 makes them for draft models where there is no connector."""

from __future__ import annotations

from dataclasses import replace

import pytest

# Something that vLLM has since 0.32, whose inside the simulation follows.
pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

from vllm.config import VllmConfig

from cargohold.lab.vllm.configuration import HASHED_AHEAD, MATCH_UNIT
from cargohold.lab.vllm.recipe import VllmRecipe

pytestmark = pytest.mark.skipif(
    not hasattr(VllmConfig, HASHED_AHEAD), reason="this version of vLLM hashes blocks alone"
)


def test_what_has_such_hashes_is_stored_and_found_under_no_other_prefix() -> None:
    """A block's hash comes later, and more often than not it is another: less is found, and never a wrong token."""
    restored = 0
    for workload in ("shared-prefix", "multi-turn", "windows", "full-hit", "limits"):
        recipe = VllmRecipe(workload, "eager", frozenset())
        for seed in range(3):
            scenario = recipe.scenario(seed)
            options = {name: value for name, value in scenario.shape.scheduler.items() if name != MATCH_UNIT}
            shape = replace(scenario.shape, scheduler={**options, HASHED_AHEAD: 1})
            result = recipe.run(replace(scenario, shape=shape)).play()
            assert result.error is None, f"{workload}, seed {seed}: {result.error!r}"
            restored += result.tallies["restored tokens"]
    assert restored > 0
