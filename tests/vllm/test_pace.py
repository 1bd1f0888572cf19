"""A connector hears of the end of each step once, right behind it: it judges by that how fast the engine computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from tests.vllm.common import EAGER, make_prompts


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_each_step_is_reported_once_right_behind_it(
    vllm_model: Callable[[str], str], start: Callable[..., Any], async_scheduling: bool
) -> None:
    """Found by reading: with asynchronous scheduling the end of a long prompt's step was reported before it was computed."""
    engine = start(vllm_model("llama"), EAGER, async_scheduling=async_scheduling)
    seen: list[str] = []

    def watch(owner: Any, method: str, *before_and_after: str) -> None:
        inner = getattr(owner, method)

        def watched(*args: Any) -> Any:
            seen.extend(before_and_after[:1])
            result = inner(*args)
            seen.extend(before_and_after[1:])
            return result

        setattr(owner, method, watched)

    watch(engine.scheduler, "update_from_output", "output", "done")
    watch(engine.side.guard.inner, "build_connector_meta", "step")
    watch(engine.side.guard.inner, "report_to_scheduler", "report")
    engine.ask(make_prompts(3, 330), max_tokens=9)
    engine.settle()
    num_steps = seen.count("step")
    assert num_steps > 10
    without_steps = [what for what in seen if what != "step"]
    assert without_steps == ["output", "report", "done"] * num_steps
