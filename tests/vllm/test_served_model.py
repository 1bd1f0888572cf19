"""Whose KV it is: whatever of vLLM's options changes its bytes makes another model of it."""

from __future__ import annotations

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


def served(
    load_format: str = "auto", backend: str = "FLASH_ATTN", layout: str | None = "LBNHC", **options: Any
) -> ServedModel | None:
    model: dict[str, Any] = {
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
        model_config=SimpleNamespace(**model | options),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
        parallel_config=SimpleNamespace(world_size=1),
        load_config=SimpleNamespace(load_format=load_format),
        lora_config=None,
        compilation_config=SimpleNamespace(static_forward_context={"layer": Layer(backend), "experts": object()}),
    )
    tensors = [SimpleNamespace(size=16 * 10)]
    caches = SimpleNamespace(num_blocks=10, kv_cache_tensors=tensors, kv_cache_layout=layout)
    return make_layout([KVCacheGroup(0, AttentionKind.FULL, 16, ("0",))], config, caches, 16).model


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
    ]
    assert None not in models
    assert len(set(models)) == len(models)
    assert served(load_format="safetensors") == served(), "the same weights, read in another way"


def test_where_the_longest_sequence_decides_on_all_angles_it_makes_another_model() -> None:
    """Found by reading, and shown with a small Phi-3: another ``max_model_len`` after a restart gave wrong tokens."""
    longrope = SimpleNamespace(rope_scaling={"rope_type": "longrope", "long_factor": [4.0]})
    assert served(hf_text_config=longrope, max_model_len=4096) != served(hf_text_config=longrope, max_model_len=8192)
    assert served(max_model_len=4096) == served(max_model_len=8192)
