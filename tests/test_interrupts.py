"""Ctrl-C comes when it does no harm."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from cargohold.process import deferred_interrupt, held_back_in_processes, interrupt_thread


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


def test_a_thread_is_interrupted_at_its_next_line() -> None:
    interrupted, started = threading.Event(), threading.Event()

    def work() -> None:
        try:
            while True:
                started.set()
        except KeyboardInterrupt:
            interrupted.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(60)
    interrupt_thread(thread)
    thread.join(60)
    assert interrupted.is_set()


def test_a_thread_is_not_interrupted_while_it_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by sending SIGINT at random: the new thread got it and died, and its starter waited for it for ever."""
    really_start, is_starting, may_start = vars(threading)["_start_new_thread"], threading.Event(), threading.Event()
    told: list[str] = []

    def start_later(*arguments: object) -> object:
        is_starting.set()
        assert may_start.wait(60)
        return really_start(*arguments)

    def work() -> None:
        try:
            monkeypatch.setattr(threading, "_start_new_thread", start_later)
            threading.Thread(target=told.append, args=["the new one ran"]).start()
            while True:
                pass
        except KeyboardInterrupt:
            told.append("interrupted")

    def let_it_start(pause_s: float) -> None:
        told.append("waited")
        may_start.set()
        time.sleep(pause_s)

    thread = threading.Thread(target=work)
    thread.start()
    assert is_starting.wait(60)
    monkeypatch.setattr("cargohold.process.time", SimpleNamespace(sleep=let_it_start))
    interrupt_thread(thread)
    may_start.set()
    thread.join(60)
    assert not thread.is_alive()
    assert told[0] == "waited" and "the new one ran" in told and told[-1] == "interrupted"
