"""Oracles of what is held and not found, of what the device would have found, had it not forgotten it, and of what is lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from cargohold.blocks import READY
from cargohold.cache import OffloadKey, TierManager, chunk_table
from cargohold.cache.manager import ForwardingManager, OffloadManager, SlotReservation
from cargohold.connector.kernel.requests import RequestState
from cargohold.connector.kernel.shared import Shared
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


# --- what is lost although there is room for it ------------------------------------------------------------------------


class LossOracle(Oracle):
    """Checks that nothing which the device alone held is lost while host memory has a free slot, or that of a copy, for it.

    Under pressure it may be: what a request held when the last step ended, preempted or left behind by a window, may be freed
    and allocated again in one go. Of several connectors, one that has kept a chunk is enough, and none sees what another
    one has held until after the last step.

    Args:
        engine: the replica.
        is_excused: whether a fault has struck, or limits of tenants may be in the way.
    """

    name = "losses"

    def __init__(self, engine: Replica, is_excused: Callable[[], bool]) -> None:
        self._is_excused = is_excused
        self._shared = [side.shared for side, _ in offloading_sides(engine.scheduler.connector)]
        # By connector, what only blocks that are free held when the last step ended, and whether there was room then; what was
        # to be saved since; and of that, what was refused although there was room.
        self._before: list[tuple[set[OffloadKey], bool]] = [(set(), False) for _ in self._shared]
        self._earlier: list[set[OffloadKey]] = [set() for _ in self._shared]  # the same, one step earlier
        self._offered: set[OffloadKey] = set()
        self._refused: list[OffloadKey] = []
        for at, shared in enumerate(self._shared):
            self._watch(at, shared)

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """What the device alone held is there still, or has a slot, or there is none."""
        lost, self._refused = self._refused, []
        for at, shared in enumerate(self._shared):
            (held, had_room), now = self._before[at], _held_and_room(shared)
            both, self._earlier[at], self._before[at] = held & self._earlier[at], held, now
            if had_room and now[1]:
                lost += _gone(shared, (both if len(self._shared) > 1 else held) - now[0] - self._offered)
        self._offered.clear()
        lost = [key for key in lost if not any(_keeps(shared, key) for shared in self._shared)]
        if lost and not self._is_excused():
            self.fail(f"{len(lost)} chunks are lost, {lost[0].hex()[:8]} among them, and there is room for them")

    def _watch(self, at: int, shared: Shared) -> None:
        prepare_saves, reset = shared.manager.prepare_saves, shared.manager.reset

        def save(keys: Sequence[OffloadKey], **options: bool) -> SlotReservation:
            listed = shared.manager.listed(keys)
            handle = prepare_saves(keys, **options)
            self._offered.update(keys)
            if len(handle.keys) < len(listed) and _held_and_room(shared)[1]:
                self._refused += set(listed).difference(handle.keys)
            return handle

        def forget() -> bool:
            if is_reset := reset():
                self._before[at] = set(), False
            return is_reset

        vars(shared.manager).update(prepare_saves=save, reset=forget)


def _keeps(shared: Shared, key: OffloadKey) -> bool:
    """Whether host memory has a chunk, or is copying it."""
    return bool(shared.manager.num_known([key])) and not shared.manager.listed([key])


def _gone(shared: Shared, keys: Collection[OffloadKey]) -> list[OffloadKey]:
    """Return those of the chunks that neither the device nor host memory has, although they may be listed still."""
    listed, keys = set(shared.manager.listed(list(keys))), list(keys)
    on_device = zip(keys, [] if shared.device is None else shared.device.holds(keys), strict=True)
    return [key for key, is_held in on_device if not is_held and (key in listed or not shared.manager.num_known([key]))]


def _held_and_room(shared: Shared) -> tuple[set[OffloadKey], bool]:
    """Return the chunks that only free blocks of the device hold, and whether host memory has a slot for such ones."""
    manager: OffloadManager = shared.manager
    while isinstance(manager, ForwardingManager):
        manager = manager.inner
    if shared.device is None or not isinstance(manager, TierManager) or not manager.num_listed:
        return set(), False
    free = shared.device.next_lost(shared.layout.num_blocks)
    # What a policy thinks no request asks for again takes free slots alone.
    copies = manager.table.slots_in(chunk_table.READY) if manager.policy.name in ("lru", "fifo") else []
    return set(manager.listed(tuple(free))), manager.num_free > 0 or any(manager.may_be_taken(copies))
