"""Jobs of lower tiers: those that requests want, writes, and the upkeep of chunks in use."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

from cargohold.blocks import READY
from cargohold.cache.manager import LoadHandle, OffloadKey, OffloadManager
from cargohold.tiers.config import WriteMode
from cargohold.tiers.port import JobKind
from cargohold.tiers.scheduler_side.fetches import BATCH_CHUNKS
from cargohold.tiers.scheduler_side.tasks import TaskTable, TierCommand, TierTask
from cargohold.tiers.scheduler_side.tier_state import TieringConfig, TierState, parents_in

_SomeKey = TypeVar("_SomeKey", OffloadKey, OffloadKey | None)


def random_epoch() -> bytes:
    """Return 16 random bytes: a name that no other engine has and that nobody can predict."""
    return secrets.token_bytes(16)


class Dispatch:
    """Turns tasks into commands for the workers, as far as the tiers can take them.

    Args:
        host: the manager of host memory; chunks are pinned there while they are written.
        tiers: the tiers.
        tasks: the table of tasks; mutated.
        config: deadlines.
        new_epoch: makes the new name for ``rename``.
    """

    def __init__(
        self,
        host: OffloadManager,
        tiers: Sequence[TierState],
        tasks: TaskTable,
        config: TieringConfig,
        new_epoch: Callable[[], bytes],
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._tasks = tasks
        self._config = config
        self._new_epoch = new_epoch
        self._epoch = b""

    def requested(self, new_id: Callable[[], int], turn_away: Callable[[TierTask], None]) -> Iterator[TierCommand]:
        """Yield commands for the probes, touches and loads that wait to be handed out.

        Tasks that were cancelled, or whose access is suspended, go to ``turn_away`` instead. Tasks for which a tier's workers
        have no room keep their turn: the workers would refuse them, which looks like a failure of the medium.
        """
        full: set[int] = set()
        for task in self._tasks.take_wanted():
            if not task.is_cancelled and (task.tier in full or self._is_too_much(task)):
                full.add(task.tier)
                self._tasks.want(task)
            elif not task.is_cancelled and self._may_go(task):
                yield self._command(new_id(), task, self._config.restore_timeout_s)
            else:
                turn_away(task)

    def writes(self, new_id: Callable[[], int]) -> Iterator[TierCommand]:
        """Yield commands that write as many chunks of the backlogs as may be in flight; pin the chunks."""
        for at, tier in enumerate(self._tiers):
            while (room := tier.num_writable) and tier.is_writable:
                backlog, is_writable = tier.backlog, self._writable
                if tier.promised:
                    backlog, is_writable = tier.promised, self._promised
                batch = backlog.take(min(room, BATCH_CHUNKS), partial(is_writable, tier))
                if batch is None:
                    break
                pins = self._host.prepare_load(batch.keys)
                task = TierTask(
                    JobKind.STORE, at, batch.keys, batch.parents, pins.slots, on_end=partial(_release, pins)
                )
                tier.begin_writing(task)
                yield self._command(new_id(), task, self._config.store_timeout_s)

    def rename(self) -> None:
        """Give chunks other names in the tiers from now on, so that nobody finds what is there under the old names."""
        self._epoch = self._new_epoch()

    def _is_too_much(self, task: TierTask) -> bool:
        num_asked = self._tasks.num_asked(task.tier)
        return num_asked > 0 and num_asked + len(task.keys) > self._tiers[task.tier].options.max_asked_chunks

    def _may_go(self, task: TierTask) -> bool:
        return self._tiers[task.tier].takes(task.kind)

    def _writable(self, tier: TierState, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the chunks that a tier wants and host memory has."""
        wanted = tier.wanted(keys)
        return [key for key, state in zip(wanted, self._host.lookup(wanted), strict=True) if state == READY]

    def _promised(self, tier: TierState, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the promised chunks that host memory has, but for those that are being written. One that is there already is
        written again, because what was known of it is old.
        """
        states = zip(keys, self._host.lookup(keys), strict=True)
        return [key for key, state in states if state == READY and not tier.is_to_write(key)]

    def _command(self, job_id: int, task: TierTask, timeout_s: float) -> TierCommand:
        self._tasks.begin(job_id, task)
        parents = self._names(task.parents) if task.kind is JobKind.STORE else ()
        return TierCommand(job_id, task.tier, task.kind, self._names(task.keys), tuple(task.slots), parents, timeout_s)

    def _names(self, keys: Sequence[_SomeKey]) -> tuple[_SomeKey, ...]:
        """Return the names of chunks in the tiers: their keys, or digests of epoch and key after a ``rename``."""
        return tuple(map(self._name, keys) if self._epoch else keys)

    def _name(self, key: _SomeKey) -> _SomeKey:
        if key is None:
            return key
        # As long as the key; the group in its last 4 bytes stays readable.
        return blake2b(self._epoch + key, digest_size=len(key) - 4).digest() + key[-4:]


def _release(pins: LoadHandle, *_: object) -> None:
    pins.release()


# --- keeps chunks in lower tiers that host memory gives back ----------------------------------------------------------

LOOK_AFTER_S = 600.0
"""Chunks in use are probed in each tier once in this many seconds, and written again where they are gone."""
TOUCH_S = 10.0
"""Tiers with an index are told of the use of each chunk once in this many seconds."""


class Upkeep:
    """Probes the tiers for chunks in use, and tells them of their use.

    More chunks than a tier takes in one job go in several jobs, the end of a prefix first, so that it counts as used earlier
    than the start and is evicted first. A tier where each chunk has its price is asked for a few at a time: nobody waits for
    the answers, and requests that wait for others should not stand behind thousands of these.

    Args:
        tiers: the tiers; mutated.
        tasks: the table that jobs are added to.
    """

    def __init__(self, tiers: Sequence[TierState], tasks: TaskTable) -> None:
        self._tiers = tiers
        self._tasks = tasks
        # Per tier: chunks to probe later, with their parents, and whether a probe has not ended. Without one, nothing waits.
        self._waiting: list[dict[OffloadKey, OffloadKey | None]] = [{} for _ in tiers]
        self._is_probing = [False for _ in tiers]

    def note_used(self, kept: Sequence[OffloadKey], keys: Sequence[OffloadKey]) -> None:
        """Learn that a request uses ``keys``, in prefix order, of which it gets ``kept`` from host memory."""
        for at, tier in enumerate(self._tiers):
            if tier.is_readable:
                if tier.options.write_mode is not WriteMode.BACK:
                    self._look_after(at, tier, kept, keys)
                if tier.options.has_index:
                    self._tell(at, tier, kept)

    def _look_after(self, at: int, tier: TierState, kept: Sequence[OffloadKey], keys: Sequence[OffloadKey]) -> None:
        asked = self._not_asked_for(tier, kept)
        if not asked:
            return
        parents = parents_in(keys)
        if tier.options.num_asked_at_once is None:
            for part in reversed(tier.parts(asked)):
                self._probe(at, part, parents)
            return
        waiting = self._waiting[at]
        room = tier.options.max_asked_chunks - len(waiting)
        waiting.update({key: parents[key] for key in asked[:room]})
        if not self._is_probing[at]:
            self._probe_next(at)

    def note_ended(self, at: int, *, is_done: bool) -> None:
        """Learn that a probe of tier ``at`` has ended, and whether it was carried out; begin the next one, if one waits.

        If it was not, what waits is forgotten. What is still not heard of is asked for again when it is used.
        """
        self._is_probing[at] = False
        if not is_done:
            self._waiting[at].clear()
        self._probe_next(at)

    def _probe_next(self, at: int) -> None:
        tier, waiting = self._tiers[at], self._waiting[at]
        size = min(tier.options.num_asked_at_once or 1, tier.options.max_asked_chunks)
        asked: Sequence[OffloadKey] = ()
        while waiting and not asked:
            part = {key: waiting.pop(key) for key in list(islice(waiting, size))}
            asked = self._not_asked_for(tier, list(part))  # requests may have asked for the others meanwhile
            if asked:
                self._is_probing[at] = True
                self._probe(at, asked, part)

    def _probe(self, at: int, asked: Sequence[OffloadKey], parents: Mapping[OffloadKey, OffloadKey | None]) -> None:
        self._tiers[at].probing.update(asked)
        self._tasks.want(TierTask(JobKind.PROBE, at, asked, [parents[key] for key in asked], owner=self))

    def _not_asked_for(self, tier: TierState, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        return [key for key in tier.presence.not_heard_of(keys, LOOK_AFTER_S) if not tier.is_asked_for(key)]

    def _tell(self, at: int, tier: TierState, kept: Sequence[OffloadKey]) -> None:
        """Tell the tier of the use of all chunks that it is thought to have, if it was not told of one of them lately.

        It is told of all of them: if only of some, the start of a prefix might count as used before its end, and be evicted
        first.
        """
        is_told = tier.touching | tier.probing  # a probe tells the tier of a chunk's use, too
        last = zip(kept, tier.presence.last(kept), strict=True)
        known = [key for key, is_there in last if is_there and key not in is_told]
        if tier.presence.not_heard_of(known, TOUCH_S):
            tier.touching.update(known)
            for part in reversed(tier.parts(known)):
                self._tasks.want(TierTask(JobKind.TOUCH, at, part))
