"""``cargohold serve`` as one calls it: what it says, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature

import pytest

from cargohold.cli.run import serve
from cargohold.engine.config import DEFAULT_KV_BYTES
from cargohold.option_values import parse_bytes
from tests.command import Command
from tests.forks import ForkedCommand

Process = subprocess.Popen[str] | ForkedCommand
Start = Callable[[Sequence[str]], Process]

pytest.importorskip("fastapi", reason="the extra serve is not installed")


def as_users_do(args: Sequence[str]) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "cargohold", *args]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def forked(args: Sequence[str]) -> ForkedCommand:
    """The same, but for what happens before it begins to work."""
    return ForkedCommand(args, os.environ)


@contextmanager
def served(start: Start, model: str, *options: str, lines: list[str] | None = None) -> Iterator[tuple[Process, str]]:
    """The command, and the address that it says; ``lines`` gets all that it says up to there."""
    process = start(["serve", model, "--port", "0", *options])
    try:
        assert process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "it has ended"
            if lines is not None:
                lines.append(line)
            found = re.search(r"at (http://\S+) ", line)
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
            stream.close()


@pytest.mark.parametrize(
    ("start", "how", "status", "said"),
    [
        pytest.param(as_users_do, signal.SIGTERM, 143, "terminated\n", marks=pytest.mark.long),
        (forked, signal.SIGTERM, 143, "terminated\n"),
        (forked, signal.SIGINT, 130, "interrupted\n"),
    ],
)
def test_it_serves_until_it_is_told_to_end(
    start: Start, how: signal.Signals, status: int, said: str, chat_model: str
) -> None:
    options = ("--num-device-blocks", "100", "--served-model-name", "mine")
    with served(start, chat_model, *options) as (process, url):
        body = json.dumps({"model": "mine", "prompt": "Hello", "max_tokens": 2}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] == 2
        process.send_signal(how)
        _, rest = process.communicate(timeout=60)
        assert (process.returncode, rest) == (status, said)


def test_it_says_what_it_does_before_it_serves_and_what_its_end_waits_for(chat_model: str) -> None:
    lines: list[str] = []
    options = ("--num-device-blocks", "100", "--host-bytes", "8MiB")
    with served(forked, chat_model, *options, lines=lines) as (process, url):
        assert lines[0] == f"loading {chat_model}\n"
        said = "".join(lines)
        for expected in (
            "limited to 1584 tokens: the 100 blocks of the device pool hold no more (num_device_blocks)",
            "device pool: 99 blocks",
            "8.0 MiB of host",
        ):
            assert expected in said, said
        body = {"model": "chat", "prompt": "Hello", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.readline()
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert process.stderr.readline() == "waiting for 1 answer to end, for 5 s at most; Ctrl-C does not wait\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--port", "70000"], "cargohold: --port=70000 is not possible: it must be a number from 0"),
        (
            ["--host", "192.0.2.1"],
            "cargohold: --host='192.0.2.1' is not possible: it must be an address of this machine",
        ),
        (["--max-queue", "-1"], "cargohold: --max-queue=-1 is not possible: it must be an integer from 0"),
        (["--max-body-bytes", "much"], "cargohold: --max-body-bytes='much' is not possible"),
        (["--api-key", "a", "--admin-key", "a"], "cargohold: --admin-key='***' is not possible"),
        (["--admin-key", "a", "--metrics-key", "a"], "cargohold: --metrics-key='***' is not possible"),
        (["--api-key", "ä"], "cargohold: --api-key='***' is not possible"),
        (["--disk-dir", "x", "--host-bytes", "lots"], "cargohold: --host-bytes='lots' is not possible"),
    ],
    ids=str,
)
def test_impossible_options_are_told_in_one_line(cargohold: Command, args: list[str], message: str) -> None:
    result = cargohold("serve", "no-such-model", *args)
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert result.err.startswith(message), result.err


def test_by_default_host_memory_is_twice_as_large_as_the_device_pool() -> None:
    assert parse_bytes("host_bytes", signature(serve).parameters["host_bytes"].default) == 2 * DEFAULT_KV_BYTES


def test_a_model_that_is_not_there_ends_the_server(cargohold: Command) -> None:
    result = cargohold("serve", "/no/such/model", "--port", "0")
    assert result.status == 2 and "/no/such/model" in result.err


def test_a_missing_package_is_named(cargohold: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cargohold.cli.app.find_spec", lambda name: None)
    result = cargohold("serve", "smollm2")
    expected = "cargohold serve: the package fastapi is not installed here: pip install 'cargohold[serve]'\n"
    assert (result.status, result.err) == (2, expected)
