"""Chunks promised to another engine: written to the shared tiers before all others, whatever those tiers' options say.

::

    made --host memory has it--> pinned, waits to be written, is written --> kept, or broken
      |
      +-- does not come in time, or could not be stored --> broken

A promised chunk is pinned in host memory until every shared tier that can take it has it: a host memory smaller than a prompt
would evict the prompt's start before its turn comes. A tier that puts it off is offered it again. No promise lasts longer than
``hold_s``, which is as long as the other engine waits, so a tier that hangs does not keep host memory from other requests; but
it lasts for ``deadlines.HOLD_STEPS`` steps, however long they take: what one step begins is reported one or two steps later.

Hard limits are kept: a tier whose daily allowance is spent or whose writes are suspended gets nothing, and ``states`` says so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

from cargohold.blocks import ABSENT, NOT_YET, READY
from cargohold.cache.manager import ChunkPins, OffloadKey, OffloadManager
from cargohold.deadlines import Deadline, HoldTime
from cargohold.protocol import Clock
from cargohold.tiers.scheduler_side.writing import Writes

_NEVER: Final = float("inf")


@dataclass(slots=True)
class _Promise:
    """One promised chunk.

    Attributes:
        parent: the chunk before it in its prefix, or ``None``.
        until: when it is given up.
        pin: its pin in host memory; ``None`` while it is not there.
    """

    parent: OffloadKey | None
    until: Deadline
    pin: ChunkPins | None = None


class Promises:
    """The chunks that requests with ``do_remote_decode`` have promised to another engine.

    Args:
        host: the manager of host memory; promised chunks are pinned there.
        writes: what is written to each tier below. Those that other machines share get promised chunks.
        clock: time in which the engine steps.
        hold_s: seconds after which a promise is given up, unless that is less than ``deadlines.HOLD_STEPS`` steps.

    Attributes:
        made: the chunks that were promised, until they are kept or broken.
        num_broken: number of promised chunks that no shared tier got, since that was last taken.
    """

    def __init__(self, host: OffloadManager, writes: Sequence[Writes], clock: Clock, hold_s: float) -> None:
        self._host = host
        options = [of.tier.options for of in writes]
        is_shared = [of.locality == "REMOTE" and not of.is_read_only for of in options]
        self._writes = list(compress(writes, is_shared))
        self._tiers = [of.tier for of in self._writes]
        self._clock = clock
        self._hold_time = HoldTime(clock, hold_s)
        self.made: dict[OffloadKey, _Promise] = {}
        for of in self._writes:
            of.is_promised = self.made.__contains__
        # Chunks in host memory that were promised and are written; the first written first. Some may have been evicted since.
        self._kept: OrderedDict[OffloadKey, None] = OrderedDict()
        self._check_at = _NEVER
        self.are_names_private = False
        self._hold_s = hold_s
        self.num_broken = 0

    @property
    def is_possible(self) -> bool:
        """Whether other machines share one of the tiers."""
        return bool(self._tiers)

    @property
    def obstacle(self) -> str:
        """Why nothing can be promised, as a clause; empty if something can."""
        if not self._tiers:
            return "no tier is shared with other engines"
        if self.are_names_private:
            return "after a reset, other engines do not find what this one writes"
        return "; ".join(tier.trouble for tier in self._tiers) if all(tier.is_off for tier in self._tiers) else ""

    @property
    def num_pins(self) -> int:
        """Number of chunks that promises pin in host memory."""
        return sum(promise.pin is not None for promise in self.made.values())

    def make(self, keys: Sequence[OffloadKey], parents: Mapping[OffloadKey, OffloadKey | None]) -> None:
        """Promise those of ``keys`` that no shared tier was found to have lately; pin those that host memory has.

        Args:
            keys: chunks of one prefix, in order. Those that host memory lacks must be stored soon.
            parents: the chunk before each in its prefix, or ``None``.
        """
        if self.obstacle:
            return
        until = self._hold_time.deadline()
        are_there = [tier.known(keys) for tier in self._tiers]
        missing = [key for key, *answers in zip(keys, *are_there, strict=True) if True not in answers]
        for key in missing:
            promise = self.made.setdefault(key, _Promise(parents[key], until))
            if promise.pin is None:  # it is on offer again, because there was no slot for it
                promise.until = until
        self._check_at = min(self._check_at, until.at)
        self.note_ready(missing)

    def note_ready(self, keys: Iterable[OffloadKey]) -> None:
        """Note that host memory may have these chunks: those that are promised are pinned, and written next."""
        if not self.made:
            return  # nearly always
        promised = [key for key in keys if (made := self.made.get(key)) is not None and made.pin is None]
        ready = [key for key, state in zip(promised, self._host.lookup(promised), strict=True) if state == READY]
        for key in ready:
            promise = self.made[key]
            promise.pin, promise.until = self._host.prepare_load([key]), self._hold_time.deadline()
        for writes in self._writes:
            writes.promised.add(ready, {key: self.made[key].parent for key in ready})

    def note_written(self, keys: Iterable[OffloadKey]) -> None:
        """Note that a job that wrote these chunks has ended: promises for which no tier has to write any more are over."""
        if not self.made:
            return  # nearly always
        promised = [key for key in keys if (made := self.made.get(key)) is not None and made.pin is not None]
        over = [key for key in promised if not any(writes.is_to_write(key) for writes in self._writes)]
        there = [tier.last_known(over) for tier in self._tiers]
        kept = [key for key, *answers in zip(over, *there, strict=True) if True in answers]
        self._kept.update(dict.fromkeys(kept))
        while len(self._kept) > self._host.capacity:
            self._kept.popitem(last=False)
        self._forget(kept)
        self.give_up(over)

    def make_room(self, num_chunks: int) -> None:
        """Remove from host memory up to ``num_chunks`` chunks that were promised and are written.

        Policies do not evict the start of a prompt for its end. A prompt that is longer than host memory goes through it all
        the same: what is in a shared tier by now can be found there.
        """
        room: list[OffloadKey] = []
        while self._kept and len(room) < num_chunks:
            key, _ = self._kept.popitem(last=False)
            if key not in self.made and self._host.lookup([key])[0] == READY:
                room.append(key)
        self._host.remove(room)

    def give_up(self, keys: Iterable[OffloadKey]) -> None:
        """Break promises. What waits to be written is written all the same if host memory still has it then."""
        self.num_broken += self._forget(keys)

    def give_up_all(self) -> None:
        self.give_up(list(self.made))
        self._kept.clear()

    def _forget(self, keys: Iterable[OffloadKey]) -> int:
        """Forget promises; return how many there were."""
        promises = [promise for key in keys if (promise := self.made.pop(key, None)) is not None]
        for promise in promises:
            if promise.pin is not None:
                promise.pin.release()
        return len(promises)

    def give_up_late(self) -> None:
        """Forget the promises whose time is over. Call it once in every step in which there are any."""
        self._hold_time.note_step()
        if self._clock() < self._check_at:
            return
        self.give_up([key for key, promise in self.made.items() if self._hold_time.has_passed(promise.until)])
        self._check_at = min((promise.until.at for promise in self.made.values()), default=_NEVER)

    def note_reset(self) -> None:
        """Forget all promises: from now on chunks have names that no other engine knows."""
        self.give_up_all()
        self.are_names_private = True

    def states(self, keys: Sequence[OffloadKey]) -> bytes:
        """Return what another engine finds, one byte per chunk, in prefix order.

        ``READY`` if a shared tier has it, ``NOT_YET`` if one will have it unless something fails, else ``ABSENT``.
        """
        if self.obstacle:
            return bytes([ABSENT]) * len(keys)
        there: set[OffloadKey] = set()
        coming: set[OffloadKey] = set()
        for writes in self._writes:
            answers = zip(keys, writes.tier.last_known(keys), strict=True)
            there.update(key for key, is_there in answers if is_there)
            coming.update(writes.will_take([key for key in keys if key in self.made], self._hold_s))
        return bytes(READY if key in there else NOT_YET if key in coming else ABSENT for key in keys)

    def why_not(self, key: OffloadKey) -> str:
        """Return why other engines will not find a chunk, as a clause; empty if they will."""
        if self.states([key]) != bytes([ABSENT]):
            return ""
        reasons = (f"tier {of.tier.name} {why}" for of in self._writes if (why := of.why_not(key, self._hold_s)))
        return next(reasons, "host memory does not have it")

    def check(self) -> None:
        """Verify every invariant. Raises ``AssertionError``."""
        assert self._tiers or not self.made, "promised to nobody"
        assert all(promise.until.at >= self._check_at for promise in self.made.values()), "a promise without an end"
