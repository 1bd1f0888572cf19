"""The scheduler side's state of each request, and what its client asks for."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from reprlib import repr as shown  # a client may send values of any size, and what is refused is logged
from typing import Any, Final, NamedTuple

from cargohold.cache.manager import ChunkKeys, OffloadKey, StoreOffer
from cargohold.cache.retention import NORMAL
from cargohold.errors import RequestError
from cargohold.protocol import AttentionKind, RequestView


@dataclass(frozen=True, slots=True)
class TransferParams:
    """The parameters of one request.

    Attributes:
        max_load_tokens: maximum number of tokens to load; ``None`` for no limit.
        max_store_tokens: maximum number of leading tokens to store; ``None`` for no limit.
    """

    max_load_tokens: int | None = None
    max_store_tokens: int | None = None

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None, request_id: str) -> TransferParams:
        """Read the parameters of this connector; other keys belong to other connectors.

        Raises:
            RequestError: a parameter of this connector has an invalid value.
        """
        params = params or {}
        limits = {}
        for key in ("max_load_tokens", "max_store_tokens"):
            limit = params.get(key)
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
                raise RequestError(f"kv_transfer_params: {key}={shown(limit)} must be an integer from 0", request_id)
            limits[key] = limit
        return cls(**limits)


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
        shared_end: number of leading tokens of which the groups that keep all blocks are there, if the others are not there as
            far; else 0.
    """

    num_tokens: int
    undecided: bool
    num_computed_tokens: int
    num_request_tokens: int
    basis: tuple[int, int]
    awaited_job: int | None = None
    shared_end: int = 0


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
        asked_at: when the engine asked for it first, since it was admitted last; ``None`` if it has not.
        deferred_at: when the answer was "not yet" for the first time, since then.
        answered_at: when the answer was another one, and has been since.
        loads_in_step: whether the step that computes the rest of it is to wait for its load, as the last look-up's answer said.
        is_awaited: whether a request waits for all of its chunks, as a guest has said when it was new: they are stored at once,
            those that the device had among them, and none may be lost.
        is_recomputed: whether it computes what could be restored, as a guest has said when it was new.
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
    asked_at: float | None = None
    deferred_at: float | None = None
    answered_at: float | None = None
    loads_in_step: bool = False
    is_awaited: bool = False
    is_recomputed: bool = False
    is_marked: bool = False
    has_ended: bool = False
    was_admitted: bool = False
    restored_tokens: Counter[str] = field(default_factory=Counter)
    restored: range = range(0)
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_NOTES))
    tenant: str | None = field(init=False)

    @classmethod
    def create(
        cls, request: RequestView, keys: tuple[ChunkKeys, ...], *, store_generated: bool = True, read_only: bool = False
    ) -> RequestState:
        """Make the state of a request that has just arrived. Raises ``RequestError`` if its parameters are invalid."""
        params = TransferParams.parse(request.kv_transfer_params, request.request_id)
        limit = NEVER if params.max_store_tokens is None else params.max_store_tokens
        limit = limit if store_generated else min(limit, request.num_prompt_tokens)
        return cls(request, params, keys, [0] * len(keys), 0 if read_only else limit)

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

    def move_to(self, keys: tuple[ChunkKeys, ...]) -> None:
        """Go on with keys of another namespace, in which nothing was looked up or offered for it yet."""
        # An earlier answer may still be given blocks: then it is loaded if it is there under these keys, too.
        self.lookup = self.lookup and self.lookup._replace(basis=(-1, -1), awaited_job=None)
        self.keys, self.is_marked = keys, False
        self.hit_tokens, self.max_computed_tokens = 0, NEVER
        self.offer_from([0] * len(keys))

    def note_once(self, sentence: str) -> None:
        """Note why the request is answered so, unless that was its last note: the engine may ask in every step."""
        if not self.notes or self.notes[-1] != sentence:
            self.notes.append(sentence)

    def note_offered(self, group: int, next_chunk: int) -> None:
        """Note that a group's chunks before ``next_chunk`` were offered for storing."""
        self.next_chunk[group] = next_chunk
        self._note_due()

    def offer_again_from(self, num_tokens: int) -> None:
        """Offer the chunks after the first ``num_tokens`` tokens for storing again, because the tier lost them."""
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


# --- its chunks on their way to host memory ---------------------------------------------------------------------------


class Offer(StoreOffer):
    """Complete chunks of one request in one group that host memory may take; then those of them that it takes.

    Attributes:
        keys: the offload keys of those that can be stored, in prefix order; once host memory has answered, of those that it
            takes.
        state: the request.
        group: index of the group.
        of_group: all of the request's chunks in the group.
        table: block ids of the request in the group; null where the KV is gone.
        first: number of the first of them.
        end: number of the chunk to stop before.
        is_urgent: whether they are offered whatever stores may hold.
        rest: number of the chunk to go on with: all before it are offered now, or were before.
        chunks: numbers of those that can be stored.
        block_ids: their device blocks.
        tail_end: if what is offered is a tail, the number of leading tokens that it is behind; else 0.
    """

    __slots__ = (
        "block_ids",
        "chunks",
        "end",
        "first",
        "group",
        "is_urgent",
        "of_group",
        "rest",
        "state",
        "table",
        "tail_end",
    )

    def __init__(
        self, state: RequestState, group: int, table: Sequence[int], first: int, end: int, *, is_urgent: bool = False
    ) -> None:
        self.state, self.group, self.table, self.is_urgent = state, group, table, is_urgent
        self.first, self.end, self.rest = first, end, end
        self.of_group, self.tenant, self.level, self.tail_end = state.keys[group], state.tenant, NORMAL, 0
        self.keys: Sequence[OffloadKey] = ()
        self.chunks: Sequence[int] = ()
        self.block_ids: Sequence[int] = ()
        self.parent = None

    @property
    def keeps_blocks(self) -> bool:
        """Whether the engine keeps their blocks as long as the request runs."""
        return self.of_group.group.kind is AttentionKind.FULL

    def take(self, first: int, rest: int, chunks: Sequence[int], block_ids: Sequence[int]) -> None:
        """Offer these chunks, of which ``first`` is at or before the first, and then go on with ``rest``."""
        whole = self.of_group.keys
        self.first, self.rest, self.chunks, self.block_ids = first, rest, chunks, block_ids
        if chunks:
            at = chunks[0]
            self.keys = (
                whole[at : at + len(chunks)] if isinstance(chunks, range) else [whole[chunk] for chunk in chunks]
            )
            self.parent = whole[at - 1] if at else None

    def num_again(self, taken: AbstractSet[OffloadKey]) -> int:
        """Return how many of these chunks were not computed for the request, because they were on the device."""
        num_hit = self.state.hit_tokens // self.of_group.chunk_tokens
        if self.first >= num_hit:
            return 0
        return sum(key in taken for chunk, key in zip(self.chunks, self.keys, strict=True) if chunk < num_hit)

    def next_chunk(self, deferred: AbstractSet[OffloadKey]) -> int:
        """Return the number of the chunk to offer next: ``rest``, or the first that is in ``deferred`` before it."""
        waiting = (chunk for chunk, key in zip(self.chunks, self.keys, strict=True) if key in deferred)
        return min(next(waiting, self.rest), self.rest)

    def parents(self) -> dict[OffloadKey, OffloadKey | None]:
        """Return the chunk before each of them in its prefix, or ``None``; also of those between the first and the last."""
        if not self.keys:
            return {}
        whole = self.of_group.keys
        first = whole.index(self.keys[0], self.first)
        span = whole[first : whole.index(self.keys[-1], first) + 1]
        return dict(zip(span, [whole[first - 1] if first else None, *span], strict=False))
