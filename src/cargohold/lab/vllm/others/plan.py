"""Which of others' connectors is played, with which options; and which cannot be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from random import Random
from typing import Any, Final

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as VllmFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

from cargohold.errors import ConfigError
from cargohold.lab.simulation.connectors import ConnectorPlan, TierPlan
from cargohold.lab.simulation.fingerprints import FINGERPRINT_BYTES
from cargohold.lab.simulation.world import Shape
from cargohold.option_values import search_current_directory
from cargohold.protocol import NULL_CONNECTOR, KVConnectorFactory

PREFIX: Final = "vllm:"
"""What the names of others' connectors begin with on the command line."""
SCRATCH: Final = "{scratch}"
"""In a connector's options, stands for a folder that is empty when a run begins."""
MULTI: Final = "MultiConnector"
OFFLOADING: Final = "OffloadingConnector"
SIMPLE: Final = "SimpleCPUOffloadConnector"
EXAMPLE: Final = "ExampleConnector"
TIERS: Final = "secondary_tiers"
"""Key in options of ``OffloadingConnector``: tiers below host memory."""

NEEDS: Final[Mapping[str, str]] = {
    "DecodeBenchConnector": "fills the cache with made-up KV, so that all answers are wrong on purpose",
    "ExampleHiddenStatesConnector": "stores what a model computes between its layers, and nothing here has layers",
    "FlexKVConnectorV1": "needs FlexKV's server",
    "HF3FSKVConnector": "needs a 3FS file system and its server of metadata",
    "HiSparseConnector": "needs a model with sparse attention, and CUDA's streams",
    "LMCacheConnectorV1": "needs the package lmcache and CUDA's streams",
    "LMCacheMPConnector": "needs LMCache's server",
    "MoRIIOConnector": "needs another engine and RDMA",
    "MooncakeConnector": "needs another engine and Mooncake's transfer engine",
    "MooncakeStoreConnector": "needs Mooncake's store, which is a server",
    "NixlConnector": "needs another engine and NIXL's agent",
    "NixlPullConnector": "needs another engine and NIXL's agent",
    "NixlPushConnector": "needs another engine and NIXL's agent",
}
"""What connectors of vLLM need that the simulation cannot give."""
_TIERS_NEED: Final[Mapping[str, str]] = {
    "example": "keeps names and no KV, so that all answers are wrong on purpose",
    "kvcr": "needs a server",
    "obj": "needs an object store and NIXL's agent",
    "p2p": "needs another engine and NIXL's agent",
}
"""The same of tiers below host memory."""


def connector_class(name: str) -> Any:
    """The class that ``NAME`` or ``MODULE:CLASS`` means. Raises ``ConfigError`` if it cannot be played."""
    if name in NEEDS:
        raise ConfigError("connector", PREFIX + name, f"it {NEEDS[name]}; the simulation has none of that")
    module, _, attribute = name.rpartition(":")
    try:
        if not module:
            return VllmFactory.get_connector_class_by_name(name)
        search_current_directory()
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        expected = f"it must be one of vLLM's, such as {OFFLOADING} or {SIMPLE}, or MODULE:CLASS: {error}"
        raise ConfigError("connector", PREFIX + name, expected) from error
    if not (isinstance(found, type) and issubclass(found, KVConnectorBase_V1)):
        raise ConfigError("connector", PREFIX + name, "it must be a class of vLLM's KVConnectorBase_V1")
    return found


def check_tiers(config: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` if one of the tiers below host memory cannot be played."""
    for tier in config.get(TIERS, ()):
        if need := _TIERS_NEED.get(tier.get("type")):
            raise ConfigError("connector-config", tier, f"this tier {need}; the simulation has none of that")


@dataclass(frozen=True, slots=True)
class StrangerPlan(ConnectorPlan):
    """A connector of vLLM's interface. Our own place in the simulation is taken by a connector that keeps nothing.

    Attributes:
        parts: name and ``kv_connector_extra_config`` of each connector; several make vLLM's ``MultiConnector``.
        polls: how many polls a simulated copy may take.
    """

    tiers: tuple[TierPlan, ...] = ()
    with_context: bool = False
    applies_locks: bool = False
    custom: tuple[KVConnectorFactory, ...] = (NULL_CONNECTOR,)
    parts: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    polls: tuple[int, ...] = (1,)

    def describe(self) -> str:
        """One line for each connector."""
        lines = [f"{name} {dict(config)}" for name, config in self.parts]
        return "\n  ".join([*lines, f"copies take one of {self.polls} polls each"])

    def transfer_config(self, scratch: str) -> Any:
        """VLLM's configuration; ``scratch`` is a folder for the connector's files."""
        parts = json.loads(json.dumps(self.parts).replace(SCRATCH, scratch))
        configs = [transfer_options(name, config) for name, config in parts]
        if len(configs) > 1:
            configs = [transfer_options(MULTI, {"connectors": configs})]
        return KVTransferConfig(**configs[0])


def transfer_options(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of vLLM's ``KVTransferConfig`` for ``NAME`` or ``MODULE:CLASS``."""
    module, _, attribute = name.rpartition(":")
    options = {"kv_connector": attribute, "kv_role": "kv_both", "kv_connector_extra_config": dict(config)}
    return options | ({"kv_connector_module_path": module} if module else {})


def drawn_config(name: str, random: Random, shape: Shape, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a connector of vLLM's, besides those given. Host memory mostly holds less than what is asked for."""
    block_bytes = max(plan.block_tokens for plan in shape.groups) * FINGERPRINT_BYTES * shape.world_size
    num_chunks, policy = random.choice((4, 16, 64, 256)), random.choice(("lru", "arc"))
    threshold, blocks_per_chunk = random.choice((0, 0, 0, 2)), random.choice((1, 1, 1, 2, 3))
    flag = random.random() < 0.5
    if name == OFFLOADING:
        page = 4096  # its chunks begin at pages
        chunk_bytes = -(-block_bytes * blocks_per_chunk // page) * page
        return {
            "cpu_bytes_to_use": num_chunks * chunk_bytes,
            "eviction_policy": policy,
            "store_threshold": 0 if TIERS in given else threshold,  # vLLM refuses it next to lower tiers
            "blocks_per_chunk": blocks_per_chunk,
            "offload_prompt_only": flag,
            # Not drawn, so that known seeds keep their options. VLLM warns that it does not describe chunks of lower tiers.
            "self_describing_kv_events": num_chunks in (4, 64) and TIERS not in given,
        }
    if name == SIMPLE:
        return {"cpu_bytes_to_use": num_chunks * block_bytes, "lazy_offload": flag}
    return {"shared_storage_path": SCRATCH} if name == EXAMPLE else {}
