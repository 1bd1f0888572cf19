"""Whoever resets vLLM's prefix cache may have changed the weights: what lies below it is then worthless too."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm.resets import CacheResets
from cargohold.protocol import ConnectorGuard, NullConnectorScheduler
from cargohold.transfer import Direction
from tests.vllm.common import EAGER, LAZY, ask_twice, make_prompts, reload, restored, tokens, with_disk
from tests.vllm.faults import Faults


class Kept(NullConnectorScheduler):
    """A connector that keeps something, and cannot drop it while it is in use."""

    def __init__(self) -> None:
        self.is_in_use = False
        self._num_resets = 0
        self.weights: list[str] = []

    def count(self) -> int:
        return self._num_resets

    def reset_cache(self) -> bool:
        self._num_resets += not self.is_in_use
        return not self.is_in_use

    def use_weights(self, name: str) -> bool:
        if not self.is_in_use:
            self.weights.append(name)
        return not self.is_in_use


def make_resets(**options: Any) -> tuple[Kept, SimpleNamespace, CacheResets]:
    kept, pool = Kept(), SimpleNamespace(cached_block_hash_to_block=object(), reset_prefix_cache=lambda: True)
    return kept, pool, CacheResets(ConnectorGuard(kept, 8), pool, **options)


def test_tokens_after_new_weights_are_theirs(vllm_model: Callable[[str], str], start: Callable[..., Any]) -> None:
    before, after = vllm_model("llama"), vllm_model("llama-retrained")
    prompts = make_prompts(2, 330)
    expected = tokens(start(after).ask(prompts))
    engine = start(before, EAGER)
    assert restored(ask_twice(engine, prompts)) == 640
    reload(engine, after)
    assert engine.llm.reset_prefix_cache()
    answers = engine.ask(prompts)
    assert tokens(answers) == expected and restored(answers) == 0


def test_weights_that_come_before_the_first_request_are_told_by_a_reset_too(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path
) -> None:
    """Else chunks would be kept under the name of the weights in the files."""
    before, after = vllm_model("llama"), vllm_model("llama-retrained")
    extra = with_disk(tmp_path)
    prompts = make_prompts(1, 330)
    engine = start(before, extra)
    reload(engine, after)
    assert engine.llm.reset_prefix_cache()
    of_new_weights = tokens(ask_twice(engine, prompts))
    answers = start(before, extra).ask(prompts, 6)
    assert restored(answers) == 0
    assert tokens(answers) != of_new_weights


@pytest.mark.usefixtures("readable")
def test_a_reset_on_demand_drops_what_is_kept(vllm_model: Callable[[str], str], start: Callable[..., Any]) -> None:
    engine = start(vllm_model("llama"), EAGER)
    prompts = make_prompts(2, 330)
    ask_twice(engine, prompts)
    engine.settle()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    answers = engine.ask(prompts)
    assert [answer.device for answer in answers] == [0, 0]


@pytest.mark.parametrize(("extra", "max_tokens", "num_blocks"), [(EAGER, 150, 300), (LAZY, 30, 150)])
def test_requests_that_never_cease_do_not_put_a_reset_off(
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any],
    max_tokens: int,
    num_blocks: int,
) -> None:
    """Found by reading: where every step stored something, the reset waited for the last request, and nothing was found."""
    engine = start(vllm_model("llama"), extra, num_blocks=num_blocks, max_num_seqs=32)
    inner = engine.side.guard.inner
    for number, prompt in enumerate(make_prompts(96, 100)):
        engine.add(str(number), prompt[number % 70 :], max_tokens)
    for _ in range(40):
        engine.step()
    while not (inner.shared.jobs and inner.shared.manager.num_ready):
        engine.step()
    in_flight = {store.job_id for store in inner.shared.jobs.stores()}
    reset, was_reset = inner.shared.manager.reset, [False]

    def reset_and_note() -> bool:
        was_reset.append(reset())
        return was_reset[-1]

    monkeypatch.setattr(inner.shared.manager, "reset", reset_and_note)
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    while engine.is_busy and not was_reset[-1]:
        assert in_flight.issuperset(store.job_id for store in inner.shared.jobs.stores()), (
            "nothing new is stored meanwhile"
        )
        engine.step()
    while engine.is_busy and not (inner.shared.jobs or inner.shared.manager.num_ready):
        engine.step()
    assert engine.is_busy, "neither the reset waited for the last request, nor what is stored again"
    for number in range(96):
        engine.abort(str(number))


def test_a_reset_that_copies_forbid_changes_nothing_and_succeeds_when_they_have_ended(
    vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    engine = start(vllm_model("llama"), EAGER)
    prompts = make_prompts(2, 330)
    faults.waits = Direction.STORE
    expected = tokens(engine.ask(prompts, 6))
    assert not engine.scheduler.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):  # /reset_prefix_cache answers 500
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    faults.waits = None
    engine.settle()
    answers = engine.ask(prompts, 6)
    assert tokens(answers) == expected and [answer.device for answer in answers] == [320, 320]
    engine.settle()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    answers = engine.ask(prompts, 6)
    assert tokens(answers) == expected and [answer.device for answer in answers] == [0, 0]
    engine.check_settled()


def test_what_could_not_be_dropped_on_demand_is_dropped_later() -> None:
    kept, _, resets = make_resets()
    kept.is_in_use = True
    assert resets.reset(), "nothing is found from now on: whoever changes weights does not ask twice"
    assert resets.is_due()
    kept.is_in_use = False
    assert resets.is_due() and kept.count() == 1, "workers look what they hold, as nobody knows it"
    _look(resets, ("first",))
    assert not resets.is_due() and kept.count() == 1


@pytest.mark.parametrize("has_tiers", [False, True])
def test_weights_that_come_before_anything_is_computed_need_no_reset(has_tiers: bool) -> None:
    """vLLM's own cache is empty then. What is kept at once, where nothing could be found, is dropped."""
    kept, _, resets = make_resets(has_tiers=has_tiers)
    resets.note_weights(0, {0: "first"})
    assert resets.is_due() == resets.is_unsure() == has_tiers
    _look(resets, ("other",))
    assert not resets.is_due() and not resets.is_unsure()
    assert len(kept.weights) == 1 and kept.weights[0] and kept.count() == (not has_tiers)


@pytest.mark.parametrize("first", ["first", ""])
def test_a_start_drops_nothing_if_no_weights_came_or_none_can_be_read(first: str) -> None:
    kept, _, resets = make_resets(has_tiers=True)
    resets.note_weights(0, {0: first})
    _look(resets, (first,))
    assert not resets.is_due() and not resets.is_unsure() and kept.count() == 0 and kept.weights == []


def _look(resets: CacheResets, seen: tuple[str, ...]) -> None:
    """Let workers say what they hold, by rank."""
    resets.is_due()  # as at the beginning of each step
    look = resets.take_look(computes=True)
    for rank, fingerprint in enumerate(seen):
        resets.note_weights(rank, {look: fingerprint})


def unsure() -> tuple[Kept, SimpleNamespace, CacheResets]:
    """Resets of a cache that was reset, with two workers that have told what they hold."""
    kept, pool, resets = make_resets(num_workers=2)
    for rank in range(2):
        resets.note_weights(rank, {0: f"first {rank}"})
    _look(resets, ("first 0", "first 1"))
    assert not resets.is_due() and not resets.is_unsure() and not resets.take_look(computes=True)
    pool.cached_block_hash_to_block = object()
    assert resets.is_due()
    return kept, pool, resets


def test_what_is_kept_stays_if_all_workers_hold_what_they_held() -> None:
    kept, _, resets = unsure()
    look = resets.take_look(computes=True)
    assert look and not resets.take_look(computes=True), "they are asked once"
    resets.note_weights(0, {look: "first 0"})
    assert resets.is_due() and resets.is_unsure(), "one has not answered"
    resets.note_weights(1, {look: "first 1"})
    assert not resets.is_due() and not resets.is_unsure() and kept.count() == 0 and kept.weights == []


@pytest.mark.parametrize("seen", [("first 0", "other"), ("other", "first 1"), ("first 1", "first 0")])
def test_if_one_holds_something_else_what_is_kept_stays_apart_until_its_weights_return(seen: tuple[str, str]) -> None:
    kept, pool, resets = unsure()
    _look(resets, seen)
    kept.is_in_use = True
    assert resets.is_due() and not resets.is_unsure(), "the connector has not moved yet"
    kept.is_in_use = False
    assert not resets.is_due() and kept.count() == 0
    for again in (("first 0", "first 1"), seen):
        pool.cached_block_hash_to_block = object()
        assert resets.is_due()
        _look(resets, again)
        assert not resets.is_due()
    assert kept.weights[0] == kept.weights[2] != "" and kept.weights[1] == ""


def test_what_is_kept_is_dropped_if_one_cannot_tell() -> None:
    kept, _, resets = unsure()
    _look(resets, ("first 0", ""))
    assert not resets.is_due() and kept.count() == 1 and kept.weights == []


def test_what_was_dropped_on_demand_is_not_dropped_again_if_one_cannot_tell() -> None:
    """Leases that clients had taken meanwhile were lost."""
    kept, pool, resets = make_resets()
    assert resets.reset() and kept.count() == 1 and resets.is_due()
    _look(resets, ("",))
    assert not resets.is_due() and kept.count() == 1
    pool.cached_block_hash_to_block = object()
    assert resets.is_due()
    _look(resets, ("",))
    assert not resets.is_due() and kept.count() == 2, "by now there may be something"


def test_workers_look_when_requests_are_served_again_and_not_while_weights_may_come() -> None:
    _, _, resets = unsure()
    assert not resets.take_look(computes=False), "an empty step may be one of a pause"
    assert resets.is_unsure(), "vLLM admits requests"
    assert resets.take_look(computes=False)


def test_a_look_before_the_last_reset_tells_nothing() -> None:
    kept, pool, resets = make_resets()
    resets.note_weights(0, {0: "first"})
    pool.cached_block_hash_to_block = object()
    assert resets.is_due()
    early = resets.take_look(computes=True)
    pool.cached_block_hash_to_block = object()
    assert resets.is_due()
    resets.note_weights(0, {early: "first"})
    assert resets.is_due(), "weights may have come since"
    resets.note_weights(0, {resets.take_look(computes=True): "second"})
    assert not resets.is_due() and len(kept.weights) == 1


def test_a_reset_where_vllm_may_sleep_is_no_wish_to_drop() -> None:
    kept, pool, resets = make_resets(may_sleep=True)
    resets.note_weights(0, {0: "first"})
    pool.cached_block_hash_to_block = object()
    assert resets.reset() and resets.is_due() and kept.count() == 0
    _look(resets, ("first",))
    assert not resets.is_due() and kept.count() == 0 and kept.weights == []
    assert resets.reset() and kept.count() == 1, "vLLM's own cache was not reset, as it is before sleep"


def test_after_a_drop_on_demand_the_weights_of_now_are_those_to_compare_with() -> None:
    """Found by reading: weights that came back after it were taken for those of what had been kept meanwhile."""
    kept, pool, resets = make_resets()
    resets.note_weights(0, {0: "first"})
    assert resets.reset() and kept.count() == 1 and resets.is_due()
    for number, seen in enumerate(("second", "first"), 1):
        resets.note_weights(0, {resets.take_look(computes=True): seen})
        assert not resets.is_due() and len(kept.weights) == number
        pool.cached_block_hash_to_block = object()
        assert resets.is_due()
    assert kept.weights == [kept.weights[0], ""] and kept.weights[0] and kept.count() == 1


class Schedule:
    """A random schedule of steps and of resets with other weights, and what is true of the device."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kept, self.pool, self.resets = make_resets(num_workers=2, may_sleep=seed % 2 == 0)
        self.weights = 0
        self.names: dict[str, int] = {"": 0}
        self.answers: list[tuple[int, int]] = []
        self.num_open = 0
        for rank in range(2):
            self.resets.note_weights(rank, {0: "0"})

    def reset(self) -> None:
        self.pool.cached_block_hash_to_block = object()
        if self.random.random() < 0.3:
            num_before = self.kept.count()
            assert self.resets.reset()
            if self.kept.count() > num_before:
                self.names.clear()
        for _ in range(self.random.randrange(3)):  # paused: nothing is computed, and weights come then or later
            self.resets.is_due()
            assert not self.resets.take_look(computes=False)
        if self.random.random() < 0.6:
            self.weights = self.random.randrange(3)

    def step(self) -> None:
        """One step, whose answers come at once or with a later one; what is computed is stored if nothing is due."""
        self.kept.is_in_use = self.random.random() < 0.2
        num_before, is_due = self.kept.count(), self.resets.is_due()
        if self.kept.count() > num_before:
            self.names.clear()
        look = self.resets.take_look(computes=True)
        if look:
            self.answers.append((look, self.weights))
        if not is_due:
            self.num_open += 1
            name = self.kept.weights[-1] if self.kept.weights else ""
            assert self.names.setdefault(name, self.weights) == self.weights, "under the name of other weights"
        while self.answers and self.random.random() < 0.7:
            number, held = self.answers.pop(0)
            for rank in range(2):  # they differ from the first weights on one rank alone
                self.resets.note_weights(rank, {number: str(held if held % 2 == rank else 0)})


def test_whatever_comes_in_whatever_order_nothing_is_kept_under_the_name_of_other_weights() -> None:
    num_open = 0
    for seed in range(400):
        schedule = Schedule(seed)
        for _ in range(40):
            schedule.random.choices([schedule.step, schedule.reset], [6, 1])[0]()
        num_open += schedule.num_open
    assert num_open > 1500
