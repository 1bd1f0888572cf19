"""Everything that the bytes of a page depend on, besides its key: which model, which options, which part of it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any, Final

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_context, get_parallel

from cargohold.errors import ConfigError
from cargohold.integrations.sglang.pages import Pages
from cargohold.integrations.sglang.plugin import watch
from cargohold.protocol import ServedModel
from cargohold.tiers import Namespace
from cargohold.tiers.namespace import digest_facts, digest_model, places_of_plugins, why_another_hub

# Options that change the KV of given tokens, or how it is arranged. Those that are as always are left out.
_CHANGES: Final = (
    "attention_backend", "context_length", "decode_attention_backend", "disable_fast_image_processor",
    "dsa_decode_backend", "dsa_prefill_backend", "dtype", "enable_deterministic_inference",
    "enable_precise_embedding_interpolation", "image_processor_backend", "json_model_override_args",
    "kv_cache_dtype", "linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend",
    "load_format", "mamba_backend", "mamba_ssm_dtype", "mm_attention_backend", "mm_process_config",
    "model_config_parser", "model_impl", "model_loader_extra_config", "modelopt_quant", "moe_runner_backend",
    "prefill_attention_backend", "prefill_kv_cache_dequant_dtype", "qsa_indexer_dtype", "quantization",
    "quantize_and_serve", "rl_on_policy_target", "rl_quant_profile",
    "speculative_algorithm", "speculative_draft_kv_cache_dtype", "speculative_draft_model_quantization",
)  # fmt: skip
_LOCAL_FORMATS: Final = (
    "auto", "bitsandbytes", "fastsafetensors", "gguf", "instanttensor", "layered", "mistral", "npcache", "pt",
    "safetensors",
)  # fmt: skip
"""Load formats that read weights from where the model is, all of them; other formats may bring them from elsewhere."""
_OTHER_SOURCES: Final = (
    "checkpoint_engine_wait_weights_before_ready", "custom_weight_loader", "decrypted_config_file", "forward_hooks",
    "kt_weight_path",
)  # fmt: skip
_SCALES: Final = "quantization_param_path"
_LIBRARIES: Final = ("sglang", "transformers")
_PLUGINS: Final = ("sglang.srt.plugins", "sglang.srt.platforms")
_SHARDED: Final = ("mamba",)
"""Pools that differ between tensor-parallel ranks even where latent attention does not."""


@dataclass(frozen=True)
class Identity:
    """Which pages a rank of SGLang keeps.

    Attributes:
        config: the rank, as SGLang describes it to storages.
    """

    config: HiCacheStorageConfig

    def namespace(self, name: str, pages: Pages) -> Namespace:
        """Return the namespace of a host pool's pages. Reads the model's files when it is called first."""
        weights, text = self._model
        rank, total = self._rank(name)
        shared = "" if not self.is_replicated(name) else f", each on {self.config.tp_size} ranks"
        return Namespace(
            label=self.config.model_name or str(_args()["model_path"]),
            weights=weights,
            config=text,
            dtype=", ".join((*(f"{name} {version(name)}" for name in _LIBRARIES), *_options())),
            layout=f"pool {name}: {pages.describe()}",
            split=f"rank {rank} of {total}{shared}, {self._split}: {name}",
            hashing="SGLang's page hashes",
        )

    def is_replicated(self, name: str) -> bool:
        """Whether all tensor-parallel ranks hold the same pages of a pool. One of them writes, and all of them read."""
        return self.config.is_mla_model and self.config.tp_size > 1 and name not in _SHARDED

    def ranks_here(self, name: str) -> int:
        """Number of ranks on this machine that keep different pages of a pool."""
        return math.ceil(self._rank(name)[1] / int(_args()["nnodes"]))

    @property
    def replica(self) -> int:
        """Number of the data-parallel replica, from 0. Each has a cache of its own."""
        parallel = get_parallel()
        return int((parallel.dp_rank or 0) * parallel.attn_dp_size + self.config.dp_rank)

    def _rank(self, name: str) -> tuple[int, int]:
        config = self.config
        rank, total = config.pp_rank * config.attn_cp_size + config.attn_cp_rank, config.pp_size * config.attn_cp_size
        if self.is_replicated(name):
            return rank, total
        return rank * config.tp_size + config.tp_rank, total * config.tp_size

    @property
    def _split(self) -> str:
        config = self.config
        return f"tensor {config.tp_size}, pipeline {config.pp_size}, context {config.attn_cp_size}"

    @cached_property
    def _model(self) -> tuple[str, str]:
        """A digest of the weights, and the text of the configuration; with a draft model's, whose KV may be kept, too."""
        reason = next(_obstacles(), "")
        if reason:
            raise ConfigError("--hicache-storage-backend", "cargohold", f"{reason}, so KV cannot outlive the server")
        args = _args()
        weights, text = digest_model(_served(args["model_path"], args["revision"]))
        draft = args["speculative_draft_model_path"]
        if draft and draft != args["model_path"]:
            of_draft = digest_model(_served(draft, args["speculative_draft_model_revision"]))
            text = (
                f"{text}\nand its draft: {digest_facts(dict(zip(('weights', 'config'), of_draft, strict=True))).hex()}"
            )
        return weights, text


def _args() -> dict[str, Any]:
    """SGLang's options as they are now: what it chose where the user left it open, and what it changed since."""
    resolved: dict[str, Any] = get_context().resolved_server_args_dict()
    return resolved


def _served(path: str, revision: str | None) -> ServedModel:
    args = _args()
    return ServedModel(
        name=path,
        path=path,
        dtype="",
        revision=revision,
        runs_code=bool(args["trust_remote_code"]),
        download_dir=args["download_dir"],
        parts=(args[_SCALES],) if args.get(_SCALES) else (),
        code_parts=tuple(
            places_of_plugins(
                _PLUGINS,
                _listed("SGLANG_PLUGINS") or None,
                [*_listed("SGLANG_EXTERNAL_MODEL_PACKAGE"), *_listed("SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE")],
                own="sglang",
            )
        ),
        read_after_s=watch.began_s,
    )


def _listed(variable: str) -> list[str]:
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


def _options() -> Iterator[str]:
    args = _args()
    for name in _CHANGES:
        if args.get(name) not in (None, False, "", {}):
            yield f"{name} {args[name]}"


def _obstacles() -> Iterator[str]:
    """Reasons, as sentences, why the KV may be another one after a restart without anyone noticing."""
    args = _args()
    if watch.began_s is None:
        yield "SGLANG_PLUGINS omits cargohold, which detects weights that change in place"
    if watch.change:
        yield f"{watch.change} has changed the weights in place, and the files may be others"
    if args["enable_lora"] or args["lora_paths"]:
        yield "SGLang identifies LoRA adapters by name and path, which may be reused"
    if str(getattr(args["load_format"], "value", args["load_format"])) not in _LOCAL_FORMATS:
        yield f"--load-format {args['load_format']} may load weights from outside {args['model_path']}"
    if os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in {"1", "true"}:
        yield from why_another_hub("SGLANG_USE_MODELSCOPE", args["model_path"])
    for name in _OTHER_SOURCES:
        if args.get(name):
            yield f"--{name.replace('_', '-')} changes what is in the model's files"
