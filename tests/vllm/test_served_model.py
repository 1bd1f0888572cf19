"""Whose KV it is: whatever of vLLM's options changes its bytes makes another model of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from cargohold.integrations.vllm.layout import make_layout
from cargohold.protocol import AttentionKind, KVCacheGroup, ServedModel


class Layer:
    """A layer of a model that runs on the attention backend of that name."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: self._backend)


class Drafts(SimpleNamespace):
    """How vLLM speculates."""

    def use_eagle(self) -> bool:
        return bool(self.method == "eagle3")

    def uses_draft_model(self) -> bool:
        return bool(self.method == "draft_model")


def served(
    load_format: str = "auto",
    backend: str = "FLASH_ATTN",
    layout: str | None = "LBNHC",
    *,
    lora: object = None,
    cache: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
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
        parallel_config=SimpleNamespace(world_size=1),
        load_config=SimpleNamespace(load_format=load_format),
        lora_config=lora,
        speculative_config=None if draft is None else Drafts(**draft),
        compilation_config=SimpleNamespace(static_forward_context={"layer": Layer(backend), "experts": object()}),
    )
    tensors = [SimpleNamespace(size=16 * 10)]
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
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
        served(backend="FLASHINFER"),
        served(layout="LBHNC"),
        served(layout=None),
        served(cache={"cache_dtype": "fp8_e4m3"}),
        served(cache={"cache_dtype": "fp8_e5m2"}),
        served(draft={"method": "eagle3", "model": "org/head", "revision": None}),
        served(draft={"method": "eagle3", "model": "org/head", "revision": "v2"}),
        served(draft={"method": "draft_model", "model": "org/small", "revision": None}),
    ]
    assert len(set(models)) == len(models)
    assert served(load_format="safetensors") == served(), "the same weights, read in another way"
    assert served(draft={"method": "ngram", "model": "ngram"}) == served(), "guessed without KV"


def test_states_that_are_arranged_otherwise_make_another_model() -> None:
    """Found by reading: blocks are padded to one size, whatever kernels' options and speculation make of states."""

    def states(*shapes: tuple[int, ...]) -> Any:
        return SimpleNamespace(block_size=16, shapes=shapes)

    models = [
        served(),
        served(specs=[states((3, 64), (2, 8, 8))]),
        served(specs=[states((64, 3), (2, 8, 8))]),
        served(specs=[states((4, 64), (2, 8, 8))]),
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
        served(using_transformers_backend=lambda: True),
        served(config_format="mistral"),
        served(trust_remote_code=True),
        served(trust_remote_code=True, code_revision="v2"),
        served(cache={"kv_cache_dtype_skip_layers": ["0"]}),
        served(cache={"mamba_cache_dtype": "float16"}),
        media(mm_processor_kwargs={"max_pixels": 1000}),
        media(media_io_kwargs={"video": {"num_frames": 8}}),
        media(video_pruning_rate=0.5),
        media(video_pruning_rate=0.5, video_pruning_method="vidcom2"),
    ]
    assert len(set(models)) == len(models)
    defaults = {"mamba_cache_dtype": "auto", "kv_cache_dtype_skip_layers": []}
    by_itself = served(model_impl="auto", config_format="auto", trust_remote_code=False, cache=defaults)
    assert by_itself == served() == media(mm_processor_kwargs=None, video_pruning_method="evs")


NO_PREFIXES = {"enable_prefix_caching": False}
NO_PROCESSOR_CACHE = SimpleNamespace(mm_processor_cache_gb=0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"multimodal_config": NO_PROCESSOR_CACHE, "cache": NO_PREFIXES}, "vLLM numbers pictures and sounds"),
        ({"lora": object()}, "LoRA adapters"),
        ({"load_format": "tensorizer"}, "load_format=tensorizer may bring weights from elsewhere"),
        ({"load_format": "my_loader"}, "from elsewhere"),
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
