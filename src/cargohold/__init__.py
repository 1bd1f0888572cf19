"""Cargohold keeps the KV cache that an LLM engine has no room for, and puts it back when the prefix returns.

::

    from cargohold import LLM, OffloadConfig, SamplingParams

    llm = LLM("smollm2", num_device_blocks=256, offload=OffloadConfig(host_bytes="2GiB"))
    for out in llm.generate(prompts, SamplingParams(max_tokens=64)):
        print(out.text, out.metrics)

The contract between engines and connectors is ``cargohold.protocol``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cargohold.connector.offloading import HintConfig, OffloadConfig, TenantQuota
    from cargohold.engine.core.request import SamplingParams
    from cargohold.engine.outputs import EngineStatus, RequestMetrics, RequestOutput
    from cargohold.errors import (
        CargoholdError,
        ConfigError,
        EngineDeadError,
        ModelError,
        ModelNotFoundError,
        RequestError,
        UnsupportedModelError,
    )
    from cargohold.llm import LLM, AsyncLLM
    from cargohold.protocol import Hint, HintEvent, HintOutcome
    from cargohold.tiers import DiskTierConfig, SharedTierConfig

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CargoholdError",
    "ConfigError",
    "DiskTierConfig",
    "EngineDeadError",
    "EngineStatus",
    "Hint",
    "HintConfig",
    "HintEvent",
    "HintOutcome",
    "ModelError",
    "ModelNotFoundError",
    "OffloadConfig",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SharedTierConfig",
    "TenantQuota",
    "UnsupportedModelError",
    "__version__",
]

_NAMES = {
    "cargohold.connector.offloading": ("HintConfig", "OffloadConfig", "TenantQuota"),
    "cargohold.engine.outputs": ("EngineStatus", "RequestMetrics", "RequestOutput"),
    "cargohold.engine.core.request": ("SamplingParams",),
    "cargohold.errors": (
        "CargoholdError",
        "ConfigError",
        "EngineDeadError",
        "ModelError",
        "ModelNotFoundError",
        "RequestError",
        "UnsupportedModelError",
    ),
    "cargohold.llm": ("LLM", "AsyncLLM"),
    "cargohold.protocol": ("Hint", "HintEvent", "HintOutcome"),
    "cargohold.tiers": ("DiskTierConfig", "SharedTierConfig"),
}
"""The public names, by the module that defines them."""


# The names are imported on first access: importing any module of the package runs this one first, and most modules need none
# of them. Imported here, they would take so long that the command could not answer Ctrl-C meanwhile. Type checkers must not see
# ``__getattr__``, or they would accept any name.
if not TYPE_CHECKING:
    _HOMES = {name: home for home, names in _NAMES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name == "protocol":
            return import_module("cargohold.protocol")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
