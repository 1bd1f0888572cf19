"""Draws have the distribution that was asked for. Seeds are fixed, so these tests either pass or fail for ever."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from cargohold.engine.core.request import SampleSpec
from cargohold.engine.model.hf_runner import sample_tokens

NUM_DRAWS = 1000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp(logit / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def kept(probabilities: list[float], keep: set[int]) -> list[float]:
    total = sum(probabilities[token] for token in keep)
    return [probability / total if token in keep else 0.0 for token, probability in enumerate(probabilities)]


ALL = softmax(LOGITS.tolist())


DISTRIBUTIONS = [
    (1.0, 0, 1.0, ALL),
    (0.5, 0, 1.0, softmax(LOGITS.tolist(), 0.5)),
    (3.0, 0, 1.0, softmax(LOGITS.tolist(), 3.0)),
    (1.0, 2, 1.0, kept(ALL, {0, 1})),
    (1.0, 100, 1.0, ALL),
    (1.0, 0, 0.5, kept(ALL, {0})),  # the likeliest alone has 0.56
    (1.0, 0, 0.6, kept(ALL, {0, 1})),
    (1.0, 0, 0.8, kept(ALL, {0, 1, 2})),
    (1.0, 2, 0.9, kept(ALL, {0, 1})),
    (1.0, 4, 0.9, kept(ALL, {0, 1, 2})),  # top_p counts within what top_k left
]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected", "varying"),
    [
        pytest.param(*asked, varying, marks=() if at in {0, 9} or at % 2 == turn else pytest.mark.long)
        for at, asked in enumerate(DISTRIBUTIONS)
        for turn, varying in enumerate(("seed", "index"))
    ],
)
def test_draws_are_distributed_as_asked(
    temperature: float, top_k: int, top_p: float, expected: list[float], varying: str
) -> None:
    specs = [SampleSpec(temperature, top_k, top_p, **{"seed": 7, "index": 7, varying: at}) for at in range(NUM_DRAWS)]
    counts = Counter(sample_tokens(LOGITS.expand(NUM_DRAWS, -1), specs))
    for token, probability in enumerate(expected):
        deviation = math.sqrt(NUM_DRAWS * probability * (1 - probability))
        assert abs(counts[token] - NUM_DRAWS * probability) <= 4 * deviation, f"token {token}: {counts[token]}"


def test_neighbouring_seeds_and_tokens_are_independent() -> None:
    logits = torch.zeros(1, 2)
    draws = [
        [sample_tokens(logits, [SampleSpec(1.0, seed=seed, index=index)])[0] for index in range(40)]
        for seed in range(40)
    ]
    pairs = Counter((draws[seed][at], draws[seed + 1][at]) for seed in range(39) for at in range(40))
    in_turn = Counter((row[at], row[at + 1]) for row in draws for at in range(39))
    for table in (pairs, in_turn):
        expected = table.total() / 4
        assert sum((table[a, b] - expected) ** 2 / expected for a in (0, 1) for b in (0, 1)) < 16.3, table  # p = 0.001


def test_greedy_takes_the_likeliest_whatever_the_seed() -> None:
    specs = [SampleSpec(0.0, seed=seed) for seed in range(3)]
    logits = torch.stack([LOGITS, LOGITS.flip(0), -LOGITS])
    assert sample_tokens(logits, specs) == [0, 5, 5]


def test_rows_are_sampled_each_by_its_own_rules() -> None:
    specs = [SampleSpec(0.0), SampleSpec(1.0, top_k=1, seed=3), SampleSpec(5.0, seed=4, index=9)]
    together = sample_tokens(LOGITS.expand(3, -1), specs)
    assert together == [sample_tokens(LOGITS[None], [spec])[0] for spec in specs]
    assert together[:2] == [0, 0]


def test_extreme_temperatures_are_greedy_and_uniform() -> None:
    coldest = sample_tokens(LOGITS.expand(50, -1), [SampleSpec(1e-300, seed=seed) for seed in range(50)])
    assert set(coldest) == {0}
    hottest = Counter(sample_tokens(LOGITS.expand(600, -1), [SampleSpec(1e9, seed=seed) for seed in range(600)]))
    assert all(60 < hottest[token] < 140 for token in range(6))


def test_of_equally_likely_tokens_top_k_keeps_no_more_than_k() -> None:
    drawn = sample_tokens(torch.zeros(200, 6), [SampleSpec(1.0, top_k=3, seed=seed) for seed in range(200)])
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_sampled_in_full_precision(dtype: torch.dtype) -> None:
    specs = [SampleSpec(0.7, top_p=0.9, seed=seed) for seed in range(100)]
    half = LOGITS.to(dtype).expand(100, -1)
    assert sample_tokens(half, specs) == sample_tokens(half.float(), specs)
