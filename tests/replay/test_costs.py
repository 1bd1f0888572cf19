"""Sizes as people write them, KV bytes by configuration, what hits are worth."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cargohold.engine.config import EngineConfig, plan_engine
from cargohold.engine.model.info import describe_model
from cargohold.errors import ConfigError, UnsupportedModelError
from cargohold.lab.replay.costs import CostModel, describe_kv, kv_size, parse_size, parse_sizes
from cargohold.lab.replay.replaying import replay
from cargohold.lab.replay.tiers import DISK, HOST
from cargohold.lab.replay.traces import TraceRequest
from cargohold.lab.replay.workload import Workload, WorkloadOptions, load_workload

REQUESTS = [TraceRequest(hash_ids=list(range(1000)), input_length=15_990, block_tokens=16)] * 2


@pytest.fixture
def workload() -> Workload:
    return load_workload(REQUESTS, WorkloadOptions(blocks_per_chunk=4))


@pytest.mark.parametrize(
    ("text", "chunks"),
    [("5%", 12), ("0.01%", 1), ("100 %", 250), ("1000", 250), ("7", 1), ("640KiB", 10), ("1MB", 15), ("0.5MiB", 8)],
)
def test_sizes(text: str, chunks: int, workload: Workload) -> None:
    assert parse_size("size", text).chunks_for(workload, 65536) == chunks


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "0%",
        "-5",
        "5 percent",
        "lots",
        "0GiB",
        "1,000",
        "NaN%",
        "9" * 5000,
        "9" * 5000 + "GiB",
        "9" * 400 + "%",
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size("size", text)


def test_sizes_that_hold_no_chunk_or_cannot_be_told(workload: Workload) -> None:
    for text in ("3", "1KiB"):
        with pytest.raises(ConfigError, match="at least one chunk"):
            parse_size("size", text).chunks_for(workload, 65536)
    with pytest.raises(ConfigError, match="bytes-per-token"):
        parse_size("size", "1GiB").chunks_for(workload, None)
    assert [size.text for size in parse_sizes("size", "1%, 20,3GiB")] == ["1%", "20", "3GiB"]


class TestCosts:
    def test_time_saved_is_prefill_less_loads(self, workload: Workload) -> None:
        costs = CostModel(
            bytes_per_token=1000, prefill_tokens_per_s=100.0, bytes_per_s={HOST: 1_000_000.0, DISK: 100_000.0}
        )
        (result,) = replay(workload, "lru", [(250,)])
        assert result.num_hit_tokens == 15_990
        assert costs.saved_s(result, 64) == pytest.approx(15_990 / 100 - 250 * 64_000 / 1e6)
        (optimum,) = replay(workload, "optimum", [(250,)])
        assert costs.saved_s(optimum, 64) == costs.saved_s(result, 64)
        assert costs.break_even_tokens_per_s(DISK) == 100.0

    def test_a_tier_slower_than_prefill_costs(self, workload: Workload) -> None:
        costs = CostModel(bytes_per_token=1000, prefill_tokens_per_s=5000.0, bytes_per_s={HOST: 1e6, DISK: 1e6})
        (result,) = replay(workload, "lru", [(250,)])
        saved_s = costs.saved_s(result, 64)
        assert saved_s is not None and saved_s < 0

    def test_what_is_not_known_is_not_guessed(self, workload: Workload) -> None:
        (result,) = replay(workload, "lru", [(250,)])
        assert CostModel(bytes_per_token=1000).saved_s(result, 64) is None
        assert CostModel(prefill_tokens_per_s=100.0).saved_s(result, 64) is None
        assert CostModel(bytes_per_token=1000, prefill_tokens_per_s=100.0).saved_s(result, None) is None

    @pytest.mark.parametrize(
        "options",
        [
            {"bytes_per_token": 0},
            {"prefill_tokens_per_s": -1.0},
            {"bytes_per_s": {HOST: 0.0}},
            {"bytes_per_token": 1.5},
            {"bytes_per_token": 10**400},
        ],
    )
    def test_impossible_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            CostModel(**options)


class TestKVSize:
    """Bytes per token by the configuration alone; expected values worked out by hand."""

    @pytest.mark.parametrize(
        ("kind", "options", "bytes_per_token"),
        [
            ("LlamaConfig", {"num_key_value_heads": 8, "dtype": "bfloat16"}, 32 * 2 * 8 * 128 * 2),
            ("MistralConfig", {"dtype": "bfloat16"}, 32 * 2 * 8 * 128 * 2),
            ("GPT2Config", {"dtype": "float16"}, 12 * 2 * 768 * 2),
            ("FalconConfig", {"dtype": "bfloat16"}, 32 * 2 * 1 * 64 * 2),
            (
                "FalconConfig",
                {"new_decoder_architecture": True, "num_attention_heads": 128, "num_kv_heads": 8, "hidden_size": 8192},
                32 * 2 * 8 * 64 * 4,
            ),
            # In groups of nine layers, of which the last has three; then in groups of four, and two.
            ("MiMoV2FlashConfig", {"dtype": "bfloat16"}, 54 * 4 * (192 + 128) * 2),
            ("Gemma3TextConfig", {"dtype": "bfloat16"}, 28 * 2 * 4 * 256 * 2),
            ("DeepseekV3Config", {"dtype": "bfloat16"}, 61 * (512 + 64) * 2),
            ("Qwen3NextConfig", {"dtype": "bfloat16"}, 12 * 2 * 2 * 256 * 2),
            ("Gemma3nTextConfig", {"dtype": "bfloat16"}, 20 * 2 * 2 * 256 * 2),
        ],
    )
    def test_kinds_of_attention(self, kind: str, options: dict[str, Any], bytes_per_token: int) -> None:
        transformers = pytest.importorskip("transformers")
        if not hasattr(transformers, kind):
            pytest.skip(f"this version of transformers has no {kind}")
        config = getattr(transformers, kind)(**options)
        size = kv_size("a model", config)
        assert size.bytes_per_token == bytes_per_token
        assert f"{bytes_per_token:,} bytes per token" in size.describe()

    @pytest.mark.parametrize("kind", ["llama", "mistral-window", "gemma3"])
    def test_it_is_what_the_engine_allocates(self, kind: str, tiny_model: Callable[[str], str]) -> None:
        model = tiny_model(kind)
        layout = plan_engine(EngineConfig(model=model, num_device_blocks=300), describe_model(model)).layout
        all_groups_bytes = len(layout.groups) * layout.block_bytes
        assert describe_kv(model).bytes_per_token * layout.hash_block_tokens == all_groups_bytes

    def test_kv_may_be_kept_in_another_type(self) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(dtype="float32")
        assert kv_size("a model", config).bytes_per_token == 4 * kv_size("a model", config, 1).bytes_per_token
        with pytest.raises(ConfigError, match="kv_dtype_bytes"):
            kv_size("a model", config, 0)

    def test_layers_that_differ_in_what_they_compress(self) -> None:
        layers = [SimpleNamespace(kv_lora_rank=rank, qk_rope_head_dim=64) for rank in (512, 1024)]

        class Mixed(SimpleNamespace):
            @property
            def kv_lora_rank(self) -> int:
                """As transformers does it."""
                raise RuntimeError("it is a per-layer attribute")

        config = Mixed(
            num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], per_layer_config=layers
        )
        size = kv_size("a model", config, 2)
        assert (size.bytes_per_token, size.is_latent) == ((512 + 64 + 1024 + 64) * 2, True)

    def test_layers_that_keep_nobody_knows_what_are_refused_by_their_kind(self) -> None:
        config = SimpleNamespace(
            num_hidden_layers=2, layer_types=["full_attention", "hybrid"], num_attention_heads=2, head_dim=8
        )
        with pytest.raises(UnsupportedModelError, match=r"layers of kind hybrid .*: give --bytes-per-token instead"):
            kv_size("a model", config)

    def test_code_that_comes_with_a_model_is_not_run_and_nobody_is_asked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("transformers")
        (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}')
        (tmp_path / "own.py").write_text("raise RuntimeError('it was run')")
        answers = io.StringIO("y\n")
        monkeypatch.setattr("sys.stdin", answers)
        with pytest.raises(UnsupportedModelError, match="which is not run: give --bytes-per-token instead"):
            describe_kv(str(tmp_path))
        assert answers.read() == "y\n"

    def test_models_without_kv_are_refused(self) -> None:
        transformers = pytest.importorskip("transformers")
        with pytest.raises(UnsupportedModelError, match="no attention layers"):
            kv_size("mamba", transformers.MambaConfig())
