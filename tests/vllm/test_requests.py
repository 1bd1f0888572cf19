"""What single requests can ask, and what happens to them: salt, limits, preemption, abort, reset, asynchronous scheduling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.protocol import EXPLAIN, TransferOutcome
from cargohold.transfer import Direction
from tests.vllm.common import EAGER, LAZY, ask_twice, forget, make_prompts, restored, tokens
from tests.vllm.engine import Engine
from tests.vllm.faults import Faults


@contextmanager
def count_preemptions(engine: Engine) -> Iterator[list[str]]:
    """The requests that vLLM preempts meanwhile."""
    preempted: list[str] = []
    preempt = engine.scheduler._preempt_request

    def note(request: Any, *rest: object, **more: object) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *rest, **more)

    engine.scheduler._preempt_request = note
    try:
        yield preempted
    finally:
        engine.scheduler._preempt_request = preempt


@pytest.fixture
def llama(vllm_model: Callable[[str], str]) -> str:
    return vllm_model("llama")


def test_an_explanation_says_what_was_restored(llama: str, start: Callable[..., Any]) -> None:
    (answer,) = ask_twice(start(llama, EAGER), make_prompts(1, 330))
    assert answer.restored == 320
    assert answer.notes == (
        "of 330 tokens, 0 were on the device and 320 more in host; 10 had to be computed, less than a chunk of 32",
    )


def test_a_request_that_uses_no_cache_is_told_why(llama: str, start: Callable[..., Any]) -> None:
    """Found by use: its explanation was empty."""
    engine = start(llama, EAGER)
    (prompt,) = make_prompts(1, 330)
    ask_twice(engine, [prompt])
    ways: dict[str, dict[str, Any]] = {
        "nothing was looked up: log probabilities of a prompt need all of it computed": {"prompt_logprobs": 0},
        "nothing was looked up: the request skips the prefix cache (skip_reading_prefix_cache)": {
            "skip_reading_prefix_cache": True
        },
        "nothing was looked up: kv_transfer_params: max_load_tokens='all' must be an integer from 0": {
            "wishes": {"max_load_tokens": "all"}
        },
    }
    for expected, options in ways.items():
        forget(engine)
        (answer,) = engine.ask_for([{"prompt_token_ids": prompt}], **options)
        assert answer.notes == (expected,)
        assert answer.params[EXPLAIN]["restored_tokens"] == {}


def test_a_request_that_may_change_its_past_and_one_after_a_failure_are_told_why(
    llama: str, start: Callable[..., Any], faults: Faults
) -> None:
    engine = start(llama, EAGER)
    (prompt,) = make_prompts(1, 330)
    ask_twice(engine, [prompt])
    session = SimpleNamespace(request_id="s", resumable=True, kv_transfer_params={EXPLAIN: True})
    connector = engine.scheduler.connector
    connector.on_new_request(session)
    assert connector.get_num_new_matched_tokens(session, 0) == (0, False)
    _, params = connector.request_finished_all_groups(session, ([],))
    assert "may change its own past" in params[EXPLAIN]["notes"][0]
    forget(engine)
    faults.outcome = lambda job: TransferOutcome.FAILED if job.direction is Direction.LOAD else TransferOutcome.DONE
    (answer,) = engine.ask([prompt])
    assert answer.notes[-1] == "nothing was looked up: its load has failed, and is not tried again"
    engine.side.guard.break_off("made for this test")
    engine.ask(make_prompts(1, 40, seed=7), 3)
    (answer,) = engine.ask([prompt])
    assert "made for this test" in answer.notes[0]


def test_a_salt_keeps_prompts_apart(llama: str, start: Callable[..., Any]) -> None:
    engine = start(llama, EAGER)
    (prompt,) = make_prompts(1, 330)
    engine.ask([prompt], salt="mine")
    forget(engine)
    assert engine.ask([prompt], salt="yours")[0].restored == 0
    assert engine.ask([prompt])[0].restored == 0
    forget(engine)
    assert engine.ask([prompt], salt="mine")[0].restored == 320


def test_wishes_that_are_no_object_cost_their_request_offloading_alone(
    llama: str, start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Found by reading: a string, which clients can send by ``vllm_xargs``, turned the connector off for everybody."""
    engine = start(llama, EAGER)
    (prompt,) = make_prompts(1, 330)
    ask_twice(engine, [prompt])
    connector, request = engine.scheduler.connector, SimpleNamespace(request_id="odd", kv_transfer_params="fast")
    connector.on_new_request(request)
    assert "kv_transfer_params='fast' must be an object" in caplog.text
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.request_finished_all_groups(request, ([],)) == (False, None)
    forget(engine)
    assert restored(engine.ask([prompt])) == 320


def test_clients_do_not_fill_the_log_with_wishes_that_are_refused(
    llama: str, start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(llama, EAGER)
    engine.ask(make_prompts(1, 330))  # the first request must be a real one: it shows what vLLM's requests have
    connector = engine.scheduler.connector
    for number in range(200):
        connector.on_new_request(SimpleNamespace(request_id=f"odd-{number}", kv_transfer_params="fast"))
    told = [message for message in caplog.messages if "must be an object" in message]
    assert 8 <= len(told) <= 12
    assert told[-1].endswith("(warning 128 of this kind; the next one logged is number 256)")


def test_limits_of_a_request_are_kept_and_impossible_ones_cost_it_offloading_alone(
    llama: str, start: Callable[..., Any]
) -> None:
    engine = start(llama, EAGER)
    prompt, other = make_prompts(2, 330)
    engine.ask([prompt], wishes={"max_store_tokens": 200})
    expected = engine.ask([other], wishes={"max_store_tokens": "many"})
    forget(engine)
    assert engine.ask([prompt])[0].restored == 192
    answers = engine.ask([other])
    assert answers[0].restored == 0
    assert tokens(answers) == tokens(expected)


def test_preempted_requests_and_loads_into_a_full_pool_change_nothing(llama: str, start: Callable[..., Any]) -> None:
    prompts = make_prompts(4, 300)
    options = {"num_blocks": 33, "max_model_len": 512}
    expected = tokens(start(llama, num_blocks=400, max_model_len=512).ask(prompts, 40))
    for extra in (EAGER, LAZY):
        engine = start(llama, extra, **options)
        with count_preemptions(engine) as preempted:
            assert tokens(engine.ask(prompts, 40)) == expected
        assert preempted, "nobody was preempted: this proves nothing"
        assert tokens(engine.ask(prompts, 40)) == expected
        assert not engine.side.guard.broken


def test_an_abort_while_loading_or_computing_leaves_nothing_behind(llama: str, start: Callable[..., Any]) -> None:
    engine = start(llama, EAGER)
    prompts = make_prompts(3, 330)
    expected = tokens(ask_twice(engine, prompts))
    forget(engine)
    for at, prompt in enumerate(prompts):
        engine.add(f"gone-{at}", prompt, 50)
    statuses = set()
    for steps in range(3):
        engine.step()
        statuses |= {request.status.name for request in engine.scheduler.requests.values()}
        engine.abort(f"gone-{steps}")
    assert "WAITING_FOR_REMOTE_KVS" in statuses
    engine.check_settled()
    assert tokens(engine.ask(prompts, 6)) == expected


def test_asynchronous_scheduling_and_no_prefix_cache(llama: str, start: Callable[..., Any]) -> None:
    prompts = make_prompts(3, 330)
    expected = tokens(ask_twice(start(llama), prompts))
    for options in ({"async_scheduling": True}, {"enable_prefix_caching": False}):
        engine = start(llama, EAGER, **options)
        answers = ask_twice(engine, prompts)
        assert tokens(answers) == expected
        assert restored(answers) == 960
        assert tokens(engine.ask(prompts * 3)) == tokens(engine.ask(prompts * 3))


def test_requests_with_the_same_prompt_share_one_load(llama: str, start: Callable[..., Any]) -> None:
    engine = start(llama, EAGER)
    (prompt,) = make_prompts(1, 330)
    (expected,) = ask_twice(engine, [prompt])
    forget(engine)
    answers = engine.ask([prompt] * 4)
    assert {answer.tokens[:6] for answer in answers} == {expected.tokens}
    assert sorted(answer.restored for answer in answers) == [0, 0, 0, 320]
    assert sorted(answer.device for answer in answers) == [320] * 4
