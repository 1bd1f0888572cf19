"""The examples that import vLLM run on a tiny model, and print what their READMEs show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from tests import example_runs
from tests.example_runs import NAMES
from tests.vllm.engine import Engine


@pytest.mark.parametrize("name", [name for name in NAMES if "vllm" in example_runs.imports(name)])
def test_example(
    name: str,
    vllm_model: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if lacking := example_runs.missing(name):
        pytest.skip(f"needs {', '.join(lacking)}")
    model = vllm_model("llama")
    monkeypatch.chdir(tmp_path)
    try:
        printed = example_runs.run(name, model, monkeypatch, capfd)
    finally:
        Engine.clean_up()
    assert example_runs.differences(example_runs.shown(name), printed) == [], printed
