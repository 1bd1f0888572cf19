"""Cargohold keeps the KV cache that an LLM engine has no room for, and puts it back when the prefix returns.

::

    from cargohold import LLM, OffloadConfig, SamplingParams

    llm = LLM("smollm2", num_device_blocks=256, offload=OffloadConfig(host_bytes="2GiB"))
    for out in llm.generate(prompts, SamplingParams(max_tokens=64)):
        print(out.text, out.metrics)

The contract between engines and connectors is ``cargohold.protocol``.
"""

from cargohold.connector.lazy import LazyOffloadConfig
from cargohold.connector.offloading import OffloadConfig
from cargohold.engine.outputs import RequestMetrics, RequestOutput
from cargohold.engine.sampling_params import SamplingParams
from cargohold.errors import (
    CargoholdError,
    ConfigError,
    EngineDeadError,
    ModelError,
    ModelNotFoundError,
    RequestError,
    UnsupportedModelError,
)
from cargohold.llm import LLM
from cargohold.offload.tier import DiskTierConfig, SharedTierConfig

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CargoholdError",
    "ConfigError",
    "DiskTierConfig",
    "EngineDeadError",
    "LazyOffloadConfig",
    "ModelError",
    "ModelNotFoundError",
    "OffloadConfig",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SharedTierConfig",
    "UnsupportedModelError",
    "__version__",
]
