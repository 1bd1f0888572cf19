"""The ARC policy: balances recency and frequency by the evictions that it regrets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import inf
from typing import ClassVar, Final

from cargohold.cache.chunk_table import NO_SLOT, ChunkTable, spread_dicts
from cargohold.cache.policies.base import REFRESHED_AFTER_PART, Newcomers, RunsPolicy
from cargohold.cache.policies.runs import Order, Run, Runs, lose

_ONCE: Final = 0
_OFTEN: Final = 1


class ARCPolicy(RunsPolicy):
    """Balances recency and frequency by the evictions that it regrets.

    Chunks used once and chunks used more often are in two LRU lists. Keys evicted from either are remembered as *ghosts*, and
    when one of them comes back, its list gets a larger part of the tier. N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low
    Overhead Replacement Cache", FAST 2003, figure 4; for chunks that come one at a time, and continue no other, this does
    exactly what is written there.

    Chunks that come together are taken from the last to the first, and all of them are looked up in the ghost lists before any
    list is changed. As in LRU, a chunk that is stored after another one of its list joins its run, and a prefix that grows
    counts as used again now and then. A list whose chunks are all in use, or before others, gives none; then the other does.

    Args:
        table: the chunks.
    """

    name: ClassVar[str] = "arc"

    def __init__(self, table: ChunkTable, runs: Runs | None = None) -> None:
        super().__init__(table, runs)
        self._patience = table.capacity // REFRESHED_AFTER_PART
        self._now = 0
        self._target = 0.0
        self._next_target = b"", 0.0
        self._sizes = [0, 0]
        self._orders = Order[int](), Order[int]()
        self._ghosts = Ghosts(table.capacity)

    def touch(self, slots: Sequence[int], *, is_whole: bool) -> None:
        if slots:
            num_once = self._num_once(slots)
            self._sizes[_ONCE] -= num_once
            self._sizes[_OFTEN] += num_once
            self._now += len(slots)
            self.runs.move(slots, self._orders[_OFTEN], self._now, _OFTEN)

    def renew(self, slot: int) -> None:
        self._now += 1
        self.runs.renew(slot, self._now, self.home)

    def make_room(self, keys: Sequence[bytes], parent: int, num_slots: int) -> bool:
        self._refresh(parent)
        balance = self._balance(num_free=len(keys) - num_slots)
        wanted = balance.admit(self._ghosts.find(keys))
        # Applied when the chunks come in: if everything is in use, they do not, and are offered again.
        self._next_target = keys[0], balance.target
        self._give_up(wanted, balance)
        return False

    def make_room_ahead(self, newcomers: Sequence[Newcomers], num_slots: int) -> None:
        ghosts = self._ghosts.find(list(chain.from_iterable([keys for keys, _ in newcomers])))
        if ghosts.count(None) == len(ghosts):  # each ghost moves the target, which decides on the next victims
            balance = self._balance(num_free=len(ghosts) - num_slots)
            self._give_up(balance.admit(ghosts), balance)

    def add(self, keys: Sequence[bytes], parent: int, slots: Sequence[int]) -> None:
        keys = keys if len(slots) == len(keys) else keys[: len(slots)]
        ghosts = self._ghosts.find(keys)
        self._settle_target(keys, ghosts)
        self._refresh(parent)
        if ghosts.count(None) == len(ghosts):
            self._enter(slots, parent, _ONCE)
        else:
            at = 0
            for is_back, some in groupby(ghosts, key=lambda ghost: ghost is not None):
                part = slots[at : at + sum(1 for _ in some)]
                self._enter(part, parent, _OFTEN if is_back else _ONCE)
                at += len(part)
                parent = part[-1]
            self._ghosts.forget([key for key, ghost in zip(keys, ghosts, strict=True) if ghost is not None])
        self._ghosts.drop_oldest(_ONCE, self._sizes[_ONCE] + self._ghosts.sizes[_ONCE] - self.table.capacity)
        self._ghosts.drop_oldest(_OFTEN, sum(self._sizes) + sum(self._ghosts.sizes) - 2 * self.table.capacity)

    def give_up(self, num_chunks: int, worth: float = inf) -> None:
        balance = self._balance(num_free=0)
        self._give_up(balance.admit([None] * num_chunks), balance)

    def home(self, run: Run[int]) -> Order[int]:
        return self._orders[run.kind]

    def note_evicted(self, victims: Sequence[tuple[Run[int], Sequence[int]]]) -> None:
        for run, slots in victims:
            self._sizes[run.kind] -= len(slots)

    def drop(self, slots: Sequence[int]) -> None:
        num_once = self._num_once(slots)
        self._sizes[_ONCE] -= num_once
        self._sizes[_OFTEN] -= len(slots) - num_once
        self.runs.drop(slots)

    def clear(self) -> None:
        self._sizes = [0, 0]
        self._orders = Order(), Order()
        self.runs.clear()

    def check(self) -> None:
        self.runs.check()
        used = self.own_slots()
        num_once = self._num_once(used)
        assert self._sizes == [num_once, len(used) - num_once], "sizes are wrong"
        assert 0 <= self._target <= self.table.capacity, "the target is out of range"
        assert self._sizes[0] + self._ghosts.sizes[0] <= self.table.capacity, (
            "the first list and its ghosts are too many"
        )
        assert not any(ghost is not None for ghost in self._ghosts.find(self.table.keys_at(used))), "a ghost is here"
        self._ghosts.check()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _balance(self, num_free: int) -> Balance:
        return Balance(self.table.capacity, self._target, list(self._sizes), list(self._ghosts.sizes), num_free)

    def _settle_target(self, keys: Sequence[bytes], ghosts: Sequence[int | None]) -> None:
        """Adapt the target to chunks coming in that are ghosts. Mutates the target."""
        first_key, target = self._next_target
        if not keys or first_key != keys[0]:
            balance = self._balance(num_free=len(keys))
            balance.admit(ghosts)
            target = balance.target
        self._target, self._next_target = target, (b"", 0.0)

    def _give_up(self, wanted: Sequence[int], balance: Balance) -> None:
        """Evict as many chunks of each list as ``Balance.admit`` wants, or of the other list. Mutates everything."""
        missing = 0
        for which, num_wanted in ((_ONCE, wanted[0]), (_OFTEN, wanted[1]), (_ONCE, 0)):
            missing += num_wanted
            if missing:
                num_ghosts = missing if which == _OFTEN else self.table.capacity - balance.sizes[0]
                missing -= self._evict(which, missing, num_ghosts)

    def _evict(self, which: int, num_chunks: int, num_ghosts: int) -> int:
        """Evict from one list; return how many. Mutates everything. At most ``num_ghosts`` are remembered, the last ones."""
        num_evicted = sum(len(slots) for _, slots in self.runs.evict(self._orders[which], num_chunks))
        if num_evicted:
            self._sizes[which] -= num_evicted
            self._ghosts.remember(self.table.evicted[-num_evicted:][max(0, num_evicted - num_ghosts) :], which)
        return num_evicted

    def _enter(self, slots: Sequence[int], parent: int, which: int) -> None:
        """Put new chunks into a list, after their parent if that is in it."""
        if not slots:
            return
        self._sizes[which] += len(slots)
        self._now += len(slots)
        before = None if parent == NO_SLOT else self.runs.run_of[parent]
        if before is not None and before.order is self._orders[which]:
            self.runs.extend(before, slots)
        else:
            self.runs.add(slots, self._orders[which], self._now, which)

    def _refresh(self, parent: int) -> None:
        """Count the prefix that ends in ``parent`` as used again, as LRU does. Its chunks stay in their lists."""
        run = None if parent == NO_SLOT else self.runs.run_of[parent]
        if run is not None and self._now - run.time > self._patience:
            self.renew(parent)

    def _num_once(self, slots: Sequence[int]) -> int:
        run_of = self.runs.run_of
        return sum([run is not None and run.kind == _ONCE for run in map(run_of.__getitem__, slots)])


@dataclass(slots=True)
class Balance:
    """The paper's variables, and how chunks that come in change them.

    Attributes:
        capacity: number of slots, ``c``.
        target: number of slots that the first list should have, ``p``.
        sizes: sizes of the lists of chunks used once, ``T1``, and used more often, ``T2``.
        ghosts: sizes of the lists of keys evicted from either: ``B1``, ``B2``.
        num_free: number of free slots.
    """

    capacity: int
    target: float
    sizes: list[int]
    ghosts: list[int]
    num_free: int

    def admit(self, ghosts: Sequence[int | None]) -> list[int]:
        """Let chunks in, the last one first; return how many chunks each list must give up. Mutates everything.

        Args:
            ghosts: for each chunk, the ghost list that it is in, 0 or 1, or ``None``.
        """
        wanted = [0, 0]
        if ghosts.count(None) == len(ghosts):
            self._admit_strangers(len(ghosts), wanted)
            return wanted
        for ghost in reversed(ghosts):
            self._adapt(ghost)
            self._admit_one(ghost, wanted)
        return wanted

    def _adapt(self, ghost: int | None) -> None:
        """Adapt the target to a chunk that comes back, if it is a ghost: its list should have been larger."""
        if ghost is None:
            return
        hit, other = self.ghosts[ghost], self.ghosts[1 - ghost]
        step = max(1.0, other / hit) if hit else 1.0
        self.target = min(self.target + step, self.capacity) if ghost == 0 else max(self.target - step, 0)
        self.ghosts[ghost] -= hit > 0

    def _admit_one(self, ghost: int | None, wanted: list[int]) -> None:
        if self.num_free:
            self.num_free -= 1
        else:
            is_over = self.sizes[0] > self.target or (ghost == 1 and self.sizes[0] == self.target)
            victim = 0 if self.sizes[0] and (is_over or not self.sizes[1]) else 1
            self.sizes[victim] -= 1
            self.ghosts[victim] += 1
            wanted[victim] += 1
        self.sizes[ghost is not None] += 1

    def _admit_strangers(self, num_chunks: int, wanted: list[int]) -> None:
        """Do ``_admit_one`` for chunks in no ghost list at once: the second list gives until the first is above its target."""
        num_free = min(self.num_free, num_chunks)
        num_victims = num_chunks - num_free
        wanted[1] = min(num_victims, self.sizes[1], max(0, int(self.target) + 1 - self.sizes[0] - num_free))
        wanted[0] = num_victims - wanted[1]
        self.num_free -= num_free
        self.sizes = [self.sizes[0] + num_chunks - wanted[0], self.sizes[1] - wanted[1]]
        self.ghosts = [self.ghosts[0] + wanted[0], self.ghosts[1] + wanted[1]]


class Ghosts:
    """Keys of evicted chunks, each in one of two lists, in the order of eviction.

    Args:
        capacity: about how many there will be.

    Attributes:
        sizes: number of keys in each list.
    """

    def __init__(self, capacity: int) -> None:
        self.sizes = [0, 0]
        self._runs_of: list[dict[bytes, Run[bytes]]] = spread_dicts(capacity)
        self._orders = Order[bytes](), Order[bytes]()

    def find(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the list that each key is in, 0 or 1; ``None`` if in neither."""
        runs_of = self._runs_of
        runs = [runs_of[key[0]].get(key) for key in keys]
        return (
            [None] * len(runs) if runs.count(None) == len(runs) else [None if run is None else run.kind for run in runs]
        )

    def remember(self, keys: Sequence[bytes], which: int) -> None:
        """Append keys, which must be in neither list, at the young end of a list. The last one is the youngest."""
        if keys:
            run = Run(list(keys)[::-1], 0, which)
            for key in keys:
                self._runs_of[key[0]][key] = run
            self._orders[which].append(run)
            self.sizes[which] += len(keys)

    def drop_oldest(self, which: int, num_keys: int) -> int:
        """Forget the oldest keys of a list, at most ``num_keys``; return how many were forgotten."""
        num_dropped = 0
        while num_dropped < num_keys and (run := self._orders[which].oldest) is not None:
            key = run.entries[-1]
            if self._is_in(key, run):
                self.forget([key])
                num_dropped += 1
            else:
                run.entries.pop()
        return num_dropped

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove keys from whichever list they are in."""
        for key in keys:
            run = self._runs_of[key[0]].pop(key, None)
            if run is not None:
                self.sizes[run.kind] -= 1
                lose(run, 1, self._is_in)

    def check(self) -> None:
        """Verify that sizes, lists and keys agree. Raises ``AssertionError``."""
        for which, order in enumerate(self._orders):
            keys = [key for run in order for key in run.entries if self._is_in(key, run)]
            assert len(keys) == self.sizes[which] == sum(run.num_live for run in order), "sizes are wrong"
            assert self.find(keys) == [which] * len(keys), "a key is in the other list"
        found = {key for part in self._runs_of for key in part}
        assert len(found) == sum(self.sizes), "a key is in no list"

    def _is_in(self, key: bytes, run: Run[bytes]) -> bool:
        return self._runs_of[key[0]].get(key) is run
