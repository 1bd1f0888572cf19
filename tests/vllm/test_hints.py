"""Hints inside vLLM: what a request carries for itself, and for another prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm.request_view import SeenRequest
from tests.vllm.common import make_prompts, with_disk
from tests.vllm.engine import Engine


def hinted(engine: Engine, kind: str, **payload: object) -> list[str]:
    """Let a short request carry a hint; returns the answers."""
    action = {"action_id": "a", "action_type": kind, "action_version": "1", "payload": payload}
    envelope = {"protocol_version": "1", "message_id": "m", "actions": [action]}
    (answer,) = engine.ask([[7, 7]], 1, wishes={"cargohold_hints": envelope})
    return [outcome["status"] for outcome in answer.params["cargohold_hints"]]


def test_a_hint_about_another_prompt_brings_it_up_from_disk_before_it_comes(
    vllm_model: Callable[[str], str], start: Callable[..., Engine], tmp_path: Path
) -> None:
    model = vllm_model("llama")
    extra = with_disk(tmp_path)
    hoped, other = make_prompts(2, 330)
    engine = start(model, extra)
    before = engine.ask([hoped, other])
    engine = start(model, extra)  # host memory is empty
    assert hinted(engine, "prefetch", token_ids=hoped) == ["deferred"]
    engine.settle()
    assert hinted(engine, "prefetch", token_ids=hoped) == ["accepted"], "host memory has it"
    again = engine.ask([hoped])[0]
    assert "320 more in host" in again.notes[0]
    assert "320 more in disk" in engine.ask([other])[0].notes[0]
    assert again.tokens == before[0].tokens
    assert hinted(engine, "pin", token_ids=make_prompts(1, 330, seed=5)[0]) == ["missing"]
    assert hinted(engine, "prefetch", token_ids="text") == ["rejected"]


def test_what_a_request_says_of_another_prompt_is_its_tenant_s() -> None:
    other = SeenRequest(SimpleNamespace(request_id="r", cache_salt="ann")).prefix([1, 2, 3])
    assert (other.salt, other.tenant, other.all_token_ids) == ("ann", "ann", [1, 2, 3])
