"""Two workers, each with its shard of every block, over both of vLLM's executors that have several."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm import compat, worker
from tests.vllm.common import EAGER, LATENT, ask_twice, forget, make_prompts, restored, tokens

ROOT = Path(__file__).parents[2]


def test_two_processes_restore_what_each_has_stored_beside_connectors_whose_messages_cannot_be_pickled(
    vllm_model: Callable[[str], str], start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """These alone are turned off; vLLM's engine has died of such messages."""
    strangers = [{"connector": "tests.vllm.strangers:Stranger", "fault": fault} for fault in ("orders", "reports")]
    composed = {"mode": "multi", "connectors": [EAGER, *strangers]}
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    prompts = make_prompts(2, 330)
    engine = start(vllm_model("llama"), composed, **options)
    assert engine.side.layout.world_size == 2
    computed = [engine.ask([prompt], 6)[0] for prompt in prompts]
    forget(engine)
    answers = [engine.ask([prompt], 6)[0] for prompt in prompts]
    assert tokens(answers) == tokens(computed)
    assert (restored(computed), restored(answers)) == (0, 640)
    assert not engine.side.guard.broken
    off = "connector stranger is turned off: its "
    assert f'{off}worker side raised TypeError("its function cannot be carried to another process: ' in caplog.text
    assert f"{off}function cannot be carried to another process: " in caplog.text


def test_two_processes_keep_latent_kv_once(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompts = vllm_model("deepseek"), make_prompts(2, 330)
    options: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    options |= {**LATENT, "caches_latents": True}
    # What is decoded behind a prefix differs from what is computed with it, in vLLM itself: a device hit says what is right.
    reference = start(model, **options)
    expected = tokens([reference.ask([prompt], 6)[0] for prompt in prompts * 2][len(prompts) :])
    disk = {"kind": "disk", "directory": str(tmp_path), "max_bytes": "64MiB", "reserve_bytes": 0}
    with caplog.at_level(logging.INFO):
        engine = start(model, {**EAGER, "tiers": [disk]}, **options)
    layout = engine.side.layout
    num_slots, num_spare = (size * 2**20 // layout.block_bytes for size in (64, 1))
    assert f"for {num_slots - num_spare} chunks of 1 block, " in caplog.text
    assert ", kept once for 2 workers that hold the same" in caplog.text
    answers = ask_twice(engine, prompts)
    assert (tokens(answers), restored(answers)) == (expected, 640)
    assert not engine.side.guard.broken
    (shard,) = tmp_path.glob("*/shard.json")
    assert "each on 2 workers" in shard.read_text()


def test_two_processes_keep_the_kv_of_one_head_once(
    vllm_model: Callable[[str], str], start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    prompts = make_prompts(2, 330)
    with caplog.at_level(logging.INFO):
        engine = start(vllm_model("llama-one-head"), EAGER, tensor_parallel_size=2, distributed_executor_backend="mp")
    layout = engine.side.layout
    assert (layout.world_size, layout.num_replicas) == (2, 2)
    assert ", kept once for 2 workers that hold the same" in caplog.text
    computed = [engine.ask([prompt], 6)[0] for prompt in prompts]
    on_device = [engine.ask([prompt], 6)[0] for prompt in prompts]
    num_slots, num_spare = (size * 2**20 // layout.block_bytes for size in (64, 1))
    assert engine.side.guard.inner.shared.manager.capacity == num_slots - num_spare, "twice as many"
    forget(engine)
    answers = [engine.ask([prompt], 6)[0] for prompt in prompts]
    assert tokens(answers) == tokens(on_device) == tokens(computed)
    assert (restored(on_device), restored(answers)) == (0, 640)
    assert not engine.side.guard.broken


def test_of_four_workers_those_with_the_same_head_speak_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with two heads, workers 0 and 1 hold the first one, and share memory; 2 and 3 share other memory."""

    def gather(messages: list[bytes], message: bytes, *, group: object) -> None:
        messages[:] = [b"0", b"1", b"2", b"3"]

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    heard = []
    for rank in range(4):
        group = SimpleNamespace(rank_in_group=rank, world_size=4, cpu_group=None)
        monkeypatch.setattr(compat, "tensor_parallel_group", lambda group=group: group)
        heard.append(worker.exchange_with_workers(2, str(rank).encode()))
    assert heard == [[b"0", b"1"]] * 2 + [[b"2", b"3"]] * 2


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
