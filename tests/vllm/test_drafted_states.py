"""Speculative decoding with recurrent state: of the states behind drafts only those that were judged are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.vllm.faults import Faults

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm import compat
from tests.vllm.common import EAGER, make_prompts, restored, tokens
from tests.vllm.engine import Engine
from tests.vllm.models import save_mtp
from tests.vllm.test_speculation import acceptance

PROMPT_TOKENS, ANSWER_TOKENS = 250, 160
FOLLOW_UP_TOKENS = 8
"""A wrong state shows in the first token. After a dozen, vLLM's own device hits differ too on processors without AVX-512, by
the block that they go on from: in bfloat16, what is computed behind it is rounded otherwise."""


@pytest.mark.skipif(compat.vllm_version() != (0, 32), reason="what vLLM's CPUs lack was written for vLLM 0.32")
@pytest.mark.parametrize("async_scheduling", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_state_behind_accepted_drafts_is_that_without_drafts(
    async_scheduling: bool,
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.vllm.state_copies import write_in_python  # noqa: PLC0415  # not there in all versions

    write_in_python(monkeypatch)
    model = save_mtp(vllm_model("qwen3-next-many-heads"))
    options = {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3},
        "async_scheduling": async_scheduling,
        "dtype": "bfloat16",
        "enable_prefix_caching": True,
        "mamba_cache_mode": "align",
        "prefix_cache_retention_interval": None,  # vLLM keeps states at the ends of all blocks, not of prompts alone
    }
    prompts = make_prompts(3, PROMPT_TOKENS)
    reference = start(model, num_blocks=400, **options)
    answers = [reference.ask([prompt], ANSWER_TOKENS)[0] for prompt in prompts]
    longer = [[*prompt, *answer.tokens, 7, 8, 9] for prompt, answer in zip(prompts, answers, strict=True)]
    hits = [reference.ask([prompt], FOLLOW_UP_TOKENS)[0] for prompt in longer]
    assert acceptance(reference) < 0.01  # states of one token after the other
    engine = start(model, EAGER, num_blocks=40, **options)
    guess_well(engine, longer)
    assert tokens([engine.ask([prompt], ANSWER_TOKENS)[0] for prompt in prompts]) == tokens(answers)
    assert 0.2 < acceptance(engine) < 0.9
    for scrambled in (False, True):
        engine.ask(make_prompts(8, 400, seed=5 + scrambled), 1)
        engine.settle()
        faults.scramble_loads = scrambled
        again = [engine.ask([prompt], FOLLOW_UP_TOKENS)[0] for prompt in longer]
        assert (tokens(again) == tokens(hits)) is not scrambled
        # vLLM computes the last block of a device hit again, for the head's sake.
        assert restored(again) >= sum(hit.device for hit in hits) > 2 * PROMPT_TOKENS
    assert not engine.side.guard.broken


def guess_well(engine: Engine, talks: Sequence[Sequence[int]]) -> None:
    """Let six of seven drafts be right: the first answer has a block's last token at the beginning of a step, others later."""
    runner = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    propose, judge = runner.drafter.propose, runner._update_states_after_model_execute
    numbers = {tuple(talk[:PROMPT_TOKENS]): number for number, talk in enumerate(talks)}
    num_known: dict[str, int] = {}

    def note(sampled: Any, output: Any) -> None:
        for row, request_id in enumerate(runner.input_batch.req_ids):
            request = runner.requests[request_id]
            num_tokens = len(request.prompt_token_ids)
            if request.num_computed_tokens + output.num_scheduled_tokens[request_id] >= num_tokens:
                num_known[request_id] = num_known.get(request_id, num_tokens) + int((sampled[row] != -1).sum())
        judge(sampled, output)

    def improve(*args: Any, **options: Any) -> Any:
        drafts = propose(*args, **options)
        for row, request_id in enumerate(runner.input_batch.req_ids):
            number = numbers.get(tuple(runner.requests[request_id].prompt_token_ids))
            if number is not None and request_id in num_known:
                first = num_known[request_id] - 1  # the token that was just sampled
                for at, token in enumerate(talks[number][first + 1 : first + 1 + drafts.shape[1]], start=1):
                    drafts[row, at - 1] = token if (first + at + number) % 7 else 0
        return drafts

    runner.drafter.propose, runner._update_states_after_model_execute = improve, note
