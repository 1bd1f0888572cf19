"""The worker side of a connector of vLLM's: our paged KV as one tensor per layer, and its hooks in vLLM's order."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from cargohold.errors import ConfigError
from cargohold.lab.vllm.requests import ends_in
from cargohold.protocol import (
    KVCacheLayout,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorker,
    Stats,
)


@dataclass(frozen=True, slots=True)
class Message:
    """What the scheduler side sends in a step.

    Attributes:
        pickled: the class's own metadata, pickled as on its way to vLLM's workers.
        loads_first: whether the step computes with what it loads: else, loads begin behind the forward pass, as in vLLM.
    """

    pickled: bytes
    loads_first: bool


@dataclass(frozen=True, slots=True)
class WorkerReports:
    """What workers send back in a step.

    Attributes:
        pickled: of each worker, in the order of ranks, its own metadata and its KV events, pickled.
    """

    pickled: tuple[bytes, ...]

    def aggregate(self, other: WorkerReports) -> WorkerReports:
        """All reports; the scheduler side merges them by the class's own rules."""
        return WorkerReports(self.pickled + other.pickled)


class BridgedWorker(KVConnectorWorker):
    """Calls a connector of vLLM's as vLLM's model runner does.

    Args:
        inner: the connector.
        layout: the paged KV cache.
    """

    metadata_type = Message

    def __init__(self, inner: Any, layout: KVCacheLayout) -> None:
        self.name = type(inner).__name__
        self._inner = inner
        self._layout = layout
        self._layers: dict[str, Any] = {}
        self._forward_context: Any = None
        self._loads_first = True

    def register_kv_caches(self, kv_caches: Sequence[Sequence[Any]]) -> None:
        """Give each layer's bytes of all blocks: shape ``(num_blocks, bytes of the layer in a block)``."""
        width = self._layout.block_bytes // max(len(group.layer_names) for group in self._layout.groups)
        for group, regions in zip(self._layout.groups, kv_caches, strict=True):
            if len(regions) != 1:
                raise ConfigError("layout", len(regions), f"{self.name} needs a group's KV in one region, to split it")
            for at, name in enumerate(group.layer_names):
                self._layers[name] = regions[0][:, at * width : (at + 1) * width]
        layers = {name: SimpleNamespace(kv_cache=tensor) for name, tensor in self._layers.items()}
        self._forward_context = SimpleNamespace(no_compile_layers=layers, attn_metadata=None, virtual_engine=0)
        self._inner.register_kv_caches(self._layers)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Give the class the metadata of its other side."""
        assert isinstance(connector_metadata, Message)
        self._loads_first = connector_metadata.loads_first
        self._inner.bind_connector_metadata(pickle.loads(connector_metadata.pickled))  # noqa: S301  # our own bytes

    def handle_preemptions(self) -> None:
        """Let copies end that read blocks which this step may overwrite."""
        self._inner.handle_preemptions(self._inner._get_connector_metadata())

    def start_load_kv(self) -> None:
        """Begin loads that this step computes with."""
        if self._loads_first:
            self._inner.start_load_kv(self._forward_context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer."""
        self._inner.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str) -> None:
        """Offer a layer to be saved. There is no metadata of attention: there are no slots here, only blocks."""
        self._inner.save_kv_layer(layer_name, self._layers[layer_name], None)

    def wait_for_save(self) -> None:
        """Begin loads that nothing in this step needs; then stores."""
        if not self._loads_first:
            self._inner.start_load_kv(self._forward_context)
        self._inner.wait_for_save()

    def get_transfer_results(self, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        """The requests whose transfers have ended."""
        return KVConnectorTransferResults(**ends_in(self._inner.get_transfer_results(set(finished_req_ids))))

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        """Blocks that hold garbage."""
        return frozenset(self._inner.get_block_ids_with_load_errors())

    def get_kv_connector_stats(self) -> Stats:
        """Nothing: what vLLM's connectors count has no declared names. It is taken, so that it does not pile up."""
        self._inner.get_kv_connector_stats()
        return {}

    def build_connector_worker_meta(self) -> WorkerReports | None:
        """The class's message to its other side, with its events; ``None`` if there is nothing."""
        events = self._inner.get_kv_connector_kv_cache_events()
        meta = self._inner.build_connector_worker_meta()
        return None if meta is None and events is None else WorkerReports((pickle.dumps((meta, events)),))

    def clear_connector_metadata(self) -> None:
        """Let the class forget the metadata."""
        self._inner.clear_connector_metadata()

    def shutdown(self) -> None:
        """Let transfers end."""
        self._inner.shutdown()
