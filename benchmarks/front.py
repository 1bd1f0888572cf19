"""What the front costs a request: processor time with it less without it, around an application that does nothing, in pairs.

Beside it, where vLLM is installed: the same requests to vLLM's server, in turn at two paths that its one handler serves, of
which the front knows one (``/v1/chat/completions``) and lets the other pass (``/invocations``).
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

from benchmarks.environment import NotInstalledError
from cargohold.connector.tenants import Tenants

KIB = 1024
SIZES_KIB = (4, 40, 1024, 4096)
EVENTS = 300
PATH = "/v1/chat/completions"
TOOLS = [
    {"type": "function", "function": {"name": "tide", "description": "Tells the tide. " * 20, "parameters": {}}}
] * 4
EVENT = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'


def conversation(num_bytes: int, *, has_tools: bool, has_marks: bool) -> bytes:
    """A body of about this size: messages of two KiB in turn, of which the last and the first are marked."""
    text = ("The ship sails on, and nobody knows where to. " * 50)[:2000]
    messages: list[dict[str, Any]] = []
    for at in range(max(1, num_bytes // 2100)):
        mark = {"cache_control": {"type": "ephemeral"}} if has_marks and at < 3 else {}
        content = [{"type": "text", "text": f"{at} {text}", **mark}]
        messages.append({"role": ("user", "assistant")[at % 2], "content": content})
    body: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": 1, "temperature": 0}
    return json.dumps({**body, "tools": TOOLS} if has_tools else body).encode()


class Nothing:
    """An application that reads the body, and answers with these pieces."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    async def __call__(self, _: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def cpu_s(app: Any, body: bytes, key: str) -> float:
    """Processor time of one request, whose body comes in pieces as of uvicorn."""
    pieces = [body[at : at + 64 * KIB] for at in range(0, len(body), 64 * KIB)]
    messages = [{"type": "http.request", "body": piece, "more_body": piece is not pieces[-1]} for piece in pieces]
    headers = [(b"content-length", str(len(body)).encode()), (b"authorization", b"Bearer " + key.encode())]
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers}
    waiting = iter(messages)

    async def receive() -> Any:
        return next(waiting)

    async def send(_: Any) -> None:
        pass

    begun = time.thread_time()
    await app(scope, receive, send)
    return time.thread_time() - begun


def added_ms(front: Any, app: Any, body: bytes, key: str, rounds: int) -> float:
    """The median of what the front adds, in pairs."""

    async def play() -> list[float]:
        return [await cpu_s(front, body, key) - await cpu_s(app, body, key) for _ in range(rounds)]

    return median(asyncio.run(play())) * 1000


def rows(tenants: Tenants, rounds: int, sizes_kib: Sequence[int]) -> list[dict[str, Any]]:
    """What is added by size, by what is in a request, and by how it is answered."""
    from cargohold.serve.access import VllmAccess  # noqa: PLC0415  # needs packages that may be absent
    from cargohold.serve.front import Front  # noqa: PLC0415  # as above

    found = []
    answer = json.dumps({"choices": [{"message": {"content": "word " * 500}, "finish_reason": "stop"}]}).encode()
    for size in sizes_kib:
        for what, options in (
            ("text", {"has_tools": False, "has_marks": False}),
            ("tools", {"has_tools": True, "has_marks": False}),
            ("tools and marks", {"has_tools": True, "has_marks": True}),
        ):
            body = conversation(size * KIB, **options)
            row: dict[str, Any] = {"body_kib": size, "has": what}
            for name, pieces in (("whole", [answer]), ("streamed", [EVENT] * EVENTS)):
                app = Nothing(pieces)
                for whose, known in (("", Tenants()), ("_tenant", tenants)):
                    front = Front(app, VllmAccess(known))
                    row[f"{name}{whose}_ms"] = round(added_ms(front, app, body, "a key", rounds), 4)
            found.append(row)
    return found


def beside_vllm(url: str, rounds: int, sizes_kib: Sequence[int]) -> list[dict[str, Any]]:
    """The median ratio of a request's time at the path that the front knows to that at the one which it lets pass."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=600)

    def asked_s(path: str, body: bytes) -> float:
        begun = time.perf_counter()
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.read() and answer.status == 200
        return time.perf_counter() - begun

    found = []
    for size in sizes_kib:
        for streamed in (False, True):
            given = json.loads(conversation(size * KIB, has_tools=True, has_marks=True))
            body = json.dumps({**given, "max_tokens": 4, "stream": streamed}).encode()
            pairs = []
            for at in range(2 * rounds):  # whoever goes first waits for what the other has cached
                paths = (PATH, "/invocations") if at % 2 else ("/invocations", PATH)
                times = {path: asked_s(path, body) for path in paths}
                pairs.append((times[PATH], times["/invocations"]))
            pairs = pairs[2:] or pairs  # the first of all has to be computed
            ratio, added = median(one / other for one, other in pairs), median(one - other for one, other in pairs)
            found.append(
                {"body_kib": size, "streamed": streamed, "ratio": round(ratio, 3), "added_ms": round(added * 1000, 2)}
            )
    return found


def served(tenants: Path, rounds: int, sizes_kib: Sequence[int]) -> list[dict[str, Any]]:
    """Start vLLM's server with the connector and the front, without tenants, and ask it."""
    from examples.vllm_server import serving  # noqa: PLC0415  # where vLLM is installed
    from tests.serve.scripted_model import save_scripted_model  # noqa: PLC0415  # beside it

    most = 2 * KIB * max(sizes_kib)  # each character is a token
    directory = tenants.parent
    model = save_scripted_model(directory / "model", {}, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    options = {
        "middleware": "cargohold.serve.front.Front",
        "served-model-name": "m",
        "enable-auto-tool-choice": True,
        "tool-call-parser": "hermes",
        "dtype": "float32",
        "max-model-len": most,
        "num-gpu-blocks-override": 2 * most // 32,
        "block-size": 32,
        "enforce-eager": True,
    }
    connector = {"kv_connector": "CargoholdConnector", "kv_role": "kv_both"}
    extra = {"kv_connector_extra_config": {"host_bytes": "256MiB"}}
    with (
        patch.dict(os.environ, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}),
        serving(model, directory / "log", transfer_config=connector | extra, options=options) as url,
    ):
        return beside_vllm(url, rounds, sizes_kib)


def run(*, quick: bool) -> dict[str, Any]:
    if find_spec("starlette") is None:
        raise NotInstalledError("the server's packages are not installed: pip install '.[serve]'")
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "tenants.json")
        file.write_text(json.dumps({"acme": {"key": "a key"}}), encoding="utf-8")
        file.chmod(0o600)
        tenants = Tenants.read(file)
        result = {"rows": rows(tenants, 3 if quick else 201, SIZES_KIB[:1] if quick else SIZES_KIB)}
        if find_spec("vllm") is not None:
            result["beside_vllm"] = served(file, 1 if quick else 60, SIZES_KIB[:1] if quick else SIZES_KIB[:2])
        return result
