"""What the simulation of vLLM has found, each with the seed that found it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm.layout import bears_full_hits
from cargohold.protocol import AttentionKind, KVCacheGroup
from tests.vllm.test_simulation import play


def test_a_full_hit_behind_a_window_that_begins_with_a_block() -> None:
    # The last token was computed again with a window that reached into a block that had not been loaded.
    play(0, "full-hit", "multi", "none")
    play(38, "full-hit", "eager", "none")


@pytest.mark.parametrize(
    ("kind", "window_tokens", "expected"),
    [
        (AttentionKind.FULL, None, True),
        (AttentionKind.SLIDING_WINDOW, 4, True),
        (AttentionKind.SLIDING_WINDOW, 5, False),
        (AttentionKind.SLIDING_WINDOW, 6, True),
        (AttentionKind.CHUNKED_LOCAL, 8, False),
        (AttentionKind.RECURRENT, None, False),
    ],
)
def test_which_groups_bear_a_full_hit(kind: AttentionKind, window_tokens: int | None, expected: bool) -> None:
    assert bears_full_hits(KVCacheGroup(0, kind, 4, ("layer",), window_tokens)) is expected
