"""What the answer to a request says can be loaded is kept until they have blocks for it, which may be many steps later.

An engine may ask about a request that has no room yet, and give it blocks later without asking again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from cargohold.cache.manager import ChunkKeys, ChunkPins, OffloadManager
from cargohold.connector.kernel.requests import Lookup, RequestState
from cargohold.errors import MissingChunkError

KEPT_STEPS: Final = 200
"""For so many steps chunks stay pinned for a request about which the engine does not ask again, and that gets no blocks."""
KEPT_SHARE: Final = 0.5
"""Share of the tier's slots of which chunks may be pinned, those of loads included, when more are to be pinned here."""


class _Kept(NamedTuple):
    """What is pinned for one request.

    Attributes:
        state: the request.
        handle: the pins.
        of: what the answer was about: its keys, and the numbers of its tokens that were on the device and that can be.
        step: the last step in which it got this answer.
    """

    state: RequestState
    handle: ChunkPins
    of: tuple[tuple[ChunkKeys, ...], int, int]
    step: int


class KeptAnswers:
    """Pins what requests are to load, within limits. Beyond them it may be gone when the blocks come, and the load fails.

    Args:
        manager: the manager of host memory.
        mark_used: marks a request's chunks as used.

    Attributes:
        answered: requests with something to load, of the look-ups since the last step.
        kept: by request, what is pinned for it.
    """

    def __init__(self, manager: OffloadManager, mark_used: Callable[[RequestState], object]) -> None:
        self._manager = manager
        self._mark_used = mark_used
        self._step = 0
        self.answered: list[RequestState] = []
        self.kept: dict[str, _Kept] = {}

    @property
    def num_pins(self) -> int:
        """Number of chunks that are pinned, counted once per request: for inspection."""
        return sum([len(kept.handle.keys) for kept in self.kept.values()])

    def keep(self) -> None:
        """Pin what was found since the last step for requests without blocks; nothing is to be stored over it.

        It counts as used, once, however long they wait. To be called in each step while there are any ``answered`` or ``kept``.
        """
        self._step += 1
        for state in self.answered:
            lookup = state.lookup
            if lookup is None or not _can_load(lookup):
                continue  # it was admitted, or has ended, or there is nothing for it now
            if not state.is_marked:
                self._mark_used(state)
                state.is_marked = True
            ends = [(keys.keys, lookup.num_tokens // keys.chunk_tokens) for keys in state.keys]
            self._manager.renew(keys[end - 1] for keys, end in ends if end)
            self._pin(state, lookup)
        self.answered.clear()
        for request_id, kept in list(self.kept.items()):
            if not _can_load(kept.state.lookup) or kept.step <= self._step - KEPT_STEPS:
                self.release(request_id)

    def reset(self) -> None:
        """Release everything: what is kept was dropped, or is set aside, or the connector ends."""
        self.answered.clear()
        for request_id in list(self.kept):
            self.release(request_id)

    def release(self, request_id: str) -> None:
        """Release what is pinned for a request: it has ended, or has blocks, and what it loads is pinned by its load."""
        if (kept := self.kept.pop(request_id, None)) is not None:
            kept.handle.release()

    def _pin(self, state: RequestState, lookup: Lookup) -> None:
        request_id, manager = state.request.request_id, self._manager
        of, kept = (state.keys, lookup.num_computed_tokens, lookup.num_tokens), self.kept.get(request_id)
        if kept is not None and kept.of == of:
            self.kept[request_id] = kept._replace(step=self._step)
            return
        self.release(request_id)
        wanted = []
        for keys in state.keys:  # of a window, what queries after the hit read
            first = max(lookup.num_computed_tokens, keys.group.num_skipped_tokens(lookup.num_tokens))
            wanted += keys.keys[first // keys.chunk_tokens : lookup.num_tokens // keys.chunk_tokens]
        if manager.num_pins + len(wanted) <= KEPT_SHARE * manager.capacity:
            with suppress(MissingChunkError):  # a tier that has lost it since the look-up
                self.kept[request_id] = _Kept(state, manager.prepare_load(wanted), of, self._step)


def _can_load(lookup: Lookup | None) -> bool:
    return lookup is not None and lookup.num_tokens > lookup.num_computed_tokens
