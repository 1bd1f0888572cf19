"""Two engines share prompts through a Mooncake Store: what one announces, the other one restores."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-mooncake installs Mooncake over vLLM's environment")

from cargohold.connector.guests.handoff import HANDOFF
from examples.vllm_server import serving
from tests import example_runs
from tests.mooncake.cluster import WAIT_S, Cluster
from tests.vllm.common import RESTARTED, make_prompts
from tests.vllm.conftest import start, vllm_model
from tests.vllm.models import save_tokenizer

__all__ = ["start", "vllm_model"]

NUM_TOKENS = 330
SERVED = {
    "served-model-name": "served",
    "dtype": "float32",
    "max-model-len": 512,
    "block-size": 32,
    "enforce-eager": True,
    "num-gpu-blocks-override": 64,
    "enable-prompt-tokens-details": True,
}


def extra_of(store: Cluster) -> dict[str, Any]:
    return {**RESTARTED, "tiers": [{"kind": "shared", "url": store.url}]}


def test_one_engine_of_vllm_prefills_and_another_decodes(
    vllm_model: Callable[[str], str], start: Callable[..., Any], store: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    model, (prompt,) = vllm_model("llama"), make_prompts(1, NUM_TOKENS)
    (alone,) = start(model).ask([prompt])
    prefill = start(model, extra_of(store), transfer={"kv_role": "kv_producer"})
    (first,) = prefill.ask([prompt], 1, wishes={"do_remote_decode": True})
    announced = first.params[HANDOFF]["num_tokens"]
    prefill.check_settled()
    decode = start(model, extra_of(store), transfer={"kv_role": "kv_consumer"})
    (answer,) = decode.ask([prompt], wishes={HANDOFF: first.params[HANDOFF]})
    assert announced == answer.restored == 320
    assert answer.tokens == alone.tokens


@pytest.fixture
def served_model(vllm_model: Callable[[str], str], tmp_path: Path) -> str:
    """A tiny model with a tokenizer, without which it cannot be served."""
    shutil.copytree(vllm_model("llama"), tmp_path / "model")
    save_tokenizer(str(tmp_path / "model"))
    return str(tmp_path / "model")


def test_two_servers_of_vllm_share_a_prompt(
    served_model: str, store: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As users run them: each with its own processes."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    (prompt,) = make_prompts(1, NUM_TOKENS, seed=1)
    with ExitStack() as running:
        urls = []
        for role in ("kv_producer", "kv_consumer"):
            config = {
                "kv_connector": "CargoholdConnector",
                "kv_role": role,
                "kv_connector_extra_config": extra_of(store),
            }
            server = serving(served_model, tmp_path / f"{role}.log", transfer_config=config, options=SERVED)
            urls.append(running.enter_context(server))
        first = completion(urls[0], prompt, {"do_remote_decode": True})
        params = first["kv_transfer_params"]
        answer = completion(urls[1], prompt, params)
    announced = params[HANDOFF]["num_tokens"]
    assert announced == answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 320
    assert answer["choices"][0]["text"] == first["choices"][0]["text"]


def completion(url: str, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "served", "prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_the_example_hands_off_over_it(
    usable: None, served_model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "disaggregated/run"
    printed = example_runs.run(name, served_model, monkeypatch, capfd, "--store", "mooncake")
    assert example_runs.differences(example_runs.shown(name), printed) == [], printed
