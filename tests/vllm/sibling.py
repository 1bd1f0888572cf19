"""Another connector beside Cargohold's inside vLLM's ``MultiConnector``, which behaves as tests want it to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from cargohold.integrations.vllm.compat import TransferResults
from tests.vllm.engine import BLOCK_TOKENS


@dataclass
class Wishes:
    """What tests want of the sibling in this process.

    Attributes:
        fails_load_of: tokens that it offers once, loads within the step, and fails to load; 0 for none.
        answer: what it answers to a request that has ended; ``None`` for nothing.
        handshake: whether its workers say something to its scheduler side at start.
    """

    fails_load_of: int = 0
    answer: Mapping[str, Any] | None = None
    handshake: bool = False


WISHES = Wishes()


@dataclass
class Blocks(base.KVConnectorMetadata):  # type: ignore[misc]  # vLLM ships no types
    """A step's message: the blocks to load."""

    block_ids: list[int] = field(default_factory=list)


@dataclass
class Address(base.KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM ships no types
    """What a worker of the sibling says at start."""

    port: int = 0


class Sibling(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]  # vLLM ships no types
    """Loads within a step, as vLLM's connectors for files do, and fails."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._offered: dict[str, tuple[int, int]] = {}
        self._planned: list[int] = []
        self._failed: set[int] = set()
        self._kv_caches: Mapping[str, Any] = {}
        self.heard: dict[tuple[int, int], Any] = {}

    # --- worker side --------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        self._kv_caches = kv_caches

    def get_handshake_metadata(self) -> Address | None:
        return Address(1) if WISHES.handshake else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for block_id in self._get_connector_metadata().block_ids:
            for cache in self._kv_caches.values():
                cache[block_id].fill_(0.37)  # as if a file had been read in part
            self._failed.add(block_id)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return TransferResults(set(), set(), set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    # --- scheduler side -----------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self.heard = metadata

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        num_tokens, WISHES.fails_load_of = max(0, WISHES.fails_load_of - num_computed_tokens), 0
        self._offered[request.request_id] = (num_computed_tokens, num_computed_tokens + num_tokens)
        return num_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first, end = self._offered[request.request_id]
            table = blocks.blocks[0][first // BLOCK_TOKENS : end // BLOCK_TOKENS]
            self._planned += [block.block_id for block in table]

    def build_connector_meta(self, scheduler_output: Any) -> Blocks:
        planned, self._planned = self._planned, []
        return Blocks(planned)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None if WISHES.answer is None else dict(WISHES.answer)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])


@contextmanager
def wishing(**wishes: Any) -> Iterator[None]:
    """Within the ``with`` block, let the sibling do this."""
    with patch.multiple(WISHES, **wishes):
        yield


def beside(*children: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an engine whose connectors are ``children``, in this order; an empty one stands for the sibling."""
    sibling = {"kv_connector": "Sibling", "kv_connector_module_path": __name__}
    connectors = [{"kv_role": "kv_both", **(child or sibling)} for child in children]
    return {
        # Counters of a MultiConnector end vLLM 0.28 where it runs in one process.
        "disable_log_stats": TransferResults is None,
        "kv_transfer_config": {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": connectors},
        },
    }
