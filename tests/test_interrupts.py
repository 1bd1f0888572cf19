"""Ctrl-C comes when it does no harm."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from cargohold import LLM, EngineDeadError, OffloadConfig, SamplingParams
from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.interrupts import deferred_interrupt, held_back_in_processes
from tests.models import VOCAB_SIZE


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted_in_a_block(done: list[str], num_interrupts: int) -> None:
    with deferred_interrupt():
        for at in range(num_interrupts):
            ctrl_c()
            done.append(f"after interrupt {at + 1}")
    done.append("after the block")


def test_the_first_is_held_back_until_the_block_is_left() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_in_a_block(done, 1)
    assert done == ["after interrupt 1"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_does_not_wait() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted_in_a_block(done, 3)
    assert done == ["after interrupt 1"]


def test_without_one_nothing_happens() -> None:
    done: list[str] = []
    interrupted_in_a_block(done, 0)
    assert done == ["after the block"]


def test_an_error_of_the_block_is_not_hidden() -> None:
    def fail() -> None:
        with deferred_interrupt():
            ctrl_c()
            raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        fail()


def test_a_program_that_handles_ctrl_c_itself_goes_on_doing_so() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("handled"))
    try:
        with deferred_interrupt():
            ctrl_c()
            assert seen == ["handled"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_nothing_is_changed() -> None:
    handlers = []

    def look() -> None:
        with deferred_interrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_processes_begin_with_it_held_back_and_here_it_waits_for_them() -> None:
    asked = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    seen: list[str] = []

    def start(num_interrupts: int) -> None:
        with held_back_in_processes():
            for _ in range(num_interrupts):
                ctrl_c()
            seen.append(
                subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
            )

    with pytest.raises(KeyboardInterrupt):
        start(1)
    start(0)
    assert seen == ["True\n", "True\n"]
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


PROMPTS = [[token] * 30 for token in range(VOCAB_SIZE - 3, VOCAB_SIZE)]
SAMPLING = SamplingParams(max_tokens=12)
OFFLOAD = OffloadConfig(host_bytes="8MiB")


def interrupt_at(llm: LLM, at_step: int, num_interrupts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C be pressed in the middle of a step."""
    executor = llm.engine._executor
    assert executor is not None
    execute, steps = executor.execute, 0

    def interrupted(step: SchedulerStep) -> StepOutput:
        nonlocal steps
        steps += 1
        for _ in range(num_interrupts if steps == at_step else 0):
            ctrl_c()
        return execute(step)

    monkeypatch.setattr(executor, "execute", interrupted)


@pytest.mark.parametrize("at_step", [1, 3, 9])
def test_a_model_can_be_used_again(
    at_step: int,
    tiny_model: Callable[[str], str],
    make_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make_llm(tiny_model("llama"), block_tokens=4, offload=OFFLOAD)
    expected = [output.token_ids for output in llm.generate(PROMPTS, SAMPLING)]
    interrupt_at(llm, at_step, 1, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SAMPLING)
    assert llm.engine.num_unfinished == 0 and not llm.engine.has_work()
    assert [output.token_ids for output in llm.generate(PROMPTS, SAMPLING)] == expected


def test_a_step_broken_off_by_a_second_one_ends_the_engine_and_says_so(
    tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_model("llama"), block_tokens=4, offload=OFFLOAD) as llm:
        interrupt_at(llm, 3, 2, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, SAMPLING)
        with pytest.raises(EngineDeadError, match="the engine has stopped: KeyboardInterrupt"):
            llm.generate(PROMPTS, SAMPLING)
