"""Real models split over several workers: the same tokens as one worker gives, whatever happens to their transfers."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import transformers
from packaging.version import Version

from cargohold import LLM, ConfigError, DiskTierConfig, EngineDeadError, OffloadConfig, UnsupportedModelError
from cargohold.connector.offloading.factory import OffloadingFactory
from cargohold.protocol import metrics
from tests.executor.split import OFFLOAD, OPTIONS, SAMPLING, MakeModel, prompts, serve
from tests.executor.wrapped import FailingLoads, WrapsTransfersOnRank, stores_nothing


@pytest.fixture
def no_process_left() -> Iterator[None]:
    yield
    assert not multiprocessing.active_children()


@pytest.mark.long  # each process imports for many seconds; what starts as outside of tests in ``test_executors`` does not
@pytest.mark.usefixtures("no_process_left")
def test_processes_that_are_started_as_outside_of_tests_answer_as_a_whole_model(
    model_with_heads: MakeModel, make_llm: Callable[..., LLM]
) -> None:
    check_split_as_whole(model_with_heads("qwen3", 2), make_llm)


@pytest.mark.parametrize(
    ("kind", "num_kv_heads"), [pytest.param("qwen3", 2, id="norms of keys"), pytest.param("gemma3", 4, id="windows")]
)
@pytest.mark.usefixtures("no_process_left", "forked_ranks")
def test_a_split_model_answers_as_a_whole_one(
    kind: str, num_kv_heads: int, model_with_heads: MakeModel, make_llm: Callable[..., LLM]
) -> None:
    check_split_as_whole(model_with_heads(kind, num_kv_heads), make_llm)


@pytest.mark.usefixtures("no_process_left", "forked_ranks")
def test_a_vocabulary_that_two_workers_do_not_divide_is_there_twice_or_refused(
    model_with_heads: MakeModel, make_llm: Callable[..., LLM]
) -> None:
    model = model_with_heads("llama", 2, vocab_size=199)
    if Version(transformers.__version__) >= Version("5.21"):
        check_split_as_whole(model, make_llm)
    else:
        with pytest.raises(UnsupportedModelError, match=r"llama': transformers cannot run it"):
            LLM(model, **OPTIONS, tensor_parallel_size=2)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.21"), reason="transformers cannot split the model")
@pytest.mark.usefixtures("no_process_left", "forked_ranks")
def test_what_both_workers_hold_is_kept_once(
    model_with_heads: MakeModel, make_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    model = model_with_heads("llama", 1)
    alone, _ = serve(make_llm(model, **OPTIONS))
    disk = DiskTierConfig(directory=tmp_path, max_bytes="64MiB", reserve_bytes=0)
    offload = OffloadConfig(host_bytes="8MiB", tiers=[disk], restore="always", restore_timeout_s=60.0, verify="off")
    for found_on_disk in (False, True):
        llm = make_llm(model, **OPTIONS, tensor_parallel_size=2, offload=offload)
        layout, factory = llm.plan.layout, OffloadingFactory(offload)
        assert factory.num_slots(layout) == 8 * 1024**2 // layout.block_bytes
        tokens, restored = serve(llm)
        stats = llm.stats()
        llm.close()
        assert tokens == alone
        assert restored > 100
        if found_on_disk:
            assert stats[metrics.MOVED.of("disk", "out")] > 0
        else:
            assert stats[metrics.COPIED_BLOCKS.of("store")] == stats[metrics.STORED.of("host")]
            assert stats[metrics.MOVED.of("disk", "in")] == stats[metrics.STORED.of("host")] * layout.block_bytes
            assert stats[metrics.COPIED_BLOCKS.of("load")] == 2 * stats[metrics.PLANNED_BLOCKS.of("load")], (
                "each worker loads all"
            )

    forgetful = WrapsTransfersOnRank(OffloadingFactory(OFFLOAD), rank=1, wrap=stores_nothing)
    tokens, _ = serve(make_llm(model, **OPTIONS, tensor_parallel_size=2, offload=forgetful))
    assert tokens != alone, "both read what either is to write"


def check_split_as_whole(model: str, make_llm: Callable[..., LLM]) -> None:
    alone, _ = serve(make_llm(model, **OPTIONS))
    split = make_llm(model, **OPTIONS, tensor_parallel_size=2, offload=OFFLOAD)
    tokens, restored = serve(split)
    assert tokens == alone
    assert restored > 100, "the ranks' shards of the tier were used"


@pytest.mark.usefixtures("no_process_left", "forked_ranks")
def test_a_rank_whose_tier_fails_every_load_costs_no_token(
    model_with_heads: MakeModel, make_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    model = model_with_heads("llama", 2)
    alone, _ = serve(make_llm(model, **OPTIONS))
    broken = WrapsTransfersOnRank(OffloadingFactory(OFFLOAD), rank=1, wrap=FailingLoads)
    tokens, restored = serve(make_llm(model, **OPTIONS, tensor_parallel_size=2, offload=broken))
    assert tokens == alone
    assert restored == 0
    assert "failed" in caplog.text


@pytest.mark.usefixtures("no_process_left", "forked_ranks")
def test_a_rank_killed_between_collectives_is_named(model_with_heads: MakeModel) -> None:
    llm = LLM(model_with_heads("llama", 2), **OPTIONS, tensor_parallel_size=2, step_timeout_s=60)
    with LLM(llm.plan.config.model, **OPTIONS) as whole:
        assert llm.plan.layout.block_bytes * 2 == whole.plan.layout.block_bytes
    (rank,) = (process for process in multiprocessing.active_children() if process.name == "cargohold-worker-1")
    stream = llm.stream(prompts()[0], SAMPLING)
    next(stream)
    rank.kill()
    with pytest.raises(EngineDeadError, match="worker 1 died: killed by SIGKILL"):
        list(stream)


MEETING = """
import multiprocessing, os, socket, sys, psutil
from cargohold.engine.executor import RankPlace
from cargohold.engine.model.weights import join_ranks

def meet(rank):
    join_ranks(RankPlace(rank, 2, sys.argv[2]), "cpu")
    listening = [found for found in psutil.Process().net_connections("inet") if found.status == "LISTEN"]
    os.write(1, "".join(f"listens at {found.laddr.ip}\\n" for found in listening).encode())  # at once: lines stay whole

if __name__ == "__main__":
    socket.sethostname(sys.argv[1])
    ranks = [multiprocessing.Process(target=meet, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a process a machine's name of its own")
def test_workers_of_one_machine_listen_to_nobody_else(tmp_path: Path) -> None:
    """Found by looking: they listened where the machine's name leads, for anybody in its network."""
    of_network = [address.address for card in psutil.net_if_addrs().values() for address in card]
    named = next((text for text in of_network if text.count(".") == 3 and not text.startswith("127.")), None)
    if named is None:
        pytest.skip("there is no network")
    script = tmp_path / "meeting.py"
    script.write_text(MEETING)
    run = subprocess.run(
        ["unshare", "--uts", sys.executable, script, named, f"file://{tmp_path / 'rendezvous'}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare failed" in run.stderr:
        pytest.skip(run.stderr)
    found = re.findall(r"(?m)^listens at (.*)$", run.stdout)  # torch may write lines of its own
    assert found, run.stderr
    assert set(found) == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tensor_parallel_size": 3},
            r"tensor_parallel_size=3 .* 4 query heads and 2 KV heads, which can be split over 1 or 2",
        ),
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size=0"),
        ({"tensor_parallel_size": 2, "executor": "inline"}, r"executor='inline' .* multiprocess or ray"),
        ({"executor": "threads"}, r"executor='threads' .* inline, multiprocess, ray"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, r"device='cuda:1' .* a device of its own"),
        ({"step_timeout_s": 0}, r"step_timeout_s=0"),
    ],
)
def test_impossible_splits_are_refused_by_name(
    options: dict[str, Any], message: str, tiny_model: Callable[[str], str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(tiny_model("llama"), **options)


def test_a_share_of_the_tier_that_its_machine_cannot_hold_is_refused(
    tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cargohold.tiers.memory.memory_limit_bytes", lambda: 2**20)
    with pytest.raises(ConfigError, match=r"host_bytes=\d+ .* one worker's share, and its machine allows 1.0 MiB"):
        LLM(tiny_model("llama"), **OPTIONS, offload=OFFLOAD)
