"""A tier of somebody else below host memory: opened, named and counted by what its own options say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cargohold import LLM, ConfigError
from cargohold.connector.offloading.factory import tier_options
from examples.own_tier.folder import FolderConfig
from tests.connector.test_tiers_with_models import OPTIONS, ask, offload, prompts, restored, tokens
from tests.llms import SettledLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparing(FolderConfig):
    bytes_per_day: int
    bytes_at_most: int

    @property
    def num_daily_bytes(self) -> int:
        return self.bytes_per_day

    @property
    def num_max_bytes(self) -> int:
        return self.bytes_at_most


def test_chunks_come_back_from_a_tier_of_ones_own(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    config = offload(FolderConfig(path=str(tmp_path)))
    with SettledLLM(tiny_model("llama"), offload=config, **OPTIONS) as first:
        expected = tokens(ask(first, prompts()))
    second = make_llm(tiny_model("llama"), offload=config, **OPTIONS)
    again = ask(second, prompts())
    assert tokens(again) == expected
    assert restored(again) == [{"folder": 100}] * 3
    assert any("folder" in str(name) for name in second.stats()) and not any(
        "shared" in str(name) for name in second.stats()
    )
    layout = second.plan.layout
    limited = Sparing(path="b", bytes_per_day=3 * layout.block_bytes // 2, bytes_at_most=5 * layout.block_bytes // 2)
    several = tier_options(offload(FolderConfig(path="a"), limited), layout)
    assert [options.name for options in several] == ["folder", "folder2"]
    assert [(options.max_daily_chunks, options.max_chunks) for options in several] == [(None, None), (1, 2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked(FolderConfig):
    def require_sizes(self, chunk_bytes: int, num_shards: int) -> None:
        raise ConfigError("path", self.path, "it must be somewhere else")


def test_it_is_checked_before_anything_is_loaded(tiny_model: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match="somewhere else"):
        SettledLLM(tiny_model("llama"), offload=offload(Checked(path="x")), **OPTIONS)


@pytest.mark.parametrize(
    "option",
    [{"admission": "some"}, {"write": "never"}, {"num_threads": 0}, {"num_threads": 257}, {"encryption_key": "secret"}],
)
def test_options_that_all_tiers_have_are_checked(option: dict[str, object]) -> None:
    (name,) = option
    with pytest.raises(ConfigError, match=name):
        FolderConfig(path="x", **option)  # type: ignore[arg-type]  # that is what is tested
