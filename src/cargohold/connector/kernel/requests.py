"""The scheduler side's state of each request, what its client asks for, and what engines tell each other of it.

Hand-offs: one engine computes a prompt and stores its KV in a shared tier, another one goes on with the decoding.

::

    client or proxy                    prefill engine                shared tier           decode engine
        | do_remote_decode, 1 token ----->| computes, step by step       |                       |
        |                                 | writes each step's chunks -->|                       |
        |<---------------- announcement --| the last ones are on their way                       |
        | announcement, the same prompt --|------------------------------|---------------------->|
        |                                                                |<-- asks, and asks again
        |                                                                |    until all have come
        |<---------------------------------------------------- tokens ---|--- loads, and computes the rest

The announcement goes through ``kv_transfer_params``, under a key of its own: other connectors' answers can stand beside it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown  # a client may send values of any size, and what is refused is logged
from typing import Any, Final, NamedTuple, Self

from cargohold.blocks import ABSENT, NOT_YET, READY, GroupUnits, longest_hit
from cargohold.cache.manager import ChunkKeys
from cargohold.errors import RequestError
from cargohold.protocol import KVCacheLayout, RequestView
from cargohold.tiers.scheduler_side import Promises, Waiting

HANDOFF: Final = "cargohold_handoff"
"""Key of the announcement in ``kv_transfer_params``: of the prefill engine's response, and of the decode engine's request."""
_ARE_READY: Final = {
    is_ready: bytes.maketrans(bytes([NOT_YET]), bytes([READY if is_ready else ABSENT])) for is_ready in (True, False)
}
"""Tables for ``bytes.translate``: by whether promised chunks count as ready, else as absent."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """The announcement of a prompt's KV by the engine that has computed it.

    Attributes:
        num_tokens: number of leading tokens whose chunks are in a shared tier, or will be unless something fails.
        num_readable_tokens: number of leading tokens that could be loaded from there when the announcement was made.
        namespace: what the chunks' bytes depend on, as ``Namespace.outline`` gives it; empty if the engine does not know.
    """

    num_tokens: int
    num_readable_tokens: int = 0
    namespace: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def announce(
        cls, keys: Sequence[ChunkKeys], num_tokens: int, promises: Promises, namespace: Mapping[str, str]
    ) -> Self:
        """Make the announcement of a request that has ended.

        Args:
            keys: its chunks per group.
            num_tokens: number of its tokens.
            promises: tells which chunks are in a shared tier, or will be.
            namespace: see ``namespace``.
        """

        def num_leading(*, with_promised: bool) -> int:
            table = _ARE_READY[with_promised]
            groups = [GroupUnits(of.group, of.chunk_tokens, _SharedStates(promises, of, table)) for of in keys]
            return longest_hit(groups, num_tokens).num_tokens

        return cls(num_leading(with_promised=True), num_leading(with_promised=False), namespace)

    @classmethod
    def parse(cls, params: Mapping[str, Any], request_id: str) -> Self | None:
        """Read the announcement in a request's ``kv_transfer_params``; ``None`` if there is none.

        Keys of other versions are ignored.

        Raises:
            RequestError: it is malformed.
        """
        told = params.get(HANDOFF)
        if told is None:
            return None
        if not isinstance(told, Mapping):
            raise RequestError(f"kv_transfer_params: {HANDOFF}={shown(told)} must be an object", request_id)
        counts = {}
        for key in ("num_tokens", "num_readable_tokens"):
            count = counts[key] = told.get(key, 0)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                expected = "must be an integer from 0"
                raise RequestError(f"kv_transfer_params: {HANDOFF}.{key}={shown(count)} {expected}", request_id)
        namespace = told.get("namespace", {})
        if not isinstance(namespace, Mapping) or not all(isinstance(value, str) for value in namespace.values()):
            expected = "must be an object of texts"
            raise RequestError(f"kv_transfer_params: {HANDOFF}.namespace={shown(namespace)} {expected}", request_id)
        return cls(**counts, namespace=namespace)

    def params(self) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` that carry it. They can be written as JSON."""
        told = {"num_tokens": self.num_tokens, "num_readable_tokens": self.num_readable_tokens}
        return {HANDOFF: {**told, "namespace": dict(self.namespace)}}

    def difference(self, namespace: Mapping[str, str]) -> str:
        """Return in what an engine's namespace differs from that of the announcement; empty if in nothing, or not known."""
        theirs, ours = self.namespace.get("id"), namespace.get("id")
        if theirs is None or ours is None or theirs == ours:
            return ""
        other = [name for name, value in namespace.items() if name != "id" and self.namespace.get(name) != value]
        return ", ".join(other) or "namespace"


class _SharedStates:
    """Presence of one group's chunks in shared tiers, for other engines; implements ``cargohold.blocks.UnitStates``."""

    def __init__(self, promises: Promises, keys: ChunkKeys, table: bytes) -> None:
        self._states = promises.states(keys.keys).translate(table)

    def run(self, first: int, end: int) -> bytes:
        return self.window(first, end)

    def window(self, first: int, end: int) -> bytes:
        return self._states[first:end]


@dataclass(frozen=True, slots=True)
class TransferParams:
    """The parameters of one request.

    Attributes:
        do_remote_decode: whether another engine will decode: all of the prompt's KV is then kept in the tier, hits included,
            and written to shared tiers at once.
        handoff: what the engine that has computed the prompt has announced; ``None`` if there was none.
        max_load_tokens: maximum number of tokens to load; ``None`` for no limit.
        max_store_tokens: maximum number of leading tokens to store; ``None`` for no limit.
    """

    do_remote_decode: bool = False
    max_load_tokens: int | None = None
    max_store_tokens: int | None = None
    handoff: Handoff | None = None

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None, request_id: str) -> TransferParams:
        """Read the parameters of this connector; other keys belong to other connectors.

        Raises:
            RequestError: a parameter of this connector has an invalid value.
        """
        params = params or {}
        remote = params.get("do_remote_decode", False)
        if not isinstance(remote, bool):
            raise RequestError(
                f"kv_transfer_params: do_remote_decode={shown(remote)} must be true or false", request_id
            )
        limits = {}
        for key in ("max_load_tokens", "max_store_tokens"):
            limit = params.get(key)
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
                raise RequestError(f"kv_transfer_params: {key}={shown(limit)} must be an integer from 0", request_id)
            limits[key] = limit
        handoff = Handoff.parse(params, request_id)
        return cls(remote, limits["max_load_tokens"], limits["max_store_tokens"], handoff)


# --- the scheduler side's state of each request -----------------------------------------------------------------------

NEVER: Final = 1 << 62
"""More tokens than any request has."""

MAX_NOTES: Final = 32
"""A request that is preempted again and again gets a note each time; only so many are kept."""


class Lookup(NamedTuple):
    """The answer of a look-up, and the values that it depended on: while they are the same, so is the answer.

    Attributes:
        num_tokens: number of leading tokens that are usable, computed ones included.
        undecided: whether the answer is "not yet", so that the engine must ask again.
        num_computed_tokens: number of leading tokens that were on the device.
        num_request_tokens: number of tokens of the request.
        basis: the state of tier and jobs that the answer depended on.
        awaited_job: the load for another request that this one waits for; while it is in flight, the answer stays the same.
    """

    num_tokens: int
    undecided: bool
    num_computed_tokens: int
    num_request_tokens: int
    basis: tuple[int, int]
    awaited_job: int | None = None

    def is_of(self, num_computed_tokens: int, num_request_tokens: int) -> bool:
        """Whether it was asked for with as many computed tokens, when the request was as long."""
        return (self.num_computed_tokens, self.num_request_tokens) == (num_computed_tokens, num_request_tokens)


@dataclass(slots=True)
class RequestState:
    """State of one request.

    Attributes:
        request: the engine's view of it.
        params: the client's parameters.
        keys: offload keys per group.
        next_chunk: per group, the number of the first chunk not offered for storing yet.
        chunk_tokens: number of tokens of the smallest chunk of all groups: less is not worth a transfer.
        store_limit: number of leading tokens that may be stored: neither options nor the client forbid it.
        hit_tokens: number of leading tokens that were on the device, or were loaded, when it was admitted last.
        due_tokens: number of leading tokens at which the first of these chunks is complete, over all groups; more than any
            request has if it may not be stored.
        max_computed_tokens: number of leading tokens that are computed when the step ends, or more: what is scheduled may be
            thrown away.
        lookup: the last look-up's answer.
        loads_in_step: whether the step that computes the rest of it is to wait for its load, as the last look-up's answer said.
        waiting: its wait for lower tiers; ``None`` before the first look-up, and once the request is admitted.
        is_handed_off: whether its chunks are promised to another engine.
        is_marked: whether its chunks were marked as used while it waits for room on the device.
        has_ended: whether the request has ended.
        was_admitted: whether the request was admitted and its tokens counted; a request that starts over is admitted again.
        restored_tokens: tokens loaded so far, by the tier they came from first.
        restored: these tokens, by their places.
        notes: what was decided and why, the last ``MAX_NOTES``.
        tenant: whose request it is, for quotas.
    """

    request: RequestView
    params: TransferParams
    keys: tuple[ChunkKeys, ...]
    next_chunk: list[int]
    store_limit: int
    chunk_tokens: int = field(init=False)
    due_tokens: int = field(init=False)  # read for every request in every step, and seldom changed
    hit_tokens: int = 0
    max_computed_tokens: int = field(init=False)
    lookup: Lookup | None = None
    loads_in_step: bool = False
    waiting: Waiting | None = None
    is_handed_off: bool = False
    is_marked: bool = False
    has_ended: bool = False
    was_admitted: bool = False
    restored_tokens: Counter[str] = field(default_factory=Counter)
    restored: range = range(0)
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_NOTES))
    tenant: str | None = field(init=False)

    @classmethod
    def create(
        cls, request: RequestView, layout: KVCacheLayout, blocks_per_chunk: int, *, store_generated: bool = True
    ) -> RequestState:
        """Make the state of a request that has just arrived. Raises ``RequestError`` if its parameters are invalid."""
        params = TransferParams.parse(request.kv_transfer_params, request.request_id)
        keys = tuple(ChunkKeys(group, blocks_per_chunk, layout.hash_block_tokens) for group in layout.groups)
        limit = NEVER if params.max_store_tokens is None else params.max_store_tokens
        limit = limit if store_generated else min(limit, request.num_prompt_tokens)
        return cls(request, params, keys, [0] * len(keys), limit)

    def __post_init__(self) -> None:
        self.tenant = self.request.tenant
        self.chunk_tokens = min([keys.chunk_tokens for keys in self.keys])
        self.max_computed_tokens = self.request.num_tokens
        self._note_due()

    def extend_keys(self) -> None:
        """Add the keys of chunks that became full since the last call."""
        hashes = self.request.block_hashes
        for keys in self.keys:
            keys.extend(hashes)

    def note_once(self, sentence: str) -> None:
        """Tell the request why it is answered so, unless that is what it was told last: the engine may ask in every step."""
        if not self.notes or self.notes[-1] != sentence:
            self.notes.append(sentence)

    def end_waiting(self) -> None:
        """Forget the wait for lower tiers, and release the chunks held for the request."""
        if self.waiting is not None:
            self.waiting.end()
            self.waiting = None

    def note_offered(self, group: int, next_chunk: int) -> None:
        """Note that a group's chunks before ``next_chunk`` were offered for storing."""
        self.next_chunk[group] = next_chunk
        self._note_due()

    def offer_again_from(self, num_tokens: int) -> None:
        """Offer the chunks behind the first ``num_tokens`` tokens for storing again, because the tier lost them."""
        for group, keys in enumerate(self.keys):
            self.next_chunk[group] = min(self.next_chunk[group], num_tokens // keys.chunk_tokens)
        self._note_due()

    def offer_from(self, chunks: Sequence[int]) -> None:
        """Offer for storing the chunks from these numbers on, one number per group, and none before them."""
        self.next_chunk[:] = chunks
        self._note_due()

    def _note_due(self) -> None:
        due = min([keys.chunk_tokens * (first + 1) for keys, first in zip(self.keys, self.next_chunk, strict=True)])
        self.due_tokens = due if due <= self.store_limit else NEVER
