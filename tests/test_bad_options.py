"""Options that cannot work: one line that names the option, the value and what would work, before weights are loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cargohold import (
    LLM,
    CargoholdError,
    ConfigError,
    DiskTierConfig,
    ModelError,
    OffloadConfig,
    SamplingParams,
    SharedTierConfig,
    UnsupportedModelError,
)
from cargohold.connector.options import parse_offload
from cargohold.errors import one_line

REQUIRED: dict[type, dict[str, str]] = {
    OffloadConfig: {"host_bytes": "1MiB"},
    DiskTierConfig: {"directory": "/var/kv", "max_bytes": "1GiB"},
    SharedTierConfig: {"url": "s3://bucket/kv"},
}


def bad(expected: str, kind: type, **option: Any) -> Any:
    *_, (key, value) = option.items()
    others = {name: given for name, given in REQUIRED.get(kind, {}).items() if name != key}
    return pytest.param(kind, {**others, **option}, expected, id=f"{kind.__name__}-{key}={value!r}")


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        bad("did you mean num_device_blocks", LLM, num_device_block=5),
        bad("there is no such option; there are block_tokens, ", LLM, colour="red"),
        bad("an integer from 1", LLM, block_tokens=0),
        bad("an integer from 1", LLM, max_num_seqs=2.0),
        bad("an integer from 1", LLM, max_num_batched_tokens=True),
        bad("an integer from 2", LLM, max_model_len=1),
        bad("at most 8192", LLM, max_model_len=10000),
        bad("needs 513 blocks", LLM, num_device_blocks=2),
        bad("one of fcfs, priority", LLM, queue_policy="lifo"),
        bad("one of recompute, fail", LLM, load_failure_policy="pray"),
        bad("here that is nothing to set: twice what a copy may take", LLM, load_timeout_s=5),
        bad("true or false", LLM, prefix_caching="yes"),
        bad("one of auto, float32", LLM, dtype="int8"),
        bad("cpu, cuda", LLM, device="tpu"),
        bad("cpu, cuda", LLM, device=torch.device("cpu")),
        bad("an OffloadConfig, the factory", LLM, offload="2GiB"),
        bad("an OffloadConfig, the factory", LLM, offload=[OffloadConfig(host_bytes="1MiB"), 3]),
        bad("an OffloadConfig, the factory", LLM, offload=OffloadConfig),
        bad("such as 2GiB", OffloadConfig, host_bytes="lots"),
        bad("one of ", OffloadConfig, policy="lucky"),
        bad("one of ", OffloadConfig, policy=["lru"]),
        bad("an integer from 1", OffloadConfig, blocks_per_chunk=0),
        bad("above 0 and at most 1", OffloadConfig, max_inflight_fraction=1.5),
        bad("above 0 and at most 1", OffloadConfig, max_inflight_fraction="half"),
        bad("a number of seconds above 0", OffloadConfig, transfer_timeout_s=0),
        bad("a number of seconds above 0", OffloadConfig, transfer_timeout_s="soon"),
        bad("30 s longer than transfer_timeout_s", OffloadConfig, job_timeout_s=10),
        bad("true or false", OffloadConfig, store_generated="never"),
        bad("an integer from 0", OffloadConfig, store_within_steps=0.5),
        bad("such as 2GiB", OffloadConfig, mode="lazy", host_bytes=None),
        bad("an integer from 1", OffloadConfig, mode="lazy", lookahead_blocks=0),
        bad("no option of mode=eager", OffloadConfig, mode="eager", lookahead_blocks=3),
        bad("no option of mode=lazy", OffloadConfig, mode="lazy", blocks_per_chunk=2),
        bad("one of exclusive, eager, lazy", OffloadConfig, mode="fast"),
        bad("did you mean host_bytes?", OffloadConfig, host_byte="1MiB"),
        bad("here that is host_bytes, for all workers together", OffloadConfig, cpu_bytes_to_use=10**9),
        bad("here that is host_bytes", OffloadConfig, DYN_KVBM_CPU_CACHE_GB=4),
        bad("here that is directory of kind=disk", DiskTierConfig, root_dir="/kv"),
        bad("did you mean max_bytes or", DiskTierConfig, max_byte=9),
        bad("an integer from 1", SamplingParams, max_tokens=0),
        bad("an integer from 1", SamplingParams, max_tokens="many"),
        bad("a number from 0", SamplingParams, temperature=-0.1),
        bad("a number from 0", SamplingParams, temperature=float("inf")),
        bad("a number from 0", SamplingParams, temperature=10**400),
        bad("or set temperature above 0", SamplingParams, top_k=40),
        bad("or set temperature above 0", SamplingParams, top_p=0.9),
        bad("above 0 and at most 1", SamplingParams, top_p=0),
        bad("or 0 for all tokens", SamplingParams, top_k=-1),
        bad("or 0 for all tokens", SamplingParams, temperature=1, top_k=2**63),
        bad("or None", SamplingParams, seed="lucky"),
        bad("none of them empty", SamplingParams, stop=["x", ""]),
        bad("none of them empty", SamplingParams, stop=b"x"),
        bad("a list of integers", SamplingParams, stop_token_ids=["</s>"]),
        bad("True or False", SamplingParams, ignore_eos=1),
        bad("at most 1000000", LLM, step_timeout_s=1e7),
        bad("make them smaller", LLM, block_tokens=10**9),
        bad("the path of a directory", DiskTierConfig, directory=5),
        bad("the path of a directory", DiskTierConfig, directory=""),
        bad("one of arc", DiskTierConfig, policy=["lru"]),
        bad("one of all, reused", DiskTierConfig, admission=True),
        bad("one of through, back", DiskTierConfig, write=None),
        bad("such as 2GiB", DiskTierConfig, max_bytes=None),
        bad("such as 2GiB", DiskTierConfig, reserve_bytes=False),
        bad("true or false", DiskTierConfig, direct_io="no"),
        bad("from 1 to 256", DiskTierConfig, num_threads=10**9),
        bad("here that is nothing to set: a start waits 20 s", DiskTierConfig, lock_wait_s=9),
        bad("such as s3://bucket/prefix", SharedTierConfig, url=5),
        bad("the scheme must be one of", SharedTierConfig, url="/var/kv"),
        bad("a third of the connector's transfer_timeout_s", SharedTierConfig, request_timeout_s=5),
        bad("at most 1000000", OffloadConfig, restore_timeout_s=float("inf")),
        bad("seconds from 1, or nothing", SharedTierConfig, ttl_s=0.5),
    ],
)
def test_each_is_refused_by_name(
    kind: Callable[..., object], options: dict[str, Any], expected: str, chat_model: str, no_weights: None
) -> None:
    with pytest.raises(ConfigError) as raised:
        kind(chat_model, **options) if kind is LLM else kind(**options)
    error, (key, value) = raised.value, list(options.items())[-1]
    assert error.key == key
    assert error.value is value or error.value == value or error.value in value
    assert expected in str(error)
    assert str(error) == " ".join(str(error).split()), "one line"


@pytest.mark.parametrize("kind", [DiskTierConfig, SharedTierConfig])
@pytest.mark.parametrize("key", ["0123456789abcdef" * 4, "file:", "", 7, ["env:KEY"]])
def test_what_stands_where_a_key_should_be_named_is_not_repeated(kind: type, key: object) -> None:
    with pytest.raises(ConfigError, match=r"file:PATH or env:NAME, never the key itself") as raised:
        kind(**REQUIRED[kind], encryption_key=key)
    assert raised.value.key == "encryption_key"
    assert not key or str(key) not in str(raised.value).replace("file:PATH", "")


@pytest.mark.parametrize(
    "options",
    [
        {"tiers": [{"kind": "shared", "ulr": "redis://:hunter2@host"}]},
        {"tiers": ["redis://:hun@hunter2@host"]},
        {"tiers": {"kind": "shared", "url": "az://container/kv?sv=1&sig=hunter2"}},
        {"tier": [{"kind": "shared", "url": "redis://user:hunter2@host"}, {"directory": "/x@y"}]},
        {"tiers": [{"kind": "shared", "url": ["rediss://host?ssl_password=hunter2"]}]},
    ],
)
def test_no_refusal_shows_the_password_of_a_url(options: dict[str, Any]) -> None:
    """Found by use: an option that was misspelt was repeated as it was."""
    with pytest.raises(ConfigError) as raised:
        parse_offload({"host_bytes": "1MiB", **options})
    assert "hunter2" not in str(raised.value)
    assert any(place in str(raised.value) for place in ("://host", "az://container/kv")), "what it is about"


def test_options_are_shown_without_the_password_of_a_url() -> None:
    tier = SharedTierConfig(url="redis://:hunter2@host", ttl_s=60)
    for shown in (repr(tier), repr(OffloadConfig(host_bytes="1MiB", tiers=[tier])), tier.describe()):
        assert "hunter2" not in shown and "redis://host" in shown
    assert "ttl_s=60" in repr(tier)


def test_the_directory_of_a_tier_may_be_a_path(tmp_path: Path) -> None:
    assert DiskTierConfig(directory=tmp_path, max_bytes="1GiB").directory == tmp_path


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights were loaded before the error was found")

    monkeypatch.setattr("cargohold.engine.model.hf_runner.load_model", load)


@pytest.mark.parametrize("model", [7, None, b"smollm2", ["smollm2"]])
def test_a_model_is_a_name_or_a_path(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"a directory, a \.gguf file, a hub id or smollm2"):
        LLM(model)


def test_a_path_may_be_a_path(chat_model: str, make_llm: Callable[..., LLM]) -> None:
    assert make_llm(Path(chat_model)).generate("x", SamplingParams(max_tokens=1))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda at: (at / "model.safetensors").unlink(), "model"),
        (lambda at: (at / "model.safetensors").write_bytes(b"\x08" * 64), "weights"),
        (lambda at: (at / "model.safetensors").write_bytes((at / "model.safetensors").read_bytes()[:-400]), "weights"),
        (lambda at: (at / "config.json").write_text("{"), "config.json"),
        (lambda at: (at / "config.json").write_text("[]"), "model"),
    ],
    ids=["no weights", "nonsense", "cut off", "no JSON", "no object"],
)
def test_a_damaged_model_is_refused_in_one_line(
    damage: Callable[[Path], object], expected: str, chat_model: str, tmp_path: Path
) -> None:
    at = shutil.copytree(chat_model, tmp_path / "damaged")
    damage(at)
    with pytest.raises(ModelError) as raised:
        LLM(str(at))
    assert expected in str(raised.value)
    assert str(at) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_errors_of_arguments_are_value_errors_too() -> None:
    with pytest.raises(ValueError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)
    assert issubclass(UnsupportedModelError, CargoholdError)


def test_long_errors_of_others_become_one_short_line() -> None:
    assert one_line(ValueError("a\n  b\t" + "c" * 500), max_chars=20) == "a b ccccccccccccc..."
    assert one_line(KeyError()) == "KeyError"
