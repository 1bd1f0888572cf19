"""Oracles of what is held and not found, and of what the device would have found, had it not forgotten it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from cargohold.blocks import READY
from cargohold.cache import OffloadKey
from cargohold.connector.kernel.requests import RequestState
from cargohold.connector.offloading import OffloadingScheduler
from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.lab.simulation.connectors import offloading_sides
from cargohold.lab.simulation.replica import Oracle, Replica
from cargohold.lab.simulation.tiers import ListedMedium
from cargohold.lab.simulation.traffic import Ask
from cargohold.protocol import AttentionKind, BlockIds, RequestView
from cargohold.tiers.scheduler_side.waiting import MAX_AGAIN


class FoundOracle(Oracle):
    """Checks that a request finds what host memory, or a tier that tells what it has, had before it asked, and has still.

    Unless a note says why not: computing is faster, there was no time, or no room. And no note says that nothing is kept where
    a chunk is. Only while no fault has struck, and where each chunk is needed: with one group, of full attention.

    Args:
        engine: the replica.
        media: the tiers below host memory that tell what they have.
        is_excused: whether a fault has struck.
    """

    name = "found"

    def __init__(
        self, engine: Replica, media: Callable[[], Iterable[ListedMedium]], is_excused: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._media = media
        self._is_excused = is_excused
        # In which step each chunk was first seen in a tier, and each request has asked first since it was admitted last.
        self._since: Mapping[OffloadKey, int] = {}
        self._asked: dict[str, int] = {}
        self._missed = ""
        self._sides = [
            side
            for side, _ in offloading_sides(engine.scheduler.connector)
            if side.lower is not None and [group.kind for group in engine.layout.groups] == [AttentionKind.FULL]
        ]
        for side in self._sides:
            self._watch(side)

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Nothing was missed in this step. Not raised in the connector's call: guards would catch that."""
        if self._missed and not self._is_excused():
            self.fail(self._missed)
        if self._sides:
            there = {key for medium in self._media() if medium.tier.knows_all for key in medium.find(())}
            self._since = {key: self._since.get(key, self._engine.num_steps) for key in there}

    def _watch(self, side: OffloadingScheduler) -> None:
        look_up, admit = side.get_num_new_matched_tokens, side.update_state_after_alloc

        def looked_up(request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
            self._asked.setdefault(request.request_id, self._engine.num_steps)
            return look_up(request, num_computed_tokens)

        def admitted(request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
            state = side.requests[request.request_id]
            is_over = state.lookup is not None
            num_found = 0 if state.lookup is None else state.lookup.num_computed_tokens + num_external_tokens
            is_explained = not self._owes_all(side, state)
            admit(request, blocks, num_external_tokens)
            if is_over:
                self._check(side, state, num_found, self._asked.pop(request.request_id), is_explained=is_explained)

        vars(side)["get_num_new_matched_tokens"], vars(side)["update_state_after_alloc"] = looked_up, admitted

    def _owes_all(self, side: OffloadingScheduler, state: RequestState) -> bool:
        """Whether a request that is about to be admitted is to get all that there is."""
        waiting = None if side.below is None else side.below.waiting.get(state.request.request_id)
        gave_up = waiting is not None and waiting.num_again >= MAX_AGAIN
        return not (state.notes or gave_up or state.was_admitted or state.params.max_load_tokens is not None)

    def _check(
        self, side: OffloadingScheduler, state: RequestState, num_found: int, asked: int, *, is_explained: bool
    ) -> None:
        (keys,) = state.keys
        at, inside = divmod(num_found, keys.chunk_tokens)
        # The rest of a chunk is not worth a load.
        if inside or at >= len(keys.keys) or (at + 1) * keys.chunk_tokens >= state.request.num_tokens:
            return
        key = keys.keys[at]
        is_in_host = side.shared.manager.lookup([key]) == bytes([READY])
        # What was there when the last step ended may have gone with a reset since.
        is_below = self._since.get(key, self._engine.num_steps) < asked and any(
            key in medium.find([key]) for medium in self._media() if medium.tier.knows_all
        )
        is_held = is_in_host or is_below
        if is_held and not is_explained:
            self._missed = f"{state.request.request_id} found {num_found} tokens, and chunk {at} is held"
        elif is_held and state.notes and "nothing of it is kept" in state.notes[-1]:
            self._missed = f"{state.request.request_id} gets the note that nothing is kept, and chunk {at} is held"


class ReuseOracle(Oracle):
    """Checks that requests find as much on the device and in tiers as they find on a device that forgets nothing.

    Less at most one chunk, and not nothing where something is found there. From the third request on that begins with the same
    three chunks: the first two tell what is shared. Only while no fault has struck, and with tiers that forget nothing.

    Args:
        asks: the requests.
        chunk_tokens: tokens at whose multiples all groups have a whole chunk.
        found: tokens that each request has found.
        alone: plays the same traffic on a device that forgets nothing; returns what each request finds there.
        is_excused: whether a fault has struck.
    """

    name = "reuse"

    def __init__(
        self,
        asks: Sequence[Ask],
        chunk_tokens: int,
        found: Mapping[str, int],
        alone: Callable[[], Mapping[str, int]],
        is_excused: Callable[[], bool],
    ) -> None:
        self._asks = asks
        self._chunk_tokens = chunk_tokens
        self._found = found
        self._alone = alone
        self._is_excused = is_excused

    def at_end(self) -> None:
        """Check what every request has found."""
        owed = [] if self._is_excused() else [ask.request_id for at, ask in enumerate(self._asks) if self._is_owed(at)]
        alone = self._alone() if owed else {}
        for name in owed:
            found, expected = self._found[name], alone[name]
            if found < expected - self._chunk_tokens or found == 0 < expected:
                self.fail(f"{name} found {found} tokens, and on a device that forgets nothing it finds {expected}")

    def _is_owed(self, at: int) -> bool:
        """Whether two earlier requests begin with the same three chunks."""
        beginning = self._asks[at].prompt[: 3 * self._chunk_tokens]
        num_alike = sum(ask.prompt[: len(beginning)] == beginning for ask in self._asks[:at])
        return len(beginning) == 3 * self._chunk_tokens and num_alike >= 2
