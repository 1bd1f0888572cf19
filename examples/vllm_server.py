"""``vllm serve`` as a child process, for demos and benchmarks."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from cargohold.errors import CargoholdError

START_TIMEOUT_S: Final = 600.0
_STOP_TIMEOUT_S: Final = 30.0
_TAIL_CHARS: Final = 2000


class ServerError(CargoholdError):
    """The server did not start.

    Attributes:
        log: the end of its output.
    """

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(f"vllm serve {reason}; it said last:\n{log}")
        self.log = log


@contextmanager
def serving(
    model: str,
    log: Path,
    *,
    transfer_config: Mapping[str, Any] | None = None,
    options: Mapping[str, object] | None = None,
) -> Iterator[str]:
    """Serve a model with vLLM; yields the address of its OpenAI-compatible interface, and stops it at the end.

    Call it in the main thread.

    Args:
        model: directory or hub id.
        log: file for the server's output.
        transfer_config: vLLM's ``--kv-transfer-config``.
        options: further options of ``vllm serve``, without the dashes in front; ``True`` for flags.

    Raises:
        ServerError: the server ended, or was not ready in time.
    """
    words: list[str] = []
    for name, value in (options or {}).items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    if transfer_config is not None:
        words += ["--kv-transfer-config", json.dumps(transfer_config)]
    with _signals_that_end(), log.open("w") as out, reserved_port() as port:
        command = [*_command(model), "--host", "127.0.0.1", "--port", str(port), *words]
        # In a process group of its own, so that the processes it starts end with it whatever happens.
        process = subprocess.Popen(  # noqa: S603  # our own interpreter, and no shell
            command, stdout=out, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
        )
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            _stop(process)


def why_turned_off(log: Path) -> str | None:
    """Return what an engine's output says of a connector that was turned off, and why; ``None`` if none was.

    The connector is in another process, the log's line says so at once, and vLLM's metrics only with the next step.
    """
    found = re.search(r"connector \S+ is turned off: .*", log.read_text(encoding="utf-8", errors="replace"))
    return None if found is None else found[0]


@contextmanager
def _signals_that_end() -> Iterator[None]:
    """Exit by an exception when this process is asked to end or loses its terminal, so that no server is left behind."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    ours = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}  # as of nohup
    for number in ours:
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def _command(model: str) -> list[str]:
    try:
        version("vllm")
    except PackageNotFoundError:
        # The command asks for the metadata of a package of that name; the CPU build's has another.
        return [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]


def _environment() -> dict[str, str]:
    """Environment variables for the server.

    By default, vLLM's CPU build uses another number of threads with a connector than without.
    """
    cores = sorted(os.sched_getaffinity(0))
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return {**defaults, **os.environ}


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a free port of this machine, kept until the end of the block for a server that sets ``SO_REUSEADDR``.

    A server takes seconds until it binds its port; meanwhile the system would give a port that nobody holds to others.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def free_port() -> int:
    """Return a port of this machine that is free at the moment."""
    with reserved_port() as port:
        return port


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"ended with status {process.returncode}", _tail(log))
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310  # our own address
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise ServerError(f"was not ready within {START_TIMEOUT_S:g} s", _tail(log))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, then end it and all that it started, even if a signal cuts the waiting short."""
    try:
        _signal_group(process, signal.SIGINT)
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass  # it had its time
    finally:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, number)


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARS:]
