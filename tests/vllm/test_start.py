"""What is said, refused or turned off at start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from cargohold.errors import ConfigError

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm import compat, probe
from cargohold.integrations.vllm.connector import CargoholdConnector
from tests.vllm.common import EAGER, ask_twice, make_prompts, restored, tokens

STATELESS = {"mamba_cache_mode": "none", "enable_prefix_caching": False}
"""Recurrent state is not kept at block boundaries: nothing can be offloaded."""


def test_a_report_says_what_is_kept(
    vllm_model: Callable[[str], str], start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="cargohold"):
        start(vllm_model("mistral-window"), {**EAGER, "policy": "lru", "blocks_per_chunk": 2})
    said = [record.message for record in caplog.records if record.name.startswith("cargohold")]
    assert said == [
        "device pool: 39 blocks of 48 KiB, 1.8 MiB in all",
        "group 0: 3 layers, sliding window of 64 tokens, 32 tokens per block, 1.5 KiB per token",
        "eager: 64 MiB of host memory for 682 chunks of 2 block(s), 96 KiB each; prompts and answers, evicted by lru",
    ]


@pytest.mark.parametrize(
    ("extra", "key"),
    [({**EAGER, "polcy": "lru"}, "polcy"), ({"host_bytes": 1000}, "host_bytes")],
    ids=["unknown option", "no room for one chunk"],
)
def test_impossible_options_stop_the_server_by_name(
    extra: dict[str, Any], key: str, vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=f"kv_connector_extra_config.{key}="):
        start(vllm_model("llama"), extra)


def test_a_model_that_cannot_be_served_is_served_without_in_one_line_or_refused(
    vllm_model: Callable[[str], str], start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(vllm_model("lfm2"), EAGER, **STATELESS)
    lines = [record.message for record in caplog.records if "offloading is off" in record.message]
    assert len(lines) == 1
    assert "--mamba-cache-mode" in lines[0]
    answers = engine.ask(make_prompts(1, 200) * 2, 6)
    assert len(answers[0].tokens) == 6
    assert restored(answers) == 0
    with pytest.raises(ConfigError, match="--mamba-cache-mode"):
        start(vllm_model("lfm2"), {**EAGER, "if_unsupported": "refuse"}, **STATELESS)


def test_a_version_that_lacks_something_is_served_without(
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = vllm_model("llama")
    monkeypatch.setattr(probe, "_POOL", (*probe._POOL, "teleport"))
    monkeypatch.setattr(compat, "VLLM_VERSION", "0.99.1")
    engine = start(model, EAGER)
    said = [record.message for record in caplog.records if record.name.startswith("cargohold")]
    assert said == [
        "vLLM 0.99.1 is outside the range that was tested, 0.28 to 0.32",
        "offloading is off, requests are served without it: its block pool has no teleport",
    ]
    assert restored(ask_twice(engine, make_prompts(2, 200))) == 0


def test_a_version_with_other_hooks_is_served_without_or_refused(
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def register_kv_caches(self: object, kv_caches: object, streams: object = None) -> None: ...

    monkeypatch.setattr(compat.KVConnectorBase_V1, "register_kv_caches", register_kv_caches)
    monkeypatch.setattr(CargoholdConnector, "__abstractmethods__", frozenset({"teleport"}))
    engine = start(vllm_model("llama"), EAGER)
    reasons = "vLLM's hook register_kv_caches has a parameter streams at place 2; vLLM demands a hook teleport"
    said = [record.message for record in caplog.records if record.name.startswith("cargohold")]
    assert said == [f"offloading is off, requests are served without it: {reasons}"]
    assert restored(ask_twice(engine, make_prompts(2, 200))) == 0
    with pytest.raises(ConfigError, match=f"nothing can be offloaded: {reasons}"):
        start(vllm_model("llama"), {**EAGER, "if_unsupported": "refuse"})


def test_a_request_that_lacks_something_turns_the_connector_off(
    vllm_model: Callable[[str], str], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(vllm_model("llama"), EAGER)
    prompts = make_prompts(2, 330)
    expected = tokens(ask_twice(engine, prompts))
    monkeypatch.setattr(probe, "_REQUEST", (*probe._REQUEST, "soul"))
    engine = start(vllm_model("llama"), EAGER)
    answers = ask_twice(engine, prompts)
    assert tokens(answers) == expected
    assert restored(answers) == 0
    assert "a request has no soul" in str(engine.side.guard.broken)
