"""What is said, refused or turned off at start."""

from __future__ import annotations

import logging
import shutil
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from cargohold.errors import ConfigError

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm import compat
from cargohold.integrations.vllm.connector import CargoholdConnector
from cargohold.integrations.vllm.layout import replicas, translate
from tests.vllm.common import EAGER, LAZY, ask_twice, make_prompts, restored, tokens
from tests.vllm.models import save_tokenizer

STATELESS = {"mamba_cache_mode": "none", "enable_prefix_caching": False}
"""Recurrent state is not kept at block boundaries: nothing can be offloaded."""


def test_a_report_says_what_is_kept(
    vllm_model: Callable[[str], str], start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="cargohold"):
        start(vllm_model("mistral-window"), {**EAGER, "policy": "lru", "blocks_per_chunk": 2})
    said = [record.message for record in caplog.records if record.name.startswith("cargohold")]
    # Whether weights can be read depends on the processor for which vLLM has packed them.
    assert [line for line in said if not line.startswith("which weights the model holds")] == [
        "device pool: 39 blocks of 48 KiB, 1.8 MiB in all",
        "group 0: 3 layers, sliding window of 64 tokens, 32 tokens per block, 1.5 KiB per token",
        "eager: 64 MiB of host memory for 672 chunks of 2 blocks, 96 KiB each; prompts and answers, evicted by lru",
        "a GiB of host memory holds 699,050 tokens of long prompts",
        (
            "if a load fails, vLLM's policy is to recompute its request (load_failure_policy; inside MultiConnector, the outer "
            "kv_load_failure_policy holds)"
        ),
    ]


def test_what_can_never_be_found_is_said_at_start(
    vllm_model: Callable[[str], str], start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Found by use: with blocks longer than the longest prompt, nothing came back."""
    engine = start(vllm_model("mistral-window"), LAZY, block_size=64, max_model_len=64)
    assert "a chunk of 1 block of group 0 has 64 tokens, and max_model_len is 64" in caplog.text
    assert restored(engine.ask(make_prompts(1, 62) * 2, 1)) == 0
    caplog.clear()
    start(vllm_model("mistral-window"), EAGER, block_size=32, max_model_len=64)
    assert "is ever restored" not in caplog.text


def test_a_data_parallel_replica_has_a_disk_of_its_own(
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Found by trying: the second replica found the first one's directory locked, and the server did not start."""
    made = CargoholdConnector.__init__

    def make_second(connector: Any, vllm_config: Any, *rest: Any) -> None:
        vllm_config.parallel_config.data_parallel_index = 1
        made(connector, vllm_config, *rest)

    monkeypatch.setattr(CargoholdConnector, "__init__", make_second)
    monkeypatch.delenv("PYTHONHASHSEED")
    tier = {"kind": "disk", "directory": str(tmp_path), "max_bytes": "64MiB", "reserve_bytes": 0}
    with caplog.at_level(logging.INFO, logger="cargohold"):
        start(vllm_model("llama"), {**EAGER, "tiers": [tier]})
    assert [path.name for path in tmp_path.iterdir()] == ["replica-1"]
    assert [path.parent.parent.name for path in tmp_path.rglob("shard.json")] == ["replica-1"]
    assert "what is being written to a tier then is lost" in caplog.text, "vllm serve kills its engine by default"
    # Found by use: a disk was filled, and nothing was ever found there after a restart.
    has_own_hashes = compat.vllm_version() == (0, 28)
    assert ("set the environment variable PYTHONHASHSEED" in caplog.text) == has_own_hashes
    assert (compat.hashes_differ("sha256"), compat.hashes_differ("xxhash")) == (has_own_hashes, True)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert not compat.hashes_differ("sha256") and not compat.hashes_differ("xxhash")


@pytest.mark.parametrize(
    ("extra", "key"),
    [({**EAGER, "polcy": "lru"}, "polcy"), ({"host_bytes": 1000}, "host_bytes")],
    ids=["unknown option", "no room for one chunk"],
)
def test_impossible_options_stop_the_server_by_name(
    extra: dict[str, Any], key: str, vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=f"kv_connector_extra_config.{key}="):
        start(vllm_model("llama"), extra)


def test_what_vllm_asks_before_it_loads_the_model_refuses_already(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.polcy="):
        CargoholdConnector.requires_piecewise_for_cudagraph({**EAGER, "polcy": "lru"})
    monkeypatch.setitem(sys.modules, "cargohold.tiers.stores.redis", None)  # its import fails
    with pytest.raises(ConfigError, match=r"pip install 'cargohold\[redis\]'"):
        CargoholdConnector.requires_piecewise_for_cudagraph(
            {**EAGER, "tiers": [{"kind": "shared", "url": "redis://h"}]}
        )
    disk = {"kind": "disk", "directory": "/var/kv", "max_bytes": "1GiB"}
    with pytest.raises(
        ConfigError, match=r"kv_connector_extra_config\.tiers\[1\]\.directory='/var/kv'.*2 tiers of this engine"
    ):
        CargoholdConnector.requires_piecewise_for_cudagraph({**EAGER, "tiers": [disk, disk]})
    assert not CargoholdConnector.requires_piecewise_for_cudagraph(dict(EAGER))


def test_a_model_that_cannot_be_served_is_served_without_in_one_line_or_refused(
    vllm_model: Callable[[str], str], start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(vllm_model("lfm2"), EAGER, **STATELESS)
    lines = [record.message for record in caplog.records if "offloading is off" in record.message]
    assert len(lines) == 1
    assert "--mamba-cache-mode" in lines[0]
    answers = engine.ask(make_prompts(1, 200) * 2, 6)
    assert len(answers[0].tokens) == 6
    assert restored(answers) == 0
    with pytest.raises(ConfigError, match="--mamba-cache-mode"):
        start(vllm_model("lfm2"), {**EAGER, "if_unsupported": "refuse"}, **STATELESS)


def test_embeddings_for_which_vllm_must_see_all_tokens_are_made_without(
    vllm_model: Callable[[str], str], start: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by reading: the second time that a prompt came, its KV was loaded, and vLLM's engine died of it."""
    from vllm.config import PoolerConfig  # noqa: PLC0415  # after the environment has been set

    model = str(tmp_path / "llama")
    shutil.copytree(vllm_model("llama"), model)
    save_tokenizer(model)
    options = {"runner": "pooling", "skip_tokenizer_init": False, "max_model_len": 512}
    options["pooler_config"] = PoolerConfig(seq_pooling_type="MEAN")
    engine = start(model, EAGER, **options)
    prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts(4, 330) * 2]
    made = [engine.llm.embed([prompt], use_tqdm=False)[0].outputs.embedding for prompt in prompts]
    assert made[4:] == made[:4]
    assert "offloading is off" in caplog.text and "its pooling or attention" in caplog.text


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_producer_stores_and_loads_where_vllm_protects_loads(
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    async_scheduling: bool,
) -> None:
    # While steps overlap, its scheduler defers the freeing of blocks that a step in flight still writes for consumers alone.
    role = {"kv_role": "kv_producer"}
    engine = start(vllm_model("llama"), EAGER, transfer=role, async_scheduling=async_scheduling)
    assert restored(ask_twice(engine, make_prompts(2, 330))) == (0 if async_scheduling else 640)
    assert ("nothing is loaded" in caplog.text) == async_scheduling
    assert engine.side.guard.inner.shared.manager.num_ready > 0


def test_a_consumer_stores_nothing(
    vllm_model: Callable[[str], str], start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(vllm_model("llama"), EAGER, transfer={"kv_role": "kv_consumer"})
    assert restored(ask_twice(engine, make_prompts(2, 330))) == 0
    assert "nothing is stored, and there is no tier" in caplog.text


@pytest.mark.parametrize("options", [EAGER, LAZY], ids=["exclusive", "lazy"])
def test_without_a_prefix_cache_all_that_is_computed_is_stored(
    options: dict[str, Any], vllm_model: Callable[[str], str], start: Callable[..., Any]
) -> None:
    engine = start(vllm_model("llama"), options, enable_prefix_caching=False)
    assert restored(ask_twice(engine, make_prompts(1, 330))) == 320


def obstacles(
    parallel: Mapping[str, Any] = MappingProxyType({}), tensors: Sequence[Any] = (object(),), **attention: Any
) -> tuple[str, ...]:
    """Why a model with one group of full attention is not served."""
    import torch  # noqa: PLC0415  # slow to import
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec  # noqa: PLC0415  # see above

    if not attention.keys() <= FullAttentionSpec.__dataclass_fields__.keys():
        pytest.skip("this version of vLLM has no such attention")
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32, **attention)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        kv_transfer_config=SimpleNamespace(is_kv_consumer=True),
        model_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(**{"world_size": 1, "distributed_executor_backend": "mp", **parallel}),
    )
    groups = SimpleNamespace(
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)], kv_cache_tensors=tensors, num_blocks=8
    )
    return translate(config, groups, reports_requests=True).obstacles


def test_a_cache_without_memory_is_not_served() -> None:
    """Found by reading: the size of its blocks was the largest of none, which raised whatever ``if_unsupported`` said."""
    (sentence,) = obstacles(tensors=[])
    assert "has no memory for the KV" in sentence


def test_attention_that_looks_ahead_is_not_served() -> None:
    assert obstacles(non_causal=False) == ()
    assert obstacles(non_causal=True) == ("group 0 has attention that looks ahead: its KV depends on what follows it",)


def test_workers_of_which_the_scheduler_does_not_hear_are_not_served() -> None:
    # With torchrun there is a scheduler in every process, which heard of its own worker alone: no copy ever ended.
    launched = {"distributed_executor_backend": "external_launcher"}
    assert obstacles(launched) == ()
    (sentence,) = obstacles({**launched, "world_size": 2})
    assert "external_launcher" in sentence and "use mp or ray" in sentence


def test_an_engine_that_survives_steps_that_failed_is_not_served() -> None:
    """Found by review: chunks of a step whose forward pass had raised were found, and gave wrong tokens."""
    (sentence,) = obstacles({"enable_fault_tolerance": True})
    assert "--enable-fault-tolerance" in sentence


def latent(*kinds: str, use_mla: bool = True, **parallel: Any) -> tuple[int, str]:
    """How many of eight workers share what is kept, with groups of these kinds, and why not."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=use_mla),
        parallel_config=SimpleNamespace(
            **{"tensor_parallel_size": 8, "distributed_executor_backend": "mp", "nnodes": 1, **parallel}
        ),
    )
    groups = [SimpleNamespace(kv_cache_spec=type(kind, (), {})(), layer_names=[kind]) for kind in kinds]
    return replicas(config, SimpleNamespace(kv_cache_groups=groups))


def test_workers_share_what_is_kept_of_latent_attention_where_all_of_them_surely_hold_the_same() -> None:
    assert latent("MLAAttentionSpec", "MLAAttentionSpec") == (8, "")
    assert latent("MLAAttentionSpec", tensor_parallel_size=1) == (1, "")
    assert latent("FullAttentionSpec", use_mla=False) == (1, "")
    assert latent("MLAAttentionSpec", "FullAttentionSpec", use_mla=False) == (1, "")
    assert latent("MLAAttentionSpec", "MambaSpec") == (1, "the model also keeps KV that differs between them")
    for parallel in ({"distributed_executor_backend": "ray"}, {"nnodes": 2}):
        count, reason = latent("MLAAttentionSpec", **parallel)
        assert count == 1 and "several machines" in reason


def shared_heads(num_heads: int, architecture: str = "Qwen3MoeForCausalLM", **others: Any) -> tuple[int, str]:
    """How many of eight workers share what is kept of a model with so many KV heads, and why not."""
    parallel = SimpleNamespace(tensor_parallel_size=8, distributed_executor_backend="mp", nnodes=1)
    told = {"per_layer_overrides": None, "quantization": None, "speculative_config": None, "of_layer": 1, **others}
    model = SimpleNamespace(
        use_mla=False,
        architecture=architecture,
        quantization=told["quantization"],
        model_arch_config=SimpleNamespace(per_layer_overrides=told["per_layer_overrides"]),
        get_total_num_kv_heads=lambda: num_heads,
    )
    asked = SimpleNamespace(model_config=model, parallel_config=parallel, speculative_config=told["speculative_config"])
    attention = type("FullAttentionSpec", (), {})()
    attention.num_kv_heads = told["of_layer"]
    groups = [SimpleNamespace(kv_cache_spec=attention, layer_names=["layer"])]
    return replicas(asked, SimpleNamespace(kv_cache_groups=groups, kv_tp_replicas=1))


def test_neighbours_share_what_is_kept_of_a_head_that_they_all_hold() -> None:
    assert [shared_heads(num_heads) for num_heads in (1, 2, 4, 8, 16)] == [(8, ""), (4, ""), (2, ""), (1, ""), (1, "")]


@pytest.mark.parametrize(
    "other",
    [
        {"architecture": "Step3p5ForCausalLM"},
        {"quantization": "fp8"},
        {"speculative_config": object()},
        {"per_layer_overrides": [{}]},
        {"of_layer": 2},
        {"num_heads": 3},
    ],
    ids=lambda other: next(iter(other)),
)
def test_where_it_is_not_sure_which_workers_hold_the_same_heads_each_keeps_its_own_and_the_log_says_why(
    other: dict[str, Any],
) -> None:
    """Layers of Step-3.5 have other numbers of KV heads than its configuration says."""
    count, reason = shared_heads(**{"num_heads": 2, **other})
    assert count == 1 and "it is not known which hold the same" in reason


def test_workers_share_what_is_kept_where_vllm_says_that_fewer_than_all_hold_the_same() -> None:
    parallel = SimpleNamespace(tensor_parallel_size=8, distributed_executor_backend="mp", nnodes=1)
    asked = SimpleNamespace(model_config=SimpleNamespace(use_mla=False), parallel_config=parallel)
    caches = SimpleNamespace(kv_cache_groups=[], kv_tp_replicas=4)
    assert replicas(asked, caches) == (4, "")
    parallel.nnodes = 2
    count, reason = replicas(asked, caches)
    assert count == 1 and "several machines" in reason


def test_a_version_that_lacks_something_is_served_without(
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = vllm_model("llama")
    monkeypatch.setattr(compat, "_POOL", (*compat._POOL, "teleport"))
    monkeypatch.setattr(compat, "VLLM_VERSION", "0.99.1")
    engine = start(model, EAGER)
    said = [record.message for record in caplog.records if record.name.startswith("cargohold")]
    # Whether weights can be read depends on the processor for which vLLM has packed them.
    assert [line for line in said if not line.startswith("which weights the model holds")] == [
        "vLLM 0.99.1 is outside the range that was tested, 0.28 to 0.33",
        "offloading is off, requests are served without it: its block pool has no teleport",
    ]
    assert restored(ask_twice(engine, make_prompts(2, 200))) == 0
    assert "is stopped" not in caplog.text, "the workers are told"


def test_a_version_with_other_hooks_is_served_without_or_refused(
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def register_kv_caches(self: object, kv_caches: object, streams: object = None) -> None: ...

    monkeypatch.setattr(compat.KVConnectorBase_V1, "register_kv_caches", register_kv_caches)
    monkeypatch.setattr(compat.KVConnectorBase_V1, "teleport", abstractmethod(lambda _: None), raising=False)
    engine = start(vllm_model("llama"), EAGER)
    reasons = "vLLM's hook register_kv_caches has a parameter streams at place 2; vLLM demands a hook teleport"
    said = [record.message for record in caplog.records if record.name.startswith("cargohold")]
    assert said == [f"offloading is off, requests are served without it: {reasons}"]
    assert restored(ask_twice(engine, make_prompts(2, 200))) == 0
    with pytest.raises(ConfigError, match=f"nothing can be offloaded: {reasons}"):
        start(vllm_model("llama"), {**EAGER, "if_unsupported": "refuse"})


def test_a_request_that_lacks_something_turns_the_connector_off(
    vllm_model: Callable[[str], str], start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(vllm_model("llama"), EAGER)
    prompts = make_prompts(2, 330)
    expected = tokens(ask_twice(engine, prompts))
    monkeypatch.setattr(compat, "_REQUEST", (*compat._REQUEST, "soul"))
    engine = start(vllm_model("llama"), EAGER)
    answers = ask_twice(engine, prompts)
    assert tokens(answers) == expected
    assert restored(answers) == 0
    assert "a request has no soul" in str(engine.side.guard.broken)


def test_more_host_memory_than_is_free_is_warned_of_and_more_than_there_is_is_refused(
    vllm_model: Callable[[str], str],
    start: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Found by use: 23 of a machine's 24 GiB started without a word."""
    monkeypatch.setattr("cargohold.connector.factory.available_memory_bytes", lambda: 32 * 1024**2)
    start(vllm_model("llama"), EAGER)
    assert "host_bytes=64MiB: only 32 MiB of this machine's memory are free now" in caplog.text
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.host_bytes='9000TiB' .* this machine allows"):
        start(vllm_model("llama"), {"host_bytes": "9000TiB"})
