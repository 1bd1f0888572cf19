"""All that requests can want, at a time and on a tiny device pool: grammars, several answers, scores of prompts, priorities.

Seeds are those of ``test_stress``.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cargohold.protocol import TransferOutcome
from tests.vllm.faults import Faults

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from vllm.sampling_params import StructuredOutputsParams

from tests.vllm.engine import Engine
from tests.vllm.models import END, save_tokenizer
from tests.vllm.test_stress import (
    CONNECTORS,
    FIXED,
    LIMITS,
    SEEDS,
    Arrival,
    make_workload,
    serve,
    speculation,
    unreliable,
)

KINDS = ("llama", "mistral-window")
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "[a-z]{3,20}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"grammar": 'root ::= ("a" | "b" | "w" [0-9]+ " ")+'},
    {
        "json": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            "required": ["a", "b"],
        }
    },
)


def wishes(seed: int, *, drafts: bool) -> Callable[[int], Mapping[str, Any]]:
    """What the requests of a workload want, by number; with drafts vLLM's CPUs cannot draw from so few tokens."""

    def want(number: int) -> Mapping[str, Any]:
        rng = random.Random(f"{seed}/wishes/{number}")
        wanted: dict[str, Any] = {"priority": rng.randrange(3)}
        if rng.random() < 0.5:
            wanted["structured_outputs"] = StructuredOutputsParams(**rng.choice(GRAMMARS))
            wanted["stop_token_ids"] = [END]
        if rng.random() < 0.15:
            wanted["prompt_logprobs"] = 0
        if rng.random() < 0.3 and not drafts:
            # Drawn from one token, for the oracle's sake: seeds end vLLM's CPUs at the first prompt in pieces.
            wanted |= {"n": rng.randint(2, 4), "temperature": 1.0, "top_k": 1}
        return wanted

    return want


def make_rush(seed: int) -> list[Arrival]:
    """A workload of which more comes at a time, and some want long answers: not all have room."""
    rng = random.Random(f"{seed}/rush")
    return [
        replace(arrival, step=arrival.step // 3, max_tokens=arrival.max_tokens + rng.choice((0, 0, 60)))
        for arrival in make_workload(seed, 24)
    ]


@pytest.fixture
def spoken(vllm_model: Callable[[str], str], tmp_path: Path) -> Callable[[str], str]:
    """Path of a model by kind, with a tokenizer."""

    def path(kind: str) -> str:
        shutil.copytree(vllm_model(kind), tmp_path / kind)
        save_tokenizer(str(tmp_path / kind))
        return str(tmp_path / kind)

    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", SEEDS.values(), ids=SEEDS.keys())
def test_whatever_is_wanted_never_depends_on_offloading(
    kind: str, seeds: tuple[int, ...], spoken: Callable[[str], str], start: Callable[..., Engine], faults: Faults
) -> None:
    model, options = spoken(kind), LIMITS | {"skip_tokenizer_init": False}
    drafts = {seed: speculation(model, random.Random(f"{seed}/drafts")) for seed in seeds}
    wanted = {seed: wishes(seed, drafts=bool(drafts[seed])) for seed in seeds}
    reference = start(model, num_blocks=2000, **options)
    expected = {seed: serve(reference, make_rush(seed), wanted[seed]) for seed in seeds}
    num_restored = num_preempted = 0
    for at, seed in enumerate(seeds):
        rng = random.Random(seed)
        connector = list(CONNECTORS)[at] if seeds is FIXED else rng.choice(list(CONNECTORS))
        faults.outcome, faults.hold_polls = lambda _job: TransferOutcome.DONE, 0
        engine = start(
            model,
            CONNECTORS[connector],
            num_blocks=rng.choice((18, 20, 24)),
            scheduling_policy=rng.choice(("fcfs", "priority")),
            async_scheduling=rng.random() < 0.5,
            **options,
            **drafts[seed],
        )
        for state in ("sound", "faulty"):
            answers = serve(engine, make_rush(seed), wanted[seed])
            for number, answer in answers.items():
                where = f"request {number} of seed {seed} with {connector}, {state}"
                right = expected[seed][number]
                assert (answer.tokens, answer.others) == (right.tokens, right.others), where
                assert answer.finish_reason == right.finish_reason, where
                assert answer.prompt_logprobs == pytest.approx(right.prompt_logprobs, rel=1e-3, abs=1e-4), where
            num_restored += sum(answer.restored for answer in answers.values())
            faults.outcome, faults.hold_polls = unreliable(rng), rng.choice((0, 1, 4))
        num_preempted += engine.metric("num_preemptions")
        engine.check_settled()
        assert not engine.side.guard.broken
    if seeds is FIXED:  # fresh ones may happen to restore nothing
        assert num_restored > 1000, "next to nothing was restored: this proves nothing"
        assert num_preempted or kind != "llama", "nobody was preempted: this proves little"
        ended = {answer.finish_reason for answers in expected.values() for answer in answers.values()}
        assert ended == {"length", "stop"}, "no grammar ended an answer: this proves little"
