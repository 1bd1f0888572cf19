"""Hand-off: one engine computes a prompt and stores its KV in a shared tier, another one goes on with the decoding.

::

    client or proxy                    prefill engine                shared tier           decode engine
        | do_remote_decode, 1 token ----->| computes, step by step       |                       |
        |                                 | writes each step's chunks -->|                       |
        |<---------------- announcement --| the last ones are on their way                       |
        | announcement, the same prompt --|------------------------------|---------------------->|
        |                                                                |<-- asks, and asks again
        |                                                                |    until all have come
        |<---------------------------------------------------- tokens ---|--- loads, and computes the rest

The announcement goes through ``kv_transfer_params``, under a key of its own: other connectors' answers can stand next to it.
Chunks are promised to the other engine when they are offered to host memory (see ``cargohold.tiers.scheduler_side.promises``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from reprlib import repr as shown  # a client may send values of any size, and what is refused is logged
from typing import Any, Final, Self

from cargohold.blocks import ABSENT, NOT_YET, READY, GroupUnits, longest_hit
from cargohold.cache.manager import ChunkKeys, OffloadKey
from cargohold.connector.kernel.guest import Consumer
from cargohold.connector.kernel.jobs import Store
from cargohold.connector.kernel.requests import Offer, RequestState
from cargohold.errors import RequestError
from cargohold.protocol import BlockIds, TransferOutcome
from cargohold.tiers.scheduler_side import LowerTiers, Promises

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
            promises: returns which chunks are in a shared tier, or will be.
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
        announced = params.get(HANDOFF)
        if announced is None:
            return None
        if not isinstance(announced, Mapping):
            raise RequestError(f"kv_transfer_params: {HANDOFF}={shown(announced)} must be an object", request_id)
        counts = {}
        for key in ("num_tokens", "num_readable_tokens"):
            count = counts[key] = announced.get(key, 0)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                expected = "must be an integer from 0"
                raise RequestError(f"kv_transfer_params: {HANDOFF}.{key}={shown(count)} {expected}", request_id)
        namespace = announced.get("namespace", {})
        if not isinstance(namespace, Mapping) or not all(isinstance(value, str) for value in namespace.values()):
            expected = "must be an object of texts"
            raise RequestError(f"kv_transfer_params: {HANDOFF}.namespace={shown(namespace)} {expected}", request_id)
        return cls(**counts, namespace=namespace)

    def params(self) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` that carry it. They can be written as JSON."""
        counts = {"num_tokens": self.num_tokens, "num_readable_tokens": self.num_readable_tokens}
        return {HANDOFF: {**counts, "namespace": dict(self.namespace)}}

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


class HandingOff(Consumer):
    """Promises prompts to the engines that decode them, announces them, and reads such announcements.

    Args:
        lower: the tiers below host memory, if there are any.
    """

    name = "hand-off"

    def __init__(self, lower: LowerTiers | None) -> None:
        self._lower = lower
        # Requests that another engine decodes; of them, those whose chunks are promised, until nothing of them is to be stored.
        self._asked: set[str] = set()
        self._promised: set[str] = set()
        self._announced: dict[str, Handoff] = {}

    def num_announced(self, state: RequestState) -> int:
        """Return how many leading tokens another engine has announced that this one can use; note it if that is none."""
        handoff = self._announced.get(state.request.request_id)
        if handoff is None or self._lower is None:
            return 0
        difference = handoff.difference(self._lower.namespace)
        if difference:
            state.notes.append(
                f"the announced KV comes from an engine that differs in its {difference}, so it cannot be used here"
            )
        return 0 if difference else handoff.num_tokens

    # --- facts --------------------------------------------------------------------------------------------------------

    def request_new(self, state: RequestState) -> None:
        """Read the request's parameters. Raises ``RequestError`` if they are malformed."""
        params, request_id = state.request.kv_transfer_params, state.request.request_id
        if not params:
            return
        remote, handoff = params.get("do_remote_decode", False), Handoff.parse(params, request_id)
        if not isinstance(remote, bool):
            raise RequestError(
                f"kv_transfer_params: do_remote_decode={shown(remote)} must be true or false", request_id
            )
        if handoff is not None:
            self._announced[request_id] = handoff
        if remote:
            state.is_awaited = True
            self._asked.add(request_id)
            if self._lower is not None and self._lower.promises.is_possible:
                self._promised.add(request_id)

    def chunks_offered(self, offers: Sequence[Offer]) -> None:
        """Promise them: those that are there are not evicted from now on."""
        for offer in offers:
            if self._lower is not None and offer.state.request.request_id in self._promised:
                self._lower.promises.make(offer.keys, offer.parents())

    def store_ended(self, store: Store, since: float | None, outcome: TransferOutcome) -> None:
        """Break the promise of what could not be stored."""
        if outcome is not TransferOutcome.DONE and store.request_ids and self._lower is not None:
            self._lower.promises.give_up(store.keys)

    def stores_abandoned(self, state: RequestState) -> None:
        """Break the promise of what was not stored by now."""
        request_id = state.request.request_id
        if request_id in self._promised and self._lower is not None:
            self._promised.remove(request_id)
            unstored = zip(state.keys, state.next_chunk, strict=True)
            self._lower.promises.give_up(key for keys, at in unstored for key in keys.keys[at:])

    def request_ended(self, state: RequestState, block_ids: BlockIds) -> None:
        """Forget what was announced."""
        self._announced.pop(state.request.request_id, None)

    def shutdown(self) -> None:
        """Break all promises."""
        self._asked.clear()
        self._promised.clear()
        self._announced.clear()
        if self._lower is not None:
            self._lower.promises.give_up_all()

    # --- questions ----------------------------------------------------------------------------------------------------

    def offer_again(self, state: RequestState, keys: Sequence[OffloadKey]) -> AbstractSet[OffloadKey]:
        """Return the promised chunks that found no slot, and make room for them."""
        if self._lower is None or state.request.request_id not in self._promised:
            return frozenset()
        promises = self._lower.promises
        without = promises.made.keys() & keys
        promises.make_room(len(without))
        return without

    def response_params(self, state: RequestState) -> Mapping[str, Any] | None:
        """Return the announcement for the engine that goes on with the decoding; ``None`` if none could find it."""
        if state.request.request_id not in self._asked:
            return None
        self._asked.remove(state.request.request_id)
        if self._lower is None or not self._lower.promises.is_possible:
            state.notes.append("nothing is handed off to another engine: no tier is shared with any")
            return None
        promises = self._lower.promises
        state.extend_keys()
        handoff = Handoff.announce(state.keys, state.request.num_tokens, promises, self._lower.namespace)
        if promises.obstacle:
            state.notes.append(f"nothing is handed off to another engine: {promises.obstacle}")
        else:
            done = f"handed off {handoff.num_tokens} tokens, of which another engine can read {handoff.num_readable_tokens} now"
            state.notes.append(done + _why_no_more(state, handoff.num_tokens, promises))
        return handoff.params()


def _why_no_more(state: RequestState, num_tokens: int, promises: Promises) -> str:
    """Return why no more leading tokens of a request are handed off, as the end of a sentence; empty if none are left."""
    for keys in state.keys:
        at = num_tokens // keys.chunk_tokens
        if at < len(keys.keys) and (why := promises.why_not(keys.keys[at])):
            return f"; no more, because of the chunk from token {at * keys.chunk_tokens} on: {why}"
    return ""
