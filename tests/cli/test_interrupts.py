"""Ctrl-C and closed pipes, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import IO

import pytest

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the command; whatever is left of it at the end is killed."""
    with ExitStack() as stack:

        def run(*args: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", "cargohold", *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield run


def read_some(stream: IO[str] | None) -> str:
    """What is there as soon as there is something."""
    assert stream is not None
    return os.read(stream.fileno(), 65536).decode()


LONG = ("--max-tokens", "6000")


def test_ctrl_c_while_it_generates_ends_cleanly(start: Start, chat_model: str) -> None:
    process = start("run", chat_model, "-p", "Hello", *LONG)
    assert read_some(process.stdout)
    _interrupt(process)


def test_ctrl_c_while_it_loads_ends_cleanly(start: Start, chat_model: str) -> None:
    process = start("--verbose", "run", chat_model, "-p", "Hello", "--num-device-blocks", "100")
    assert "sequences are limited" in read_some(process.stderr), "what it says just before it loads the weights"
    _interrupt(process)


def _interrupt(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err == "interrupted\n"


def test_ctrl_c_in_a_chat_ends_the_answer_and_not_the_conversation(start: Start, chat_model: str) -> None:
    process = start("chat", chat_model, *LONG)
    assert process.stdin is not None
    process.stdin.write("Hello\n")
    process.stdin.flush()
    assert read_some(process.stdout)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate("/new\n/quit\n")
    assert process.returncode == 0
    lines = err.splitlines()
    assert lines[-2:] == ["(interrupted)", "a new conversation"]
    assert "Traceback" not in err


def test_a_reader_that_goes_away_is_no_error(start: Start, chat_model: str) -> None:
    process = start("run", chat_model, "-p", "Hello", *LONG)
    assert process.stdout is not None
    assert read_some(process.stdout)
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait() == 0
    assert err == ""
