"""Pictures: the same words under another picture are another prompt, and a picture may be restored in part."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cargohold.errors import ConfigError
from tests.vllm.faults import Faults

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm.adapters import named_from
from tests.vllm.common import EAGER, EVENTS, LAZY, RESTARTED, follow_events, forget, make_prompts, restored, tokens
from tests.vllm.engine import BLOCK_TOKENS, Answer, Engine
from tests.vllm.models import PICTURE_SIZE, PICTURE_TOKENS

OPTIONS = {"skip_tokenizer_init": False}


def make_prompt(seed: int) -> dict[str, Any]:
    """A picture before words that are always the same; 330 tokens in all."""
    picture = np.random.default_rng(seed).integers(0, 256, (PICTURE_SIZE, PICTURE_SIZE, 3), dtype=np.uint8)
    (words,) = make_prompts(1, 330 - PICTURE_TOKENS)
    return {"prompt_token_ids": words, "multi_modal_data": {"image": picture}}


PROMPTS = [make_prompt(seed) for seed in range(3)]


def look(engine: Engine, **options: Any) -> list[Answer]:
    """The answers to all prompts, one after the other."""
    return [engine.ask_for([prompt], **options)[0] for prompt in PROMPTS]


def named(prompt: dict[str, Any], name: str) -> dict[str, Any]:
    """The prompt with a picture that its client has named."""
    return {**prompt, "multi_modal_uuids": {"image": [name]}}


def test_a_picture_s_name_is_true_for_one_process_alone(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by use: after a restart, another picture under the same name got the KV of the one before from the disk."""
    extra = {**RESTARTED, "tiers": [{"kind": "disk", "directory": str(tmp_path), "max_bytes": "64MiB"}]}
    model = vllm_model("blip2")
    of_first, of_second = tokens(look(start(model, **OPTIONS)))[:2]
    engine = start(model, extra, **OPTIONS)
    with caplog.at_level(logging.INFO, logger="cargohold"):
        engine.ask_for([named(PROMPTS[0], "logo")])
        forget(engine)
        (answer,) = engine.ask_for([named(PROMPTS[0], "logo")])
    assert (answer.tokens, answer.restored) == (of_first, 320), "host memory of the same process has it"
    assert any("its client has named a picture" in note for note in answer.notes)
    assert caplog.text.count("its client has named a picture") == 1
    engine.settle()
    engine = start(model, extra, **OPTIONS)
    (answer,) = engine.ask_for([named(PROMPTS[1], "logo")])
    assert (answer.tokens, answer.restored) == (of_second, 0)
    assert restored(engine.ask_for([PROMPTS[0]])) == 0, "and under its contents' own hash there is nothing either"
    engine = start(model, LAZY, **OPTIONS)
    engine.ask_for([named(PROMPTS[0], "logo")])
    forget(engine)
    assert restored(engine.ask_for([named(PROMPTS[0], "logo")])) == 320, "blocks on the device have the same keys"


def test_from_the_first_picture_on_that_a_client_has_named_hashes_are_this_process_s_own() -> None:
    def at(offset: int, name: str) -> Any:
        return SimpleNamespace(mm_hash=name, identifier=name, mm_position=SimpleNamespace(offset=offset))

    seen = SimpleNamespace(mm_features=[at(0, 64 * "a"), at(70, "logo"), at(100, 64 * "b"), at(200, "map")])
    assert named_from(seen, SimpleNamespace(hash_block_size=BLOCK_TOKENS)) == 70 // BLOCK_TOKENS


def test_who_sees_another_picture_is_restored_nothing_of_it(
    vllm_model: Callable[[str], str], start: Callable[..., Any], faults: Faults
) -> None:
    model = vllm_model("blip2")
    expected = tokens(look(start(model, **OPTIONS)))
    assert len(set(expected)) == len(PROMPTS), "the model says the same of all pictures: this proves nothing"
    for extra in (EAGER, LAZY):
        engine = start(model, extra, **OPTIONS)
        first = look(engine)
        forget(engine)
        second = look(engine)
        assert tokens(first) == tokens(second) == expected
        assert restored(first) == 0
        assert [answer.restored for answer in second] == [320] * 3
        forget(engine)
        faults.scramble_loads = True
        assert tokens(look(engine)) != expected
        faults.scramble_loads = False
        assert not engine.side.guard.broken


def test_a_picture_of_which_a_part_is_restored_is_seen_as_a_whole(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    engine = start(vllm_model("blip2"), EAGER, **OPTIONS)
    expected = tokens(look(engine, wishes={"max_store_tokens": 100}))
    forget(engine)
    again = look(engine, wishes={"max_store_tokens": 100})
    assert tokens(again) == expected
    assert [answer.restored for answer in again] == [96] * 3


def test_pictures_are_found_again_on_disk(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path
) -> None:
    tier = {"kind": "disk", "directory": str(tmp_path), "max_bytes": "64MiB"}
    extra = {**RESTARTED, "tiers": [tier]}
    engine = start(vllm_model("blip2"), extra, **OPTIONS)
    expected = tokens(look(engine))
    engine.settle()
    again = look(start(vllm_model("blip2"), extra, **OPTIONS))
    assert tokens(again) == expected
    assert restored(again) == 960


def test_pictures_that_are_numbered_are_not_kept_on_disk(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path
) -> None:
    """Found by reading: the first picture after a restart was given the KV of the first one before it."""
    tier = {"kind": "disk", "directory": str(tmp_path), "max_bytes": "64MiB"}
    unhashed = {**OPTIONS, "mm_processor_cache_gb": 0, "enable_prefix_caching": False}
    with pytest.raises(ConfigError, match="vLLM numbers pictures and sounds"):
        start(vllm_model("blip2"), {**EAGER, "tiers": [tier]}, **unhashed)
    assert restored(look(start(vllm_model("blip2"), EAGER, **unhashed))) == 0, "without a disk nothing is in the way"


def test_events_say_of_pictures_what_vllm_says(vllm_model: Callable[[str], str], start: Callable[..., Any]) -> None:
    engine = start(vllm_model("blip2"), EAGER, **EVENTS, **OPTIONS)
    told = follow_events(engine, lambda: look(engine))
    assert len(told["CPU"]) == 3 * (330 // BLOCK_TOKENS)
    assert told["CPU"].items() <= told["GPU"].items()
    assert len({block["extra_keys"] for block in told["CPU"].values() if block["extra_keys"]}) >= 3
