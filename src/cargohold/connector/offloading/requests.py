"""The scheduler side's state of each request."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cargohold.connector.offloading.params import TransferParams
from cargohold.offload.keys import ChunkKeys
from cargohold.offload.tiering import Promotion, TierTask
from cargohold.protocol import KVCacheLayout, RequestView

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
class Recall:
    """A request's chunks on their way up from lower tiers; see ``cargohold.connector.offloading.recall``.

    Attributes:
        begun_at: time at which the request began to wait.
        deadline: time at which the request stops waiting; put off while the engine has no place for the request.
        ask_until: time at which the request stops asking tiers, and makes do with what they have said; put off likewise.
        excuse: what to note for the request if it stops at the deadline.
        alarm_at: time at which the request is looked at again if nothing else happens: the deadline when the alarm was set.
        asked_in: number of the step before which the engine asked for the request last.
        has_place: whether the engine could have admitted the request then.
        probes: questions to the tiers that the request waits for.
        num_found: by tier, the number of chunks that earlier questions have found there.
        look_again_at: time before which the request is not looked at again unless its probes have ended, because looking
            costs time that other requests could use.
        is_in_line: whether the request waits for slots in host memory.
        promotion: the chunks that are being brought up; ``None`` before that begins.
        skipped: indices of tiers that are not asked which chunks they have, because that would take too long.
        is_limited: whether its deadline was compared with the time that computing takes.
        is_over: whether the request need not wait any more.
    """

    begun_at: float
    deadline: float
    ask_until: float
    excuse: str
    alarm_at: float
    asked_in: int
    has_place: bool
    probes: Sequence[TierTask] = ()
    num_found: Counter[int] = field(default_factory=Counter)
    look_again_at: float = 0.0
    is_in_line: bool = False
    promotion: Promotion | None = None
    skipped: set[int] = field(default_factory=set)
    is_limited: bool = False
    is_over: bool = False

    @property
    def has_expired(self) -> bool:
        """Whether its chunks were released before the request was admitted, although it has not given up."""
        return self.promotion is not None and self.promotion.is_released and not self.promotion.is_given_up

    def end(self) -> None:
        """Stop waiting, and release the chunks held for the request."""
        self.is_over = True
        if self.promotion is not None:
            self.promotion.release()

    def give_up(self) -> None:
        """Stop waiting, because it took too long, and release the chunks held for the request."""
        if self.promotion is not None:
            self.promotion.give_up()
        self.end()


@dataclass(slots=True)
class RequestState:
    """State of one request.

    Attributes:
        request: the engine's view of it.
        params: the client's parameters.
        keys: offload keys per group.
        next_chunk: per group, the number of the first chunk not offered for storing yet.
        hit_tokens: number of leading tokens that were on the device, or were loaded, when it was admitted last.
        due_tokens: number of leading tokens at which the first of these chunks is complete, over all groups.
        lookup: the last look-up's answer.
        recall: its wait for lower tiers; ``None`` before the first look-up, and once the request is admitted.
        was_admitted: whether the request was admitted and its tokens counted; a request that starts over is admitted again.
        restored_tokens: tokens loaded so far, by the tier they came from.
        notes: what was decided and why, the last ``MAX_NOTES``.
    """

    request: RequestView
    params: TransferParams
    keys: tuple[ChunkKeys, ...]
    next_chunk: list[int]
    due_tokens: int = field(init=False)  # read for every request in every step, and seldom changed
    hit_tokens: int = 0
    lookup: Lookup | None = None
    recall: Recall | None = None
    was_admitted: bool = False
    restored_tokens: Counter[str] = field(default_factory=Counter)
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_NOTES))

    @classmethod
    def create(cls, request: RequestView, layout: KVCacheLayout, blocks_per_chunk: int) -> RequestState:
        """Make the state of a request that has just arrived. Raises ``RequestError`` if its parameters are invalid."""
        params = TransferParams.parse(request.kv_transfer_params, request.request_id)
        keys = tuple(ChunkKeys(group, blocks_per_chunk, layout.hash_block_tokens) for group in layout.groups)
        return cls(request, params, keys, [0] * len(keys))

    def __post_init__(self) -> None:
        self._note_due()

    def extend_keys(self) -> None:
        """Add the keys of chunks that became full since the last call."""
        hashes = self.request.block_hashes
        for keys in self.keys:
            keys.extend(hashes)

    def end_recall(self) -> None:
        """End the wait for lower tiers, and release the chunks held for the request."""
        recall, self.recall = self.recall, None
        if recall is not None:
            recall.end()

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
        self.due_tokens = min(
            [keys.chunk_tokens * (first + 1) for keys, first in zip(self.keys, self.next_chunk, strict=True)]
        )
