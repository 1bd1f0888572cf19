"""What the answer to a request says can be loaded is kept until they have blocks for it, which may be many steps later.

An engine may ask about a request that has no room yet, and give it blocks later without asking again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from cargohold.cache.manager import ChunkKeys, ChunkPins, OffloadManager
from cargohold.connector.kernel.guest import AdmissionReport, Guest
from cargohold.connector.kernel.requests import Lookup, RequestState
from cargohold.errors import MissingChunkError
from cargohold.protocol import BlockIds, StepView

KEPT_STEPS: Final = 200
"""For so many steps chunks stay pinned for a request about which the engine does not ask again, and that gets no blocks."""
KEPT_SHARE: Final = 0.5
"""Share of the tier's slots of which chunks may be pinned, those of loads included, when more are to be pinned here."""


class _Kept(NamedTuple):
    """What is pinned for one request.

    Attributes:
        handle: the pins.
        of: what the answer promised: its keys, and the numbers of its tokens that were on the device and that can be.
        step: the last step in which it got this answer.
    """

    handle: ChunkPins
    of: tuple[tuple[ChunkKeys, ...], int, int]
    step: int


class KeptAnswers(Guest):
    """Pins what requests were promised, within limits. Beyond them it may be gone when the blocks come, and the load fails.

    Args:
        manager: the manager of host memory.
        mark_used: marks a request's chunks as used.
    """

    name = "kept answers"

    def __init__(self, manager: OffloadManager, mark_used: Callable[[RequestState], object]) -> None:
        self._manager = manager
        self._mark_used = mark_used
        self._step = 0
        # Answers with something to load, since the last step; and by request, what is pinned for it.
        self._told: list[RequestState] = []
        self._kept: dict[str, _Kept] = {}

    @property
    def num_pins(self) -> int:
        """Number of chunks that are pinned, counted once per request: for inspection."""
        return sum([len(kept.handle.keys) for kept in self._kept.values()])

    def request_asked(self, state: RequestState, is_known: bool) -> None:
        """Note the answer to a request. A look-up changes nothing, so this is all."""
        if is_known and (_can_load(state.lookup) or state.request.request_id in self._kept):
            self._told.append(state)

    def request_admitted(self, state: RequestState, admission: AdmissionReport) -> None:
        """Release what is pinned for it: it has blocks now, and what it loads is pinned by its load."""
        self._release(state.request.request_id)

    def request_ended(self, state: RequestState, block_ids: BlockIds) -> None:
        """Release what is pinned for it."""
        self._release(state.request.request_id)

    def step_begins(self, step: StepView) -> None:
        """Pin what was promised since the last step to requests without blocks, before anything is stored over it.

        It counts as used, once, however long they wait.
        """
        self._step += 1
        for state in self._told:
            lookup = state.lookup
            if lookup is None or not _can_load(lookup):
                # It was admitted, or has ended, or there is nothing for it now.
                self._release(state.request.request_id)
                continue
            if not state.is_marked:
                self._mark_used(state)
                state.is_marked = True
            ends = [(keys.keys, lookup.num_tokens // keys.chunk_tokens) for keys in state.keys]
            self._manager.renew(keys[end - 1] for keys, end in ends if end)
            self._pin(state, lookup)
        self._told.clear()
        if not self._kept:
            return
        for request_id in [name for name, kept in self._kept.items() if kept.step <= self._step - KEPT_STEPS]:
            self._release(request_id)

    def reset(self) -> None:
        """Release everything: what is kept was dropped, or is set aside."""
        self._told.clear()
        for request_id in list(self._kept):
            self._release(request_id)

    def shutdown(self) -> None:
        """Release everything."""
        self.reset()

    def _release(self, request_id: str) -> None:
        if (kept := self._kept.pop(request_id, None)) is not None:
            kept.handle.release()

    def _pin(self, state: RequestState, lookup: Lookup) -> None:
        request_id, manager = state.request.request_id, self._manager
        of, kept = (state.keys, lookup.num_computed_tokens, lookup.num_tokens), self._kept.get(request_id)
        if kept is not None and kept.of == of:
            self._kept[request_id] = kept._replace(step=self._step)
            return
        self._release(request_id)
        wanted = []
        for keys in state.keys:  # of a window, what queries after the hit read
            first = max(lookup.num_computed_tokens, keys.group.num_skipped_tokens(lookup.num_tokens))
            wanted += keys.keys[first // keys.chunk_tokens : lookup.num_tokens // keys.chunk_tokens]
        if manager.num_pins + len(wanted) <= KEPT_SHARE * manager.capacity:
            with suppress(MissingChunkError):  # a tier that has lost it since the look-up
                self._kept[request_id] = _Kept(manager.prepare_load(wanted), of, self._step)


def _can_load(lookup: Lookup | None) -> bool:
    return lookup is not None and lookup.num_tokens > lookup.num_computed_tokens
