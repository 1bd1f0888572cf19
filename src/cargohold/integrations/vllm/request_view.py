"""vLLM's requests and steps, as the contract shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, overload

from cargohold.connector.tenants import tenant_in
from cargohold.integrations.vllm import compat
from cargohold.integrations.vllm.groups import Groups
from cargohold.integrations.vllm.pool_view import GROUP_BYTES, BlockIdTable, BlockTables
from cargohold.protocol import (
    NULL_BLOCK_ID,
    Adapter,
    AttentionKind,
    BlockIds,
    ExtraKey,
    KVCacheGroup,
    KVCacheLayout,
    Prefix,
    Tail,
    ToolTokens,
    TurnEnd,
)


class SeenRequest:
    """A view of one of vLLM's requests; see ``cargohold.protocol.RequestView``.

    Args:
        own: vLLM's request object.

    Attributes:
        own: vLLM's request object.
        request_id: its id.
        turn_end: how it ended.
    """

    __slots__ = ("own", "request_id", "turn_end")

    def __init__(self, own: Any) -> None:
        self.own = own
        self.request_id: str = own.request_id
        self.turn_end = TurnEnd.UNKNOWN

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
        """The salt, with which a gateway in front of vLLM keeps its tenants apart; of ours, the tenant's part of it."""
        return tenant_in(getattr(self.own, "cache_salt", None))

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


_ENDS: Final = {
    "FINISHED_STOPPED": TurnEnd.ANSWER,
    "FINISHED_LENGTH_CAPPED": TurnEnd.LENGTH,
    "FINISHED_IGNORED": TurnEnd.LENGTH,  # its prompt is too long
    "FINISHED_REPETITION": TurnEnd.LENGTH,
    "FINISHED_ABORTED": TurnEnd.ABORT,
    "FINISHED_ERROR": TurnEnd.ERROR,
}


def turn_end_of(own: Any, tool_tokens: ToolTokens) -> TurnEnd:
    """How one of vLLM's requests ended, as far as its scheduler can know.

    A stop string is found by the process in front, which then aborts the request. Calls of tools that a grammar forces are
    plain JSON, without the model's own token.
    """
    sampling = getattr(own, "sampling_params", None)
    end = _ENDS.get(getattr(own.status, "name", ""), TurnEnd.UNKNOWN)
    if end is TurnEnd.ABORT and getattr(sampling, "stop", None):
        return TurnEnd.UNKNOWN
    if end is not TurnEnd.ANSWER:
        return end
    end = tool_tokens.end_of(own.all_token_ids[own.num_prompt_tokens :])
    is_forced = getattr(sampling, "structured_outputs", None) is not None
    return TurnEnd.UNKNOWN if is_forced and end is TurnEnd.ANSWER else end


class StepShare:
    """One request's share of a step; see ``cargohold.protocol.ScheduledRequest``.

    Args:
        request: vLLM's request, before this step is counted as computed.
        num_scheduled_tokens: tokens this step computes.
        layout: the paged KV.
        tables: the requests' block tables, of all groups of vLLM's.
        groups: the KV-cache groups.

    Attributes:
        request_id: the request.
        num_computed_tokens: tokens whose KV is in the device pool before this step.
        num_scheduled_tokens: tokens this step computes.
    """

    __slots__ = (
        "_groups",
        "_hash_tokens",
        "_request",
        "_tables",
        "num_computed_tokens",
        "num_scheduled_tokens",
        "request_id",
    )

    def __init__(
        self, request: Any, num_scheduled_tokens: int, layout: KVCacheLayout, tables: BlockTables, groups: Groups
    ) -> None:
        self._request = request
        self._hash_tokens = layout.hash_block_tokens
        self._tables = tables
        self._groups = groups
        self.request_id: str = request.request_id
        self.num_computed_tokens: int = request.num_computed_tokens
        self.num_scheduled_tokens = num_scheduled_tokens

    @property
    def block_ids(self) -> BlockIds:
        """The request's block tables; made when asked for, since few steps complete a chunk."""
        tables = zip(self._groups.by_number, self._tables.blocks(self.request_id), strict=True)
        return tuple(
            self._states(group, number, table) if group.kind is AttentionKind.RECURRENT else BlockIdTable(table)
            for number, (group, table) in enumerate(tables)
            if group is not None
        )

    def _states(self, group: KVCacheGroup, number: int, table: Sequence[Any]) -> list[int]:
        """Blocks of recurrent state; null where a block does not hold the state at its end.

        vLLM keeps running states, checkpoints and scratch space in the same table. A block holds the state that belongs to its
        place exactly if vLLM's own prefix cache has it under the hash of that place.
        """
        per_block = group.block_tokens // self._hash_tokens
        hashes = self._request.block_hashes
        suffix = number.to_bytes(GROUP_BYTES, "big")
        ids = [NULL_BLOCK_ID] * len(table)
        for at, block in enumerate(table):
            last = (at + 1) * per_block - 1
            if block.block_hash is not None and last < len(hashes) and block.block_hash == hashes[last] + suffix:
                ids[at] = block.block_id
        return ids


class _Shares(Sequence[StepShare]):
    """The requests' shares of a step, each made when it is asked for: of many that generate, few complete a chunk."""

    def __init__(
        self,
        counts: Mapping[str, int],
        requests: Mapping[str, Any],
        of: tuple[KVCacheLayout, BlockTables, Groups],
    ) -> None:
        self._counts = counts
        self._requests = requests
        self._of = of
        self._ids: list[str] | None = None

    def __len__(self) -> int:
        return len(self._counts)

    @overload
    def __getitem__(self, at: int) -> StepShare: ...

    @overload
    def __getitem__(self, at: slice) -> list[StepShare]: ...

    def __getitem__(self, at: int | slice) -> StepShare | list[StepShare]:
        if self._ids is None:
            self._ids = list(self._counts)
        if isinstance(at, slice):
            return list(map(self._share, self._ids[at]))
        return self._share(self._ids[at])

    def _share(self, request_id: str) -> StepShare:
        return StepShare(self._requests[request_id].own, self._counts[request_id], *self._of)


class ScheduledStep:
    """What vLLM decided for one step; see ``cargohold.protocol.StepView``.

    Args:
        output: vLLM's scheduler output.
        requests: the records of requests that the connector knows, by id.
        layout: the paged KV.
        tables: the requests' block tables, of all groups of vLLM's.
        groups: the KV-cache groups.
    """

    def __init__(
        self,
        output: Any,
        requests: Mapping[str, Any],
        layout: KVCacheLayout,
        tables: BlockTables,
        groups: Groups,
    ) -> None:
        counts: dict[str, int] = output.num_scheduled_tokens
        if not counts.keys() <= requests.keys():
            counts = {request_id: num_tokens for request_id, num_tokens in counts.items() if request_id in requests}
        self.num_scheduled_tokens = counts
        self.scheduled: Sequence[StepShare] = _Shares(counts, requests, (layout, tables, groups))
        self.preempted_req_ids: AbstractSet[str] = output.preempted_req_ids or frozenset()
        self.finished_req_ids: AbstractSet[str] = output.finished_req_ids
        self._output, self._requests, self._tables, self._groups = output, requests, tables, groups

    @property
    def tails(self) -> Iterator[Tail]:
        """What prompts have left inside a block. Only of layouts that have tails, whose groups' blocks have one size.

        vLLM shows copies of states, which nothing writes again. Of attention, a request's own block has what it needs.
        """
        # Since 0.32.
        shown = getattr(getattr(self._output, "kv_connector_block_state", None), "boundary_state_offloads", {})
        size = self._groups.served[0].block_tokens
        for request_id in filter(self._requests.__contains__, shown):
            tables = self._tables.blocks(request_id)
            states = {(number, end): block_id for number, block_id, end in shown[request_id]}
            for end in sorted({end for _, end in states if end % size}):
                ids = [
                    states.get((group.index, end), NULL_BLOCK_ID)
                    if group.kind is AttentionKind.RECURRENT
                    else tables[group.index][end // size].block_id
                    for group in self._groups.served
                ]
                if NULL_BLOCK_ID not in ids:
                    yield Tail(request_id, end, ids)
