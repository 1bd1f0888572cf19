"""Published models' groups, as vLLM's planner makes them, under vLLM's own scheduler with the adapter, faults and oracles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import count
from random import Random

import pytest

# Something that vLLM has since 0.32, whose inside the simulation follows.
pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

from cargohold.integrations.vllm.groups import Groups, groups_of
from cargohold.lab.simulation.faults import Fault
from cargohold.lab.simulation.fingerprints import GroupPlan, num_blocks_needed
from cargohold.lab.simulation.run import quiet_logging
from cargohold.lab.simulation.traffic import Ask
from cargohold.lab.simulation.world import Scenario, draw_scenario
from cargohold.lab.vllm.configuration import MATCH_UNIT
from cargohold.lab.vllm.recipe import APPLICABLE, VllmRecipe, fitted, with_option
from cargohold.protocol import AttentionKind
from tests.vllm.layouts import published

WORKLOADS = ("shared-prefix", "multi-turn", "agents", "aborts", "full-hit", "preemption", "shared-beginnings", "forks")
MAX_BLOCK_TOKENS = 16
MAX_WINDOW_TOKENS = 40
"""Blocks are made smaller, and windows with them, so that a prompt of a hundred tokens has several and leaves some behind."""
NUM_STEPS = 100_000
MODELS = {model.name: model for model in published()}


@cache
def plans(name: str) -> tuple[GroupPlan, ...]:
    """The groups of a model that are kept, smaller; empty if it is refused."""
    groups = groups_of(MODELS[name].kv_cache_config())
    if not isinstance(groups, Groups):
        return ()
    factor = max(1, max(group.block_tokens for group in groups.served) // MAX_BLOCK_TOKENS)
    return tuple(
        GroupPlan(
            group.kind,
            max(1, group.block_tokens // factor),
            None if group.window_tokens is None else max(1, min(group.window_tokens // factor, MAX_WINDOW_TOKENS)),
        )
        for group in groups.served
    )


SERVED = [name for name in MODELS if plans(name)]
TAILED = [name for name in SERVED if any(plan.kind is AttentionKind.RECURRENT for plan in plans(name))]


def scenario(name: str, seed: int) -> Scenario:
    """A drawn scenario with the groups of a model, and as many spare blocks per group as were drawn."""
    random = Random(f"{name}/{seed}")
    faults = frozenset(Fault) if random.random() < 0.5 else frozenset[Fault]()
    drawn = draw_scenario(seed, random.choice(WORKLOADS), random.choice(APPLICABLE), faults)
    longest = max(len(ask.prompt) + ask.max_tokens for ask in drawn.actions if isinstance(ask, Ask))
    max_step_tokens = drawn.shape.scheduler["max_num_batched_tokens"]
    num_spare = drawn.shape.num_blocks - num_blocks_needed(drawn.shape.groups, longest, max_step_tokens)
    num_blocks = num_blocks_needed(plans(name), longest, max_step_tokens) + num_spare * len(plans(name))
    tiers = tuple(replace(tier, options={**tier.options, "blocks_per_chunk": 1}) for tier in drawn.connector.tiers)
    shape = replace(drawn.shape, groups=plans(name), num_blocks=num_blocks)
    with quiet_logging("vllm"):
        return fitted(replace(drawn, shape=shape, connector=replace(drawn.connector, tiers=tiers)), random)


def with_tails(name: str, seed: int) -> Scenario:
    """The same where prefixes may end inside a block."""
    drawn, random = scenario(name, seed), Random(f"tails {name} {seed}")
    size, num_groups = min(group.block_tokens for group in drawn.shape.groups), len(drawn.shape.groups)
    tailed = with_option(drawn, MATCH_UNIT, random.choice([unit for unit in (1, 2, 4, 8) if unit < size]))
    num_more = 0 if MATCH_UNIT in drawn.shape.scheduler else num_groups  # as in ``fitted``
    return replace(tailed, shape=replace(tailed.shape, num_blocks=tailed.shape.num_blocks + num_more))


def play(name: str, seeds: Iterator[int], num_steps: int, draw: Callable[[str, int], Scenario] = scenario) -> None:
    """Play seeds until so many steps have been made."""
    recipe, num_played = VllmRecipe("any", "any"), 0
    while num_played < num_steps:
        seed = next(seeds)
        result = recipe.run(draw(name, seed)).play()
        assert result.error is None, f"{name}, seed {seed}: {result.error!r}"
        num_played += result.num_steps


@pytest.mark.parametrize("name", SERVED)
def test_groups_of_a_published_model_are_served_without_a_wrong_token(name: str) -> None:
    play(name, count(1), 1)


@pytest.mark.parametrize(("name", "seed"), [("GLM-5.3 Flash (GLM-5-next)", 7640259), ("Qwen3-Next 80B", 7640218)])
def test_nothing_is_lost_where_prefixes_end_inside_a_block(name: str, seed: int) -> None:
    """Found by seeds: blocks that vLLM gives back once it has copied a tail, and the slot of a copy that came from below."""
    play(name, count(seed), 1, with_tails)


@pytest.mark.long
@pytest.mark.parametrize("name", SERVED)
def test_groups_of_published_models_are_served_for_many_steps(name: str) -> None:
    play(name, count(100), NUM_STEPS // len(SERVED))


@pytest.mark.long
@pytest.mark.parametrize("name", TAILED)
def test_tails_of_published_models_are_served_for_many_steps(name: str) -> None:
    play(name, count(100), NUM_STEPS // len(TAILED), with_tails)
