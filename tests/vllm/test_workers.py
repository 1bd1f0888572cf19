"""Two workers, each with its shard of every block, over both of vLLM's executors that have several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from tests.vllm.common import EAGER, forget, make_prompts, restored, tokens

ROOT = Path(__file__).parents[2]


def test_two_processes_restore_what_each_has_stored(
    vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    prompts = make_prompts(2, 330)
    engine = start(vllm_model("llama"), EAGER, **options)
    assert engine.side.layout.world_size == 2
    computed = [engine.ask([prompt], 6)[0] for prompt in prompts]
    forget(engine)
    answers = [engine.ask([prompt], 6)[0] for prompt in prompts]
    assert tokens(answers) == tokens(computed)
    assert (restored(computed), restored(answers)) == (0, 640)
    assert not engine.side.guard.broken


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here; make test-vllm installs it")
@pytest.mark.long
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ray_actors_restore_what_each_has_stored(
    split: str, vllm_model: Callable[[str], str], tmp_path: Path
) -> None:
    from tests.vllm.over_ray import write_plugin  # noqa: PLC0415  # imports vLLM's platforms

    write_plugin(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.vllm.over_ray", vllm_model("llama"), split],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))),
            "RAY_USAGE_STATS_ENABLED": "0",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["actors"] == result["world_size"] == 2
    assert result["second"] == result["first"]
    assert result["restored"] == [320, 320]
