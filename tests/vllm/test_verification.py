"""Verification inside vLLM: what is kept is what vLLM computes again, and a lie is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import cargohold.connector.offloading.factory as factory_module
from cargohold.tiers import HostMemory
from tests.vllm.common import EAGER, ask_twice, forget, make_prompts
from tests.vllm.engine import BLOCK_TOKENS

VERIFIED: dict[str, Any] = {**EAGER, "verify": 1.0, "verify_bytes_per_s": "1GiB"}
CHANGED = "is not what was computed"


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_what_vllm_computes_again_is_what_is_kept_unless_it_lies(
    dtype: str, vllm_model: Callable[[str], str], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    memories: list[HostMemory] = []

    class Kept(HostMemory):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            memories.append(self)

    monkeypatch.setattr(factory_module, "HostMemory", Kept)
    engine = start(vllm_model("llama"), VERIFIED, dtype=dtype, num_blocks=80)
    prompts = make_prompts(3, 5 * BLOCK_TOKENS + 2)
    answers = ask_twice(engine, prompts, max_tokens=2 * BLOCK_TOKENS)
    engine.settle()
    assert not any(answer.restored for answer in answers)
    told = [" ".join(answer.notes) for answer in answers]
    assert all("kept are computed all the same" in notes and CHANGED not in notes for notes in told)
    forget(engine)
    memories[0].rows[:, 3] ^= 0x40
    (lied_to,) = engine.ask(prompts[:1], 2 * BLOCK_TOKENS)
    assert lied_to.tokens == answers[0].tokens
    assert any(CHANGED in note for note in lied_to.notes)
