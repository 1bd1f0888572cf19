"""Models loaded by several threads at the same time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
import transformers

from cargohold import LLM, SamplingParams
from cargohold.engine.model import hf_runner
from cargohold.engine.model.weights import load_model


@pytest.fixture(autouse=True)
def _read_each_time(models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the loads themselves are tested: no copies (see ``tests.models.read_once``)."""
    monkeypatch.setattr(hf_runner, "load_model", load_model)


MODELS = (("llama", "float32"), ("gemma3", "bfloat16"), ("qwen3", "float16"))


def generate(path: str, dtype: str) -> tuple[int, ...]:
    with LLM(path, dtype=dtype, num_device_blocks=100) as llm:
        return llm.generate([list(range(30))], SamplingParams(max_tokens=4))[0].token_ids


def test_threads_load_models_of_several_dtypes_at_once(tiny_model: Callable[[str], str]) -> None:
    models = [(tiny_model(kind), dtype) for kind, dtype in MODELS]
    one_by_one = [generate(*model) for model in models]
    with ThreadPoolExecutor(len(models)) as threads:
        for _ in range(4):
            at_once = list(threads.map(generate, *zip(*models, strict=True)))
            assert at_once == one_by_one
    assert torch.get_default_dtype() is torch.float32


def test_transformers_makes_one_model_at_a_time(
    tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    making, load = Lock(), transformers.AutoModelForCausalLM.from_pretrained

    def watched(*args: Any, **options: Any) -> Any:
        assert making.acquire(blocking=False), "another thread is making a model"
        try:
            return load(*args, **options)
        finally:
            making.release()

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", watched)
    with ThreadPoolExecutor(3) as threads:
        tokens = list(threads.map(generate, [tiny_model("llama")] * 6, ["float32"] * 6))
    assert len(set(tokens)) == 1


def test_loading_shows_no_progress_where_there_is_no_terminal(
    tiny_model: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    path = tiny_model("llama")
    transformers.utils.logging.enable_progress_bar()  # an earlier test may have turned it off
    capfd.readouterr()
    with LLM(path, num_device_blocks=100):
        assert capfd.readouterr().err == ""
