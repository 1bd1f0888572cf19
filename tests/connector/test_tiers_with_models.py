"""Real tiers under real models: prompts are restored by a process that comes later, and tokens are those without."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from cargohold import LLM, ConfigError, OffloadConfig, RequestOutput, SamplingParams
from cargohold.connector.offloading import OffloadingFactory, OffloadingScheduler
from cargohold.deadlines import ANSWER, LOCK, PROGRESS
from cargohold.engine.model.info import ModelInfo, describe_model
from cargohold.errors import ContractError
from cargohold.protocol import BlockStored, SchedulerEnvironment, metrics
from cargohold.tiers import (
    BreakerConfig,
    DiskTierConfig,
    QueueConfig,
    SharedTierConfig,
    Tier,
    TierConfig,
    TierQueue,
    open_tier,
)
from cargohold.tiers.kinds import open_inventory
from tests.forks import fork_server
from tests.llms import SettledLLM
from tests.models import CONFIGS, VOCAB_SIZE, save_model
from tests.wrapped_tiers import FaultyTier, MemoryTier

SAMPLING = SamplingParams(max_tokens=9)
OPTIONS: dict[str, Any] = {"block_tokens": 4, "num_device_blocks": 200, "max_model_len": 200}


def prompts(num: int = 3, length: int = 100) -> list[list[int]]:
    generator = random.Random(5)
    return [[generator.randrange(VOCAB_SIZE) for _ in range(length)] for _ in range(num)]


def disk(directory: Path, **options: Any) -> DiskTierConfig:
    return DiskTierConfig(**{"directory": str(directory), "max_bytes": "64MiB", "reserve_bytes": 0, **options})


def offload(*tiers: TierConfig, **options: Any) -> OffloadConfig:
    return OffloadConfig(
        **{"host_bytes": "16MiB", "tiers": tiers, "restore": "always", "restore_timeout_s": 60.0, **options}
    )


def ask(llm: LLM, asked: list[list[int]]) -> list[RequestOutput]:
    return [llm.generate([prompt], SAMPLING)[0] for prompt in asked]


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def restored(outputs: list[RequestOutput]) -> list[dict[str, int]]:
    return [dict(output.metrics.restored_tokens) for output in outputs]


@pytest.mark.parametrize(
    ("kind", "blocks_per_chunk"),
    [
        pytest.param(kind, blocks, marks=() if (kind, blocks) in {("llama", 1), ("gemma3", 3)} else pytest.mark.long)
        for kind in CONFIGS
        for blocks in (1, 3)
    ],
)
def test_a_restarted_engine_restores_from_disk(
    kind: str, blocks_per_chunk: int, tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    with SettledLLM(tiny_model(kind), **OPTIONS) as plain:
        expected = tokens(ask(plain, prompts()))
    config = offload(disk(tmp_path), blocks_per_chunk=blocks_per_chunk)
    with SettledLLM(tiny_model(kind), offload=config, **OPTIONS) as first:
        assert tokens(ask(first, prompts())) == expected
    again = ask(make_llm(tiny_model(kind), offload=config, **OPTIONS), prompts())
    assert tokens(again) == expected
    chunk = 4 * blocks_per_chunk
    assert restored(again) == [{"disk": 100 // chunk * chunk}] * 3


@pytest.mark.parametrize("key", [None, "env:CARGOHOLD_TEST_KEY"], ids=["plain", "encrypted"])
def test_a_restarted_engine_restores_packed_kv_from_disk_and_store(
    key: str | None,
    tmp_path: Path,
    tiny_model: Callable[[str], str],
    make_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("zstandard", reason="needs cargohold[packing]")
    monkeypatch.setenv("CARGOHOLD_TEST_KEY", "7" * 64)
    options = {**OPTIONS, "dtype": "bfloat16"}
    with SettledLLM(tiny_model("llama"), **options) as plain:
        expected = tokens(ask(plain, prompts()))
    store = SharedTierConfig(url=f"file://{tmp_path}/shared", pack="exponent", encryption_key=key)
    packed = disk(tmp_path / "disk", pack="exponent", encryption_key=key)
    with SettledLLM(tiny_model("llama"), offload=offload(packed, store, blocks_per_chunk=3), **options) as first:
        assert tokens(ask(first, prompts())) == expected
    for tier, name in ((packed, "disk"), (store, "shared")):
        config = offload(tier, blocks_per_chunk=3)
        again = make_llm(tiny_model("llama"), offload=config, **options)
        answers = ask(again, prompts())
        assert tokens(answers) == expected and restored(answers) == [{name: 96}] * 3
        (holding,) = open_inventory(str(tmp_path / "disk") if name == "disk" else store.url).holdings()
        assert holding.plain_bytes > (
            0 if name == "disk" else holding.num_bytes
        )  # chunks smaller than a page of a disk
        again.close()


def test_a_directory_shared_by_url_serves_another_engine_while_the_first_runs(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    pytest.importorskip("obstore", reason="object stores need cargohold[shared]")
    config = offload(SharedTierConfig(url=f"file://{tmp_path}"))
    first = make_llm(tiny_model("llama"), offload=config, **OPTIONS)
    expected = tokens(ask(first, prompts()))
    second = make_llm(tiny_model("llama"), offload=config, **OPTIONS)
    again = ask(second, prompts())
    assert tokens(again) == expected
    assert restored(again) == [{"shared": 100}] * 3


def test_events_say_whether_others_have_what_is_stored(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    pytest.importorskip("obstore", reason="object stores need cargohold[shared]")
    config = offload(disk(tmp_path / "disk"), SharedTierConfig(url=f"file://{tmp_path}/shared"))
    (tmp_path / "shared").mkdir()
    llm = make_llm(tiny_model("llama"), offload=config, kv_events=True, **OPTIONS)
    ask(llm, prompts(num=1))
    stored = {(event.medium, event.locality) for event in llm.take_events() if isinstance(event, BlockStored)}
    assert stored == {("GPU", None), ("CPU", None), ("STORAGE", "LOCAL"), ("STORAGE", "REMOTE")}


@pytest.mark.parametrize("key", [None, "env:CARGOHOLD_TEST_KEY"])
def test_a_restarted_engine_announces_what_is_on_disk(
    key: str | None,
    tmp_path: Path,
    tiny_model: Callable[[str], str],
    make_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CARGOHOLD_TEST_KEY", "7" * 64)
    config = offload(disk(tmp_path, encryption_key=key), blocks_per_chunk=3)
    with SettledLLM(tiny_model("llama"), offload=config, kv_events=True, **OPTIONS) as first:
        ask(first, prompts())
        first.settle()
        expected = on_disk(first)
    assert sum(map(len, expected)) > 200
    again = make_llm(tiny_model("llama"), offload=config, kv_events=True, **OPTIONS)
    again.settle()
    assert on_disk(again) == expected, "with tokens, before anything was asked"


def on_disk(llm: LLM) -> list[tuple[int, ...]]:
    """The tokens that are announced to be on disk, sorted."""
    events = [event for event in llm.take_events() if isinstance(event, BlockStored) and event.medium == "STORAGE"]
    return sorted(event.token_ids for event in events)


def test_other_weights_under_the_same_name_find_nothing(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    path = Path(save_model("llama", tmp_path / "models"))
    config = offload(disk(tmp_path / "kv"))
    with SettledLLM(str(path), offload=config, **OPTIONS) as first:
        ask(first, prompts())
    (weights,) = path.glob("*.safetensors")
    contents = bytearray(weights.read_bytes())
    contents[-1] ^= 1  # a bit of the last weight
    weights.write_bytes(contents)
    assert restored(ask(make_llm(str(path), offload=config, **OPTIONS), prompts())) == [{}] * 3


def test_another_version_of_the_models_code_finds_nothing(
    tmp_path: Path, tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: KV that one transformers had computed was restored to another, whatever it had mended."""
    for version, found in (("1.0", 0), ("1.0", 3), ("1.1", 0)):
        monkeypatch.setattr("cargohold.engine.config.version", {"transformers": version}.__getitem__)
        with SettledLLM(tiny_model("llama"), offload=offload(disk(tmp_path)), **OPTIONS) as llm:
            assert sum(map(bool, restored(ask(llm, prompts())))) == found


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("workers", [{}, {"tensor_parallel_size": 2, "executor": "multiprocess"}], ids=["one", "two"])
def test_weights_that_were_replaced_after_they_were_loaded_are_refused_tiers(
    workers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by trying: KV of the old weights was kept under the name of the new ones, and gave wrong tokens later."""
    model = Path(save_model("llama", tmp_path / "models", vocab_size=200))  # which two workers divide
    shutil.copy(model / "model.safetensors", tmp_path / "trained")
    tiers = disk(tmp_path / "kv")
    started = describe_model

    def replaced_meanwhile(*options: Any) -> ModelInfo:
        """Replaced after the engine has begun to read the model, and so at the latest when its weights are digested."""
        info = started(*options)
        time.sleep(0.05)  # the clock of a file system ticks every few milliseconds
        (tmp_path / "trained").replace(model / "model.safetensors")
        return info

    with monkeypatch.context() as training:
        training.setattr("cargohold.base_llm.describe_model", replaced_meanwhile)
        with pytest.raises(ConfigError, match="changed or replaced while the engine started"):
            SettledLLM(model, offload=offload(tiers), **OPTIONS, **workers)
    assert not list((tmp_path / "kv").rglob("shard.json"))
    with SettledLLM(model, offload=offload(tiers), **OPTIONS, **workers) as llm:
        assert ask(llm, prompts(1))


def test_damaged_files_are_misses(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    config = offload(disk(tmp_path))
    with SettledLLM(tiny_model("llama"), offload=config, **OPTIONS) as first:
        expected = tokens(ask(first, prompts()))
    generator = random.Random(1)
    num_flipped = 0
    for file in (file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > 2**16):
        contents = bytearray(file.read_bytes())
        for at in range(0, len(contents) - 512, 512):  # padding may be damaged unnoticed, so often enough
            contents[at + generator.randrange(512)] ^= 1 << generator.randrange(8)
            num_flipped += 1
        file.write_bytes(contents)
    assert num_flipped > 100
    again = ask(make_llm(tiny_model("llama"), offload=config, **OPTIONS), prompts())
    assert tokens(again) == expected
    assert restored(again) == [{}] * 3


def test_bytes_to_and_from_a_disk_and_damage_are_counted(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    config = offload(disk(tmp_path))
    with SettledLLM(tiny_model("llama"), offload=config, **OPTIONS) as first:
        ask(first, prompts(2))
        block_bytes, stats = first.plan.layout.block_bytes, first.stats()
        assert (
            stats[metrics.MOVED.of("disk", "in")]
            == 2 * 27 * block_bytes
            == stats[metrics.STORED.of("disk")] * block_bytes
        )
        assert not stats[metrics.MOVED.of("disk", "out")] and not stats[metrics.CORRUPT.of("disk")]
    (data,) = tmp_path.rglob("*.data")
    contents = bytearray(data.read_bytes())
    contents[100] ^= 1  # the first chunk
    data.write_bytes(contents)
    again = make_llm(tiny_model("llama"), offload=config, **OPTIONS)
    ask(again, prompts(2))
    stats = again.stats()
    assert stats[metrics.CORRUPT.of("disk")] == 1
    assert (
        stats[metrics.MOVED.of("disk", "out")]
        == 49 * block_bytes
        == stats[metrics.OTHER.of("disk_loaded_chunks")] * block_bytes
    )


def test_a_directory_that_disappears_costs_misses(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    """Moved away while the engine runs; what the engine has open does not matter to a rename, so its names go as well."""
    config = offload(disk(tmp_path / "kv"), host_bytes="1MiB")
    llm = make_llm(tiny_model("llama"), offload=config, **OPTIONS)
    expected = tokens(ask(llm, prompts(8)))
    for file in sorted((tmp_path / "kv").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    assert tokens(ask(llm, prompts(8))) == expected
    assert tokens(ask(llm, prompts(8))) == expected


def test_two_engines_do_not_share_a_directory(
    tmp_path: Path,
    tiny_model: Callable[[str], str],
    make_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = offload(disk(tmp_path))
    monkeypatch.setattr("cargohold.tiers.disk.shard.LOCK", replace(LOCK, plus_s=0.0))
    make_llm(tiny_model("llama"), offload=config, **OPTIONS)
    with pytest.raises(ConfigError) as caught:
        SettledLLM(tiny_model("llama"), offload=config, **OPTIONS)
    assert caught.value.key == "tiers[0].directory"


class TwoReports(OffloadingFactory):
    """Expects reports of more workers than there are."""

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        side = super().make_scheduler_side(environment)
        side.get_finished_count = lambda: 2  # type: ignore[method-assign]  # wrong on purpose
        return side


@pytest.mark.parametrize("reason", ["the same directory twice", "too many reports"])
def test_an_engine_that_was_refused_leaves_its_directory_to_the_next(
    reason: str, tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    """Found by trying: threads of the refused one used it until the process ended."""
    config = offload(disk(tmp_path))
    impossible: Any = TwoReports(config) if reason == "too many reports" else [config, config]
    with pytest.raises((ConfigError, ContractError)):
        SettledLLM(tiny_model("llama"), offload=impossible, **OPTIONS)
    make_llm(tiny_model("llama"), offload=config, **OPTIONS)


@pytest.mark.parametrize("directory", ["/proc/cargohold", "/dev/null/kv"])
def test_a_directory_that_cannot_be_is_refused_by_name(directory: str, tiny_model: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError) as caught:
        SettledLLM(tiny_model("llama"), offload=offload(disk(Path(directory))), **OPTIONS)
    assert caught.value.key == "tiers[0].directory"


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("directory", {"directory": "/dev/null/kv"}),
        ("max_bytes", {"max_bytes": "1000000GiB"}),
        ("max_bytes", {"max_bytes": "4KiB"}),
        ("encryption_key", {"encryption_key": "env:CARGOHOLD_NO_SUCH_KEY"}),
    ],
)
def test_tiers_that_cannot_be_are_refused_before_the_weights_are_loaded(  # which may take minutes
    mode: str,
    key: str,
    option: dict[str, Any],
    tmp_path: Path,
    tiny_model: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cargohold.base_llm.make_executor", lambda *_: pytest.fail("a worker was started"))
    config = OffloadConfig(mode=mode, host_bytes="16MiB", tiers=[replace(disk(tmp_path), **option)])
    with pytest.raises(ConfigError) as caught:
        SettledLLM(tiny_model("llama"), offload=[config], **OPTIONS)
    assert caught.value.key == f"connectors[0].tiers[0].{key}"


def test_a_directory_that_hangs_at_the_start_is_told_and_refused(
    tmp_path: Path, tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by trying with a disk that hangs: nothing was said, and the start took no Ctrl-C."""
    answers, really_look = threading.Event(), os.statvfs

    def look(place: str) -> os.statvfs_result:
        answers.wait()
        return really_look(place)

    monkeypatch.setattr(os, "statvfs", look)
    with monkeypatch.context() as patch:
        patch.setattr("cargohold.tiers.opening.ANSWER", replace(ANSWER, plus_s=0.01))
        with pytest.raises(ConfigError, match=rf"tiers\[0\].directory='{tmp_path}' .* has not answered for 0.01 s"):
            LLM(tiny_model("llama"), offload=offload(disk(tmp_path)), **OPTIONS)
    assert f"the start has waited 0.01 s for {tmp_path}" in caplog.text
    answers.clear()
    monkeypatch.setattr("cargohold.tiers.opening._SILENT_S", 0.0)
    monkeypatch.setattr("cargohold.tiers.opening.logger.warning", lambda *_: answers.set())
    with SettledLLM(tiny_model("llama"), offload=offload(disk(tmp_path)), **OPTIONS) as slow:
        assert len(ask(slow, prompts(1))) == 1


@pytest.mark.parametrize("url", ["file:///dev/null/kv", "redis://127.0.0.1:1/0?no_such_option=1"])
def test_stores_that_cannot_be_are_refused_before_the_weights_are_loaded(
    url: str, tiny_model: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cargohold.base_llm.make_executor", lambda *_: pytest.fail("a worker was started"))
    with pytest.raises(ConfigError) as caught:
        SettledLLM(tiny_model("llama"), offload=offload(SharedTierConfig(url=url)), **OPTIONS)
    assert caught.value.key == "tiers[0].url"


def test_a_small_host_over_a_large_disk(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    """More conversations than host memory and device together hold: what comes back comes from disk, batched."""
    asked = prompts(12)
    options = OPTIONS | {"num_device_blocks": 60, "max_model_len": 120}
    with SettledLLM(tiny_model("llama"), **options) as plain:
        expected = tokens(ask(plain, asked))
    llm = make_llm(tiny_model("llama"), offload=offload(disk(tmp_path), host_bytes="270KiB"), **options)
    num_restored = 0
    for _ in range(3):
        outputs = llm.generate(asked, SAMPLING)
        assert tokens(outputs) == expected
        num_restored += sum(counts.get("disk", 0) for counts in restored(outputs))
    assert num_restored > 600


def test_as_one_of_several_connectors(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    offloads: list[Any] = [offload(disk(tmp_path)), OffloadConfig(mode="lazy", host_bytes="1MiB")]
    with SettledLLM(tiny_model("gemma3"), offload=offloads, **OPTIONS) as first:
        expected = tokens(ask(first, prompts()))
    again = ask(make_llm(tiny_model("gemma3"), offload=offloads, **OPTIONS), prompts())
    assert tokens(again) == expected
    assert restored(again) == [{"disk": 100}] * 3


@pytest.mark.usefixtures("forked_ranks")
def test_on_two_workers_each_with_its_shard(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, make_llm: Callable[..., LLM]
) -> None:
    model = save_model("llama", tmp_path_factory.mktemp("models"), vocab_size=200)  # which two workers divide
    small = {"num_device_blocks": 40, "max_model_len": 120, "tensor_parallel_size": 2}
    config = offload(disk(tmp_path), host_bytes="64KiB", restore_timeout_s=60.0)
    llm = make_llm(model, offload=config, **(OPTIONS | small))
    expected = tokens(ask(llm, prompts()))
    again = ask(llm, prompts())
    assert tokens(again) == expected
    assert all(counts["disk"] > 40 and sum(counts.values()) == 100 for counts in restored(again)), (
        "the rest is in host memory"
    )


@pytest.mark.parametrize("trouble", ["fails", "hangs"])
def test_a_medium_in_trouble_costs_misses_and_is_used_again_when_it_is_back(
    trouble: str,
    tmp_path: Path,
    tiny_model: Callable[[str], str],
    make_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real queues and threads over a medium that the test holds in its hand."""
    memory: dict[int, MemoryTier] = {}
    is_well = threading.Event()

    def fault(_: str) -> str | None:
        if trouble == "fails":
            return None if is_well.is_set() else "away"
        is_well.wait()
        return None

    def opened(_: TierConfig, __: object, chunk_sizes: Sequence[int], *___: object, **____: object) -> Tier:
        chunk_bytes = max(chunk_sizes)
        return FaultyTier(memory.setdefault(chunk_bytes, MemoryTier(chunk_bytes, name="disk")), fault)

    monkeypatch.setattr("cargohold.connector.offloading.factory.open_tier", opened)
    soon_tried = partial(QueueConfig, breaker=BreakerConfig(cooldown_s=0.05, max_cooldown_s=0.1))
    monkeypatch.setattr("cargohold.connector.offloading.factory.QueueConfig", soon_tried)
    config = offload(disk(tmp_path), restore_timeout_s=0.1, transfer_timeout_s=0.5)
    with SettledLLM(tiny_model("llama"), **OPTIONS) as plain:
        expected = tokens(ask(plain, prompts(3)))
    with SettledLLM(tiny_model("llama"), offload=config, **OPTIONS) as llm:
        outputs = ask(llm, prompts(3))
        assert tokens(outputs) == expected
        assert not any(counts.get("disk") for counts in restored(outputs))
        is_well.set()
        others = iter(range(10**6))
        while not any(tier.usage().num_chunks for tier in memory.values()):  # until the breaker lets work through
            llm.generate([[next(others) % VOCAB_SIZE] * 50], SamplingParams(max_tokens=1))
    config = replace(config, restore_timeout_s=60.0, transfer_timeout_s=60.0)
    again = make_llm(tiny_model("llama"), offload=config, **OPTIONS)
    assert tokens(ask(again, prompts(3))) == expected
    (tier,) = memory.values()
    assert tier.usage().num_chunks >= 3 * 25
    assert restored(ask(make_llm(tiny_model("llama"), offload=config, **OPTIONS), prompts(3)))[0]["disk"] == 100


def test_a_directory_that_another_engine_uses_for_the_model_is_refused_before_the_model_is_loaded(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by use: in a rolling restart it was refused when all weights had been loaded."""
    monkeypatch.setattr("cargohold.tiers.disk.shard.LOCK", replace(LOCK, plus_s=0.0))
    first = make_llm(tiny_model("llama"), offload=offload(disk(tmp_path)), **OPTIONS)
    expected = tokens(ask(first, prompts(1)))
    with monkeypatch.context() as patch:
        patch.setattr("cargohold.base_llm.build_engine", lambda *_: pytest.fail("it was built"))
        with pytest.raises(ConfigError, match="another tier uses it for the same model"):
            LLM(tiny_model("llama"), offload=offload(disk(tmp_path)), **OPTIONS)
    make_llm(tiny_model("qwen3"), offload=offload(disk(tmp_path)), **OPTIONS)  # which has files of its own there
    first.close()
    assert (
        tokens(ask(make_llm(tiny_model("llama"), offload=offload(disk(tmp_path)), **OPTIONS), prompts(1))) == expected
    )


def test_what_is_being_written_when_the_engine_stops_is_there_after_a_restart(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: it was cancelled. The disk takes nothing until the engine, which waits no longer, is being stopped."""
    is_stopping = threading.Event()
    shutdown = TierQueue.shutdown

    def stop(queue: TierQueue) -> None:
        is_stopping.set()
        shutdown(queue)

    def fault(_: str) -> str | None:
        is_stopping.wait()
        return None

    def opened(*args: Any, **named: Any) -> Tier:
        return FaultyTier(open_tier(*args, **named), fault)

    config = offload(disk(tmp_path), restore_timeout_s=0.01)
    with monkeypatch.context() as patched:
        patched.setattr("cargohold.connector.offloading.factory.open_tier", opened)
        patched.setattr("cargohold.tiers.scheduler_side.lower_tiers.PROGRESS", replace(PROGRESS, plus_s=0.05))
        patched.setattr(TierQueue, "shutdown", stop)
        with SettledLLM(tiny_model("llama"), offload=config, **OPTIONS) as first:
            expected = tokens(ask(first, prompts(1)))
            assert not is_stopping.is_set()
    again = ask(make_llm(tiny_model("llama"), offload=offload(disk(tmp_path)), **OPTIONS), prompts(1))
    assert tokens(again) == expected
    assert restored(again)[0]["disk"] == 100


def serve_for_ever(model: str, directory: Path, channel: Connection) -> None:
    with LLM(model, offload=offload(disk(directory, max_bytes="2MiB")), **OPTIONS) as llm:
        while True:
            for prompt in prompts(16):
                llm.generate([prompt], SAMPLING)
                channel.send("served")


def test_killed_in_the_middle_of_its_work(
    tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    """The disk holds half of what it writes, so it was evicting and writing over when it was killed."""
    model = tiny_model("llama")
    ours, theirs = multiprocessing.Pipe()
    process = fork_server().Process(target=serve_for_ever, args=(model, tmp_path, theirs))
    with ours, theirs:
        process.start()
        for _ in range(23):
            assert ours.recv() == "served"
        process.kill()
        process.join()
    with SettledLLM(model, **OPTIONS) as plain:
        newest_first = [*prompts(16)[6::-1], *prompts(16)[:6:-1]]
        expected = tokens(ask(plain, newest_first))
    llm = make_llm(model, offload=offload(disk(tmp_path, max_bytes="2MiB")), **OPTIONS)
    outputs = ask(llm, newest_first)
    assert tokens(outputs) == expected
    assert sum(counts.get("disk", 0) for counts in restored(outputs)) > 100
    assert sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*") if file.is_file()) <= 2 * 1024**2


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3", marks=pytest.mark.long)])
def test_below_a_lazy_connector(
    kind: str, tmp_path: Path, tiny_model: Callable[[str], str], make_llm: Callable[..., LLM]
) -> None:
    """What the device evicts goes to host memory, and from there to disk; what it never evicts goes nowhere."""
    config = OffloadConfig(
        mode="lazy",
        host_bytes="16MiB",
        tiers=[disk(tmp_path)],
        restore="always",
        restore_timeout_s=60.0,
        transfer_timeout_s=60.0,
    )
    options = OPTIONS | {"num_device_blocks": 100, "max_model_len": 110}
    with SettledLLM(tiny_model(kind), **options) as plain:
        expected = tokens(ask(plain, prompts(8)))
    with SettledLLM(tiny_model(kind), offload=config, **options) as first:
        assert tokens(ask(first, prompts(8))) == expected
    again = ask(make_llm(tiny_model(kind), offload=config, **options), prompts(8))
    assert tokens(again) == expected
    assert sum(counts.get("disk", 0) for counts in restored(again)) >= 400
