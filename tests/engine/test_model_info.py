"""What is read of a model's configuration, and which models are refused before any weights are loaded."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from cargohold import ConfigError, UnsupportedModelError
from cargohold.engine.model import files
from cargohold.engine.model.files import CACHE_ENV, locate_model
from cargohold.engine.model.info import describe_model
from cargohold.errors import ModelNotFoundError

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def saved(directory: Path, kind: str, **fields: Any) -> str:
    """A directory with the configuration of a model of that kind."""
    getattr(transformers, kind)(**fields).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (
            "Qwen3NextConfig",
            SMALL,
            "layers of type linear_attention are not supported; supported are full_attention, sliding",
        ),
        ("DeepseekV3Config", SMALL, "multi-head latent attention is not supported"),
        ("Gemma2Config", SMALL, "soft-capped attention scores are not supported"),
        (
            "Llama4TextConfig",
            {**SMALL, "layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0]},
            "attention scores that are scaled by position are not supported",
        ),
        (
            "Gemma3TextConfig",
            {**SMALL, "use_bidirectional_attention": True},
            "attention that looks ahead is not supported",
        ),
        (
            "Gemma3nTextConfig",
            {**SMALL, "num_kv_shared_layers": 1, "intermediate_size": 48, "layer_types": ["full_attention"] * 2},
            "layers that share another layer's KV are not supported",
        ),
        ("T5Config", {}, "encoder-decoder models are not supported; choose a decoder-only model"),
        ("ViTConfig", {}, "vit is not a language model that generates text"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith("Config") else "",
)
def test_models_that_would_be_answered_wrongly_are_refused(
    kind: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        describe_model(saved(tmp_path, kind, **fields))


@pytest.mark.parametrize(
    ("kind", "rope", "more"),
    [
        ("LlamaConfig", {"rope_type": "dynamic"}, {}),
        (
            "Phi3Config",
            {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
            {"original_max_position_embeddings": 128, "pad_token_id": 0},
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_sequences_end_before_rotary_embeddings_change(
    kind: str, rope: dict[str, Any], more: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Requests of one batch would share the angles of the longest, and cached keys keep theirs.
    parameters = {"factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128, **rope}
    model = saved(tmp_path, kind, **SMALL, **more, max_position_embeddings=512, rope_parameters=parameters)
    assert describe_model(model).max_positions == 128
    assert f"up to 128 of its 512 tokens: its {rope['rope_type']} rotary embedding changes there" in caplog.text


def test_a_file_that_is_replaced_while_it_is_converted_is_not_kept_under_the_name_of_the_former(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: whoever brought the former file back was served the other model from then on."""
    file = tmp_path / "model.gguf"
    file.write_text("former")
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))

    def convert(model: str, gguf_file: Path, target: Path) -> None:
        gguf_file.write_text("other")
        (target / "config.json").write_text(gguf_file.read_text())

    monkeypatch.setattr(files, "_convert_gguf", convert)
    with pytest.raises(ModelNotFoundError, match="changed or replaced while it was converted; start again"):
        locate_model(str(file))
    assert Path(locate_model(str(file)), "config.json").read_text() == "other"
    file.write_text("former")
    with pytest.raises(ModelNotFoundError):
        locate_model(str(file))


def test_the_type_of_numbers_is_the_one_saved_unless_told_otherwise(tmp_path: Path) -> None:
    model = saved(tmp_path, "LlamaConfig", **SMALL, dtype="bfloat16")
    assert describe_model(model).dtype == "bfloat16"
    assert describe_model(model, "float32").dtype_bytes == 4
    with pytest.raises(ConfigError, match=r"dtype='int8' .* auto or one of float32, bfloat16, float16"):
        describe_model(model, "int8")


def test_code_that_comes_with_a_model_is_not_run_whatever_stands_on_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "configuration_own.py"
    code.write_text("raise SystemExit('the code was run')", encoding="utf-8")
    fields = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", answers := io.StringIO("y\nthe second prompt\n"))
    with pytest.raises(UnsupportedModelError, match="Python code that comes with it, which is not run"):
        describe_model(str(tmp_path))
    assert answers.tell() == 0, "a prompt was taken for an answer"


def test_layers_that_all_have_a_rotary_embedding_have_no_scores_scaled_by_position(tmp_path: Path) -> None:
    model = saved(tmp_path, "Llama4TextConfig", **SMALL, layer_types=["full_attention"] * 2, no_rope_layers=[1, 1])
    assert len(describe_model(model).geometry.layer_kinds) == 2


@pytest.mark.parametrize(("eos", "expected"), [(5, {5}), ([5, 6], {5, 6}), ([], set())])
def test_the_generation_config_says_where_answers_end(tmp_path: Path, eos: object, expected: set[int]) -> None:
    path = saved(tmp_path, "LlamaConfig", **SMALL)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert describe_model(path).eos_token_ids == expected


@pytest.mark.parametrize(
    ("generation_config", "reason"),
    [
        ({"eos_token_id": "5"}, "eos_token_id='5' must be a token's number"),
        ([5], "generation_config.json is not valid"),
    ],
)
def test_a_generation_config_that_would_never_end_an_answer_is_refused(
    tmp_path: Path, generation_config: object, reason: str
) -> None:
    path = saved(tmp_path, "LlamaConfig", **SMALL)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    with pytest.raises(UnsupportedModelError, match=reason):
        describe_model(path)
