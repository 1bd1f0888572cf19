"""What the scheduler side remembers of each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cargohold.connector.offloading.params import TransferParams
from cargohold.offload.keys import ChunkKeys
from cargohold.offload.tiering import Promotion, TierTask
from cargohold.protocol import KVCacheLayout, RequestView


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer of a look-up, and what it depended on: while that is the same, so is the answer.

    Attributes:
        num_tokens: leading tokens usable, computed ones included.
        undecided: whether to ask again.
        num_computed_tokens: leading tokens that were on the device.
        basis: what else it depended on.
    """

    num_tokens: int
    undecided: bool
    num_computed_tokens: int
    basis: tuple[int, ...]


@dataclass(slots=True)
class Recall:
    """A request's chunks on their way up from lower tiers; see ``cargohold.connector.offloading.recall``.

    Attributes:
        deadline: when the request goes on with what there is; later if nobody had a place for it meanwhile.
        alarm_at: when it is looked at again if nothing happens: the deadline, as it was when the alarm was set.
        was_asked_for: whether the engine has asked for the request since the last step.
        probes: what the tiers were asked for.
        look_again_at: not before this time, unless a probe has ended: looking costs time that others could use.
        promotion: what is being brought up.
        is_over: whether the request need not wait any more.
    """

    deadline: float
    alarm_at: float
    was_asked_for: bool = True
    probes: Sequence[TierTask] = ()
    look_again_at: float = 0.0
    promotion: Promotion | None = None
    is_over: bool = False

    def end(self) -> None:
        """Wait for nothing and hold nothing any more."""
        self.is_over = True
        if self.promotion is not None:
            self.promotion.release()


@dataclass(slots=True)
class RequestState:
    """One request.

    Attributes:
        request: the engine's view of it.
        params: the client's wishes.
        keys: offload keys per group.
        next_chunk: per group, the first chunk not offered for storing yet.
        due_tokens: so many tokens complete one of these.
        lookup: the last look-up's answer.
        recall: what lower tiers are asked for; ``None`` before the first look-up, and once the request is admitted.
        was_admitted: whether its tokens were counted: one that starts over is admitted again.
        restored_tokens: tokens loaded so far, by the tier they came from.
        notes: what was decided and why.
    """

    request: RequestView
    params: TransferParams
    keys: tuple[ChunkKeys, ...]
    next_chunk: list[int]
    due_tokens: int = field(init=False)  # read for every request in every step, and seldom changed
    lookup: Lookup | None = None
    recall: Recall | None = None
    was_admitted: bool = False
    restored_tokens: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def create(cls, request: RequestView, layout: KVCacheLayout, blocks_per_chunk: int) -> RequestState:
        """State of a request that has just arrived. Raises ``RequestError`` if its wishes cannot be."""
        params = TransferParams.parse(request.kv_transfer_params, request.request_id)
        keys = tuple(ChunkKeys(group, blocks_per_chunk, layout.hash_block_tokens) for group in layout.groups)
        return cls(request, params, keys, [0] * len(keys))

    def __post_init__(self) -> None:
        self._note_due()

    def extend_keys(self) -> None:
        """Add the keys of chunks that became full."""
        hashes = self.request.block_hashes
        for keys in self.keys:
            keys.extend(hashes)

    def end_recall(self) -> None:
        """Lower tiers are not needed any more."""
        recall, self.recall = self.recall, None
        if recall is not None:
            recall.end()

    def note_offered(self, group: int, next_chunk: int) -> None:
        """A group's chunks before ``next_chunk`` were offered for storing."""
        self.next_chunk[group] = next_chunk
        self._note_due()

    def offer_again_from(self, num_tokens: int) -> None:
        """Offer again for storing what lies behind ``num_tokens``: the tier lost it."""
        for group, keys in enumerate(self.keys):
            self.next_chunk[group] = min(self.next_chunk[group], num_tokens // keys.chunk_tokens)
        self._note_due()

    def skip_offers(self, num_tokens: int) -> None:
        """Do not offer for storing the chunks that lie wholly in the first ``num_tokens`` tokens."""
        for group, keys in enumerate(self.keys):
            self.next_chunk[group] = max(self.next_chunk[group], num_tokens // keys.chunk_tokens)
        self._note_due()

    def _note_due(self) -> None:
        self.due_tokens = min(
            [keys.chunk_tokens * (first + 1) for keys, first in zip(self.keys, self.next_chunk, strict=True)]
        )
