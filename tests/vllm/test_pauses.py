"""Requests that a pause has frozen go on where they were, although vLLM forgets meanwhile what the device holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.connector.kernel.pooled_stores import PooledStores
from tests.vllm.common import make_prompts
from tests.vllm.engine import Answer, Engine

MAX_TOKENS = 40


def with_frozen(engine: Engine, prompt: list[int]) -> None:
    """Let a request run where host memory is full of other prompts, and pause as before sleep."""
    for other in make_prompts(4, 325, seed=1):
        engine.ask([other], 1)
    engine.settle()
    engine.side._resets._may_sleep = True  # the CPU build has no such mode
    engine.side._options = replace(engine.side._options, may_sleep=True)
    engine.add("frozen", prompt, MAX_TOKENS)
    for _ in range(8):
        engine.step()
    # As vLLM does where its engine core has a process of its own: it steps as long as the connector asks for that.
    engine.scheduler.set_pause_state(type(engine.scheduler.pause_state).PAUSED_ALL)
    engine.settle()
    assert not engine.side.has_pending_work(), "it waits for nothing, however long the pause is"
    engine.llm.llm_engine.engine_core.engine_core.pause_scheduler("keep")


def go_on(engine: Engine) -> Answer | None:
    engine.llm.llm_engine.engine_core.engine_core.resume_scheduler()
    answers: dict[str, Answer] = {}
    while engine.is_busy:
        answers |= engine.step()
    return answers.get("frozen")


@pytest.mark.usefixtures("readable")
def test_what_a_frozen_request_has_on_the_device_alone_is_restored(
    vllm_model: Callable[[str], str], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has 25 whole blocks. Of the 40 chunks in host memory, half may go for them."""
    prompts = make_prompts(3, 805)
    (expected,) = start(vllm_model("llama"), num_blocks=41).ask(prompts[:1], MAX_TOKENS)
    engine = start(vllm_model("llama"), {"host_bytes": "1920KiB"}, num_blocks=41)
    with_frozen(engine, prompts[0])
    answer = go_on(engine)
    assert answer is not None and (answer.tokens, answer.restored) == (expected.tokens, 640)
    with_frozen(engine, prompts[1])
    engine.abort("frozen")
    assert go_on(engine) is None and not engine.side.guard.broken
    monkeypatch.setattr(PooledStores, "pause", lambda *_: None)
    with_frozen(engine, prompts[2])
    answer = go_on(engine)
    assert answer is not None and answer.restored == 0, "it would have been restored without this"
