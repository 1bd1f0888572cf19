"""Ids of requests: what belongs to one request never reaches another, however soon its id is used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from cargohold import LLM, RequestError, SamplingParams

MakeLLM = Callable[..., LLM]
ONE, TWO, THREE = ([seed, *range(5, 24)] for seed in range(3))


@pytest.fixture
def llm(tiny_model: Callable[[str], str], make_llm: MakeLLM) -> LLM:
    return make_llm(tiny_model("llama"), num_device_blocks=64)


def test_an_id_that_is_made_up_is_not_that_of_a_stream_with_unread_outputs(llm: LLM) -> None:
    """Found by a review: the second stream's outputs went nowhere, and it was asked for for ever."""
    unread = llm.stream(ONE, SamplingParams(max_tokens=3), request_id="request-1")
    next(unread)
    llm.generate(TWO, SamplingParams(max_tokens=10), request_id="other")  # meanwhile the first one ends
    another = llm.stream(THREE, SamplingParams(max_tokens=50))
    assert next(another).request_id != "request-1"
    (*_, last) = unread
    assert (last.request_id, last.finish_reason, len(last.token_ids)) == ("request-1", "length", 3)
    (*_, last) = another
    assert (last.finish_reason, len(last.token_ids)) == ("length", 50)


def test_who_asks_again_under_an_id_gets_nothing_of_the_request_that_was_given_up(llm: LLM) -> None:
    """Found by a review: the last output of the one that was aborted ended the other, whose tokens were computed for nobody."""
    expected = llm.generate(TWO, SamplingParams(max_tokens=8))[0].token_ids
    other = llm.stream(THREE, SamplingParams(max_tokens=100))  # so that closing the next one makes no step
    next(other)
    given_up = llm.stream(ONE, SamplingParams(max_tokens=100), request_id="mine")
    next(given_up)
    given_up.close()
    outputs = list(llm.stream(TWO, SamplingParams(max_tokens=8), request_id="mine"))
    assert {output.prompt_token_ids for output in outputs} == {tuple(TWO)}
    assert (outputs[-1].token_ids, outputs[-1].finish_reason) == (expected, "length")
    assert llm.engine.num_unfinished == 1
    other.close()


def test_an_id_is_free_when_the_last_output_has_been_read(llm: LLM) -> None:
    first = llm.stream(ONE, SamplingParams(max_tokens=3), request_id="mine")
    while not next(first).finished:
        pass
    second = llm.stream(TWO, SamplingParams(max_tokens=5), request_id="mine")
    next(second)
    first.close()
    (*_, last) = second
    assert (last.prompt_token_ids, len(last.token_ids), last.finish_reason) == (tuple(TWO), 5, "length")


def test_the_engine_refuses_an_id_whose_last_output_it_has_not_returned(llm: LLM) -> None:
    engine = llm.engine
    engine.add_request(ONE, request_id="mine")
    engine.abort("mine")
    with pytest.raises(RequestError, match="request mine: a request with this id is being served already"):
        engine.add_request(TWO, request_id="mine")
    assert [(output.request_id, output.finish_reason) for output in engine.step()] == [("mine", "abort")]
    engine.add_request(TWO, request_id="mine")
    engine.abort("mine")
    assert [(output.request_id, output.finish_reason) for output in engine.take_outputs()] == [("mine", "abort")]
    assert engine.step() == []


class Preempted(deque[Any]):
    """What is to be aborted; before a call adds what it leaves behind, something else happens, once."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__()
        self._happens = happens

    def extend(self, items: Iterable[Any]) -> None:
        happens, self._happens = self._happens, lambda: None
        happens()
        super().extend(items)


@pytest.mark.parametrize("is_read_to_the_end", [True, False])
def test_a_call_that_ends_aborts_nothing_of_the_one_that_has_its_id_next(is_read_to_the_end: bool, llm: LLM) -> None:
    """Found by a review: in two threads that used one id in turn, requests were aborted that nobody had given up."""
    successor = llm.stream(TWO, SamplingParams(max_tokens=30), request_id="mine")
    first = llm.stream(ONE, SamplingParams(max_tokens=2), request_id="mine")
    next(first)
    llm.generate(THREE, SamplingParams(max_tokens=5))  # meanwhile the first one ends
    llm._aborted = Preempted(lambda: next(successor))
    if is_read_to_the_end:
        list(first)
    else:
        first.close()
    (*_, last) = successor
    assert (last.finish_reason, len(last.token_ids)) == ("length", 30)
