"""Two workers, each with its shard of every block: vLLM's own multiprocess executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from tests.vllm.common import EAGER, ask_twice, make_prompts, restored, tokens


def test_two_workers_restore_what_each_has_stored(vllm_model: Callable[[str], str], start: Callable[..., Any]) -> None:
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    prompts = make_prompts(2, 330)
    expected = tokens(ask_twice(start(vllm_model("llama"), **options), prompts))
    engine = start(vllm_model("llama"), EAGER, **options)
    assert engine.side.layout.world_size == 2
    answers = ask_twice(engine, prompts)
    assert tokens(answers) == expected
    assert restored(answers) == 640
    assert not engine.side.guard.broken
