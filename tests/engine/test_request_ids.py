"""Ids of requests: what belongs to one request never reaches another, however soon its id is used again."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor

import pytest

from cargohold import LLM, RequestError, SamplingParams
from cargohold.engine.llm_engine import LLMEngine
from cargohold.protocol import ClassFactory, KVConnectorTransferResults, RequestView
from cargohold.protocol.connector import NullConnectorScheduler, NullConnectorWorker
from tests.llms import in_engine

BLOCK_TOKENS = 4
MakeLLM = Callable[..., LLM]
ONE, TWO, THREE = ([seed, *range(5, 24)] for seed in range(3))


@pytest.fixture
def llm(tiny_model: Callable[[str], str], make_llm: MakeLLM) -> LLM:
    return make_llm(tiny_model("llama"), num_device_blocks=64)


def test_an_id_is_free_when_its_request_has_ended_although_its_last_output_was_not_read(llm: LLM) -> None:
    """Outputs go to the call that has asked, whoever has the id by then."""
    first = llm.stream(ONE, SamplingParams(max_tokens=60), request_id="mine")
    next(first)
    llm.generate(THREE, SamplingParams(max_tokens=90))  # meanwhile the first one ends
    second = llm.stream(TWO, SamplingParams(max_tokens=60), request_id="mine")
    next(second)
    (*_, last) = first
    assert (last.prompt_token_ids, len(last.token_ids), last.finish_reason) == (tuple(ONE), 60, "length")
    (*_, last) = second
    assert (last.prompt_token_ids, len(last.token_ids), last.finish_reason) == (tuple(TWO), 60, "length")


@pytest.mark.parametrize("is_read_to_the_end", [True, False])
def test_a_call_that_ends_aborts_nothing_of_the_one_that_has_its_id_next(is_read_to_the_end: bool, llm: LLM) -> None:
    """Found by a review: in two threads that used one id in turn, requests were aborted that nobody had given up."""
    first = llm.stream(ONE, SamplingParams(max_tokens=60), request_id="mine")
    next(first)
    llm.generate(THREE, SamplingParams(max_tokens=90))  # meanwhile the first one ends
    successor = llm.stream(TWO, SamplingParams(max_tokens=60), request_id="mine")
    next(successor)
    if is_read_to_the_end:
        list(first)
    else:
        first.close()
    (*_, last) = successor
    assert (last.finish_reason, len(last.token_ids)) == ("length", 60)


class Loads(NullConnectorScheduler):
    """Has the first block of every prompt, and loads it asynchronously."""

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int, bool]:
        return (0, False) if num_computed_tokens else (BLOCK_TOKENS, True)


class LoadsWhenTold(NullConnectorWorker):
    """Ends the loads of these requests, once."""

    def __init__(self) -> None:
        self.ended: frozenset[str] = frozenset()

    def get_transfer_results(self, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        ended, self.ended = self.ended, frozenset()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=ended)


def test_an_id_is_refused_while_blocks_of_an_aborted_request_are_still_being_loaded(
    tiny_model: Callable[[str], str], make_llm: MakeLLM
) -> None:
    """It was refused for being served already, which it was not any more."""
    worker = LoadsWhenTold()
    offload = ClassFactory(lambda _: Loads(), lambda _: worker)
    llm = make_llm(tiny_model("llama"), settled=False, block_tokens=BLOCK_TOKENS, offload=offload)
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(llm.generate, ONE, request_id="mine")
        while not llm.status.num_loading:
            in_engine(llm, LLMEngine.status)
        with pytest.raises(RequestError, match="request mine: a request with this id is being served already"):
            llm.generate(TWO, request_id="mine")
        llm.abort("mine")
        assert loading.result()[0].finish_reason == "abort"
    with pytest.raises(RequestError, match=r"request mine: the blocks of an earlier request .* are still being copied"):
        llm.generate(TWO, request_id="mine")
    worker.ended = frozenset({"mine"})
    assert llm.settle()
    stream = llm.stream(TWO, SamplingParams(max_tokens=2), request_id="mine")
    with ThreadPoolExecutor(1) as threads:
        served = threads.submit(list, stream)
        while not llm.status.num_loading:
            in_engine(llm, LLMEngine.status)
        worker.ended = frozenset({"mine"})
        assert served.result()[-1].finish_reason == "length"


def test_who_asks_again_under_an_id_gets_nothing_of_the_request_that_was_given_up(llm: LLM) -> None:
    """Found by a review: the last output of the one that was aborted ended the other, whose tokens were computed for nobody."""
    expected = llm.generate(TWO, SamplingParams(max_tokens=8))[0].token_ids
    other = llm.stream(THREE, SamplingParams(max_tokens=150))
    next(other)
    given_up = llm.stream(ONE, SamplingParams(max_tokens=100), request_id="mine")
    next(given_up)
    given_up.close()
    outputs = list(llm.stream(TWO, SamplingParams(max_tokens=8), request_id="mine"))
    assert {output.prompt_token_ids for output in outputs} == {tuple(TWO)}
    assert (outputs[-1].token_ids, outputs[-1].finish_reason) == (expected, "length")
    assert in_engine(llm, lambda engine: engine.num_unfinished) == 1
    other.close()


def test_the_engine_refuses_an_id_whose_last_output_it_has_not_returned(
    tiny_model: Callable[[str], str], make_engine: Callable[..., LLMEngine]
) -> None:
    engine = make_engine(tiny_model("llama"), num_device_blocks=64)
    engine.add_request(ONE, request_id="mine")
    engine.abort("mine")
    with pytest.raises(RequestError, match="request mine: a request with this id is being served already"):
        engine.add_request(TWO, request_id="mine")
    assert [(output.request_id, output.finish_reason) for output in engine.step()] == [("mine", "abort")]
    engine.add_request(TWO, request_id="mine")
    engine.abort("mine")
    assert [(output.request_id, output.finish_reason) for output in engine.take_outputs()] == [("mine", "abort")]
    assert engine.step() == []
