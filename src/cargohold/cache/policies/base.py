"""The policy port: decides which chunks of one tier stay, and which are evicted to make room for others.

A policy knows slots, keys and order; nothing of engines, tensors, groups, handles or bytes. It asks no clock: its time is the
sequence of calls, so the same calls always lead to the same choice.

A chunk is worth nothing when the chunk before it is gone, because a prefix is only usable up to its first hole. So only ends of
prefixes are evicted: chunks that no other chunk in the tier follows.

The two simplest, LRU and FIFO, stand next to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf
from typing import ClassVar, Final, NamedTuple

from cargohold.cache.chunk_table import NO_SLOT, ChunkTable
from cargohold.cache.policies.runs import Order, Run, Runs
from cargohold.protocol import TurnEnd


class Newcomers(NamedTuple):
    """Absent chunks of one prefix that want slots.

    Attributes:
        keys: the chunks, in prefix order.
        parent: slot of the chunk before the first, or ``NO_SLOT`` if that is not in the tier.
    """

    keys: Sequence[bytes]
    parent: int


class ReplacementPolicy(ABC):
    """Decides which chunks of a table stay.

    Attributes:
        name: the policy's name in options.
        table: the chunks. A policy reads its columns and evicts with ``evict``; all else is its owner's.
        may_pool: whether some chunks of its table may have no slot, because the device holds them; see ``rows.PooledTable``.

    Args:
        table: the chunks, of which there are none yet.
    """

    name: ClassVar[str]
    may_pool: ClassVar[bool] = False

    def __init__(self, table: ChunkTable) -> None:
        self.table = table

    def admit_all(self) -> None:  # noqa: B027  # most policies do so anyway
        """Refuse no chunk for its worth from now on. See ``OffloadManager.admit_all``."""

    @abstractmethod
    def touch(self, slots: Sequence[int], *, is_whole: bool) -> None:
        """Note that a request uses chunks.

        Args:
            slots: slots of the request's chunks that are in the tier, in prefix order.
            is_whole: whether the last of them is the request's last chunk.
        """

    def renew(self, slot: int) -> None:  # noqa: B027  # an order without times has nothing to renew
        """Let the prefix that ends in ``slot`` count as used now, although it is not: a request waits for it, or goes on."""

    def end_turn(self, keys: Sequence[bytes], slot: int, end: TurnEnd) -> None:  # noqa: B027  # most do not learn
        """Note that a request has ended.

        Args:
            keys: all its chunks, those of its answer included, in prefix order.
            slot: slot of the last of them that is in the tier, or ``NO_SLOT``.
            end: how it ended.
        """

    @abstractmethod
    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        """Evict at most ``num_slots`` chunks, with ``table.evict``, for absent chunks of one prefix.

        Only chunks with no ``children`` and no ``pins`` may be evicted. ``parent`` is pinned.

        Args:
            keys: the chunks that want slots, in prefix order.
            parent: slot of the chunk before the first, or ``NO_SLOT`` if that is not in the tier.
            num_slots: how many of them have no slot yet: the last ones, because free slots go to the first ones.

        Returns:
            If fewer were evicted: whether that is because the others are worth more than ``keys``. If not, they are all in use,
            and asking again later may give more.
        """

    def make_room_ahead(self, newcomers: Sequence[Newcomers], num_slots: int) -> None:  # noqa: B027  # it saves time alone
        """Evict at most ``num_slots`` chunks for absent chunks of prefixes, which will be placed one after the other.

        Optional: if it evicts fewer, ``make_room`` is asked for each prefix that finds no free slot. It must evict none that
        ``make_room`` would keep for all of them. What comes from many requests in one step then takes one eviction.

        Args:
            newcomers: the chunks of each prefix; all their parents are pinned.
            num_slots: how many of all these chunks have no slot yet, and maybe a few more, to spare.
        """

    @abstractmethod
    def add(self, keys: Sequence[bytes], parent: int, slots: Sequence[int]) -> None:
        """Note that the leading chunks of ``keys`` were placed in ``slots``; the others will not be stored."""

    @abstractmethod
    def drop(self, slots: Sequence[int]) -> None:
        """Note that chunks leave the table for other reasons than eviction: a failed store, a corrupt chunk.

        They are still in the table during the call.
        """

    # --- where some chunks of the table have no slot, because the device holds them: see ``may_pool``

    def worth_of(self, slots: Sequence[int]) -> Sequence[float]:
        """Return what chunks are worth. By default, none is worth more than another, and those used longest ago go."""
        return [inf] * len(slots)

    def note_saved(self, slots: Sequence[int]) -> None:  # noqa: B027  # only where ``may_pool``
        """Note that chunks which had no slot have one now, so that they may be evicted."""

    def lose(self, slots: Sequence[int]) -> None:
        """Note that chunks leave the table which had no slot, because the device has lost them."""
        self.drop(slots)

    @abstractmethod
    def clear(self) -> None:
        """Forget every chunk. What was learned about the traffic may be kept."""

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant, against the table. Raises ``AssertionError``. For tests and idle moments."""


class RunsPolicy(ReplacementPolicy):
    """A policy whose order of eviction is one of runs. Only such a policy can honour hints and quotas.

    Its owner may set chunks aside, in orders of its own (see ``Runs``), and choose victims there. Several policies may share a
    table, each for chunks of its own, if they share the runs too.

    Args:
        table: the chunks.
        runs: the runs of a policy that has chunks in the same table.

    Attributes:
        number: what the table calls the owner of its chunks.
    """

    def __init__(self, table: ChunkTable, runs: Runs | None = None) -> None:
        super().__init__(table)
        self.runs = Runs(table) if runs is None else runs
        self.number = 0

    def own_slots(self) -> list[int]:
        """Return the slots of its chunks. Walks the whole table."""
        owners = self.table.owners
        used = [slot for slot, run in enumerate(self.runs.run_of) if run is not None]
        return used if owners is None else [slot for slot in used if owners[slot] == self.number]

    def note_saved(self, slots: Sequence[int]) -> None:
        """See ``ReplacementPolicy``."""
        for slot in slots:
            self.runs.put_back(slot)

    @abstractmethod
    def home(self, run: Run[int]) -> Order[int]:
        """Return the order in which a run of its chunks belongs."""

    @abstractmethod
    def give_up(self, num_chunks: int, worth: float = inf) -> None:
        """Evict at most ``num_chunks``, those worth least, none worth more than ``worth``. Chunks set aside do not count."""

    def note_evicted(self, victims: Sequence[tuple[Run[int], Sequence[int]]]) -> None:  # most keep no books
        """Note that its owner has evicted chunks that were set aside, given as slots by run."""


REFRESHED_AFTER_PART: Final = 8
"""A growing prefix counts as used again if more chunks than this part (an eighth) of the tier were used since its last use."""


class FIFOPolicy(RunsPolicy):
    """Evicts the chunks stored longest ago; of chunks stored together, the last one first.

    The baseline against which the value of knowing uses is measured.
    """

    name: ClassVar[str] = "fifo"
    may_pool: ClassVar[bool] = True

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

    def give_up(self, num_chunks: int, worth: float = inf) -> None:  # noqa: D102
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
    in use: if more chunks than an eighth of the tier holds were used or stored since it was touched, it counts as used again.
    That is no use of its own: else a few long prompts that grow would make each other older, and be due again with every chunk.
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
        if run is None or run.order is not self._order:  # without a parent, or after one that was set aside
            super().add(keys, parent, slots)
        else:
            self._now += len(slots)
            self.runs.extend(run, slots)

    def renew(self, slot: int) -> None:  # noqa: D102
        self._now += 1
        self.runs.renew(slot, self._now, self.home)

    def _refresh(self, parent: int) -> None:
        """Count the prefix that ends in ``parent`` as used again, if it is time to: see the class."""
        run = None if parent == NO_SLOT else self.runs.run_of[parent]
        if run is not None and self._now - run.time > self._patience:
            self.renew(parent)
