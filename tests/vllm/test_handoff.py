"""Hand-offs between two engines of vLLM over a shared directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.connector.guests.handoff import HANDOFF
from tests.vllm.common import EAGER, LAZY, RESTARTED, make_prompts

PRODUCER, CONSUMER = {"kv_role": "kv_producer"}, {"kv_role": "kv_consumer"}


@pytest.mark.parametrize("connector", [EAGER, LAZY], ids=["eager", "lazy"])
@pytest.mark.parametrize("option", [{"admission": "reused"}, {"write": "back"}], ids=str)
def test_one_engine_prefills_and_another_decodes(
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    tmp_path: Path,
    connector: dict[str, Any],
    option: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # vLLM 0.28 hashes differently in every process without it
    model, (prompt,) = vllm_model("llama"), make_prompts(1, 330)
    (alone,) = start(model).ask([prompt])
    extra = {**RESTARTED, **connector, "tiers": [{"kind": "shared", "url": f"file://{tmp_path / 'store'}", **option}]}
    prefill = start(model, extra, transfer=PRODUCER)
    (first,) = prefill.ask([prompt], 1, wishes={"do_remote_decode": True})
    assert first.params.keys() <= {HANDOFF, "cargohold_explain"}, "nothing that vLLM or another connector reads"
    assert first.params[HANDOFF]["num_tokens"] == 320
    prefill.check_settled()
    decode = start(model, extra, transfer=CONSUMER)
    (answer,) = decode.ask([prompt], wishes={HANDOFF: first.params[HANDOFF]})
    assert (answer.restored, answer.tokens) == (320, alone.tokens)
    assert first.tokens == alone.tokens[:1]
    assert decode.side.guard.inner.shared.manager.num_ready == 320 // 32, "what it decoded is not stored"


def test_another_split_of_the_tokens_is_told_and_not_waited_for(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path
) -> None:
    model, (prompt,) = vllm_model("llama"), make_prompts(1, 330)
    extra = {**RESTARTED, "tiers": [{"kind": "shared", "url": f"file://{tmp_path / 'store'}"}]}
    (first,) = start(model, extra).ask([prompt], 1, wishes={"do_remote_decode": True})
    other = start(model, {**extra, "blocks_per_chunk": 2})
    other.ask(make_prompts(2, 40)[1:], 1)  # its worker says with its first step what it has loaded
    (answer,) = other.ask([prompt], wishes={HANDOFF: first.params[HANDOFF]})
    assert answer.restored == 0
    assert any("differs in its layout" in note for note in answer.notes), answer.notes
