"""An oracle of chunks that are lost although host memory could have kept them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from cargohold.cache import OffloadKey, TierManager
from cargohold.cache.chunk_table import READY
from cargohold.cache.manager import ForwardingManager, OffloadManager, SlotReservation
from cargohold.connector.kernel.shared import Shared
from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.lab.simulation.connectors import offloading_sides
from cargohold.lab.simulation.replica import Oracle, Replica


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
    copies = manager.table.slots_in(READY) if manager.policy.name in ("lru", "fifo") else []
    return set(manager.listed([key for key, _ in free])), manager.num_free > 0 or any(manager.may_be_taken(copies))
