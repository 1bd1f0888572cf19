"""vLLM's scheduler tells the connector of blocks long after it has asked, or never, and takes nothing of what was found."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

# Something that vLLM has since 0.32, whose inside the simulation follows.
pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

from cargohold.lab.simulation.campaign import Recipe
from cargohold.lab.simulation.faults import parse_faults
from cargohold.lab.simulation.run import RunResult
from cargohold.lab.vllm.late_blocks import LATE_BLOCKS, LateBlocks
from cargohold.lab.vllm.others.recipe import StrangerRecipe
from cargohold.lab.vllm.recipe import VllmRecipe, with_option

OURS = "vllm:cargohold.integrations.vllm.connector:CargoholdConnector"
OURS_CONFIG = {"host_bytes": "1MiB", "kv_events_salted": True}


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often blocks came late, and never, and nothing of a hit was taken."""
    happened: Counter[str] = Counter()
    later, forget, take = LateBlocks._tell_later, LateBlocks.forget, LateBlocks._ask_and_take

    def noted_later(self: LateBlocks, request: Any, blocks: Any, num_external_tokens: int) -> None:
        later(self, request, blocks, num_external_tokens)
        happened["late"] += request.request_id in self._late

    def noted_forget(self: LateBlocks, request_id: str) -> None:
        happened["never"] += request_id in self._late
        forget(self, request_id)

    def noted_take(self: LateBlocks, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = self._ask(request, num_computed_tokens)  # a look-up changes nothing
        taken = take(self, request, num_computed_tokens)
        happened["nothing of a hit"] += bool(found[0]) and taken[0] == 0
        return taken

    monkeypatch.setattr(LateBlocks, "_tell_later", noted_later)
    monkeypatch.setattr(LateBlocks, "forget", noted_forget)
    monkeypatch.setattr(LateBlocks, "_ask_and_take", noted_take)
    return happened


def play(recipe: Recipe, seed: int) -> RunResult:
    scenario = with_option(recipe.scenario(seed), LATE_BLOCKS, 0.5)
    result = recipe.run(scenario).play()
    assert result.error is None, f"seed {seed}: {result.error!r}"
    return result


def test_nothing_goes_wrong_if_blocks_come_late_or_never_or_nothing_is_taken(happened: Counter[str]) -> None:
    for workload, seed in (("aborts", 0), ("shared-prefix", 0), ("windows", 1), ("recurrent", 1), ("stops", 3)):
        happened["restored"] += play(VllmRecipe(workload, "eager", frozenset()), seed).tallies["restored tokens"]
    play(VllmRecipe("shared-prefix", "any", parse_faults("all")), 2)
    assert all(happened[what] for what in ("late", "never", "nothing of a hit", "restored")), happened


def test_any_connector_can_be_played_so(happened: Counter[str]) -> None:
    recipe = StrangerRecipe("shared-prefix", OURS, frozenset(), OURS_CONFIG)
    for seed in range(8):  # copies of it take real time, so no seed is the same run every time
        play(recipe, seed)
    assert happened["late"], happened
    assert happened["nothing of a hit"], happened
