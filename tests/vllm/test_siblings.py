"""Other connectors beside Cargohold's, inside vLLM's ``MultiConnector``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm import connector
from cargohold.integrations.vllm.layout import NO_GROUPS, Translation
from tests.vllm.common import EAGER, ask_twice, forget, make_prompts, restored, tokens
from tests.vllm.sibling import beside, wishing

OURS: dict[str, Any] = {"kv_connector": "CargoholdConnector", "kv_connector_extra_config": EAGER}
SIBLING: dict[str, Any] = {}


def test_what_a_step_computed_behind_a_siblings_failed_load_is_never_found(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    """Found by review: vLLM tells of the blocks, and Cargohold listened to its own workers only: wrong tokens were restored."""
    (prompt,) = make_prompts(1, 330)
    model = vllm_model("llama")
    expected = tokens(start(model).ask([prompt]))
    engine = start(model, **beside(SIBLING, OURS))
    with wishing(fails_load_of=256):
        assert tokens(engine.ask([prompt])) == expected, "vLLM computes again what could not be loaded"
    forget(engine)
    answers = engine.ask([prompt])
    assert tokens(answers) == expected, "nothing is kept of the step that failed"
    assert restored(answers) == 320, "and everything of those that computed it again"


def test_a_prefill_engine_may_answer_a_request_through_another_connector_too(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path
) -> None:
    """Found by review: vLLM's engine ended at the first request, since both connectors answered ``do_remote_prefill``."""
    tiers = [{"kind": "shared", "url": f"file://{tmp_path}"}]
    ours = {**OURS, "kv_connector_extra_config": {**OURS["kv_connector_extra_config"], "tiers": tiers}}
    engine = start(vllm_model("llama"), **beside(SIBLING, ours))
    (prompt,) = make_prompts(1, 330)
    with wishing(answer={"do_remote_prefill": True, "remote_port": 1}):
        (answer,) = engine.ask([prompt], 1, wishes={"do_remote_decode": True})
    assert answer.params["cargohold_handoff"]["num_tokens"] == 320
    assert answer.params["do_remote_prefill"] and answer.params["remote_port"] == 1


def test_of_two_cargohold_connectors_one_serves(
    vllm_model: Callable[[str], str], start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Found by review: vLLM's engine ended at the first request for an explanation, since both gave one."""
    engine = start(vllm_model("llama"), **beside(OURS, OURS))
    assert "another Cargohold connector serves this engine" in caplog.text
    assert restored(ask_twice(engine, make_prompts(2, 330))) == 640
    assert "is stopped" not in caplog.text, "the workers of the second are told"


@pytest.mark.parametrize("who", ["both sides", "workers"])
def test_a_sibling_hears_its_workers_where_cargohold_is_off(
    who: str,
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Found by review: vLLM passed on what our workers said instead, and the engine did not start with NIXL beside."""

    def translate(side: Any) -> Translation:
        return (
            found(side)
            if side._is_scheduler and who == "workers"
            else Translation(NO_GROUPS, ("group 0 mixes layers",))
        )

    found = connector.CargoholdConnector._translate
    monkeypatch.setattr(connector.CargoholdConnector, "_translate", translate)
    with wishing(handshake=True):
        engine = start(vllm_model("llama"), **beside(OURS, SIBLING))
    sibling = engine.scheduler.connector._connectors[1]
    assert [type(said).__name__ for said in sibling.heard.values()] == ["Address"]
    assert restored(ask_twice(engine, make_prompts(2, 330))) == 0
    assert "group 0 mixes layers" in caplog.text


def test_pipeline_stages_are_not_served_beside_others(
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(connector, "has_stages", lambda _config: True)
    engine = start(vllm_model("llama"), **beside(OURS, SIBLING))
    assert "as a child of vLLM's MultiConnector they cannot" in caplog.text
    assert restored(ask_twice(engine, make_prompts(2, 330))) == 0
