"""What is found out about a model before any request: whether its logits are those of transformers' own attention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cargohold import UnsupportedModelError
from cargohold.engine.model.hf_runner import verify_logits
from cargohold.engine.model.info import ModelInfo, describe_model

NOT_A_NUMBER = float("nan")
INFINITE = float("inf")


@pytest.fixture
def info(tiny_model: Callable[[str], str]) -> ModelInfo:
    return describe_model(tiny_model("llama"))


@pytest.fixture
def reference() -> torch.Tensor:
    """Logits of five tokens."""
    return torch.randn(5, 50, generator=torch.Generator().manual_seed(0))


def test_what_is_off_by_rounding_or_in_a_row_or_two_passes(info: ModelInfo, reference: torch.Tensor) -> None:
    ours = reference * (1 + 1e-5) + 7  # what is added to all logits changes no token
    ours[:2] = 0
    verify_logits(info, ours, reference)


@pytest.mark.parametrize("wrong", [-1.0, INFINITE, NOT_A_NUMBER])
def test_wrong_logits_are_refused(info: ModelInfo, reference: torch.Tensor, wrong: float) -> None:
    """Found by reading: logits that are no numbers passed, for no comparison with them holds."""
    ours = reference.clone()
    ours[:3] *= wrong
    expected = "200% off from those" if wrong == -1 else "no numbers, unlike those"
    with pytest.raises(UnsupportedModelError, match=f"its logits are {expected} of transformers' own attention"):
        verify_logits(info, ours, reference)


@pytest.mark.parametrize("logit", [0.0, INFINITE, NOT_A_NUMBER])
def test_a_model_whose_own_logits_say_nothing_is_not_compared(
    info: ModelInfo, reference: torch.Tensor, logit: float
) -> None:
    verify_logits(info, reference, torch.full_like(reference, logit))
