"""Deliberately broken adapters: what the simulation of vLLM is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

# Something that vLLM has since 0.32, whose inside the simulation follows.
pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

import cargohold.integrations.vllm.groups as groups_module
import cargohold.integrations.vllm.scheduler as scheduler_module
from cargohold.cache import TierManager
from cargohold.connector.kernel.answers import KeptAnswers
from cargohold.connector.kernel.jobs import JobTable
from cargohold.connector.kernel.loads import Loads
from cargohold.connector.kernel.pooled_stores import PooledStores
from cargohold.connector.kernel.requests import RequestState
from cargohold.connector.offloading import OffloadingScheduler
from cargohold.integrations.vllm.groups import bears_full_hits
from cargohold.integrations.vllm.pool_view import PoolContext
from cargohold.integrations.vllm.request_view import StepShare
from cargohold.integrations.vllm.resets import CacheResets
from cargohold.integrations.vllm.scheduler import SchedulerSide
from cargohold.integrations.vllm.worker import Ended, WorkerSide
from cargohold.lab.simulation.campaign import play_seed
from cargohold.lab.simulation.world import Scenario
from cargohold.lab.vllm.late_blocks import LATE_BLOCKS
from cargohold.lab.vllm.recipe import VllmRecipe, with_option
from cargohold.protocol import AttentionKind, KVCacheGroup, OutputAggregator
from tests.simulation.mutants import loads_the_state_of_one_block_too_early
from tests.simulation.mutation import Mutant, Patch, assert_caught, registrar
from tests.vllm.frozen import FrozenRecipe

MAX_SEEDS = 60


MUTANTS: Final[list[Mutant]] = []
mutant = registrar(MUTANTS, VllmRecipe)


class LateRecipe(VllmRecipe):
    """Scenarios in which vLLM tells the connector late of blocks."""

    def scenario(self, seed: int) -> Scenario:
        """The scenario of a seed."""
        return with_option(VllmRecipe.scenario(self, seed), LATE_BLOCKS, 0.5)


late_mutant = registrar(MUTANTS, LateRecipe)
frozen_mutant = registrar(MUTANTS, FrozenRecipe)


# --- blocks that come late --------------------------------------------------------------------------------------------


@late_mutant(first_seed=17)
def takes_what_was_found_for_granted_until_blocks_come(patch: Patch) -> None:
    patch.setattr(KeptAnswers, "keep", lambda self: self.answered.clear())
    plan = Loads.plan

    def plan_all(self: Loads, state: RequestState, *args: Any) -> Any:
        planned = plan(self, state, *args)
        job = self.planned[-1]
        self.planned[-1] = replace(job, rows=job.rows or (0,) * len(job.block_ids))
        return planned

    patch.setattr(Loads, "plan", plan_all)


@late_mutant(workload="aborts")
def pins_what_was_found_for_requests_that_never_have_blocks(patch: Patch) -> None:
    patch.setattr(KeptAnswers, "release", lambda self, request_id: None)


# --- scheduler side ---------------------------------------------------------------------------------------------------


@mutant()
def does_not_protect_blocks_that_are_being_stored(patch: Patch) -> None:
    patch.setattr(PoolContext, "touch_ids", lambda self, block_ids: None)
    patch.setattr(PoolContext, "free_ids", lambda self, block_ids, *, evict_first=False: None)


@mutant()
def never_gives_references_back(patch: Patch) -> None:
    patch.setattr(PoolContext, "free_ids", lambda self, block_ids, *, evict_first=False: None)


@mutant()
def lets_the_engine_stop_while_stores_are_in_flight(patch: Patch) -> None:
    patch.setattr(SchedulerSide, "has_pending_work", lambda self: bool(self._loads))


@mutant(workload="stops")
def takes_all_weights_for_the_same(patch: Patch) -> None:
    patch.setattr(WorkerSide, "_look", lambda self, number: self._weights.update({number: "as ever"}))


@mutant(workload="stops")
def asks_the_first_rank_alone_which_weights_it_holds(patch: Patch) -> None:
    note = CacheResets.note_weights

    def note_for_all(self: CacheResets, rank: int, seen: Mapping[int, str]) -> None:
        for every in range(self._num_workers) if rank == 0 else ():
            note(self, every, seen)

    patch.setattr(CacheResets, "note_weights", note_for_all)


@mutant(workload="stops")
def finds_what_is_kept_of_other_weights(patch: Patch) -> None:
    patch.setattr(OffloadingScheduler, "use_weights", lambda self, name: True)


@mutant(workload="stops", connector="eager")
def looks_which_weights_are_held_before_they_come(patch: Patch) -> None:
    take_look = CacheResets.take_look

    def take_early(self: CacheResets, *, computes: bool) -> int:
        del computes
        return take_look(self, computes=True)

    patch.setattr(CacheResets, "take_look", take_early)


@mutant(workload="stops")
def does_not_follow_resets(patch: Patch) -> None:
    patch.setattr(CacheResets, "is_due", lambda self: False)


@mutant(workload="aborts")
def remembers_ended_requests(patch: Patch) -> None:
    patch.setattr(SchedulerSide, "request_finished", lambda self, request, tables: (False, None))


@mutant(workload="ranks")
def believes_the_first_rank(patch: Patch) -> None:
    def aggregator(world_size: int, expected: int | None, connector: str) -> OutputAggregator:
        return OutputAggregator(world_size, 1, connector)

    patch.setattr(scheduler_module, "OutputAggregator", aggregator)


@mutant(faults="raises")
def does_not_stop_workers_of_a_connector_turned_off(patch: Patch) -> None:
    build = SchedulerSide.build_connector_meta
    patch.setattr(SchedulerSide, "build_connector_meta", lambda self, output: replace(build(self, output), stop=False))


@mutant(workload="full-hit", connector="multi")
def has_full_hits_behind_every_window(patch: Patch) -> None:
    patch.setattr(groups_module, "bears_full_hits", lambda group: True)


@mutant(workload="recurrent", faults="full")
def stores_a_state_that_was_advanced_past_its_boundary(patch: Patch) -> None:
    states = StepShare._states

    def with_the_latest(self: StepShare, group: KVCacheGroup, number: int, table: Sequence[Any]) -> list[int]:
        return [table[-1].block_id if block_id else block_id for block_id in states(self, group, number, table)]

    patch.setattr(StepShare, "_states", with_the_latest)


mutant(workload="recurrent", connector="lazy", first_seed=9)(loads_the_state_of_one_block_too_early)


@mutant(workload="recurrent")
def takes_the_last_token_into_a_state_twice(patch: Patch) -> None:
    patch.setattr(
        groups_module,
        "bears_full_hits",
        lambda group: group.kind is AttentionKind.RECURRENT or bears_full_hits(group),
    )


@mutant(workload="shared-beginnings")
def does_not_mark_what_prompts_share(patch: Patch) -> None:
    patch.setattr(OffloadingScheduler, "get_shared_prefix_end", lambda self, request: 0)


@mutant(workload="windows", connector="eager", faults="late,slow", first_seed=16)
def loads_a_prefix_twice_at_a_time(patch: Patch) -> None:
    patch.setattr(JobTable, "load_up_to", lambda self, keys, first_token, num_tokens: None)


@frozen_mutant(workload="sleep", connector="exclusive")
def keeps_nothing_of_frozen_requests(patch: Patch) -> None:
    patch.setattr(PooledStores, "pause", lambda self, states: None)


@frozen_mutant(workload="sleep", connector="exclusive")
def is_busy_as_long_as_requests_are_frozen(patch: Patch) -> None:
    patch.setattr(PooledStores, "has_pending_work", property(lambda self: self._paused is not None))


@frozen_mutant(workload="sleep", connector="exclusive", first_seed=161)
def takes_what_a_pause_has_saved_for_lost(patch: Patch) -> None:
    save = PooledStores._save_paused

    def save_unnoted(self: PooledStores, step: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(TierManager, "note_copies", lambda *_: None)
            return save(self, step)

    patch.setattr(PooledStores, "_save_paused", save_unnoted)


# --- worker side ------------------------------------------------------------------------------------------------------


def with_reports(patch: Patch, change: Callable[[WorkerSide, Ended], Ended]) -> None:
    collect = WorkerSide.collect
    patch.setattr(WorkerSide, "collect", lambda self, finished: change(self, collect(self, finished)))


@mutant()
def reports_loads_before_they_have_ended(patch: Patch) -> None:
    def early(self: WorkerSide, ended: Ended) -> Ended:
        received = ended.received | self._loading.keys()
        self._loading.clear()
        return replace(ended, received=received)

    with_reports(patch, early)


@mutant(faults="failed")
def ignores_failed_loads(patch: Patch) -> None:
    with_reports(patch, lambda self, ended: replace(ended, failed=frozenset()))


@mutant()
def stores_before_the_forward_pass(patch: Patch) -> None:
    begin = WorkerSide.begin

    def begin_and_save(self: WorkerSide, message: Any) -> None:
        is_first = self._message is None
        begin(self, message)
        if is_first:
            self.save()

    patch.setattr(WorkerSide, "begin", begin_and_save)


@mutant()
def starts_no_loads(patch: Patch) -> None:
    patch.setattr(WorkerSide, "start_load", lambda self: None)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_every_mutant_is_caught(mutant: Mutant, monkeypatch: Patch) -> None:
    assert_caught(mutant, monkeypatch, MAX_SEEDS)


def test_without_mutants_nothing_is_caught() -> None:
    recipes = VllmRecipe("shared-prefix", "eager", frozenset()), FrozenRecipe("sleep", "exclusive", frozenset())
    assert [play_seed(recipe, seed).failure for recipe in recipes for seed in range(5)] == [None] * 10


def test_the_document_counts_mutants() -> None:
    text = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text(encoding="utf-8")
    assert f" {len(MUTANTS)} mutants of the adapter" in text
