"""The front inside vLLM's own server, asked by the clients of OpenAI and Anthropic: agents whose tools pause, and tenants."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm import plugin
from examples.vllm_server import serving
from tests.serve.clients import anthropic, openai
from tests.serve.scripted_model import save_scripted_model

QUESTION, THANKS = "How high is the tide?", "Thanks."
CALL = '<tool_call>\n{"name": "tide", "arguments": {"at": "noon"}}\n</tool_call>'
SCRIPTS = {QUESTION: [CALL], THANKS: ["You are welcome."], "told": ["It is high."]}
BLOCK_TOKENS = 32
NUM_FLOODING, FLOOD_TOKENS = 10, 1400
"""Prompts that have no room on the device and in host memory."""
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
KEYS = {"agents": "key of agents", "acme": "key of acme", "zebra": "key of zebra"}
VLLM_KEY = "key of vllm itself"

numbers = count()


@dataclass(frozen=True)
class Served:
    """A server with tenants.

    Attributes:
        url: where it is.
        log: what it has written so far.
    """

    url: str
    log: Path

    def call(self, path: str, body: Any = None, key: str | None = None, method: str | None = None) -> tuple[int, Any]:
        """A request; returns its status, and the answer as JSON or text."""
        headers = {"content-type": "application/json"} | ({} if key is None else {"x-api-key": key})
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            with urlopen(Request(self.url + path, sent, headers, method=method), timeout=300) as answer:
                status, text = answer.status, answer.read().decode()
        except HTTPError as error:
            status, text = error.code, error.read().decode()
        return status, json.loads(text) if text[:1] == "{" else text

    def complete(self, prompt: str, tenant: str, **fields: Any) -> Any:
        """Complete a text; returns the answer."""
        body = {"model": "m", "prompt": prompt, "max_tokens": 1, **fields}
        status, answer = self.call("/v1/completions", body, KEYS[tenant])
        assert status == 200, answer
        return answer

    def cached(self, prompt: str, tenant: str, **fields: Any) -> int:
        """How many tokens of a prompt had not to be computed."""
        return int(self.complete(prompt, tenant, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"])

    def flood(self, tenant: str, **fields: Any) -> None:
        """Ask more than there is room for."""
        for _ in range(NUM_FLOODING):
            self.complete(text(FLOOD_TOKENS), tenant, **fields)


def text(num_tokens: int) -> str:
    """A text that begins as no other one; each of its characters is a token."""
    return f"Text {next(numbers)}. {'The ship sails on. ' * 100}"[:num_tokens]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("front")
    model = save_scripted_model(directory / "model", SCRIPTS, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    shares = {"acme": {"reserved": "25%"}, "zebra": {"hard": "50%"}, "agents": {}}
    tenants = {name: {"key": KEYS[name], **of} for name, of in shares.items()}
    (directory / "tenants.json").write_text(json.dumps(tenants), encoding="utf-8")
    (directory / "tenants.json").chmod(0o600)
    options = {
        "middleware": "cargohold.serve.front.Front",
        "api-key": VLLM_KEY,
        "served-model-name": "m",
        "enable-auto-tool-choice": True,
        "tool-call-parser": "hermes",
        "dtype": "float32",
        "max-model-len": 2048,
        "max-num-batched-tokens": 512,
        "block-size": BLOCK_TOKENS,
        "num-gpu-blocks-override": 80,
        "enforce-eager": True,
        "enable-log-requests": True,
    }
    connector = {
        "kv_connector": "CargoholdConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_bytes": "2MiB", "restore": "always", "policy": "lru"},
    }
    environment = {
        "CARGOHOLD_TENANTS": str(directory / "tenants.json"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
    log = directory / "log"
    with patch.dict(os.environ, environment), serving(model, log, transfer_config=connector, options=options) as url:
        yield Served(url.removesuffix("/v1"), log)


# --- agents -----------------------------------------------------------------------------------------------------------


def openai_agent(served: Served, pause: Any, **extra: Any) -> list[int]:
    """The loop of OpenAI's documentation. Returns the tokens cached of each turn's prompt."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEYS["agents"])
    tools: Any = [{"type": "function", "function": {"name": "tide", "description": "The tide", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "system", "content": text(700)}, {"role": "user", "content": QUESTION}]
    cached = []
    while True:
        answer: Any = client.chat.completions.create(model="m", messages=messages, tools=tools, extra_body=extra)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            assert message.content == "It is high."
            return cached
        pause()
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "high"} for call in message.tool_calls]


def anthropic_agent(served: Served, pause: Any, **extra: Any) -> list[int]:
    """The loop of Anthropic's documentation, streamed. Returns the tokens cached of each turn's prompt."""
    client = anthropic.Anthropic(base_url=served.url, api_key=KEYS["agents"])
    tools: Any = [{"name": "tide", "description": "The tide", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    system, cached = text(700), []
    while True:
        with client.messages.stream(
            model="m", max_tokens=50, system=system, messages=messages, tools=tools, extra_body=extra
        ) as stream:
            message: Any = stream.get_final_message()
        cached.append(message.usage.cache_read_input_tokens or 0)
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            assert [block.text for block in message.content] == ["It is high."]
            return cached
        pause()
        calls = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "high"} for call in calls]
        messages.append({"role": "user", "content": results})


@pytest.mark.parametrize("agent", [openai_agent, anthropic_agent])
def test_a_conversation_is_still_there_when_its_tool_has_ended(served: Served, agent: Any) -> None:
    first, second = agent(served, lambda: served.flood("agents"))
    assert first == 0 and second > 640
    no_hints = {"kv_transfer_params": {"cargohold_hints": {"protocol_version": "1", "actions": []}}}
    assert agent(served, lambda: served.flood("agents"), **no_hints) == [0, 0], "without the front's hints"


def test_what_was_answered_is_kept_no_longer(served: Served) -> None:
    seen: list[str] = []

    def notes() -> str:
        explained: Any = served.complete("Hello", "agents", kv_transfer_params={"cargohold_explain": True})
        told: list[str] = explained["kv_transfer_params"]["cargohold_explain"]["notes"]
        return " ".join(told)

    openai_agent(served, lambda: seen.append(notes()))
    assert "hint end" not in seen[0], "its tool runs"
    assert "hint end-1: accepted" in notes()
    assert "hint end" not in notes()


def test_marks_of_anthropic_s_client_outlive_a_flood(served: Served) -> None:
    client = anthropic.Anthropic(base_url=served.url, api_key=KEYS["agents"])
    kept = []
    for mark in ({}, {"cache_control": {"type": "ephemeral"}}):
        block: Any = [{"type": "text", "text": text(700), **mark}]
        asked: Any = {"model": "m", "max_tokens": 1, "system": block, "messages": [{"role": "user", "content": THANKS}]}
        client.messages.create(**asked)
        served.flood("agents")
        kept.append(client.messages.create(**asked).usage.cache_read_input_tokens or 0)
    assert kept[0] == 0 and 500 < kept[1] <= 700


# --- tenants ----------------------------------------------------------------------------------------------------------


def test_a_tenant_learns_nothing_of_what_another_has_cached(served: Served) -> None:
    secret = text(900)
    assert served.cached(secret, "acme") == 0 < served.cached(secret, "acme")
    salt = known_salt(served)
    assert served.cached(secret, "zebra") == 0
    explain = {"kv_transfer_params": {"cargohold_explain": True}}
    for guess in ({}, {"cache_salt": salt}, {"cache_salt": f"{salt}.x"}, {"vllm_xargs": {"cache_salt": salt}}):
        another = text(900)
        served.complete(another, "acme")
        answer = served.complete(another, "zebra", **guess, **explain)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        (note,) = answer["kv_transfer_params"]["cargohold_explain"]["notes"]
        assert "0 were on the device and 0 more in host" in note


def known_salt(served: Served) -> str:
    """A salt as it is in the log of a server that was told to log requests; tenants do not see that."""
    return str(re.findall(r"ch1\.[0-9a-f]{32}", served.log.read_text(errors="replace"))[0])


def test_a_tenant_keeps_what_is_reserved_for_it_whatever_another_does(served: Served) -> None:
    mine = text(900)
    served.complete(mine, "acme")
    day = {"prompt_cache_retention": "24h"}
    served.flood("zebra", **day)
    pins = [
        served.call("/cache/pins", {"prompt": text(1400), "lease": f"greedy {at}", "ttl_s": 600}, KEYS["zebra"])[1]
        for at in range(4)
    ]
    told = [outcome for answer in pins for outcome in answer["outcomes"]]
    assert sum(outcome["num_tokens"] for outcome in told) <= 2048 * 2 * 0.25 / 2, "half of a quarter of host memory"
    assert {outcome["status"] for outcome in told} <= {"clipped", "rejected"}
    served.flood("zebra", **day)
    assert served.cached(mine, "acme") >= 864
    for at in range(4):
        served.call(f"/cache/pins/greedy%20{at}", key=KEYS["zebra"], method="DELETE")


def test_a_tenant_cannot_release_another_s_pin(served: Served) -> None:
    def release(tenant: str) -> str:
        _, answer = served.call("/cache/pins/mine", key=KEYS[tenant], method="DELETE")
        return str(answer["outcomes"][0]["status"])

    messages = [{"role": "user", "content": text(200)}, {"role": "user", "content": THANKS}]
    _, pinned = served.call("/cache/pins", {"messages": messages, "lease": "mine", "ttl_s": 600}, KEYS["acme"])
    assert pinned["outcomes"][0]["status"] == "accepted", pinned
    assert [release(tenant) for tenant in ("zebra", "acme", "acme")] == ["missing", "accepted", "missing"]


def test_only_keys_let_in_and_tenants_have_no_way_around_their_salts(served: Served) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": THANKS}], "max_tokens": 2}
    refused = served.call("/v1/chat/completions", chat)
    assert (refused[0], refused[1]["error"]["code"]) == (401, "invalid_api_key")
    assert served.call("/v1/messages", chat, "wrong")[1]["type"] == "error"
    for path in ("/invocations", "/v1/chat/completions/batch", "/inference/v1/generate", "/scale_elastic_ep"):
        assert served.call(path, chat)[0] == 401, path
        assert served.call(path, chat, KEYS["acme"])[0] == 403, path
    assert served.call("/v1/models", key=KEYS["acme"])[0] == 200
    assert served.call("/v1/messages/count_tokens", chat, KEYS["acme"])[1]["input_tokens"] > 5
    assert served.call("/tokenize", {"model": "m", "prompt": "Hello"}, KEYS["acme"])[1]["count"] == 5
    assert served.call("/invocations", chat, VLLM_KEY)[0] == 200, "its operator may"
    assert served.call("/health")[0] == 200


@pytest.mark.parametrize("tenant", ["acme", None])
def test_bodies_of_all_kinds_leave_the_server_as_it_was(served: Served, tenant: str | None) -> None:
    key = VLLM_KEY if tenant is None else KEYS[tenant]
    chance = random.Random(3)
    good = json.dumps({"model": "m", "messages": [{"role": "user", "content": THANKS}], "max_tokens": 1}).encode()
    bodies = [b"", b"[1]", b"\xff", b'{"a": NaN}', b"[" * 5000, good[:-1], good.decode().encode("utf-16")]
    for _ in range(30):
        at = chance.randrange(len(good))
        bodies.append(good[:at] + bytes([chance.randrange(256)]) + good[at + 1 :])
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/responses"):
        for body in bodies:
            status, _ = served.call(path, body, key)
            assert status in {200, 400, 404, 422}, (path, body)
    assert served.call("/v1/chat/completions", json.loads(good), key)[0] == 200


def test_keys_are_in_no_log_and_in_no_metric_and_tenants_have_their_names(served: Served) -> None:
    served.complete(text(100), "acme")
    _, metrics = served.call("/metrics")
    assert re.search(r'cargohold_tenant_bytes\{[^}]*tenant="acme"', metrics), "the log may be asked of whom it speaks"
    told = metrics + served.log.read_text(errors="replace")
    salts = set(re.findall(r"ch1\.[0-9a-f]{32}", metrics))
    assert not salts
    for key in KEYS.values():
        digests = [
            hashlib.new(name, key.encode()).hexdigest() for name in ("md5", "sha1", "sha256", "sha512", "blake2b")
        ]
        assert not [found for found in (key, *digests) if found in told]


def test_where_vllm_s_rust_front_end_passes_it_by_the_start_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CARGOHOLD_TENANTS", raising=False)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "--middleware", "cargohold.serve.front.Front"])
    plugin.register()
    assert "requests pass the front by" in caplog.text
    monkeypatch.setenv("CARGOHOLD_TENANTS", "tenants.json")
    with pytest.raises(SystemExit, match="would not be kept apart"):
        plugin.register()
