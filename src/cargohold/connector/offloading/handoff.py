"""Hand-offs: one engine computes a prompt and stores its KV in a shared tier, another one goes on with the decoding.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown  # a client may send values of any size, and what is refused is logged
from typing import Any, Final, Self

from cargohold.blocks import ABSENT, NOT_YET, READY, GroupUnits, longest_hit
from cargohold.cache.keys import ChunkKeys
from cargohold.errors import RequestError
from cargohold.tiers.scheduler_side import Promises

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
