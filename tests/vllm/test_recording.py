"""A trace that vLLM records, replayed, says what vLLM itself reused."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.lab.replay.replaying import replay
from cargohold.lab.replay.traces import read_trace
from cargohold.lab.replay.workload import load_workload
from tests.vllm.common import EAGER, make_prompts
from tests.vllm.engine import Engine
from tests.vllm.models import VOCAB_SIZE


def serve_conversations(engine: Engine) -> int:
    """Conversations that outgrow the device pool together, one request after the other; tokens that vLLM says it reused."""
    rng = random.Random(7)
    talks = [[rng.randrange(3, VOCAB_SIZE) for _ in range(90)] for _ in range(10)]
    num_reused = 0
    for _ in range(36):
        talk = rng.choice(talks)
        talk += [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        (answer,) = engine.ask([talk], max_tokens=rng.randint(1, 40))
        engine.settle()
        talk += answer.tokens
        num_reused += answer.device
    return num_reused


def test_the_replay_of_a_recorded_trace_agrees(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    engine = start(vllm_model("llama"), EAGER | {"record": str(path)})
    num_reused = serve_conversations(engine)
    workload = load_workload(read_trace([path]))
    (everything,) = replay(workload, "infinite", [(1,)])  # host memory is large enough for all of it
    assert workload.num_requests == 36
    assert workload.num_reused_blocks == everything.num_prefix_hits > 0
    assert everything.num_hit_tokens == num_reused


def test_a_trace_says_how_each_turn_ended(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(vllm_model("llama"), model)
    path = tmp_path / "trace.jsonl"
    (prompt,) = make_prompts(1, 40)
    plain = start(str(model))
    (answer,) = plain.ask([prompt], max_tokens=4)
    call = {"id": answer.tokens[1], "content": "<tool_call>"}
    (model / "tokenizer.json").write_text(json.dumps({"added_tokens": [call]}))
    engine = start(str(model), EAGER | {"record": str(path)})
    engine.ask([prompt], max_tokens=4)
    engine.ask_for([{"prompt_token_ids": prompt}], 4, stop_token_ids=[answer.tokens[0]])
    engine.ask_for([{"prompt_token_ids": prompt}], 4, stop_token_ids=[answer.tokens[1]])
    assert [request.turn_end.value for request in read_trace([path])] == ["length", "answer", "tool_call"]
