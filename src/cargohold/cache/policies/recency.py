"""LRU and FIFO: runs in one order, with and without regard to use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from cargohold.cache.chunk_table import NO_SLOT, ChunkTable
from cargohold.cache.policies.base import Newcomers, RunsPolicy
from cargohold.cache.policies.runs import Order, Run, Runs

REFRESHED_AFTER_PART: Final = 8
"""A growing prefix counts as used again if more chunks than this part (an eighth) of the tier were used since its last use."""


class FIFOPolicy(RunsPolicy):
    """Evicts the chunks stored longest ago; of chunks stored together, the last one first.

    The baseline against which the value of knowing uses is measured.
    """

    name: ClassVar[str] = "fifo"

    def __init__(self, table: ChunkTable, runs: Runs | None = None) -> None:
        super().__init__(table, runs)
        self._now = 0
        self._order = Order[int]()

    def touch(self, slots: Sequence[int], *, is_whole: bool) -> None:
        """Do nothing: uses do not count here."""

    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:  # noqa: D102
        self.runs.evict(self._order, num_slots)
        return False

    def make_room_ahead(self, newcomers: Sequence[Newcomers], num_slots: int) -> None:  # noqa: D102
        self.runs.evict(self._order, num_slots)

    def give_up(self, num_chunks: int) -> None:  # noqa: D102
        self.runs.evict(self._order, num_chunks)

    def home(self, run: Run[int]) -> Order[int]:  # noqa: D102
        return self._order

    def add(self, keys: Sequence[bytes], parent: int, slots: Sequence[int]) -> None:  # noqa: D102
        if slots:
            self._now += len(slots)
            self.runs.add(slots, self._order, self._now)

    def drop(self, slots: Sequence[int]) -> None:  # noqa: D102
        self.runs.drop(slots)

    def clear(self) -> None:  # noqa: D102
        self._order = Order[int]()
        self.runs.clear()

    def check(self) -> None:  # noqa: D102
        self.runs.check()


class LRUPolicy(FIFOPolicy):
    """Evicts the chunks used longest ago; of chunks used together, the last one first.

    Stored chunks count as used together with the chunk before them, just before it: they join its run. A prefix that grows is
    in use: if more chunks than an eighth of the tier holds were used since it was touched, it counts as used again.
    """

    name: ClassVar[str] = "lru"

    def __init__(self, table: ChunkTable, runs: Runs | None = None) -> None:
        super().__init__(table, runs)
        self._patience = table.capacity // REFRESHED_AFTER_PART

    def touch(self, slots: Sequence[int], *, is_whole: bool) -> None:  # noqa: D102
        if slots:
            self._now += len(slots)
            self.runs.move(slots, self._order, self._now)

    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:  # noqa: D102
        self._refresh(parent)
        return super().make_room(keys, parent, num_slots)

    def add(self, keys: Sequence[bytes], parent: int, slots: Sequence[int]) -> None:  # noqa: D102
        if not slots:
            return
        self._refresh(parent)
        run = None if parent == NO_SLOT else self.runs.run_of[parent]
        if run is None or run.order is not self._order:  # without a parent, or behind one that was set aside
            super().add(keys, parent, slots)
        else:
            self.runs.extend(run, slots)

    def _refresh(self, parent: int) -> None:
        """Count the prefix that ends in ``parent`` as used again, if it is time to: see the class."""
        run = None if parent == NO_SLOT else self.runs.run_of[parent]
        if run is not None and self._now - run.time > self._patience:
            self.touch(self.table.ancestors(parent), is_whole=False)
