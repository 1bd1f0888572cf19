"""Models with silent heads compute what they computed without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cargohold.engine.model.info import describe_model
from cargohold.engine.model.weights import write_with_silent_heads

TOKENS = torch.tensor([[5, 17, 3, 99, 42, 7, 150, 8]])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_silent_heads_change_nothing(kind: str, tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    info = describe_model(tiny_model(kind))
    assert not info.geometry.splits_over(3)
    write_with_silent_heads(info, 3, tmp_path)
    assert describe_model(str(tmp_path)).geometry.splits_over(3)
    before = AutoModelForCausalLM.from_pretrained(info.path)(TOKENS).logits
    after = AutoModelForCausalLM.from_pretrained(tmp_path)(TOKENS).logits
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert torch.equal(after.argmax(-1), before.argmax(-1))
