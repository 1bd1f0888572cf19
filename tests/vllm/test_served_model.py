"""Whose KV it is: whatever of vLLM's options changes its bytes makes another model of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import invalidate_caches
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cargohold.errors import ConfigError
from cargohold.tiers.namespace import digest_model

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from vllm.config.lora import LoRAConfig

from cargohold.integrations.vllm.layout import make_layout
from cargohold.protocol import AttentionKind, KVCacheGroup, ServedModel


class Layer:
    """A layer of a model that runs on the attention backend of that name and class."""

    def __init__(self, backend: str, of_class: str) -> None:
        self._backend = type(of_class, (), {"get_name": staticmethod(lambda: backend)})

    def get_attn_backend(self) -> Any:
        return self._backend


class Drafts(SimpleNamespace):
    """How vLLM speculates."""

    def use_eagle(self) -> bool:
        return bool(self.method == "eagle3")

    def uses_draft_model(self) -> bool:
        return bool(self.method == "draft_model")


def served(
    load_format: str = "auto",
    backend: str = "FLASH_ATTN",
    of_class: str = "Backend",
    layout: str | None = "LBNHC",
    *,
    lora: object = None,
    cache: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    device: str = "cuda",
    load: dict[str, Any] | None = None,
    transfer: object = None,
    further: object = None,
    worker: str = "auto",
    specs: Sequence[Any] = (SimpleNamespace(block_size=16),),
    **options: Any,
) -> ServedModel:
    defaults: dict[str, Any] = {
        "dtype": "bfloat16",
        "model": "org/name",
        "served_model_name": "name",
        "revision": None,
        "quantization": None,
        "quantization_config": None,
        "hf_overrides": {},
        "hf_config_path": None,
        "max_model_len": 4096,
        "hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "default"}),
    }
    config = SimpleNamespace(
        model_config=SimpleNamespace(**defaults | options),
        cache_config=SimpleNamespace(
            **{"cache_dtype": "auto", "enable_prefix_caching": True, "prefix_caching_hash_algo": "sha256"}
            | (cache or {})
        ),
        parallel_config=SimpleNamespace(world_size=1, worker_cls=worker),
        device_config=SimpleNamespace(device_type=device),
        load_config=SimpleNamespace(
            **{"load_format": load_format, "ignore_patterns": ["original/**/*"], "model_loader_extra_config": {}}
            | (load or {})
        ),
        weight_transfer_config=transfer,
        additional_config=further or {},
        lora_config=lora,
        speculative_config=None if draft is None else Drafts(**draft),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": Layer(backend, of_class), "experts": object()}
        ),
    )
    tensors = [SimpleNamespace(size=16 * 10)]
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[str(number)]) for number, spec in enumerate(specs)]
    caches = SimpleNamespace(num_blocks=10, kv_cache_tensors=tensors, kv_cache_layout=layout, kv_cache_groups=groups)
    model = make_layout([KVCacheGroup(0, AttentionKind.FULL, 16, ("0",))], config, caches, 16).model
    assert model is not None
    return model


def test_options_that_change_kv_make_another_model() -> None:
    """Found by reading: a restart with other rope parameters, or another revision, found the KV of before on the disk."""
    models = [
        served(),
        served(revision="v2"),
        served(quantization="fp8"),
        served(quantization="fp8", quantization_config={"activation": "dynamic"}),
        served(hf_overrides={"rope_parameters": {"rope_theta": 1e6}}),
        served(hf_config_path="other/config"),
        served(load_format="dummy"),
        served(load_format="safetensors"),
        served(load_format="mistral"),
        served(load={"ignore_patterns": ["model-*"]}),
        served(load_format="sharded_state", load={"model_loader_extra_config": {"pattern": "other-{rank}-{part}"}}),
        served(load_format="sharded_state"),
        served(backend="FLASHINFER"),
        served(of_class="BackendOfThatName"),
        served(layout="LBHNC"),
        served(layout=None),
        served(cache={"cache_dtype": "fp8_e4m3"}),
        served(cache={"cache_dtype": "fp8_e5m2"}),
        served(draft={"method": "eagle3", "model": "org/head", "revision": None}),
        served(draft={"method": "eagle3", "model": "org/head", "revision": "v2"}),
        served(draft={"method": "draft_model", "model": "org/small", "revision": None}),
        served(lora=LoRAConfig(max_loras=2)),
        served(lora=LoRAConfig(max_loras=2, fully_sharded_loras=True)),
        served(further={"gdn_prefill_backend": "triton"}),
        served(further=LoRAConfig()),
    ]
    assert not any(model.obstacle for model in models if "load_format dummy" not in model.dtype)
    assert len(set(models)) == len(models)
    assert served(draft={"method": "ngram", "model": "ngram"}) == served(), "guessed without KV"


def test_processors_for_which_vllm_arranges_kv_otherwise_make_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by review: on an Intel CPU with AMX, keys and values lie in another order, under the same backend's name."""
    models = []
    for machine, has_amx in (("x86_64", True), ("x86_64", False), ("aarch64", False)):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        models.append(served(device="cpu"))
        assert served(device="cuda") == served(), "where KV lies on a GPU, the host's processor does not matter"
    assert len(set(models)) == len(models)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_BATCH_INVARIANT", True),
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", {"weight_scale_group_size": 128}),
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"),
        ("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"),
        ("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", True),
        ("VLLM_VIDEO_LOADER_BACKEND", "another"),
    ],
)
def test_switches_in_the_environment_make_another_model(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: of these, only the one for ROCm was asked for."""
    plain = served()
    monkeypatch.setattr(f"vllm.envs.{name}", value, raising=False)
    assert served() != plain


def test_what_its_libraries_and_device_decide_makes_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: transformers fills in what a configuration leaves out, and makes numbers of pictures."""
    models = [served()]
    with monkeypatch.context() as patch:
        patch.setattr("cargohold.integrations.vllm.identity.version", {"transformers": "0.1"}.__getitem__)
        models.append(served())
    with monkeypatch.context() as patch:
        patch.setattr("vllm.platforms.current_platform.fp8_dtype", lambda: "torch.float8_e4m3fnuz", raising=False)
        models.append(served())
    assert len(set(models)) == len(models)


def test_states_that_are_arranged_otherwise_make_another_model() -> None:
    """Found by reading: blocks are padded to one size, whatever kernels' options and speculation make of states."""

    def states(*shapes: tuple[int, ...], dtype: str = "bfloat16") -> Any:
        return SimpleNamespace(block_size=16, shapes=shapes, dtypes=(dtype,) * len(shapes))

    models = [
        served(),
        served(specs=[states((3, 64), (2, 8, 8))]),
        served(specs=[states((64, 3), (2, 8, 8))]),
        served(specs=[states((4, 64), (2, 8, 8))]),
        served(specs=[states((3, 64), (2, 8, 8), dtype="float16")]),
        served(specs=[states((3, 64), (2, 8, 8), dtype="float32")]),
        served(specs=[SimpleNamespace(kv_cache_specs={"0": states((3, 64)), "1": states((2, 8, 8))})]),
    ]
    assert len(set(models)) == len(models)


def test_where_the_longest_sequence_decides_on_all_angles_it_makes_another_model() -> None:
    """Found by reading, and shown with a small Phi-3: another ``max_model_len`` after a restart gave wrong tokens."""
    longrope = SimpleNamespace(rope_scaling={"rope_type": "longrope", "long_factor": [4.0]})
    assert served(hf_text_config=longrope, max_model_len=4096) != served(hf_text_config=longrope, max_model_len=8192)
    assert served(max_model_len=4096) == served(max_model_len=8192)


def test_where_the_longest_sequence_or_the_generation_config_decides_on_attention_it_makes_another_model() -> None:
    """Found by reading: Llama 4 scales its queries where sequences may be longer than 32,768, unless it is told otherwise."""

    def llama4(max_model_len: int = 32768, override: dict[str, Any] | None = None, **generation: Any) -> ServedModel:
        return served(
            hf_text_config=SimpleNamespace(attn_temperature_tuning=True),
            max_model_len=max_model_len,
            override_generation_config=override or {},
            try_get_generation_config=lambda: generation,
        )

    models = [
        llama4(),
        llama4(32769),
        llama4(attn_temperature_tuning=True),
        llama4(attn_temperature_tuning=False),
        llama4(32769, attn_temperature_tuning=False),
    ]
    assert len(set(models)) == len(models)
    assert llama4(override={"attn_temperature_tuning": True}) == llama4(attn_temperature_tuning=True)
    assert llama4(temperature=0.5) == llama4(), "that is for sampling alone"


def test_what_is_seen_of_a_picture_and_which_code_runs_make_another_model() -> None:
    """Found by reading: vLLM's hash of a picture knows of the request's own options of its processor alone."""

    def media(**options: Any) -> ServedModel:
        return served(multimodal_config=SimpleNamespace(**options))

    models = [
        served(),
        served(model_impl="transformers"),
        served(config_format="mistral"),
        served(trust_remote_code=True),
        served(trust_remote_code=True, code_revision="v2"),
        served(cache={"kv_cache_dtype_skip_layers": ["0"]}),
        media(mm_processor_kwargs={"max_pixels": 1000}),
        media(media_io_kwargs={"video": {"num_frames": 8}}),
        media(video_pruning_rate=0.5),
        media(video_pruning_rate=0.5, video_pruning_method="vidcom2"),
    ]
    assert len(set(models)) == len(models)
    defaults: dict[str, Any] = {"kv_cache_dtype_skip_layers": []}
    by_itself = served(model_impl="auto", config_format="auto", trust_remote_code=False, cache=defaults)
    assert by_itself == served() == media(mm_processor_kwargs=None, video_pruning_method="evs")


NO_PREFIXES = {"enable_prefix_caching": False}
NO_PROCESSOR_CACHE = SimpleNamespace(mm_processor_cache_gb=0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"multimodal_config": NO_PROCESSOR_CACHE, "cache": NO_PREFIXES}, "vLLM numbers pictures and sounds"),
        ({"transfer": object()}, "weight_transfer_config"),
        ({"load_format": "tensorizer"}, "load_format=tensorizer may load weights from outside"),
        ({"load_format": "dummy"}, "may load weights from outside"),
        ({"load_format": "my_loader"}, "may load weights from outside"),
        ({"load_format": "npcache"}, "may load weights from outside"),
        ({"load_format": "sharded_state", "model_weights": "/other"}, "model_weights=/other loads weights"),
        ({"hf_overrides": lambda config: config}, "hf_overrides is a function"),
        ({"trust_remote_code": True, "hf_overrides": {"auto_map": {"AutoConfig": "org/a--b.C"}}}, "names code"),
        ({"model_class_overrides": {"Llama": "module:Own"}}, "names code"),
    ],
)
def test_what_cannot_be_known_again_is_said(options: dict[str, Any], reason: str) -> None:
    """Found by reading: weights that a loader brought from elsewhere counted as those in the model's directory."""
    assert reason in served(**options).obstacle
    known = [
        served(trust_remote_code=True),
        served(cache=NO_PREFIXES),
        served(multimodal_config=NO_PROCESSOR_CACHE),
        served(cache=NO_PREFIXES, multimodal_config=SimpleNamespace(mm_processor_cache_gb=4)),
    ]
    assert not any(model.obstacle for model in known)


def test_weights_of_another_hub_are_not_looked_for_in_the_caches_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by reading: what ModelScope brings was taken for what an equal name has in Hugging Face's cache."""
    monkeypatch.setattr("vllm.envs.VLLM_USE_MODELSCOPE", True, raising=False)
    assert "VLLM_USE_MODELSCOPE brings org/name from another hub" in served().obstacle
    assert not served(model=str(tmp_path)).obstacle


def test_weights_and_scales_that_a_model_has_elsewhere_are_its_own(tmp_path: Path) -> None:
    """Found by reading: Ultravox takes its language model from another repository or directory, and that was not looked at."""
    own, text = tmp_path / "own", tmp_path / "text"
    for directory in (own, text):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_text(directory.name)
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    ultravox = served(model=str(own), hf_config=SimpleNamespace(text_model_id=str(text), audio_model_id=None))
    scaled = served(model=str(own), multimodal_config=SimpleNamespace(mm_encoder_fp8_scale_path=str(scales)))
    digests = [digest_model(served(model=str(own))), digest_model(ultravox), digest_model(scaled)]
    for changed in (text / "model.safetensors", text / "config.json"):
        changed.write_text('{"changed": 1}')
        digests.append(digest_model(ultravox))
    scales.write_text('{"changed": 1}')
    digests.append(digest_model(scaled))
    assert len(set(digests)) == len(digests)
    with pytest.raises(ConfigError, match="changed or replaced"):
        digest_model(replace(ultravox, read_after_s=0.0))


def test_code_of_plugins_and_workers_is_part_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by reading: a model of a plugin that was mended found what it had computed before."""
    names = ("a_platform_of_ours", "a_model_of_ours", "one_file_of_ours")
    for name in names[:2]:
        (tmp_path / name).mkdir()
    files = [tmp_path / names[0] / "__init__.py", tmp_path / names[1] / "model.py", tmp_path / f"{names[2]}.py"]
    points = [
        EntryPoint("a", "a_platform_of_ours:activate", "vllm.platform_plugins"),
        EntryPoint("b", "a_model_of_ours.model:register", "vllm.general_plugins"),
        EntryPoint("c", "one_file_of_ours:register", "vllm.general_plugins"),
    ]
    monkeypatch.setattr(
        "cargohold.tiers.namespace.entry_points",
        lambda group: [point for point in points if point.group == group],
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "model.safetensors").write_text("weights")
    digests = []
    for file in files:
        for contents in ("", "pass"):
            file.write_text(contents)
            invalidate_caches()
            digests.append(digest_model(served(model=str(tmp_path))))
    assert len(set(digests)) == len(digests)
    monkeypatch.setattr("vllm.envs.VLLM_PLUGINS", ["a"], raising=False)
    digests = [digest_model(served(model=str(tmp_path)))]
    files[1].write_text("changed, and not run")
    assert digest_model(served(model=str(tmp_path))) == digests[0]
    assert digest_model(served(model=str(tmp_path), worker="vllm.v1.worker.gpu_worker.Worker")) == digests[0]
    assert digest_model(served(model=str(tmp_path), worker="one_file_of_ours.Worker")) != digests[0]


def test_weights_of_the_hub_are_looked_for_where_vllm_has_downloaded_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by review: tiers never started with ``--download-dir``, or took old weights in the hub's own cache for the new."""

    def put(cache: str, commit: str, name: str, contents: str) -> None:
        place = tmp_path / cache / "models--org--name"
        (place / "refs").mkdir(parents=True, exist_ok=True)
        (place / "refs" / "main").write_text(commit)
        (place / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        (place / "snapshots" / commit / name).write_text(contents)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = served(load={"download_dir": str(tmp_path / "own")})
    old, new = "1" * 40, "2" * 40
    put("hub", old, "config.json", "{}")
    with pytest.raises(ConfigError, match=f"weights must be in local files; none are in {tmp_path / 'own'}"):
        digest_model(model)
    digests = []
    for cache, commit, name, contents in (
        ("own", old, "model.safetensors", "old"),
        ("own", new, "model.safetensors", "new"),
        ("own", new, "quant_config.json", "{}"),
        ("hub", old, "config.json", '{"rope_theta": 1}'),
    ):
        put(cache, commit, name, contents)
        digests.append(digest_model(model))
    assert len(set(digests)) == len(digests)
    put("hub", old, "model.safetensors", "nobody reads this")
    assert digest_model(model) == digests[-1]
    assert digest_model(replace(model, read_after_s=0.0)) == digests[-1], "vLLM itself may just have downloaded them"


class Resolved(str):
    """A revision as vLLM 0.32 gives it: what the user named, and the commit that it is."""

    __slots__ = ()
    resolved = "1" * 40


def test_a_branch_stands_for_the_commit_that_vllm_has_loaded() -> None:
    """Found by trying: vLLM had loaded one commit, and the branch was at another when the files were digested."""
    revision = Resolved("main")
    assert served(revision=revision).revision == revision.resolved
    assert served(revision="main").revision == "main"
    assert served(revision=revision, hf_config_path="org/other").revision == "main", (
        "the other repository has no such commit"
    )
