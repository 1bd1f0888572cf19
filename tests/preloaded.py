"""What processes of tests need and takes seconds to import: the fork server imports it once (see ``tests.forks``)."""

from __future__ import annotations

import gc
from importlib import import_module

for name in (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "cargohold.cli.run",
    "cargohold.lab.conformance",
    "cargohold.engine.ranks.processes",
    "cargohold.engine.model.hf_runner",
    "tests.executor.ranks",
    "tests.executor.wrapped",
):
    import_module(name)
gc.freeze()  # pages that the collector does not write to stay shared
