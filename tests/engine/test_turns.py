"""Threads that share a model take turns, and code that interrupts a turn, as signal handlers do, harms nobody."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from cargohold import LLM, EngineDeadError, RequestError, SamplingParams
from cargohold.engine import turns as turns_module
from cargohold.engine.turns import Turns
from cargohold.protocol import ClassFactory, ConnectorMetadata, EmptyMetadata, StepView
from cargohold.protocol.null import NullConnectorScheduler, NullConnectorWorker

MakeLLM = Callable[..., LLM]
PATIENCE_S = 60.0
PROMPT = list(range(5, 25))


class Announced:
    """A lock that says when a thread is about to wait for it; other threads than ``waiter`` go unmentioned."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.waiter: threading.Thread | None = None
        self.is_awaited = threading.Event()

    def acquire(self, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is self.waiter:
            self.is_awaited.set()
        return self._inner.acquire(*args, **kwargs)

    def release(self) -> None:
        self._inner.release()


def start_waiter(turns: Turns, take: Callable[[], object]) -> threading.Thread:
    """Start a thread that takes a turn, and return when it waits for the turn of the calling thread to end."""
    announced = Announced(turns._now)
    turns._now = announced  # type: ignore[assignment]  # a lock all the same
    announced.waiter = threading.Thread(target=take, daemon=True)
    announced.waiter.start()
    assert announced.is_awaited.wait(PATIENCE_S)
    return announced.waiter


def ends(what: Callable[[], object]) -> bool:
    """Whether a function ends, called in a thread that does not keep the tests from ending if it hangs."""
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    thread.join(PATIENCE_S / 6)
    return not thread.is_alive()


def take_one(turns: Turns, log: list[str]) -> None:
    with turns.take() as is_whole:
        log.append("whole" if is_whole else "nested")


def nested_while_another_waits(turns: Turns, log: list[str]) -> None:
    with turns.take():
        waiter = start_waiter(turns, lambda: take_one(turns, log))
        take_one(turns, log)
        with turns.take_if_free() as is_free:
            assert not is_free
        log.append("outer")
    waiter.join(PATIENCE_S)


def test_a_turn_may_be_nested_while_another_thread_waits() -> None:
    """Found by a review: the waiting thread had the lock that the nested turn waited for, and all hung for ever."""
    turns, log = Turns(), list[str]()
    assert ends(lambda: nested_while_another_waits(turns, log))
    assert log == ["nested", "outer", "whole"]


@pytest.mark.parametrize("interrupted_at", range(24))
def test_a_turn_may_be_nested_at_any_moment_of_taking_or_ending_one(interrupted_at: int) -> None:
    """A signal handler runs between any two lines, while another thread waits."""
    turns, log = Turns(), list[str]()

    def interrupted() -> None:
        num_lines = 0

        def trace(frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal num_lines
            if frame.f_code.co_filename != turns_module.__file__:
                return None
            if event == "line":
                if num_lines == interrupted_at:
                    sys.settrace(None)
                    take_one(turns, log)
                num_lines += 1
            return trace

        sys.settrace(trace)
        try:
            with turns.take():
                traced, waiter = sys.gettrace(), None
                sys.settrace(None)
                waiter = start_waiter(turns, lambda: take_one(turns, []))
                sys.settrace(traced)
        finally:
            sys.settrace(None)
        waiter.join(PATIENCE_S)

    assert ends(interrupted)
    assert ends(lambda: take_one(turns, log)), "and nobody has kept a turn"
    assert log[-1] == "whole"


def test_no_turn_is_taken_in_passing_while_another_thread_waits_for_one() -> None:
    turns, taken = Turns(), list[bool]()
    with turns._next:  # as a thread has that waits

        def take_in_passing() -> None:
            with turns.take_if_free() as is_free:
                taken.append(is_free)

        assert ends(take_in_passing)
    assert ends(take_in_passing)
    assert taken == [False, True]


# --- a model whose call is interrupted --------------------------------------------------------------------------------


class Interrupted(NullConnectorScheduler):
    """Does something in the middle of a step, once: as a signal handler may."""

    def __init__(self) -> None:
        self.act: Callable[[], object] = lambda: None

    def build_connector_meta(self, step: StepView) -> ConnectorMetadata:
        act, self.act = self.act, lambda: None
        act()
        return EmptyMetadata()


@pytest.fixture
def interrupted() -> Interrupted:
    return Interrupted()


@pytest.fixture
def llm(tiny_model: Callable[[str], str], make_llm: MakeLLM, interrupted: Interrupted) -> LLM:
    factory = ClassFactory(lambda _: interrupted, lambda _: NullConnectorWorker())
    return make_llm(tiny_model("llama"), num_device_blocks=64, offload=factory)


@pytest.fixture
def handles_signal() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Sets what SIGUSR1 does."""
    before = signal.getsignal(signal.SIGUSR1)

    def handle_by(handle: Callable[[], object]) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: handle())

    yield handle_by
    signal.signal(signal.SIGUSR1, before)


def test_counters_may_be_read_in_the_middle_of_a_step_while_another_thread_waits(
    llm: LLM, interrupted: Interrupted
) -> None:
    answers: list[object] = []

    def read() -> None:
        start_waiter(llm._turns, lambda: answers.append(llm.generate([PROMPT], SamplingParams(max_tokens=2))))
        answers.append(llm.stats())

    interrupted.act = read
    assert ends(lambda: answers.append(llm.generate([PROMPT], SamplingParams(max_tokens=5))))
    assert ends(lambda: answers.append(llm.stats()))
    assert isinstance(answers[0], dict), "while the other waited"
    assert llm.engine.scheduler.connector.broken is None


def test_a_signal_handler_may_close_the_model_in_the_middle_of_a_step(
    llm: LLM, interrupted: Interrupted, handles_signal: Callable[[Callable[[], object]], None]
) -> None:
    """Found by a review: closing it computed steps within the step, and failed with an assertion of ours."""
    closed: list[str] = []

    def close() -> None:
        llm.close()
        closed.append("returned")

    handles_signal(close)
    interrupted.act = lambda: signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(EngineDeadError, match="the engine has stopped: it was shut down"):
        llm.generate([PROMPT], SamplingParams(max_tokens=20))
    assert closed == ["returned"]
    assert not llm.engine.has_work()


def test_closed_in_the_middle_of_a_call_that_makes_no_more_steps_the_model_is_closed_all_the_same(llm: LLM) -> None:
    class Closing(list[int]):
        def __iter__(self) -> Iterator[int]:
            llm.close()
            return super().__iter__()

    next(stream := llm.stream(PROMPT, SamplingParams(max_tokens=20)))
    with pytest.raises(RequestError, match="token id -1"):
        llm.generate([Closing([1, -1])])
    with pytest.raises(EngineDeadError, match="it was shut down"):
        next(stream)


def test_a_signal_handler_that_asks_for_tokens_is_refused_and_harms_nobody(
    llm: LLM, interrupted: Interrupted, handles_signal: Callable[[Callable[[], object]], None]
) -> None:
    """Found by trying: the step within a step ended the engine, for everybody."""
    refused: list[str] = []
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=20))
    next(stream)

    def ask() -> None:
        for call in (lambda: llm.generate([PROMPT]), lambda: next(stream)):
            with pytest.raises(RequestError, match="in the middle of another call of this thread") as raised:
                call()
            refused.append(str(raised.value))
        assert not llm.reset_cache()

    handles_signal(ask)
    interrupted.act = lambda: signal.raise_signal(signal.SIGUSR1)
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=9))
    assert (output.finish_reason, len(output.token_ids), len(refused)) == ("length", 9, 2)
    assert llm.engine.scheduler.connector.broken is None
    assert llm.engine.num_unfinished == 0
