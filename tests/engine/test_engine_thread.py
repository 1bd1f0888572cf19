"""The engine's thread: callers wait for their own requests only, hear of its end, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from cargohold import LLM, EngineDeadError, OffloadConfig, RequestError, SamplingParams
from cargohold.engine.llm_engine import LLMEngine
from cargohold.protocol import ClassFactory, EmptyMetadata, KVConnectorMetadata, StepView, metrics
from cargohold.protocol.connector import NullConnectorScheduler, NullConnectorWorker
from tests.llms import in_engine, scheduler_of, thread_of

MakeLLM = Callable[..., LLM]
PATIENCE_S = 60.0
PROMPT = list(range(5, 25))
LONG = SamplingParams(max_tokens=150)


class Watched(NullConnectorScheduler):
    """Notes the requests of each step. Has a write in flight while ``is_writing``, or for ``num_looks`` looks at that.

    Acts in the middle of a step, once.
    """

    def __init__(self) -> None:
        self.is_writing = False
        self.num_looks = 0
        self.batches: list[set[str]] = []
        self.act: Callable[[], object] = lambda: None

    def has_pending_work(self) -> bool:
        self.num_looks -= 1
        return self.is_writing or self.num_looks >= 0

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        self.batches.append({share.request_id for share in step.scheduled})
        act, self.act = self.act, lambda: None
        act()
        return EmptyMetadata()


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def make(tiny_model: Callable[[str], str], make_llm: MakeLLM, watched: Watched) -> MakeLLM:
    def make(**options: Any) -> LLM:
        offload = ClassFactory(lambda _: watched, lambda _: NullConnectorWorker())
        return make_llm(
            tiny_model("llama"), **{"settled": False, "num_device_blocks": 64, "offload": offload, **options}
        )

    return make


@contextmanager
def held(llm: LLM) -> Iterator[None]:
    """Keep the engine's thread from doing anything until the block is left."""
    reached, gate = threading.Event(), threading.Event()

    def wait(_: LLMEngine) -> None:
        reached.set()
        gate.wait(PATIENCE_S)

    thread_of(llm).ask(wait)
    assert reached.wait(PATIENCE_S)
    try:
        yield
    finally:
        gate.set()


def wait_for_posts(llm: LLM, number: int) -> None:
    """Wait until so many commands were posted to a thread that is held."""
    while thread_of(llm)._commands.qsize() < number:
        threading.Event().wait(0.001)


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_generate_returns_while_a_write_is_in_flight(make: MakeLLM, watched: Watched) -> None:
    """It waited for all copies and writes to lower tiers: three seconds for a request of 0.06 s."""
    llm = make()
    watched.is_writing = True
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=3))
    assert output.finish_reason == "length"
    assert in_engine(llm, LLMEngine.has_work)
    assert not llm.settle(timeout_s=0)
    watched.is_writing = False
    assert llm.settle()


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("num_looks", range(1, 10))
def test_settle_returns_whenever_pending_work_ends_with_time(num_looks: int, make: MakeLLM, watched: Watched) -> None:
    """Found on a busy machine: work ended between two looks of the engine, which then slept with the caller unanswered."""
    llm = make()
    watched.num_looks = num_looks
    assert llm.settle()


def test_an_aborted_stream_returns_while_a_write_is_in_flight(make: MakeLLM, watched: Watched) -> None:
    llm = make()
    watched.is_writing = True
    stream = llm.stream(PROMPT, LONG)
    next(stream)
    stream.close()
    assert in_engine(llm, lambda engine: engine.num_unfinished) == 0
    watched.is_writing = False


def test_requests_of_two_threads_are_batched_in_the_same_step(make: MakeLLM, watched: Watched) -> None:
    llm = make()
    with ThreadPoolExecutor(2) as threads:
        with held(llm):
            calls = [
                threads.submit(llm.generate, PROMPT, SamplingParams(max_tokens=3), request_id=name) for name in "ab"
            ]
            wait_for_posts(llm, 2)
        assert [call.result(PATIENCE_S)[0].finish_reason for call in calls] == ["length", "length"]
    assert watched.batches[0] == {"a", "b"}


def test_of_several_prompts_none_is_computed_if_one_is_refused(make: MakeLLM, watched: Watched) -> None:
    with pytest.raises(RequestError, match="prompt 2 of 2: the prompt is empty"):
        make().generate([PROMPT, []])
    assert not any(watched.batches)


def test_a_stream_that_is_dropped_is_aborted(make: MakeLLM) -> None:
    llm = make()
    stream = llm.stream(PROMPT, LONG)
    next(stream)
    del stream
    gc.collect()
    assert llm.settle()
    assert llm.status.num_free_blocks == llm.status.num_blocks


def test_status_counts_what_runs_and_what_waits(make: MakeLLM) -> None:
    llm = make(max_num_seqs=1)
    streams = [llm.stream(PROMPT, LONG) for _ in range(2)]
    next(streams[0])
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(next, streams[1])
        while not llm.status.num_waiting:
            in_engine(llm, LLMEngine.status)
        assert llm.status.num_running == 1
        assert llm.status.num_free_blocks < llm.status.num_blocks
        streams[0].close()
        waiting.result(PATIENCE_S)


def test_a_connector_that_asks_its_own_engine_is_turned_off_and_hangs_nobody(make: MakeLLM, watched: Watched) -> None:
    llm = make()
    watched.act = llm.stats
    assert llm.generate(PROMPT, SamplingParams(max_tokens=3))[0].finish_reason == "length"
    assert "cannot wait for itself" in str(in_engine(llm, lambda engine: engine.scheduler.connector.broken))


# --- interrupts and signals -------------------------------------------------------------------------------------------


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("at_step", [1, 3, 9])
def test_ctrl_c_ends_the_call_and_the_model_can_be_used_again(at_step: int, make: MakeLLM, watched: Watched) -> None:
    llm = make()
    prompts = [[number, *PROMPT] for number in range(3)]
    expected = [output.token_ids for output in llm.generate(prompts, SamplingParams(max_tokens=12))]
    watched.batches.clear()

    def interrupt() -> None:
        if len(watched.batches) < at_step:
            watched.act = interrupt
        else:
            ctrl_c()

    watched.act = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, LONG)
    assert in_engine(llm, lambda engine: engine.num_unfinished) == 0
    assert [output.token_ids for output in llm.generate(prompts, SamplingParams(max_tokens=12))] == expected


@pytest.fixture
def handles_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Sets what SIGUSR1 does."""
    before = signal.getsignal(signal.SIGUSR1)

    def handle_by(handle: Callable[[], object]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: handle())

    yield handle_by
    signal.signal(signal.SIGUSR1, before)


HandleBy = Callable[[Callable[[], object]], None]


def test_a_signal_handler_may_do_all_that_others_may_in_the_middle_of_a_call(
    make: MakeLLM, watched: Watched, handles_signal: HandleBy
) -> None:
    """It was refused tokens, and some of what it was allowed had hung."""
    llm, answers = make(), list[Any]()
    stream = llm.stream(PROMPT, LONG)
    next(stream)

    def handle() -> None:
        answers.append(llm.stats())
        answers.append(llm.generate(PROMPT, SamplingParams(max_tokens=2))[0].finish_reason)
        answers.append(next(stream).finished)
        stream.close()

    handles_signal(handle)
    watched.act = lambda: os.kill(os.getpid(), signal.SIGUSR1)
    (output,) = llm.generate(PROMPT, LONG)
    assert (output.finish_reason, answers) == ("length", [{}, "length", False])


def test_a_signal_handler_may_close_the_model_in_the_middle_of_a_call(
    make: MakeLLM, watched: Watched, handles_signal: HandleBy
) -> None:
    llm = make()
    handles_signal(llm.close)
    watched.act = lambda: os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(EngineDeadError, match="the engine has stopped: it was shut down"):
        llm.generate(PROMPT, LONG)


def test_ctrl_c_while_the_model_loads_ends_the_load(
    tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def load(*_: object) -> LLMEngine:
        try:
            ctrl_c()
            while True:
                pass
        finally:
            ended.set()

    monkeypatch.setattr("cargohold.base_llm.build_engine", load)
    with pytest.raises(KeyboardInterrupt):
        LLM(tiny_model("llama"))
    assert ended.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "cargohold-engine"]


@pytest.mark.parametrize("has_begun", [False, True])
def test_ctrl_c_in_the_moment_of_the_start_ends_it(
    has_begun: bool, tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found under load: a thread that was about to begin could not be joined, and its error hid the interrupt."""
    start = threading.Thread.start
    late: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != "cargohold-engine":
            start(thread)
            return
        late.append(thread)
        if has_begun:
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM(tiny_model("llama"))
    if not has_begun:
        start(late[0])
    late[0].join(PATIENCE_S)
    assert not late[0].is_alive()


# --- the end ----------------------------------------------------------------------------------------------------------


def test_an_error_of_a_step_reaches_everybody_who_waits(
    make: MakeLLM, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        calls.extend(
            [threads.submit(llm.generate, PROMPT), threads.submit(llm.settle), threads.submit(llm.reset_cache)]
        )
        wait_for_posts(llm, 3)
        raise ValueError("of the model")

    llm = make()
    watched.is_writing = True
    stream = llm.stream(PROMPT, LONG)
    next(stream)
    calls: list[Future[Any]] = []
    with ThreadPoolExecutor(6) as threads:
        with held(llm):
            monkeypatch.setattr("cargohold.engine.model.hf_runner.HFModelRunner.execute", fail)
            calls += [threads.submit(llm.generate, PROMPT), threads.submit(llm.generate, [PROMPT, PROMPT])]
            calls += [threads.submit(lambda: list(stream))]
            wait_for_posts(llm, 2)
        calls[0].exception(PATIENCE_S)  # by then, the others have been asked
        errors = [call.exception(PATIENCE_S) for call in calls]
    with pytest.raises(EngineDeadError) as later:
        llm.stats()
    errors.append(later.value)
    assert len({id(error) for error in errors}) == 7, "each adds its own traceback"
    for error in errors:
        assert isinstance(error, EngineDeadError)
        assert str(error) == "a step failed, the engine has stopped: of the model"
        assert isinstance(error.__cause__, ValueError)
    in_flight = scheduler_of(llm)
    in_flight.connector.break_off("the engine is gone")
    llm.close()
    monkeypatch.undo()
    leave_unchecked(llm)


def leave_unchecked(llm: LLM) -> None:
    """Spare the engine the check at the end of the test: a step of it was broken off."""
    scheduler_of(llm).check_settled = lambda: None  # type: ignore[method-assign]


def test_close_waits_for_writes_no_longer_than_it_may(make: MakeLLM, watched: Watched) -> None:
    """Of a store that never ends, it waited for half a minute."""
    llm = make(shutdown_timeout_s=0)
    watched.is_writing = True
    llm.generate(PROMPT, SamplingParams(max_tokens=2))
    llm.close()
    assert watched.is_writing
    leave_unchecked(llm)


def test_close_lets_writes_end(make: MakeLLM, watched: Watched) -> None:
    llm = make(shutdown_timeout_s=PATIENCE_S)
    watched.is_writing = True

    def end_writing_after_five_steps() -> None:
        watched.is_writing = len(watched.batches) < 5
        watched.act = end_writing_after_five_steps

    watched.act = end_writing_after_five_steps
    llm.close()
    assert not watched.is_writing


def test_a_call_that_waits_when_the_model_is_closed_is_told(make: MakeLLM) -> None:
    llm = make()
    stream = llm.stream(PROMPT, LONG)
    next(stream)
    with ThreadPoolExecutor(1) as threads, held(llm):
        waiting = threads.submit(llm.generate, PROMPT, LONG)
        wait_for_posts(llm, 1)
        thread_of(llm).start_closing()
    for call in (waiting.result, lambda: list(stream), lambda: llm.generate(PROMPT), llm.stats, llm.reset_cache):
        with pytest.raises(EngineDeadError, match="the engine has stopped: it was shut down"):
            call()
    llm.close()
    llm.close()


def test_what_is_posted_while_the_engine_ends_is_answered(make: MakeLLM) -> None:
    llm = make()
    with ThreadPoolExecutor(2) as threads, held(llm):
        thread_of(llm).start_closing()
        late: list[Future[Any]] = [threads.submit(llm.generate, PROMPT), threads.submit(llm.settle)]
        wait_for_posts(llm, 3)
    assert isinstance(late[0].exception(PATIENCE_S), EngineDeadError)
    assert late[1].exception(PATIENCE_S) is None or isinstance(late[1].exception(), EngineDeadError)


# --- all of it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_many_threads_that_ask_stream_abort_and_give_up_leave_nothing_behind(
    seed: int, tiny_model: Callable[[str], str], make_llm: MakeLLM
) -> None:
    llm = make_llm(
        tiny_model("llama"),
        settled=False,
        block_tokens=4,
        num_device_blocks=48,
        max_model_len=100,
        offload=OffloadConfig(host_bytes="1MiB"),
    )

    def use(thread: int) -> None:
        draw = random.Random(100 * seed + thread)
        for turn in range(6):
            prompts = [[draw.randrange(4)] * 20 + [draw.randrange(100)] for _ in range(draw.randint(1, 3))]
            sampling = SamplingParams(max_tokens=draw.randint(1, 20))
            match draw.randrange(4):
                case 0:
                    assert all(output.finished for output in llm.generate(prompts, sampling))
                case 1:
                    stream = llm.stream(prompts[0], sampling)
                    next(stream)
                    if draw.random() < 0.5:
                        stream.close()
                case 2:
                    for output in llm.stream(prompts[0], sampling, request_id=f"{thread} {turn}"):
                        llm.abort(output.request_id)
                case _:
                    llm.stats()
                    llm.reset_cache()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(8)))
    gc.collect()
    assert llm.settle()
    status = llm.status
    assert (status.num_running, status.num_waiting, status.num_loading) == (0, 0, 0)
    assert status.num_free_blocks == status.num_blocks
    assert metrics.FAILURES.of("connector_off") not in llm.stats()
