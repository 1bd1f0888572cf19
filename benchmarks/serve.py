"""A model through HTTP beside the same model in a program, and beside the server that comes with transformers."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.environment import NotInstalledError
from cargohold import LLM, OffloadConfig, SamplingParams
from cargohold.engine.model.files import locate_model

MODEL = "smollm2"
HOST_BYTES = "1GiB"
NUM_BLOCKS = 1200
NAME = "served"
OPTIONS = ("--host-bytes", HOST_BYTES, "--num-device-blocks", str(NUM_BLOCKS))
TEXT_CHARACTERS = 3000
QUESTIONS = ("What is it about?", "Who is in it?", "How does it end?")
ANSWER_TOKENS = 16
ANSWER_S = 900.0
"""Others may use the machine, too."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One round, one way.

    Attributes:
        tokens_per_s: of all requests together.
        first_token_s: the median of the requests.
        cpu_ms_per_token: processor time of the process that has the engine. Others who use the machine change it least.
    """

    tokens_per_s: float
    first_token_s: float
    cpu_ms_per_token: float


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one round, all sent at the same time."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    vocab_size: int

    def prompts(self, generator: random.Random) -> list[list[int]]:
        """Prompts that no earlier one begins like."""
        return [
            [generator.randrange(self.vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.num_requests)
        ]


def run(*, quick: bool, model: str = MODEL) -> dict[str, Any]:
    if find_spec("uvicorn") is None:
        raise NotInstalledError("the server's packages are not installed: pip install '.[serve]'")
    rounds, generator = (1 if quick else 5), random.Random(0)
    with (
        serving(model) as (port, server),
        LLM(model, num_device_blocks=NUM_BLOCKS, offload=OffloadConfig(host_bytes=HOST_BYTES)) as llm,
    ):
        shape = (2, 20, 4) if quick else (8, 64, 48)
        load = Load(*shape, llm.plan.info.vocab_size)
        measured: list[dict[str, Measured]] = []
        for number in range(rounds + 1):
            ways = {
                "library": lambda: in_program(llm, load, generator),
                "http": lambda: over_http(port, server, load, generator, stream=False),
                "http_streams": lambda: over_http(port, server, load, generator, stream=True),
            }
            names = [*ways][number % 3 :] + [*ways][: number % 3]  # whoever comes after another finds the machine warm
            measured.append({name: ways[name]() for name in names})
    servers = [] if quick else returning(model, texts())
    return {
        "returning": servers,
        "workload": {
            "model": MODEL if model == MODEL else "tiny",
            "concurrent_requests": load.num_requests,
            "prompt_tokens": load.prompt_tokens,
            "generated_tokens": load.output_tokens,
            "rounds": rounds,
        },
        "rows": [_row(name, measured[1:]) for name in ("library", "http", "http_streams")],
    }


def _row(name: str, measured: Sequence[dict[str, Measured]]) -> dict[str, Any]:
    """Medians over the rounds; ratios are of what was measured in the same round."""
    row: dict[str, Any] = {"way": name}
    for what in ("tokens_per_s", "first_token_s", "cpu_ms_per_token"):
        pairs = [(getattr(one[name], what), getattr(one["library"], what)) for one in measured]
        row[what] = round(median(own for own, _ in pairs), 4)
        row[f"{what}_over_library"] = round(median(own / library for own, library in pairs), 3)
    return row


def in_program(llm: LLM, load: Load, generator: random.Random) -> Measured:
    prompts, start, cpu = load.prompts(generator), time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, SamplingParams(max_tokens=load.output_tokens, ignore_eos=True))
    took_s, num_tokens = time.perf_counter() - start, sum(len(out.token_ids) for out in outputs)
    llm.settle()
    cpu_s = time.process_time() - cpu
    return Measured(num_tokens / took_s, median(out.metrics.ttft_s or 0.0 for out in outputs), 1e3 * cpu_s / num_tokens)


def over_http(port: int, server: psutil.Process, load: Load, generator: random.Random, *, stream: bool) -> Measured:
    """The same. Without streams, the first token is that of the engine, as the server says it."""
    prompts, together, cpu = load.prompts(generator), threading.Barrier(load.num_requests), _cpu_s(server)
    start = time.perf_counter()
    with ThreadPoolExecutor(load.num_requests) as pool:
        asked = partial(_ask, port, max_tokens=load.output_tokens, together=together, stream=stream)
        answers = list(pool.map(asked, prompts))
    took_s, num_tokens = time.perf_counter() - start, sum(tokens for tokens, _ in answers)
    cpu_s = _cpu_s(server) - cpu
    return Measured(num_tokens / took_s, median(first_s for _, first_s in answers), 1e3 * cpu_s / num_tokens)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _ask(
    port: int, prompt: list[int], *, max_tokens: int, together: threading.Barrier, stream: bool
) -> tuple[int, float]:
    """Generated tokens, and seconds to the first."""
    body: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    body |= {"temperature": 0, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    together.wait()
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    first_s = 0.0
    last: dict[str, Any] = {}
    for line in reply:
        if not line.strip() or line.startswith(b"data: [DONE]"):
            continue
        if not last:
            first_s = time.perf_counter() - start
        last = json.loads(line.removeprefix(b"data: ")) if not stream or b'"usage"' in line else {"line": line}
    connection.close()
    if not stream:
        first_s = _explained(port, last["id"])["ttft_s"]
    return int(last["usage"]["completion_tokens"]), first_s


# --- conversations that come back, beside the server of transformers --------------------------------------------------


def texts() -> list[str]:
    """Texts that people talk about: some 700 tokens each."""
    files = [file for file in (resources.files("cargohold.cli") / "texts").iterdir() if file.name.endswith(".txt")]
    return [file.read_text(encoding="utf-8")[:TEXT_CHARACTERS] for file in sorted(files, key=lambda file: file.name)]


def returning(model: str, about: Sequence[str]) -> list[dict[str, Any]]:
    """Talk about all texts, one after the other, and then come back to each: once behind our server, once behind theirs.

    The device pool of ours holds fewer than all of the conversations, so what comes back comes from host memory.
    """
    rows = []
    with serving(model, (*OPTIONS, "--max-model-len", "1500")) as (port, _):
        rows.append({"server": "cargohold serve", **_talk(port, NAME, about)})
    with of_transformers(model) as (port, name):
        rows.append({"server": "transformers serve", **_talk(port, name, about)})
    return rows


def _talk(port: int, name: str, about: Sequence[str]) -> dict[str, Any]:
    talks = [[{"role": "system", "content": text}, {"role": "user", "content": QUESTIONS[0]}] for text in about]
    _say(port, name, [{"role": "user", "content": "Hello"}])
    row: dict[str, Any] = {}
    start = time.perf_counter()
    for turn, question in enumerate(QUESTIONS):
        first_s = []
        for talk in talks:
            if turn:
                talk.append({"role": "user", "content": question})
            text, one_s = _say(port, name, talk)
            first_s.append(one_s)
            talk.append({"role": "assistant", "content": text})
        row[f"first_token_s_of_turn_{turn + 1}"] = round(median(first_s), 3)
    return {**row, "all_turns_s": round(time.perf_counter() - start, 1)}


def _say(port: int, name: str, messages: Sequence[dict[str, str]]) -> tuple[str, float]:
    """The answer, and seconds to its first piece."""
    body = {"model": name, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True}
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    start, first_s, text = time.perf_counter(), 0.0, ""
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    for line in reply:
        if not line.startswith(b"data: {"):
            continue
        choices = json.loads(line.removeprefix(b"data: ")).get("choices") or [{}]
        piece = choices[0].get("delta", {}).get("content") or ""
        if piece and not text:
            first_s = time.perf_counter() - start
        text += piece
    connection.close()
    return text, first_s


@contextmanager
def of_transformers(model: str) -> Iterator[tuple[int, str]]:
    """The server of transformers, with the same weights; yields its port, and what it calls the model."""
    path = locate_model(model)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    program = str(Path(sys.executable).with_name("transformers"))
    command = [program, "serve", path, "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603  # theirs
    try:
        deadline = time.monotonic() + ANSWER_S
        while not _is_healthy(port):
            assert process.poll() is None, "transformers serve has ended"
            assert time.monotonic() < deadline, "transformers serve does not start"
            time.sleep(0.5)
        yield port, path
    finally:
        process.terminate()
        process.wait(timeout=60)


def _is_healthy(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


# --- the server -------------------------------------------------------------------------------------------------------


def _explained(port: int, request_id: str) -> Any:
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    connection.request("GET", f"/cache/explain/{request_id}")
    told = json.load(connection.getresponse())
    connection.close()
    return told


@contextmanager
def serving(model: str, options: Sequence[str] = OPTIONS) -> Iterator[tuple[int, psutil.Process]]:
    """The server, in a process of its own; yields its port and the process."""
    command = [sys.executable, "-m", "cargohold", "serve", model, "--served-model-name", NAME, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: S603  # our own command
    try:
        assert process.stderr is not None
        lines = [process.stderr.readline()]
        while (found := re.search(r"at http://[\d.]+:(\d+) ", lines[-1])) is None:
            assert lines[-1], f"the server has ended: {''.join(lines)}"
            lines.append(process.stderr.readline())
        yield int(found[1]), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=60)
