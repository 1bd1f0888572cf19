"""Connectors and tiers of somebody else inside vLLM, named in its configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cargohold.errors import ConfigError

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm.settings import VllmSettings
from tests.vllm.common import COMPOSED, EAGER, RESTARTED, ask_twice, forget, make_prompts, restored, tokens

STRANGER = "tests.vllm.strangers:Stranger"


@pytest.fixture
def expected(vllm_model: Callable[[str], str], start: Callable[..., Any]) -> list[tuple[int, ...]]:
    """The tokens without a connector."""
    return tokens(ask_twice(start(vllm_model("llama")), make_prompts(3, 330)))


@pytest.mark.parametrize("chunked", [False, True])
def test_loads_of_a_synchronous_connector_are_served(
    vllm_model: Callable[[str], str], start: Callable[..., Any], expected: list[tuple[int, ...]], chunked: bool
) -> None:
    options = {"max_num_batched_tokens": 64} if chunked else {}
    engine = start(vllm_model("llama"), {"connector": STRANGER}, **options)
    answers = ask_twice(engine, make_prompts(3, 330))
    assert tokens(answers) == expected
    assert [answer.device for answer in answers] == [320] * 3
    assert engine.side.guard.broken is None


def test_a_whole_prompt_is_loaded_by_a_synchronous_connector(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    prompts = make_prompts(2, 320)
    without = tokens(ask_twice(start(vllm_model("llama")), prompts))
    engine = start(vllm_model("llama"), {"connector": STRANGER})
    answers = ask_twice(engine, prompts)
    assert tokens(answers) == without
    assert all(answer.device >= 319 for answer in answers)


def test_its_options_reach_it(vllm_model: Callable[[str], str], start: Callable[..., Any]) -> None:
    engine = start(vllm_model("llama"), {"connector": STRANGER, "places": 4})
    prompts = make_prompts(1, 330)
    engine.ask(prompts, 1)
    forget(engine)
    assert [answer.device for answer in engine.ask(prompts, 1)] == [0], "four places do not hold ten blocks"


def test_spoiled_loads_change_the_answers(
    vllm_model: Callable[[str], str], start: Callable[..., Any], expected: list[tuple[int, ...]]
) -> None:
    engine = start(vllm_model("llama"), {"connector": STRANGER, "fault": "spoils"})
    assert tokens(ask_twice(engine, make_prompts(3, 330))) != expected, "these tests would see nothing"


@pytest.mark.parametrize("fault", ["fails", "raises"])
def test_synchronous_loads_that_fail_are_computed_instead(
    fault: str, vllm_model: Callable[[str], str], start: Callable[..., Any], expected: list[tuple[int, ...]]
) -> None:
    engine = start(vllm_model("llama"), {"connector": STRANGER, "fault": fault})
    answers = ask_twice(engine, make_prompts(3, 330))
    assert tokens(answers) == expected
    assert (engine.side.guard.broken is not None) == (fault == "raises")


def test_it_stands_beside_connectors_of_ours(
    vllm_model: Callable[[str], str], start: Callable[..., Any], expected: list[tuple[int, ...]]
) -> None:
    engine = start(vllm_model("llama"), {**COMPOSED, "connectors": [{"connector": STRANGER, "places": 4}, EAGER]})
    answers = ask_twice(engine, make_prompts(3, 330))
    assert tokens(answers) == expected
    assert all(answer.device >= 288 for answer in answers)
    assert engine.side.guard.broken is None


def test_chunks_come_back_from_a_tier_of_ones_own(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path
) -> None:
    tier = {"kind": "examples.own_tier.folder:FolderConfig", "path": str(tmp_path)}
    prompts = make_prompts(2, 330)
    first = start(vllm_model("llama"), {**RESTARTED, "tiers": [tier]})
    without = tokens(first.ask(prompts))
    first.settle()
    again = start(vllm_model("llama"), {**RESTARTED, "tiers": [tier]}).ask(prompts)
    assert tokens(again) == without
    assert restored(again) == 640


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"connector": STRANGER, "fault": "some"}, r"kv_connector_extra_config\.fault='some' .* one of none, spoils"),
        ({"connector": STRANGER, "place": 3}, r"kv_connector_extra_config\.place=3 .* did you mean places"),
        ({"connector": "nowhere:X"}, r"kv_connector_extra_config\.connector='nowhere:X' .* No module named 'nowhere'"),
        (
            {"cpu_bytes_to_use": 1 << 30},
            r"kv_connector_extra_config\.cpu_bytes_to_use=1073741824 .* here that is host_bytes",
        ),
        (
            {"host_bytes": "1GiB", "tiers": [{"type": "fs", "root_dir": "/kv"}]},
            r"kv_connector_extra_config\.tiers\[0\]\.type='fs' .* here that is kind",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(extra: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        VllmSettings.parse(extra)
