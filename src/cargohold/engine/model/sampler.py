"""Chooses tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cargohold.engine.core.step import SampleSpec


def sample_tokens(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int | None]:
    """Choose one token per row; ``None`` where the largest number is not finite, as where one of them is a NaN.

    Args:
        logits: shape ``(len(specs), vocabulary)``.
        specs: how to choose, row by row. The random draw depends on the spec alone: not on the batch, the device or what was
            drawn before.
    """
    largest, places = logits.max(dim=-1)  # a NaN counts as larger than all else
    greedy, is_finite = places.tolist(), largest.isfinite().tolist()
    return [
        None if not finite else likeliest if spec.temperature == 0 else _sample(row, spec)
        for finite, likeliest, row, spec in zip(is_finite, greedy, logits, specs, strict=True)
    ]


def _sample(logits: torch.Tensor, spec: SampleSpec) -> int:
    # The largest score is moved to 0: otherwise, division by a very small temperature could make two of them infinite.
    scores = (logits.double() - logits.max()) / spec.temperature
    if 0 < spec.top_k < scores.numel():
        scores = _keep_top_k(scores, spec.top_k)
    if spec.top_p < 1:
        scores = _keep_top_p(scores, spec.top_p)
    return int((scores.cpu() + _gumbel_noise(scores.numel(), spec)).argmax())


def _keep_top_k(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Keep the ``top_k`` likeliest tokens, no more even if several are equally likely."""
    top = scores.topk(top_k)
    return torch.full_like(scores, -torch.inf).scatter(0, top.indices, top.values)


def _keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the likeliest tokens that together reach ``top_p`` (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751)."""
    ordered, order = scores.sort(descending=True)
    probabilities = ordered.softmax(dim=-1)
    # A token goes if those likelier than it reach top_p already; the likeliest always stays.
    reached_before = probabilities.cumsum(dim=-1) - probabilities >= top_p
    return scores.masked_fill(torch.zeros_like(reached_before).scatter(0, order, reached_before), -torch.inf)


def _gumbel_noise(size: int, spec: SampleSpec) -> torch.Tensor:
    """Noise to add to the scores, so that the largest sum is distributed like ``softmax(scores)`` (the Gumbel-max trick).

    Drawn on the CPU, so that every device draws the same, from a generator whose key is the seed and the token's number:
    neighbouring seeds and tokens have nothing in common.
    """
    generator = np.random.Generator(np.random.Philox(key=spec.seed | spec.index << 64))
    return -torch.from_numpy(generator.standard_exponential(size)).clamp_min(1e-300).log()
