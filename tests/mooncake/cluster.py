"""A Mooncake Store on this machine: a master, and processes that lend memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import mooncake
from tests.servers import Server, free_port

BIN = Path(mooncake.__file__).parent
LENT = 64 * 1024**2
WAIT_S = 60.0


class Cluster:
    """A master that can be stopped and frozen, and its lenders.

    Args:
        options: of the master.
    """

    def __init__(self, *options: str) -> None:
        self.web_port = free_port()
        local = ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", f"--metrics_port={self.web_port}"]
        command = [str(BIN / "mooncake_master"), *local, *options]
        self.master = Server(lambda port: [*command, f"--rpc_port={port}"], lambda _: self.is_up())
        self.lenders: list[Server] = []
        self.metadata = "P2PHANDSHAKE"

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.master.port}"

    @property
    def place(self) -> str:
        """For ``cargohold cache``, which asks the master's web server."""
        return f"{self.url}?metrics_port={self.web_port}"

    def is_up(self) -> bool:
        with suppress(OSError):
            return bool(self.asked("health"))
        return False

    def asked(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.web_port}/{path}", timeout=WAIT_S) as answer:
            return bytes(answer.read())

    def segments(self) -> list[dict[str, Any]]:
        """What the master knows to be lent."""
        with suppress(OSError, ValueError):
            return list(json.loads(self.asked("get_segments_detail"))["segments"])
        return []

    def lent(self) -> set[str]:
        """Ids of segments; those of a lender that was killed are there for a while."""
        return {segment["segment_id"] for segment in self.segments()}

    def await_segments(self, number: int) -> None:
        until(lambda: len(self.segments()) == number, f"{number} lenders were expected")

    def lend(self, num_bytes: int = LENT) -> Server:
        """Start a process that lends memory; return when the master knows."""
        before = self.lent()
        options = ["--host=127.0.0.1", f"--metadata_server={self.metadata}", f"--global_segment_size={num_bytes}"]
        command = [str(BIN / "mooncake_client"), *options, f"--master_server_address=127.0.0.1:{self.master.port}"]
        lender = Server(lambda port: [*command, f"--port={port}"], lambda _: not self.lent() <= before)
        self.lenders.append(lender)
        lender.start()
        return lender

    def end_lenders(self) -> None:
        for lender in self.lenders:
            lender.stop()


def until(is_so: Callable[[], bool], otherwise: str, limit_s: float = WAIT_S) -> None:
    """Wait until something is so: masters and lenders do things at times of their own."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


@contextmanager
def cluster(*options: str, lent: int = LENT, metadata: str = "P2PHANDSHAKE") -> Iterator[Cluster]:
    with ExitStack() as running:
        made = Cluster(*options)
        running.callback(made.master.stop)
        made.master.start()
        running.callback(made.end_lenders)
        made.metadata = metadata
        if lent:
            made.lend(lent)
        yield made


def why_not() -> str:
    """Why Mooncake cannot be used here; empty if it can."""
    trial = subprocess.run(
        [sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, check=False, timeout=WAIT_S
    )
    return (trial.stderr.splitlines() or [f"status {trial.returncode}"])[-1] if trial.returncode else ""
