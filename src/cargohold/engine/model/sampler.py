"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cargohold.engine.core.step import SampleSpec


def sample_tokens(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """Choose one token per row.

    Args:
        logits: shape ``(len(specs), vocabulary)``.
        specs: how to choose, row by row. The random draw depends on the spec alone: not on the batch, the device or what was
            drawn before.
    """
    greedy = logits.argmax(dim=-1).tolist()
    return [
        greedy[row] if spec.sampling.temperature == 0 else _sample(logits[row], spec) for row, spec in enumerate(specs)
    ]


def _sample(logits: torch.Tensor, spec: SampleSpec) -> int:
    sampling = spec.sampling
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        scores = _keep_top_p(scores, sampling.top_p)
    # Gumbel-max: the largest of scores plus Gumbel noise is distributed like softmax(scores). Noise is drawn on the CPU, so
    # that every device draws the same.
    generator = torch.Generator().manual_seed((spec.seed * 1_000_003 + spec.index) % 2**63)
    uniform = torch.rand(scores.shape, generator=generator, dtype=torch.float64).clamp_min(1e-300)
    gumbel = -torch.log(-torch.log(uniform))
    return int((scores.double().cpu() + gumbel).argmax())


def _keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the likeliest tokens that together reach ``top_p`` (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751)."""
    ordered, order = scores.sort(descending=True)
    probabilities = ordered.softmax(dim=-1)
    # A token goes if those likelier than it reach top_p already; the likeliest always stays.
    reached_before = probabilities.cumsum(dim=-1) - probabilities >= top_p
    return scores.masked_fill(torch.zeros_like(reached_before).scatter(0, order, reached_before), -torch.inf)
