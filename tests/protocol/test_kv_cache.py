"""Impossible layouts of the KV cache are refused, naming what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from cargohold.protocol import AttentionKind, KVCacheGroup, KVCacheLayout


@pytest.mark.parametrize(
    ("kind", "block_tokens", "window_tokens", "named"),
    [
        (AttentionKind.FULL, 0, None, "block_tokens must be at least 1, not 0"),
        (AttentionKind.FULL, 16, 64, "full"),
        (AttentionKind.SLIDING_WINDOW, 16, None, "window_tokens=None"),
        (AttentionKind.SLIDING_WINDOW, 16, 0, "window_tokens must be at least 1, not 0"),
        (AttentionKind.CHUNKED_LOCAL, 16, -4, "window_tokens must be at least 1, not -4"),
        (AttentionKind.RECURRENT, 16, 8, "window_tokens=8"),
    ],
)
def test_impossible_groups_are_refused(
    kind: AttentionKind, block_tokens: int, window_tokens: int | None, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        KVCacheGroup(0, kind, block_tokens, ("layer",), window_tokens)


def test_a_window_may_be_smaller_than_a_block() -> None:
    group = KVCacheGroup(0, AttentionKind.SLIDING_WINDOW, 16, ("layer",), 3)
    assert group.num_skipped_tokens(40) == 38, "the query at 40 sees 38, 39 and itself"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"hash_block_tokens": 6}, "hash_block_tokens=6 does not divide block_tokens=16 of group 0"),
        ({"hash_block_tokens": 32}, "hash_block_tokens=32 does not divide block_tokens=16 of group 0"),
        ({"groups": ()}, "there must be one at least"),
        ({"groups": (KVCacheGroup(1, AttentionKind.FULL, 16, ("layer",)),)}, "numbered 0, 1"),
        ({"num_blocks": 1}, "num_blocks=1 is too few: .* at least 2"),
        ({"block_bytes": 0}, "block_bytes=0 is too few: .* at least 1"),
        ({"world_size": 0}, "world_size=0 is too few: .* at least 1"),
        ({"world_size": 4, "num_replicas": 3}, "num_replicas=3 does not divide world_size=4"),
        ({"num_replicas": 0}, "num_replicas=0 does not divide world_size=1"),
    ],
)
def test_impossible_layouts_are_refused(changed: dict[str, Any], named: str) -> None:
    layout: dict[str, Any] = {
        "groups": (KVCacheGroup(0, AttentionKind.FULL, 16, ("layer",)),),
        "num_blocks": 8,
        "block_bytes": 1,
        "hash_block_tokens": 16,
    }
    KVCacheLayout(**layout)
    with pytest.raises(ValueError, match=named):
        KVCacheLayout(**{**layout, **changed})
