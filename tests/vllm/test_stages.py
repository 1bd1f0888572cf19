"""Pipeline parallelism: each worker has layers of its own, blocks of its own size, and is a step ahead of the next."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cargohold.errors import ConfigError

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.connector.factory import Parts
from cargohold.integrations.vllm import compat, connector
from cargohold.integrations.vllm.layout import NO_GROUPS, Translation
from cargohold.integrations.vllm.worker import WorkerPart, check_stages, stage_obstacles, united
from tests.vllm.common import EAGER, ask_twice, forget, make_prompts, restored, tokens
from tests.vllm.engine import Engine
from tests.vllm.test_requests import count_preemptions
from tests.vllm.test_stress import LIMITS, make_workload, serve

RANKS = (0, 1)


@pytest.fixture
def start_stages(start: Callable[..., Engine]) -> Callable[..., Engine]:
    """Starts engines of two stages, one worker each."""

    def make(model: str, extra: dict[str, Any], **options: Any) -> Engine:
        engine = start(
            model,
            extra,
            pipeline_parallel_size=2,
            distributed_executor_backend="mp",
            worker_extension_cls="tests.vllm.staged_worker.StagedWorker",
            **options,
        )
        engine.llm.collective_rpc("get_ready")
        return engine

    return make


def go_wrong(engine: Engine, rank: int, failing: str | None = None, **how: Any) -> None:
    engine.llm.collective_rpc("go_wrong", args=(rank, failing), kwargs=how)


def test_each_stage_restores_its_layers(
    vllm_model: Callable[[str], str],
    start: Callable[..., Engine],
    start_stages: Callable[..., Engine],
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = make_prompts(3, 330)
    alone = start(vllm_model("llama"))
    expected = tokens([alone.ask([prompt], 6)[0] for prompt in prompts])
    with caplog.at_level(logging.INFO, logger="cargohold"):
        engine = start_stages(vllm_model("llama"), {**EAGER, "policy": "lru"})
    assert [record.message for record in caplog.records if record.name.startswith("cargohold")] == [
        "device pool: 39 blocks of at most 32 KiB on each of 2 workers, 1.8 MiB in all",
        "group 0: 3 layers, full attention, 32 tokens per block, 1.5 KiB per token",
        (
            "exclusive: 64 MiB of host memory, an equal share for every worker, for 1,008 chunks of 1 block, 48 KiB each; "
            "prompts and answers that the device pool has no room for, evicted by lru"
        ),
        "both together hold 26.8 times as much as the device pool",
        "a GiB of host memory holds 524,288 tokens of long prompts",
        (
            "if a load fails, vLLM's policy is to recompute its request (load_failure_policy; inside MultiConnector, the outer "
            "kv_load_failure_policy holds)"
        ),
    ]
    # The second stage has rows of half the size: more of them, of which as many are used as the first stage has.
    assert engine.llm.collective_rpc("host_bytes") == [32 << 20, 32 << 20]
    computed = [engine.ask([prompt], 6)[0] for prompt in prompts]
    forget(engine)
    answers = engine.ask(prompts, 6)
    assert tokens(answers) == tokens(computed) == expected
    assert (restored(computed), restored(answers)) == (0, 960)
    for rank in RANKS:  # a load that fails on one stage has failed, whatever the other has brought
        forget(engine)
        go_wrong(engine, rank, "load")
        answers = engine.ask(prompts, 6)
        assert (tokens(answers), restored(answers)) == (expected, 0)
        assert engine.llm.collective_rpc("num_failed")[rank] > 0
        go_wrong(engine, rank)
        forget(engine)
        answers = engine.ask(prompts, 6)
        assert (tokens(answers), restored(answers)) == (expected, 960)
    for rank in RANKS:  # the control: all this is about KV that the answers depend on, on either stage
        forget(engine)
        go_wrong(engine, rank, scramble_loads=True)
        answers = engine.ask(prompts, 6)
        assert restored(answers) == 960
        assert tokens(answers) != expected
    assert engine.side.guard.broken is None


def test_tokens_never_depend_on_offloading_whatever_fails_on_one_stage(
    vllm_model: Callable[[str], str], start: Callable[..., Engine], start_stages: Callable[..., Engine]
) -> None:
    workloads = [make_workload(seed) for seed in (1, 1, 2, 3, 4, 5)]
    reference = start(vllm_model("llama"), num_blocks=2000, **LIMITS)
    expected = [serve(reference, workload) for workload in workloads]
    engine = start_stages(vllm_model("llama"), {**EAGER, "host_bytes": "4MiB"}, num_blocks=22, **LIMITS)
    faults: list[tuple[int, str | None, dict[str, Any]]] = [
        (0, None, {}),
        (1, None, {"hold_polls": 1}),
        (0, "load", {}),
        (1, "load", {"hold_polls": 2}),
        (0, "store", {"hold_polls": 3}),
        (1, "store", {}),
    ]
    num_restored = 0
    with count_preemptions(engine) as preempted:
        for (rank, failing, how), workload, tokens_of in zip(faults, workloads, expected, strict=True):
            go_wrong(engine, rank, failing, **how)
            answers = serve(engine, workload)
            for number, answer in answers.items():
                assert answer.tokens == tokens_of[number].tokens, f"request {number}, {failing} fails on rank {rank}"
            num_restored += restored(list(answers.values()))
    assert preempted
    assert num_restored > 400, "next to nothing was restored: this proves nothing"
    assert all(engine.llm.collective_rpc("num_failed"))
    assert engine.side.guard.broken is None


def test_groups_without_layers_on_a_stage(
    vllm_model: Callable[[str], str], start_stages: Callable[..., Engine]
) -> None:
    # Seven groups of one layer each: every stage has some of them, and none has all.
    engine = start_stages(vllm_model("gemma3"), EAGER, num_blocks=400)
    prompts = make_prompts(2, 330)
    computed = [engine.ask([prompt], 6)[0] for prompt in prompts]
    forget(engine)
    answers = [engine.ask([prompt], 6)[0] for prompt in prompts]
    assert tokens(answers) == tokens(computed)
    assert restored(answers) == 640
    go_wrong(engine, 1, scramble_loads=True)
    forget(engine)
    assert tokens(engine.ask(prompts, 6)) != tokens(computed)


def test_what_is_on_disk_is_found_again_by_the_same_stages_alone(
    vllm_model: Callable[[str], str],
    start_stages: Callable[..., Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    extra = {**EAGER, "tiers": [{"kind": "disk", "directory": str(tmp_path), "max_bytes": "64MiB"}]}
    (prompt,) = make_prompts(1, 330)
    found = []
    expected: set[tuple[int, ...]] = set()
    for partition in ("2,1", "1,2", "2,1"):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        engine = start_stages(vllm_model("llama"), extra)
        (answer,) = engine.ask([prompt], 6)
        found.append(answer.restored)
        expected.add(answer.tokens)
        engine.settle()
    assert found == [0, 0, 320]
    assert len(expected) == 1


class TestWhatWorkersSay:
    """The handshake, with one worker in this process that is taken for a stage."""

    def test_a_stage_that_says_nothing_turns_offloading_off(
        self,
        vllm_model: Callable[[str], str],
        start: Callable[..., Engine],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(connector, "has_stages", lambda _config: True)
        engine = start(vllm_model("llama"), EAGER)
        assert restored(ask_twice(engine, make_prompts(2, 330))) == 640
        monkeypatch.setattr(connector.CargoholdConnector, "get_handshake_metadata", lambda self: None)
        engine = start(vllm_model("llama"), EAGER)
        assert "offloading is off, requests are served without it: not all workers say what they hold" in caplog.text
        assert restored(ask_twice(engine, make_prompts(2, 330))) == 0

    def test_a_worker_that_cannot_be_served_turns_it_off_for_all(
        self,
        vllm_model: Callable[[str], str],
        start: Callable[..., Engine],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Found by reading: of layers of several kinds in one group the workers alone know, and no copy ever ended."""
        translate = connector.CargoholdConnector._translate

        def translate_on(side: Any) -> Translation:
            return translate(side) if side._is_scheduler else Translation(NO_GROUPS, ("group 0 mixes layers",))

        monkeypatch.setattr(connector.CargoholdConnector, "_translate", translate_on)
        engine = start(vllm_model("llama"), EAGER)
        assert "offloading is off, requests are served without it: group 0 mixes layers" in caplog.text
        assert restored(ask_twice(engine, make_prompts(2, 330))) == 0

    def test_parts_add_up(self) -> None:
        parts = {
            (0, 0): WorkerPart(3000, (2, 0)),
            (0, 1): WorkerPart(3000, (2, 0)),
            (1, 0): WorkerPart(2000, (1, 1)),
            (1, 1): WorkerPart(2000, (1, 1)),
        }
        assert united(parts, 2) == Parts(largest_block_bytes=3000, all_block_bytes=10_000, num_layers=(3, 1))


def cut(backend: object, num_stages: int = 2, runner_type: str = "generate", **more: object) -> Any:
    """As much of vLLM's configuration as says how workers are run."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend=backend, pipeline_parallel_size=num_stages),
        model_config=SimpleNamespace(runner_type=runner_type),
        kv_transfer_config=SimpleNamespace(kv_connector="CargoholdConnector"),
        **more,
    )


def test_executors_that_hear_of_the_last_stage_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stage_obstacles(cut("mp")) == []
    assert stage_obstacles(cut("external_launcher", num_stages=1)) == []
    (sentence,) = stage_obstacles(cut("uni"))
    assert sentence == "with pipeline parallelism UniProcExecutor passes on the last stage's reports only; use mp"
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")  # the older one, which 0.33 has no more
    assert len(stage_obstacles(cut("ray"))) == (find_spec("vllm.v1.executor.ray_executor") is not None)
    monkeypatch.setattr(compat, "MultiprocExecutor", None)
    assert stage_obstacles(cut("mp")) == ["vLLM does not say how it runs stages"]


def test_stages_with_drafts_or_embeddings_are_not_served() -> None:
    (sentence,) = stage_obstacles(cut("mp", speculative_config=object()))
    assert "speculative decoding" in sentence
    (sentence,) = stage_obstacles(cut("mp", runner_type="pooling"))
    assert "embeddings" in sentence
    assert stage_obstacles(cut("mp", num_stages=1, runner_type="pooling", speculative_config=object())) == []


def test_what_would_end_vllm_is_refused_at_start() -> None:
    """Found by trying it: of stages that make embeddings the first request ended vLLM, for it had a connector at all."""
    check_stages(cut("mp"))
    check_stages(cut("mp", num_stages=1, runner_type="pooling"))
    check_stages(cut("mp", runner_type="pooling", use_v2_model_runner=True))
    with pytest.raises(ConfigError, match=r"kv_connector='CargoholdConnector'.*embedding"):
        check_stages(cut("mp", runner_type="pooling", use_v2_model_runner=False))
