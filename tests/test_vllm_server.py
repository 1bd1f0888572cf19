"""What examples and tests start vLLM's server with: however they end, the server ends, too."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cargohold.lab.simulation import simulated_layout
from cargohold.protocol import NULL_CONNECTOR, ConnectorGuard, SchedulerEnvironment
from examples.vllm_server import reserved_port, why_turned_off

SERVER = """
import os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if os.environ["SERVER"] != "loading" else 503)
        self.end_headers()

if os.environ["SERVER"] == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
server = HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
Path(os.environ["NOTES"], "pids").write_text(f"{os.getpid()} {engine.pid}")
server.serve_forever()
"""
"""Stands in for vLLM's server: its engine is a process that it does not end, and it answers nothing but how it is."""

REPOSITORY = Path(__file__).parents[1]

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program on a server that is not vLLM's: well, loading for ever, or stubborn."""
    path = tmp_path / "packages" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    path.parent.mkdir(parents=True)
    path.write_text(SERVER)
    started: list[subprocess.Popen[str]] = []

    def run(server: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": f"{tmp_path / 'packages'}{os.pathsep}{REPOSITORY}",
                "SERVER": server,
                "NOTES": str(tmp_path),
            },
        )
        started.append(process)
        awaited = tmp_path / ("pids" if server == "loading" else "asks")
        while not awaited.exists() or (awaited.name == "pids" and not awaited.read_text()):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        return process

    yield run
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    try:
        assert not [pid for pid in pids if is_alive(pid)], "it left its server behind"
    finally:
        for pid in [*pids, *(process.pid for process in started)]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        for process in started:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and not only its exit status for a parent that does not ask."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


PROGRAM = """
import os, signal, time
from pathlib import Path
from examples import vllm_server

vllm_server._STOP_TIMEOUT_S = 0.5  # for one that is stubborn
# Jobs in the background ignore one, and those that outlive their terminal the other.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
notes = Path(os.environ["NOTES"])
try:
    with vllm_server.serving("a model", notes / "log"):
        (notes / "asks").touch()
        time.sleep(600)
except KeyboardInterrupt:
    raise SystemExit(130)
"""


@pytest.mark.parametrize(
    ("server", "number"),
    [
        ("well", signal.SIGINT),
        ("well", signal.SIGHUP),
        ("loading", signal.SIGTERM),
        ("stubborn", signal.SIGTERM),
    ],
)
def test_whatever_ends_the_program_ends_its_server(server: str, number: signal.Signals, start: Start) -> None:
    process = start(server)
    process.send_signal(number)
    said, _ = process.communicate()
    assert process.returncode == 128 + number, said
    assert "Traceback" not in said


def test_impatience_leaves_nothing_behind_either(start: Start) -> None:
    process = start("stubborn")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)  # so that the second comes while the first is being served
    process.communicate()
    assert process.returncode == 130


def test_the_servers_output_tells_that_its_connector_was_turned_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    log.write_text("(EngineCore pid=7) INFO ready\n")
    assert why_turned_off(log) is None
    environment = SchedulerEnvironment(simulated_layout(4), time.monotonic)
    ConnectorGuard(NULL_CONNECTOR.make_scheduler_side(environment), num_blocks=4).break_off("it raised")
    with log.open("a") as out:
        out.write(f"(EngineCore pid=7) {caplog.text}")
    why = why_turned_off(log)
    assert why is not None
    assert why.startswith("connector ") and why.endswith(" is turned off: it raised; requests are served without it")


def test_a_port_is_kept_for_the_server_that_takes_seconds_until_it_binds_it() -> None:
    with reserved_port() as port, socket.socket() as stranger, socket.socket() as server:
        with pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        socket.create_connection(("127.0.0.1", port)).close()
