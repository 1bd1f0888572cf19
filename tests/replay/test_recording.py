"""A recorded trace, replayed, says what the engine itself counted: exactly, where requests come one after the other."""

from __future__ import annotations

import json
import logging
import os
import random
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cargohold import LLM, ConfigError, Hint, OffloadConfig, SamplingParams
from cargohold.cache.policies import POLICIES
from cargohold.connector.recording import RecordingFactory
from cargohold.engine.llm_engine import LLMEngine
from cargohold.lab.replay.replaying import HINTED, replay
from cargohold.lab.replay.traces import TraceRequest, read_trace
from cargohold.lab.replay.workload import WorkloadOptions, load_workload
from cargohold.lab.simulation import SimulatedEngine, SimulatedOffloading, simulated_layout
from cargohold.protocol import (
    NULL_CONNECTOR,
    ClassFactory,
    NullConnectorScheduler,
    SchedulerEnvironment,
    TransferOutcome,
    TurnEnd,
)
from cargohold.transfer import CopyResult
from cargohold.transfer.cpu import CpuTransferWorker
from tests.connector.common import finish, serve_and_lose
from tests.llms import in_engine
from tests.models import VOCAB_SIZE
from tests.serve.scripted_model import save_scripted_model

BLOCK_TOKENS = 4


def serve_conversations(llm: LLM, num_turns: int = 45) -> tuple[int, int]:
    """Conversations whose answers come back in the next turn, one request after the other.

    Returns:
        Prompt tokens, and those that the engine says it reused.
    """
    rng = random.Random(7)
    system = [rng.randrange(VOCAB_SIZE) for _ in range(13)]
    talks = [list(system) for _ in range(7)]
    num_prompt = num_reused = 0
    for _ in range(num_turns):
        talk = rng.choice(talks)
        talk += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 14))]
        (output,) = llm.generate([talk], SamplingParams(max_tokens=rng.randint(1, 11)))
        settle(llm)
        talk += output.token_ids
        num_prompt += output.metrics.prompt_tokens
        num_reused += output.metrics.device_tokens + sum(output.metrics.restored_tokens.values())
        if len(talk) > 150:
            talk[:] = system
    return num_prompt, num_reused


def settle(llm: LLM) -> None:
    """Let transfers end, as they would before the next request of a real user."""
    assert llm.settle()


@pytest.fixture
def prompt_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores end in the step that starts them. Policies may pass over what is still being written, and so does no replay."""
    poll = CpuTransferWorker.poll

    def finish_and_poll(worker: CpuTransferWorker) -> list[CopyResult]:
        worker.finish_stores()
        return poll(worker)

    monkeypatch.setattr(CpuTransferWorker, "poll", finish_and_poll)


def serve_sessions(llm: LLM) -> tuple[list[int], int]:
    """Sessions of four turns each, each of which says with its last turn that it is over, as the front does for clients.

    Returns:
        The session of each request, and how many prompt tokens were restored.
    """
    rng = random.Random(3)
    waiting, talks, served = list(range(14)), dict[int, list[int]](), list[int]()
    num_restored = 0
    while waiting or talks:
        if waiting and len(talks) < 5:
            talks[waiting.pop(0)] = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
        session = rng.choice(sorted(talks))
        is_over = served.count(session) == 3
        hints = [Hint.retain(priority=0)] if is_over else []
        (output,) = llm.generate([talks[session]], SamplingParams(max_tokens=6), hints=hints)
        settle(llm)
        talks[session] += [*output.token_ids, *(rng.randrange(VOCAB_SIZE) for _ in range(9))]
        num_restored += sum(output.metrics.restored_tokens.values())
        served.append(session)
        if is_over:
            del talks[session]
    return served, num_restored


def recorded(path: Path) -> list[TraceRequest]:
    return list(read_trace([path]))


@pytest.fixture
def no_shared_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reuse-index policy knows absent chunks by digests of their keys, which are others in a replay: two chunks may be
    taken for one there, or here. With room for more digests they are not.
    """
    monkeypatch.setattr("cargohold.cache.policies.reuse_model._MIN_ENTRIES", 1 << 20)


BLOCK_BYTES = 2 * 2 * BLOCK_TOKENS * 2 * 12 * 4
RECORDED: dict[str, Any] = {
    "block_tokens": BLOCK_TOKENS,
    "prefix_caching": False,
    "num_device_blocks": 200,
    "max_num_batched_tokens": 32,
    "max_model_len": 256,
}
QUICK = {("lru", 24, 1), ("reuse-index", 40, 2)}
"""Policies, slots, and blocks per chunk of the quick tests."""


@pytest.mark.usefixtures("prompt_stores", "no_shared_tags")
@pytest.mark.parametrize(
    ("policy", "num_slots", "blocks_per_chunk"),
    [
        pytest.param(policy, *sizes, marks=() if (policy, *sizes) in QUICK else pytest.mark.long)
        for policy in sorted(POLICIES)
        for sizes in [(24, 1), (40, 2)]
    ],
)
def test_the_replay_agrees_with_an_engine_that_offloads(
    policy: str,
    num_slots: int,
    blocks_per_chunk: int,
    tiny_model: Callable[[str], str],
    make_llm: Callable[..., LLM],
    tmp_path: Path,
) -> None:
    host_bytes = num_slots * blocks_per_chunk * BLOCK_BYTES
    offload = OffloadConfig(host_bytes=host_bytes, policy=policy, blocks_per_chunk=blocks_per_chunk)
    llm = make_llm(tiny_model("llama"), offload=offload, record=tmp_path / "trace.jsonl", **RECORDED)
    _, num_reused = serve_conversations(llm)
    workload = load_workload(recorded(tmp_path / "trace.jsonl"), WorkloadOptions(blocks_per_chunk=blocks_per_chunk))
    (result,) = replay(workload, policy, [(num_slots,)])

    assert workload.num_reused_blocks is not None
    assert workload.num_reused_blocks * BLOCK_TOKENS == num_reused > 0
    assert result.num_prefix_hits * blocks_per_chunk == workload.num_reused_blocks
    assert result.num_hit_tokens == num_reused
    assert result.tiers[0].evicted > 0, "the tier was too large to prove anything"


@pytest.mark.usefixtures("prompt_stores", "no_shared_tags")
@pytest.mark.parametrize("policy", ["lru", pytest.param("reuse-index", marks=pytest.mark.long)])
def test_the_replay_with_hints_agrees_with_an_engine_whose_sessions_say_that_they_are_over(
    policy: str, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    offload = OffloadConfig(host_bytes=60 * BLOCK_BYTES, policy=policy)
    llm = make_llm(tiny_model("llama"), offload=offload, record=tmp_path / "trace.jsonl", **RECORDED)
    sessions, num_restored = serve_sessions(llm)
    requests = recorded(tmp_path / "trace.jsonl")
    told = [msgspec.structs.replace(one, session_id=session) for one, session in zip(requests, sessions, strict=True)]
    (hinted,), (plain,) = (replay(load_workload(told), kind, [(60,)]) for kind in (policy + HINTED, policy))
    assert hinted.num_prefix_hits * BLOCK_TOKENS == num_restored
    assert hinted.num_prefix_hits > plain.num_prefix_hits


def test_the_replay_agrees_with_an_engine_whose_own_cache_never_evicts(
    tiny_model: Callable[[str], str], make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    llm = make_llm(
        tiny_model("llama"), record=path, block_tokens=BLOCK_TOKENS, num_device_blocks=2000, max_model_len=256
    )
    num_prompt, num_reused = serve_conversations(llm)
    workload = load_workload(recorded(path))
    (result,) = replay(workload, "infinite", [(1,)])
    assert workload.num_prompt_tokens == num_prompt
    assert workload.num_reused_blocks == result.num_prefix_hits == num_reused // BLOCK_TOKENS > 0


@pytest.mark.parametrize(("first_bad", "num_reused"), [(None, 2), (3, 5), (0, 2)])
def test_what_a_load_failed_to_bring_was_not_reused(first_bad: int | None, num_reused: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    offloading = SimulatedOffloading(60)
    engine = SimulatedEngine(simulated_layout(60), RecordingFactory(offloading, str(path)))
    prompt = list(range(41))
    serve_and_lose(engine, offloading, prompt, 1)
    engine.add("short", prompt[:9], 1)
    finish(engine, offloading)
    (transfers,) = offloading.transfers
    transfers.auto = False
    engine.add("long", prompt, 1)
    engine.step()
    (load,) = transfers.pending
    bad = () if first_bad is None else load.block_ids[first_bad:]
    transfers.complete(load, TransferOutcome.FAILED, bad)
    transfers.auto = True
    finish(engine, offloading)
    assert [request.reused_blocks for request in recorded(path)] == [0, 2, num_reused]
    assert engine.requests["long"].num_device_tokens == 4 * num_reused


def test_a_trace_has_neither_tokens_nor_hashes(
    tiny_model: Callable[[str], str], make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    traces = []
    began = time.monotonic()
    for path in (tmp_path / "a", tmp_path / "b"):
        llm = make_llm(tiny_model("llama"), record=path, block_tokens=BLOCK_TOKENS)
        llm.generate([[11, 12, 13, 14, 15]], SamplingParams(max_tokens=5))
        traces.append(json.loads(path.read_text()))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for trace in traces:
        assert trace.keys() == {
            "timestamp_ms",
            "ended_ms",
            "input_length",
            "output_length",
            "block_tokens",
            "step_tokens",
            "reused_blocks",
            "hash_ids",
            "output_hash_ids",
            "stop",
        }
        assert (trace["input_length"], trace["output_length"]) == (5, 5)
        assert 0 < trace["timestamp_ms"] < trace["ended_ms"] < 1000 * (time.monotonic() - began)
        assert (len(trace["hash_ids"]), len(trace["output_hash_ids"])) == (1, 1)
        assert all(0 <= number < 2**53 for number in trace["hash_ids"])
    # The same prompt in another file: whoever has one file and a guess cannot tell.
    assert traces[0]["hash_ids"] != traces[1]["hash_ids"]


def test_a_file_that_cannot_be_made_is_refused_at_once(tiny_model: Callable[[str], str], tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()
    for path in (there, tmp_path / "no" / "where", ""):
        with pytest.raises(ConfigError, match="record"):
            LLM(tiny_model("llama"), record=path)


def test_a_file_that_cannot_be_made_leaves_no_connector_open(tmp_path: Path) -> None:
    closed = []

    class Closing(NullConnectorScheduler):
        def shutdown(self) -> None:
            closed.append(self)

    path = tmp_path / "trace"
    factory = RecordingFactory(ClassFactory(lambda _: Closing(), NULL_CONNECTOR.make_worker_side), str(path))
    path.touch()  # by somebody else, since it was looked at
    with pytest.raises(ConfigError, match="record"):
        factory.make_scheduler_side(SchedulerEnvironment(simulated_layout(20), lambda: 0.0))
    assert len(closed) == 1


def test_every_replica_has_a_file_of_its_own(
    tiny_model: Callable[[str], str], make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    make_llm(tiny_model("llama"), record=tmp_path / "trace-{pid}")
    assert [path.name for path in tmp_path.iterdir()] == [f"trace-{os.getpid()}"]


def test_a_full_disk_ends_the_trace_and_nothing_else(
    tiny_model: Callable[[str], str],
    make_llm: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm = make_llm(tiny_model("llama"), record=tmp_path / "trace", block_tokens=BLOCK_TOKENS)
    sampling = SamplingParams(max_tokens=2)
    llm.generate([[1, 2, 3, 4, 5]], sampling)

    def full(_: int, __: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "cargohold"):
        patch.setattr(os, "write", full)
        outputs = [llm.generate([[1, 2, 3, 4, 5]], sampling)[0] for _ in range(3)]
    assert all(output.finish_reason == "length" for output in outputs)
    assert sum("No space left" in record.message for record in caplog.records) == 1
    assert len(recorded(tmp_path / "trace")) == 1


def test_a_trace_says_how_each_turn_ended(
    tiny_model: Callable[[str], str], make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    llm = make_llm(tiny_model("llama"), record=tmp_path / "trace", block_tokens=BLOCK_TOKENS)
    prompt = [11, 12, 13, 14, 15]
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=5))
    llm.generate(
        [prompt], SamplingParams(stop_token_ids=output.token_ids)
    )  # the model has no tokenizer to tell calls by

    def begin_and_abort(engine: LLMEngine) -> None:
        request_id = engine.add_request(prompt)
        engine.step()
        engine.abort(request_id)

    in_engine(llm, begin_and_abort)
    settle(llm)
    ends = [request.turn_end for request in recorded(tmp_path / "trace")]
    assert ends == [TurnEnd.LENGTH, TurnEnd.UNKNOWN, TurnEnd.ABORT]


def test_calls_of_tools_are_told_from_answers_by_text_where_a_model_has_no_token_for_them(
    make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    scripts = {"look": ("<tool", "_call>{}"), "talk": ("At noon.",), "json": ('{"at": 12}',)}
    model = save_scripted_model(tmp_path / "model", scripts)
    llm = make_llm(model, record=tmp_path / "trace", block_tokens=BLOCK_TOKENS)
    llm.generate([f"High water, please<|{name}|>" for name in scripts], SamplingParams(max_tokens=20))
    ends = {request.turn_end for request in recorded(tmp_path / "trace")}
    assert ends == {TurnEnd.ANSWER, TurnEnd.UNKNOWN, TurnEnd.TOOL_CALL}


def test_an_aborted_request_that_never_ran_leaves_no_line(
    tiny_model: Callable[[str], str], make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    llm = make_llm(tiny_model("llama"), record=tmp_path / "trace", block_tokens=BLOCK_TOKENS)

    def add_and_abort(engine: LLMEngine) -> None:
        engine.abort(engine.add_request([1, 2, 3, 4, 5]))

    in_engine(llm, add_and_abort)
    settle(llm)
    assert recorded(tmp_path / "trace") == []


def test_the_factory_can_be_sent_to_workers(tmp_path: Path) -> None:
    import pickle  # noqa: PLC0415

    factory: Any = RecordingFactory(NULL_CONNECTOR, str(tmp_path / "trace"))
    (tmp_path / "trace").touch()
    assert pickle.loads(pickle.dumps(factory)) == factory
