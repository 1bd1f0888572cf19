"""vLLM's own server as users start it: engine core and workers in processes of their own, asked over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from examples.vllm_server import serving
from tests.vllm.common import make_prompts

BLOCK_TOKENS = 32
NUM_BLOCKS = 60
LONG = 330
RESTORED = LONG // BLOCK_TOKENS * BLOCK_TOKENS
CHAT = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{{ c['text'] if c['type'] == 'text' else '' }}{% endfor %}{% endif %} {% endfor %}"
)
OPTIONS: Mapping[str, object] = {
    "served-model-name": "m",
    "dtype": "float32",
    "max-model-len": 1024,
    "max-num-batched-tokens": 512,
    "max-num-seqs": 8,
    "block-size": BLOCK_TOKENS,
    "num-gpu-blocks-override": NUM_BLOCKS,
    "enforce-eager": True,
    "shutdown-timeout": 20,
}
EXTRA: Mapping[str, Any] = {"host_bytes": "16MiB", "restore": "always"}
# What other tests set for engines in their own process is no user's environment.
_NOT_OURS = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")


@dataclass(frozen=True)
class Answer:
    """What a request was answered.

    Attributes:
        tokens: the generated tokens.
        restored: number of the prompt's tokens that were restored.
        cached: number of them that were not computed, as the usage says.
        notes: of the explanation.
    """

    tokens: tuple[int, ...]
    restored: int
    cached: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        url: its address, without ``/v1``.
        log: the file with its output.
        key: the key that requests show.
    """

    url: str
    log: Path
    key: str | None = None

    def call(self, path: str, body: Any = None, *, method: str | None = None) -> tuple[int, Any]:
        """Send a request; returns its status, and the answer as JSON or text."""
        headers = {"content-type": "application/json"} | (
            {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        )
        sent = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self.url + path, sent, headers, method=method), timeout=120) as answer:
                status, said = answer.status, answer.read().decode()
        except HTTPError as error:
            status, said = error.code, error.read().decode()
        return status, json.loads(said) if said[:1] in "{[" and said else said

    def post(self, path: str, body: Any = None) -> Any:
        """Send a request that must succeed; returns the answer."""
        status, said = self.call(path, body or {}, method="POST")
        assert status == 200, (path, status, said)
        return said

    def ask(self, prompt: Sequence[int], *, max_tokens: int = 6, **fields: Any) -> Answer:
        """Complete a prompt."""
        return answer_of(self.post("/v1/completions", completion(prompt, max_tokens=max_tokens, **fields)))

    def ask_twice(self, prompt: Sequence[int], **fields: Any) -> Answer:
        """Ask a prompt, let the device forget it, ask it again; returns the second answer, which must be as the first."""
        first = self.ask(prompt, **fields)
        self.forget()
        second = self.ask(prompt, **fields)
        assert second.tokens == first.tokens
        return second

    def forget(self) -> None:
        """Ask so many other prompts that the device has nothing else."""
        for prompt in make_prompts(NUM_BLOCKS * BLOCK_TOKENS // 900 + 1, 900, seed=99):
            self.ask(prompt, max_tokens=1)

    def of(self, key: str) -> Server:
        """The same server, asked with another key."""
        return replace(self, key=key)

    @contextmanager
    def streaming(self, path: str, body: Mapping[str, Any]) -> Iterator[Iterator[Any]]:
        """Send a request for a stream; yields its events, and closes the connection at the end of the ``with`` block."""
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
        headers = {"content-type": "application/json"} | (
            {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        )
        connection.request("POST", path, json.dumps({**body, "stream": True}), headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        try:
            yield (json.loads(line[6:]) for line in answer if line.startswith(b"data: {"))
        finally:
            answer.close()
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the time series of this name that have these labels."""
        _, said = self.call("/metrics")
        total = 0.0
        for line in said.splitlines():
            if re.match(rf"{name}[{{ ]", line) and all(f'{label}="{value}"' in line for label, value in labels.items()):
                total += float(line.rpartition(" ")[2])
        return total

    def said(self) -> list[str]:
        """Lines of the log that are ours."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line.partition("cargohold: ")[2] for line in lines if "cargohold: " in line]


def completion(prompt: Sequence[int], *, max_tokens: int = 6, **fields: Any) -> dict[str, Any]:
    """The body of a request that completes a prompt and explains itself."""
    return {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": {"cargohold_explain": True},
        **fields,
    }


def answer_of(said: Mapping[str, Any]) -> Answer:
    """What the answer to a completion says."""
    explanation = (said.get("kv_transfer_params") or {}).get("cargohold_explain", {})
    return Answer(
        tokens=tuple(said["choices"][0].get("token_ids") or ()),
        restored=sum(explanation.get("restored_tokens", {}).values()),
        cached=((said.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        notes=tuple(explanation.get("notes", ())),
    )


@contextmanager
def serve(
    model: str,
    directory: Path,
    extra: Mapping[str, Any] | None = EXTRA,
    *,
    environment: Mapping[str, str] | None = None,
    name: str = "log",
    **options: object,
) -> Iterator[Server]:
    """Start vLLM's server for a model, with a connector or without; ``options`` with underscores for dashes."""
    template = directory / "chat.jinja"
    template.write_text(CHAT, encoding="utf-8")
    connector = {"kv_connector": "CargoholdConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    given = {**OPTIONS, "chat-template": template, **{name.replace("_", "-"): value for name, value in options.items()}}
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_OURS}
    log = directory / name
    with (
        patch.dict(os.environ, {**kept, **(environment or {})}, clear=True),
        serving(model, log, transfer_config=None if extra is None else connector, options=given) as url,
    ):
        yield Server(url.removesuffix("/v1"), log)


def command_line() -> list[str]:
    """The words behind the program's name with which the server that this process has started was started."""
    words = Path(f"/proc/{_server()}/cmdline").read_text().rstrip("\0").split("\0")
    return words[next(at for at, word in enumerate(words) if word.startswith("vllm.")) + 1 :]


def stop() -> None:
    """Ask the server that this process has started to end, as an orchestrator does, and wait until it has."""
    server = _server()
    os.kill(server, signal.SIGTERM)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)


def _server() -> int:
    return int(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[-1])
