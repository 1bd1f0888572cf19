"""What a prompt leaves inside a block is found again, and never taken for anything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

# Something that vLLM has since 0.32, when it began to show connectors what prompts leave inside a block.
pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)

from benchmarks.neighbours import ALONE, MODELS, OURS, Model, compare, play, written
from cargohold.cache.manager import ChunkKeys, OffloadKey
from cargohold.lab.simulation.fingerprints import GroupPlan, WrongTokenError
from cargohold.protocol import AttentionKind
from tests.vllm.common import EAGER, EVENTS, RESTARTED, ask_twice, follow_events, make_prompts, tokens
from tests.vllm.faults import Faults
from tests.vllm.test_neighbours import TAILED, nested


@pytest.mark.parametrize("traffic", ["same_prompts", "shared_beginnings", "turns", "forks"])
def test_as_much_is_found_as_on_a_device_that_forgets_nothing(traffic: str) -> None:
    row = compare(MODELS[TAILED], traffic, (0,), (ALONE, OURS))
    assert int(row.computed[OURS]) <= int(row.computed[ALONE])


TWO_SIZES = Model((GroupPlan(block_tokens=32), GroupPlan(AttentionKind.RECURRENT, 16)), unit=4)


@pytest.mark.parametrize(
    "model", [replace(MODELS[TAILED], drafted=1), TWO_SIZES], ids=["drafts", "blocks of two sizes"]
)
def test_where_tails_are_not_kept_whole_chunks_are_found(model: Model) -> None:
    alone, ours = (play(model, written("same_prompts", 0), connector).total() for connector in (ALONE, OURS))
    whole = play(replace(model, unit=None), written("same_prompts", 0), OURS).total()
    assert ours == whole > alone, "if they are, docs/findings.md should no longer say that they are not"


def test_requests_that_load_tails_leave_each_other_the_blocks_that_they_need() -> None:
    # vLLM copies the state that a load ends with, and does not count the block: three loads filled the pool for ever.
    assert compare(MODELS[TAILED], "several_answers", (1,), (OURS,)).computed


def a_shorter_one(keys: ChunkKeys, num_tokens: int) -> OffloadKey:
    return KEY_OF(keys, num_tokens - 4 if num_tokens % 16 > 4 else num_tokens)


def the_state_before(keys: ChunkKeys, num_tokens: int) -> OffloadKey:
    is_state = keys.group.kind is AttentionKind.RECURRENT
    return keys.keys[num_tokens // 16 - 1] if is_state else KEY_OF(keys, num_tokens)


KEY_OF = ChunkKeys.tail


@pytest.mark.parametrize("mistake", [a_shorter_one, the_state_before])
def test_a_prefix_taken_for_one_of_another_length_is_a_wrong_token(
    mistake: Callable[[ChunkKeys, int], OffloadKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = ChunkKeys.cut

    def cut_wrongly(self: ChunkKeys, num_tokens: int) -> ChunkKeys:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ChunkKeys, "tail", mistake)
            return cut(self, num_tokens)

    assert play(MODELS[TAILED], nested(), OURS).total() == play(MODELS[TAILED], nested(), ALONE).total()
    monkeypatch.setattr(ChunkKeys, "cut", cut_wrongly)
    with pytest.raises(WrongTokenError):
        play(MODELS[TAILED], nested(), OURS)


def test_a_tail_whose_key_does_not_say_how_long_it_is_is_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first, shorter one is kept for all that end inside the same block.
    monkeypatch.setattr(ChunkKeys, "tail", lambda keys, num_tokens: KEY_OF(keys, num_tokens // 16 * 16 + 4))
    with pytest.raises(WrongTokenError):
        play(MODELS[TAILED], nested(), OURS)


ALIGNED: dict[str, Any] = {
    "num_blocks": 40,
    "mamba_cache_mode": "align",
    "prefix_match_unit": 16,
    "enable_prefix_caching": True,
}


def test_events_say_of_tails_what_vllm_says_and_can_be_found(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    engine = start(vllm_model("lfm2"), EAGER, **ALIGNED, **EVENTS)
    (prompt,) = make_prompts(1, 345)
    told = follow_events(engine, lambda: engine.ask([prompt], 2))
    tails = {block: of for block, of in told["CPU"].items() if of["tokens"] == prompt[320:336]}
    assert len(tails) == 2 and tails.items() <= told["GPU"].items(), "of attention, and of the state"
    assert len(told["CPU"]) == engine.side.guard.inner.shared.manager.num_ready


@pytest.mark.parametrize("tier", ["disk", "shared"])
def test_a_models_tokens_are_the_same_from_tails_that_were_restored(
    tier: str,
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    faults: Faults,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks have 32 tokens; a prompt's last hash covers 336 of 345. A shared store has no index: it finds whole blocks."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    disk = {"kind": "disk", "directory": str(tmp_path), "max_bytes": "64MiB", "reserve_bytes": 0}
    below = {"disk": disk, "shared": {"kind": "shared", "url": tmp_path.as_uri()}}[tier]
    extra = {**RESTARTED, "tiers": [below]}
    model, prompts = vllm_model("lfm2"), make_prompts(2, 345)
    expected = tokens(ask_twice(start(model, **ALIGNED), prompts))
    engine = start(model, extra, **ALIGNED)
    answers = ask_twice(engine, prompts)
    assert tokens(answers) == expected and [answer.restored for answer in answers] == [336] * 2
    engine.settle()
    engine = start(model, extra, **ALIGNED)
    answers = [engine.ask([prompt], 6)[0] for prompt in prompts]
    assert tokens(answers) == expected
    assert [answer.restored for answer in answers] == [336 if tier == "disk" else 320] * 2
    assert not engine.side.guard.broken
    faults.scramble_loads = True
    assert tokens(ask_twice(start(model, extra, **ALIGNED), prompts)) != expected
