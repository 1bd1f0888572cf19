"""Verification inside vLLM's own server: what is kept is what vLLM computes again, and a lie on a disk is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from tests.liars import flip, lie_on_disk
from tests.vllm.common import make_prompts, with_disk
from tests.vllm.models import save_model, save_tokenizer
from tests.vllm.served import BLOCK_TOKENS, LONG, Server, serve

CHANGED = "is not what was computed"
METRIC = "cargohold_verified_chunks_total"


def verified(server: Server, *outcomes: str) -> float:
    return sum(server.metric(METRIC, outcome=outcome) for outcome in outcomes)


def flip_all(payloads: list[bytearray]) -> None:
    for payload in payloads:
        flip([payload])


def test_what_vllm_computes_again_is_what_is_kept_unless_it_lies(tmp_path: Path) -> None:
    model, disk = save_model("llama", tmp_path), tmp_path / "kv"
    extra = {**with_disk(disk), "verify": 1.0, "verify_bytes_per_s": "1GiB"}
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "no_enable_prefix_caching": True,
        "environment": {"PYTHONHASHSEED": "0"},
    }
    save_tokenizer(model)
    (prompt,) = make_prompts(1, LONG, seed=1)
    with serve(model, tmp_path, extra, **options) as server:
        first, again = (server.ask(prompt, max_tokens=BLOCK_TOKENS) for _ in range(2))
        assert again.tokens == first.tokens
        assert not again.restored and any("kept are computed all the same" in note for note in again.notes)
        assert verified(server, "equal", "close") > 0 and not verified(server, "different")
    lie_on_disk(disk, flip_all)
    with serve(model, tmp_path, extra, name="again", **options) as server:
        lied_to = server.ask(prompt, max_tokens=BLOCK_TOKENS)
        assert lied_to.tokens == again.tokens, "as without what is kept"
        assert any(CHANGED in note for note in lied_to.notes)
        assert server.metric(METRIC, outcome="different", tier="disk") > 0
