"""SGLang's cache over our tiers: what was computed comes back, byte by byte, also after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.sglang.host import KINDS, Host, disk, extra_config, tokens_from

Start = Callable[..., Host]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("attention", "page_first_direct"),
        ("attention", "layer_first"),
        ("latent", "page_first_direct"),
        ("latent", "layer_first"),
        ("hybrid", "page_first_direct"),
    ],
)
@pytest.mark.parametrize("pack", ["none", "exponent"])
def test_what_was_evicted_comes_back_and_so_does_what_was_computed_before_a_restart(
    start: Start, kind: str, layout: str, pack: str, tmp_path: Path
) -> None:
    if pack == "exponent":
        pytest.importorskip("zstandard", reason="needs cargohold[packing]")
    extra = extra_config(disk(tmp_path / "kv", pack=pack))
    host = start(kind, layout, **extra)
    tokens = tokens_from(100)
    computed = host.compute(tokens)
    host.back_up()
    host.evict()
    assert host.load(tokens)[0] == 0
    assert host.prefetch(tokens) == 64
    assert host.load(tokens)[0] == 64 and same(host.load(tokens)[1], computed)
    host = start(kind, layout, **extra)
    assert host.load(tokens)[0] == 0
    assert host.prefetch(tokens) == 64
    count, restored = host.load(tokens)
    assert count == 64 and same(restored, computed)


def test_only_what_is_left_of_a_prefix_is_fetched_and_what_follows_is_computed(start: Start) -> None:
    host = start()
    tokens = tokens_from(100)
    computed = host.compute(tokens)
    host.back_up()
    host.evict()
    longer = tokens + tokens_from(500, 16)
    assert host.prefetch(longer) == 64
    count, restored = host.load(longer)
    assert count == 64 and same(restored, computed)
    assert host.prefetch(tokens_from(1000)) == 0


@pytest.mark.parametrize(("kind", "pack"), [*((kind, "none") for kind in KINDS), ("attention", "exponent")])
def test_under_failures_that_sglang_injects_whatever_is_found_is_right(
    start: Start, kind: str, pack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.001")
    host = start(kind, **extra_config(disk(tmp_path / "kv", pack=pack)))
    computed = {first: host.compute(tokens_from(first, 32)) for first in (100, 200, 300, 400)}
    host.back_up()
    for _ in range(3):
        host.evict()
        for first, kv in computed.items():
            host.prefetch(tokens_from(first, 32))
            count, restored = host.load(tokens_from(first, 32))
            if kind != "hybrid":
                assert same(restored, [tensor[:count] for tensor in kv])
            elif count:
                assert count == 32  # the state is that of all tokens
            host.evict()
