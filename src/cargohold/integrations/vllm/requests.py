"""vLLM's requests and steps as the contract shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from cargohold.integrations.vllm import compat
from cargohold.integrations.vllm.blocks import BlockIdTable, BlockTables
from cargohold.protocol import NULL_BLOCK_ID, Adapter, AttentionKind, BlockIds, ExtraKey, KVCacheLayout, Prefix


class SeenRequest:
    """A view of one of vLLM's requests; see ``cargohold.protocol.RequestView``.

    Args:
        own: vLLM's request object.

    Attributes:
        own: vLLM's request object.
        request_id: its id.
    """

    __slots__ = ("own", "request_id")

    def __init__(self, own: Any) -> None:
        self.own = own
        self.request_id: str = own.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens the user sent."""
        return int(self.own.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known."""
        return int(self.own.num_tokens)

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Their ids, prompt first."""
        token_ids: Sequence[int] = self.own.all_token_ids
        return token_ids

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Digests that vLLM made."""
        hashes: Sequence[bytes] = self.own.block_hashes
        return hashes

    @property
    def adapter(self) -> Adapter | None:
        """The LoRA adapter."""
        lora = getattr(self.own, "lora_request", None)
        return None if lora is None else Adapter(lora.lora_name, lora.lora_int_id)

    @property
    def salt(self) -> str | None:
        """The request's ``cache_salt``."""
        salt: str | None = self.own.cache_salt
        return salt

    def extra_keys(self, start: int, end: int) -> tuple[ExtraKey, ...]:
        """What block hashes cover of these tokens besides their ids, in the form of vLLM's own events."""
        keys: tuple[Any, ...] | None = compat.extra_keys(self.own, start, end, 0)[0]
        return () if keys is None else compat.event_keys([keys])[0]

    @property
    def tenant(self) -> str | None:
        """The salt, with which a gateway in front of vLLM keeps its tenants apart."""
        salt: str | None = getattr(self.own, "cache_salt", None)
        return salt

    def prefix(self, token_ids: list[int]) -> Prefix:
        """Another prefix that this request's hints are about, with the request's salt and adapter."""
        hashes = compat.hashes_of(self.own, token_ids)
        return Prefix(hashes, token_ids, len(token_ids), self.salt, self.tenant)

    @property
    def trace_headers(self) -> Mapping[str, str] | None:
        """The trace that it belongs to; ``None`` unless vLLM itself traces."""
        headers: Mapping[str, str] | None = getattr(self.own, "trace_headers", None)
        return headers

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What the client asks of the connectors."""
        params: Mapping[str, Any] | None = self.own.kv_transfer_params
        return params


# --- vLLM's scheduler output as the step of the contract --------------------------------------------------------------


class Share:
    """One request's share of a step; see ``cargohold.protocol.ScheduledRequest``.

    Args:
        request: vLLM's request, before this step is counted as computed.
        num_scheduled_tokens: tokens this step computes.
        layout: the paged KV.
        tables: the requests' block tables.

    Attributes:
        request_id: the request.
        num_computed_tokens: tokens whose KV is in the device pool before this step.
        num_scheduled_tokens: tokens this step computes.
    """

    # Made for every request in every step: plain attributes are the quickest.
    __slots__ = ("_layout", "_request", "_tables", "num_computed_tokens", "num_scheduled_tokens", "request_id")

    def __init__(self, request: Any, num_scheduled_tokens: int, layout: KVCacheLayout, tables: BlockTables) -> None:
        self._request = request
        self._layout = layout
        self._tables = tables
        self.request_id: str = request.request_id
        self.num_computed_tokens: int = request.num_computed_tokens
        self.num_scheduled_tokens = num_scheduled_tokens

    @property
    def block_ids(self) -> BlockIds:
        """The request's block tables; made when asked for, since few steps complete a chunk."""
        tables = self._tables.blocks(self.request_id)
        return tuple(
            self._states(group.index, table) if group.kind is AttentionKind.RECURRENT else BlockIdTable(table)
            for group, table in zip(self._layout.groups, tables, strict=True)
        )

    def _states(self, group: int, table: Sequence[Any]) -> list[int]:
        """Blocks of recurrent state; null where a block does not hold the state at its end.

        vLLM keeps running states, checkpoints and scratch space in the same table. A block holds the state that belongs to its
        place exactly if vLLM's own prefix cache has it under the hash of that place.
        """
        per_block = self._layout.groups[group].block_tokens // self._layout.hash_block_tokens
        hashes = self._request.block_hashes
        suffix = group.to_bytes(4, "big")
        ids = [NULL_BLOCK_ID] * len(table)
        for at, block in enumerate(table):
            last = (at + 1) * per_block - 1
            if block.block_hash is not None and last < len(hashes) and block.block_hash == hashes[last] + suffix:
                ids[at] = block.block_id
        return ids


class Step:
    """What vLLM decided for one step; see ``cargohold.protocol.StepView``.

    Args:
        output: vLLM's scheduler output.
        requests: the requests that the connector knows, by id.
        layout: the paged KV.
        tables: the requests' block tables.
    """

    def __init__(
        self, output: Any, requests: Mapping[str, SeenRequest], layout: KVCacheLayout, tables: BlockTables
    ) -> None:
        self.scheduled: Sequence[Share] = [
            Share(requests[request_id].own, num_tokens, layout, tables)
            for request_id, num_tokens in output.num_scheduled_tokens.items()
            if request_id in requests
        ]
        self.preempted_req_ids: AbstractSet[str] = output.preempted_req_ids or frozenset()
        self.finished_req_ids: AbstractSet[str] = output.finished_req_ids
