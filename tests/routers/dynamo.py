"""Dynamo's own KV indexer, run in a network namespace of its own: an index that is not ours, of events that are.

``make test-routers`` installs it and runs these tests in a namespace with nothing but the loopback device: the indexer listens
on all interfaces. Its process ends with the namespace's first process, whatever happens to the tests.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

PYTHON = os.environ.get("CARGOHOLD_DYNAMO_PYTHON", "")
PATIENCE_S = 30.0
MODEL = "model"

ports = count(20_000)
"""Ports to listen on. Nobody else is in this network, and connections get theirs from 32768 on: these are free, and stay so."""


def why_not() -> str:
    """Why the indexer cannot run here; empty if it can."""
    if not PYTHON or not Path(PYTHON).exists():
        return "Dynamo's indexer is not installed: make test-routers"
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        return "the indexer listens on all interfaces, so it runs in a network namespace of its own: make test-routers"
    return ""


needs_dynamo = pytest.mark.skipif(bool(why_not()), reason=why_not())


class Found(NamedTuple):
    """How many leading tokens of a prompt the indexer finds: on the device, then in host memory, then on disk."""

    device: int
    host: int
    disk: int


class Indexer:
    """A running indexer.

    Args:
        port: where it listens.
    """

    def __init__(self, port: int) -> None:
        self._port = port

    def call(self, path: str, body: object = None) -> Any:
        """Ask it; returns what it answers, as JSON or text."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"http://127.0.0.1:{self._port}{path}", data, {"content-type": "application/json"})
        with urlopen(request, timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        return json.loads(text) if text[:1] in "{[" and text else text

    def register(self, worker: int, endpoint: str, replay_endpoint: str | None, block_tokens: int) -> None:
        """Let it follow an engine."""
        about = {"instance_id": worker, "model_name": MODEL, "block_size": block_tokens, "endpoint": endpoint}
        self.call("/register", about | ({} if replay_endpoint is None else {"replay_endpoint": replay_endpoint}))

    def forget(self, worker: int) -> None:
        """Let it forget an engine."""
        self.call("/unregister", {"instance_id": worker, "model_name": MODEL})

    def find(self, token_ids: Sequence[int], worker: int) -> Found:
        """Ask how much of a prompt an engine has."""
        answer = self.call("/query", {"model_name": MODEL, "token_ids": list(token_ids)})
        instance = answer["instances"].get(str(worker))
        return Found(0, 0, 0) if instance is None else Found(instance["gpu"], instance["cpu"], instance["disk"])


@contextmanager
def running_indexer(log: Path) -> Iterator[Indexer]:
    """Start the indexer, and end it."""
    port = next(ports)
    command = [PYTHON, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            indexer = Indexer(port)
            end = time.monotonic() + PATIENCE_S
            while True:
                try:
                    indexer.call("/health")
                    break
                except URLError:
                    assert process.poll() is None and time.monotonic() < end, log.read_text()
                    time.sleep(0.05)
            yield indexer
        finally:
            process.kill()


def end_of_run(chunks: list[bool], first: int, per_chunk: int) -> int:
    """The number of the block before which all from ``first`` on are in chunks that are there."""
    while first // per_chunk < len(chunks) and chunks[first // per_chunk]:
        first = (first // per_chunk + 1) * per_chunk
    return first
