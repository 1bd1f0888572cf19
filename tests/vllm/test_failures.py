"""Transfers that fail, and connectors that break: requests go on, and no token is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cargohold.protocol import TransferOutcome
from cargohold.transfer import CopyJob, Direction
from tests.vllm.faults import Faults

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm import compat
from cargohold.integrations.vllm.settings import VllmSettings
from tests.vllm.common import EAGER, ask_twice, forget, make_prompts, restored, tokens

VERSION = compat.vllm_version()

CASES: dict[str, dict[str, Any]] = {
    "llama": {"num_blocks": 40},
    "gemma3": {"num_blocks": 150},
    "lfm2": {"num_blocks": 40, "mamba_cache_mode": "align", "enable_prefix_caching": True},
}


def fail(direction: Direction, outcome: TransferOutcome) -> Callable[[CopyJob], TransferOutcome]:
    return lambda job: outcome if job.direction is direction else TransferOutcome.DONE


@pytest.mark.parametrize("kind", CASES)
def test_a_failed_load_is_recomputed(
    kind: str, vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    prompts = make_prompts(3, 330)
    engine = start(vllm_model(kind), EAGER, **CASES[kind])
    first = [engine.ask([prompt], 6)[0].tokens for prompt in prompts]
    forget(engine)
    for outcome in (TransferOutcome.FAILED, TransferOutcome.ABANDONED):
        faults.outcome = fail(Direction.LOAD, outcome)
        answers = [engine.ask([prompt], 6)[0] for prompt in prompts]
        assert tokens(answers) == first
        assert restored(answers) == 0
        assert faults.counts[Direction.LOAD, outcome] > 0
        faults.outcome = lambda _job: TransferOutcome.DONE
        forget(engine)
    answers = [engine.ask([prompt], 6)[0] for prompt in prompts]
    assert tokens(answers) == first
    assert restored(answers) >= 640, "what was lost was not stored again"


def test_a_failed_store_is_never_found(
    vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    faults.outcome = fail(Direction.STORE, TransferOutcome.FAILED)
    prompts = make_prompts(2, 330)
    engine = start(vllm_model("llama"), EAGER)
    first = [engine.ask([prompt], 6)[0].tokens for prompt in prompts]
    forget(engine)
    answers = engine.ask(prompts, 6)
    assert tokens(answers) == first
    assert restored(answers) == 0
    assert faults.counts[Direction.STORE, TransferOutcome.FAILED] > 0


def test_requests_can_be_failed_instead(
    vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    engine = start(vllm_model("llama"), {**EAGER, "load_failure_policy": "fail"})
    prompts = make_prompts(2, 330)
    assert all(answer.finish_reason == "length" for answer in ask_twice(engine, prompts))
    forget(engine)
    faults.outcome = fail(Direction.LOAD, TransferOutcome.FAILED)
    engine.add("unlucky", prompts[0], 6)
    ended: dict[str, Any] = {}
    while engine.is_busy:
        ended |= engine.step()
    assert ended["unlucky"].finish_reason == "error"


def test_slow_transfers_keep_nobody_else_waiting(
    vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    engine = start(vllm_model("llama"), EAGER)
    (known,), new = make_prompts(1, 330), make_prompts(1, 330, seed=5)[0]
    (expected,) = ask_twice(engine, [known])
    forget(engine)
    faults.hold_polls = 30
    engine.add("loads", known, 6)
    engine.add("computes", new, 3)
    order: list[str] = []
    ended: dict[str, Any] = {}
    while engine.is_busy:
        now = engine.step()
        order += now
        ended |= now
    assert order == ["computes", "loads"]
    assert ended["loads"].tokens == expected.tokens
    assert ended["loads"].restored == 320


@pytest.mark.parametrize("method", ["get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"])
def test_a_connector_that_raises_on_the_scheduler_is_turned_off(
    method: str, vllm_model: Callable[[str], str], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(vllm_model("llama"), EAGER)
    prompts = make_prompts(2, 330)
    expected = tokens(ask_twice(engine, prompts))
    forget(engine)

    def explode(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(engine.side.guard.inner, method, explode)
    answers = engine.ask(prompts, 6)
    assert tokens(answers) == expected
    assert restored(answers) == 0
    assert "boom" in str(engine.side.guard.broken)


@pytest.mark.parametrize("kind", ["finished_recving", "finished_sending"])
def test_the_end_of_a_transfer_that_no_request_has_turns_the_connector_off(
    kind: str, vllm_model: Callable[[str], str], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in our own engine."""
    engine = start(vllm_model("llama"), EAGER)
    inner = compat.worker_connector()._worker._guard._inner
    ended = inner.get_transfer_results
    monkeypatch.setattr(
        inner, "get_transfer_results", lambda ids: replace(ended(ids), **{kind: frozenset({"unknown"})})
    )
    assert [len(answer.tokens) for answer in engine.ask(make_prompts(2, 330), 6)] == [6, 6]
    assert "transfers that these requests do not have: ['unknown']" in str(engine.side.guard.broken)


def test_a_worker_that_raises_while_requests_wait_for_its_loads(
    vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    engine = start(vllm_model("llama"), EAGER)
    prompts = make_prompts(3, 330)
    expected = tokens(ask_twice(engine, prompts))
    forget(engine)

    def explode(_: CopyJob) -> TransferOutcome:
        raise RuntimeError("boom")

    faults.outcome = explode
    answers = engine.ask(prompts, 6)
    assert tokens(answers) == expected
    assert restored(answers) == 0
    assert "boom" in str(engine.side.guard.broken)


def test_chunks_that_a_failed_store_lost_are_stored_when_a_request_hits_them_on_the_device(
    vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    engine = start(vllm_model("llama"), EAGER)
    prompts = make_prompts(2, 330)
    faults.outcome = fail(Direction.STORE, TransferOutcome.ABANDONED)
    expected = tokens(engine.ask(prompts, 6))
    faults.outcome = lambda _job: TransferOutcome.DONE
    assert tokens(engine.ask(prompts, 6)) == expected
    forget(engine)
    answers = engine.ask(prompts, 6)
    assert tokens(answers) == expected
    assert restored(answers) >= 600


@pytest.mark.skipif(
    VERSION is not None and VERSION < (0, 30), reason="before 0.30, vLLM computes again in the very blocks of the load"
)
def test_a_load_that_does_not_end_is_recomputed_in_other_blocks_and_its_own_stay_held(
    vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmSettings, "load_timeout_s", 0.2)
    engine = start(vllm_model("llama"), EAGER)
    prompts = make_prompts(2, 330)
    expected = tokens(ask_twice(engine, prompts))
    forget(engine)
    faults.hold_polls = 10**9
    assert tokens(engine.ask(prompts, 6)) == expected
    guard = engine.side.guard
    assert guard.broken is None
    assert guard.num_held_references == guard.num_stuck_references() > 0
    faults.hold_polls = 0
    forget(engine)
    answers = engine.ask(prompts, 6)
    assert tokens(answers) == expected
    assert restored(answers) > 0 and guard.num_held_references == 0
