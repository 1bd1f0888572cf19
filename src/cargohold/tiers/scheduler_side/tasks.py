"""Jobs of lower tiers on the scheduler side, from the moment they are wanted until all workers have reported them."""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from hashlib import blake2b, sha256
from itertools import repeat
from typing import Final, TypeVar

from cargohold.cache.manager import OffloadKey, Slot, namespace_of_key, offload_key, split_key
from cargohold.cache.retention import NO_RETENTION, Retention
from cargohold.protocol import Clock
from cargohold.tiers.chunk_format import NO_DETAILS, NO_NOTE, Note
from cargohold.tiers.messages import TierCommand, both
from cargohold.tiers.port import (
    ACCESS_OF,
    DONE,
    LISTED_AT_ONCE,
    NOTHING_LISTED,
    OPEN,
    SHOW_NOTHING,
    Access,
    JobKind,
    Listing,
)

_MAX_NAMES: Final = 2**18
"""Maximum number of names whose chunks are remembered. Of further chunks, losses of tiers are not reported."""
_MAX_LASTING: Final = 256
"""Maximum number of namespaces with lasting names: chunks of further ones that host memory still has die with the process."""
_IS_DONE: Final = bytes(verdict & DONE for verdict in range(256))
"""A table for ``bytes.translate``."""
_SomeKey = TypeVar("_SomeKey", OffloadKey, OffloadKey | None)


def random_epoch() -> bytes:
    """Return 16 random bytes: a name that no other engine has and that can't be predicted."""
    return secrets.token_bytes(16)


@dataclass(slots=True, eq=False)
class TierTask:
    """A job of a lower tier: wanted, then in flight, then ended.

    Attributes:
        kind: what to do.
        tier: index of the tier.
        keys: the chunks, in any order.
        on_end: draws the consequences of its end; called with the task, whether each chunk succeeded on all workers, and
            whether the job was carried out as a whole.
        parents: the chunk before each in its prefix, or ``None``, parallel to ``keys``; empty where that does not matter.
        slots: for loads and stores, their slots in host memory, parallel to ``keys``.
        owner: what it is for; the owner may cancel it.
        num_before: for a probe, number of chunks that the same look-up has found in the tier before.
        num_after: for a probe, number of chunks that the look-up will ask the tier for if all of these are there.
        num_found: for a probe, number of chunks that are there, once it is answered.
        begun_at: time at which it was handed out.
        took_s: seconds that the tier itself took, if reported. Until its end is known here, a long step may pass.
        answers: one byte per chunk: the merged ``TierJob.verdicts`` of all workers that have answered.
        num_answers: number of workers that have answered.
        listing: what the first worker has listed, for a task that lists.
        lost: chunks that a worker has lost after it had answered, and before the task has ended.
        has_ended: whether it has ended and its consequences were drawn.
        is_cancelled: whether it is no longer needed.
    """

    kind: JobKind
    tier: int
    keys: Sequence[OffloadKey]
    on_end: Callable[[TierTask, Sequence[bool], bool], None]
    parents: Sequence[OffloadKey | None] = ()
    slots: Sequence[Slot] = ()
    owner: object = None
    num_before: int = 0
    num_after: int = 0
    num_found: int = field(default=0, init=False)
    begun_at: float = field(default=0.0, init=False)
    took_s: float = field(default=0.0, init=False)
    answers: bytes = field(default=b"", init=False)
    num_answers: int = field(default=0, init=False)
    listing: Listing = field(default=NOTHING_LISTED, init=False)
    lost: set[OffloadKey] = field(default_factory=set, init=False)
    has_ended: bool = field(default=False, init=False)
    is_cancelled: bool = field(default=False, init=False)

    def note_answers(self, answers: bytes, num_workers: int) -> None:
        """Merge in the answers of ``num_workers`` further workers."""
        self.answers = both(self.answers, answers) if self.num_answers else answers
        self.num_answers += num_workers

    def succeeded(self, num_workers: int) -> list[bool]:
        """Return, per chunk, whether all ``num_workers`` workers were successful; ``False`` while some have not answered."""
        if self.num_answers != num_workers:
            return [False] * len(self.keys)
        return list(map(bool, self.answers.translate(_IS_DONE)))

    @property
    def refused(self) -> list[bool]:
        """Per chunk of a store, whether a worker had no room for it, so that it is no use to offer it again soon."""
        return [not verdict & OPEN for verdict in self.answers] if self.num_answers else [False] * len(self.keys)


class TaskTable:
    """The tasks that wait to be handed out to workers, and those in flight.

    A task in flight ends when all workers have reported it, and not before: its slots are theirs until then.

    Args:
        clock: time in which the engine steps.
        new_epoch: makes a new name for ``rename``, and for chunks of weights that only this process has held.

    Attributes:
        notes_of: says what else is known of chunks that are written, one note each, or none at all if that is nothing.
        granted: what hints ask for now; false if nothing.
        retention_of: returns what they ask for a chunk.
        is_renamed: whether all chunks have other names in the tiers than their keys.
    """

    def __init__(self, clock: Clock, new_epoch: Callable[[], bytes]) -> None:
        self._clock = clock
        self._new_epoch = new_epoch
        # Part of the names of chunks that no other engine is to find: of all, or of all but those in namespace 0. By namespace,
        # in its place, what later engines with the same weights know, too; the latest reports are last.
        self._epoch = b""
        self._lasting: OrderedDict[int, bytes] = OrderedDict()
        self.is_renamed = False
        # By name, where that is not the key; the oldest first.
        self._key_of: OrderedDict[OffloadKey, OffloadKey] = OrderedDict()
        self.notes_of: Callable[[Sequence[OffloadKey]], Sequence[Note]] = lambda _: ()
        self.granted: Collection[object] = ()
        self.retention_of: Callable[[OffloadKey], Retention] = lambda _: NO_RETENTION
        self._wanted: deque[TierTask] = deque()
        self._in_flight: dict[int, TierTask] = {}
        self._cancelled: list[int] = []
        # Per tier and access, the number of jobs in flight except those that show nothing, and the number of chunks of all.
        self._num_jobs: Counter[tuple[int, Access]] = Counter()
        self._num_chunks: Counter[tuple[int, Access]] = Counter()

    def __bool__(self) -> bool:
        return bool(self._wanted or self._in_flight)

    def __iter__(self) -> Iterator[TierTask]:
        yield from self._wanted
        yield from self._in_flight.values()

    def want(self, task: TierTask) -> None:
        """Add a task that waits to be handed out."""
        self._wanted.append(task)

    def take_wanted(self) -> Sequence[TierTask]:
        """Remove and return the tasks that wait to be handed out, the oldest first."""
        wanted, self._wanted = self._wanted, deque()
        return wanted

    def begin(self, job_id: int, task: TierTask, timeout_s: float) -> TierCommand:
        """Note that a task is handed out now under ``job_id``; return the command for the workers."""
        task.begun_at = self._clock()
        self._in_flight[job_id] = task
        self._count(task, 1)
        if task.kind in LISTED_AT_ONCE:
            return TierCommand(job_id, task.tier, task.kind, tuple(task.keys), (), (), timeout_s)
        parents: tuple[OffloadKey | None, ...] = ()
        notes: tuple[Note, ...] = ()
        if task.kind is JobKind.STORE:
            parents, notes = self.names(task.parents), self._notes(task.keys)
        elif task.kind is JobKind.RANK:
            notes = tuple(Note(retention=self.retention_of(key)) for key in task.keys)
        names = self.names(task.keys)
        return TierCommand(job_id, task.tier, task.kind, names, tuple(task.slots), parents, timeout_s, notes)

    def get(self, job_id: int) -> TierTask | None:
        return self._in_flight.get(job_id)

    def end(self, job_id: int) -> TierTask | None:
        """Remove and return a job that all workers have reported; ``None`` if it is not in flight."""
        task = self._in_flight.pop(job_id, None)
        if task is not None:
            self._count(task, -1)
        return task

    def is_in_flight(self, tier: int, access: Access) -> bool:
        """Whether a job of a tier is in flight that shows whether this access works."""
        return self._num_jobs[tier, access] > 0

    def num_asked(self, tier: int) -> int:
        """Return the number of chunks in a tier's probes, touches and loads in flight."""
        return self._num_chunks[tier, Access.LOOK_UP] + self._num_chunks[tier, Access.LOAD]

    def cancel(self, is_meant: Callable[[TierTask], bool], *, in_flight: bool = True) -> None:
        """Cancel the tasks that ``is_meant`` selects, those ``in_flight`` too. They end like all others, only sooner."""
        for task in self._wanted:
            task.is_cancelled |= is_meant(task)
        if not in_flight:
            return
        for job_id, task in self._in_flight.items():
            if not task.is_cancelled and is_meant(task):
                task.is_cancelled = True
                self._cancelled.append(job_id)

    def take_cancelled(self) -> Sequence[TierCommand]:
        """Return commands to cancel the jobs that were cancelled since the last call and are still in flight."""
        if not self._cancelled:
            return ()
        cancelled, self._cancelled = self._cancelled, []
        tasks = [(job_id, task) for job_id in cancelled if (task := self._in_flight.get(job_id)) is not None]
        return [TierCommand(job_id, task.tier, task.kind, cancels=True) for job_id, task in tasks]

    def rename(self) -> None:
        """Give chunks other names in the tiers from now on, so that no request finds what is there under the old names."""
        self._epoch, self.is_renamed = self._new_epoch(), True
        self._lasting.clear()
        self._key_of.clear()

    def use_namespace(self, namespace: int, weights: str = "") -> None:
        """Give chunks of a namespace that is not 0 names in the tiers that only this process knows.

        With a lasting name of their ``weights``, names that a later process gives them, too, unless all were given new ones.
        """
        self._epoch = self._epoch or self._new_epoch()
        if weights and not self.is_renamed:
            self._lasting[namespace] = sha256(weights.encode()).digest()
            self._lasting.move_to_end(namespace)
            if len(self._lasting) > _MAX_LASTING:
                self._lasting.popitem(last=False)

    def is_private(self, key: OffloadKey) -> bool:
        """Whether a chunk has another name in the tiers than its key, so that no other engine finds it."""
        return self.is_renamed or namespace_of_key(key) > 0

    def keys_of(self, names: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the keys of chunks that have these names in the tiers; those unknown since a ``rename`` are left out."""
        if not self._epoch:
            return names
        return [key for name in names if (key := self._key_of.get(name, None if self.is_renamed else name)) is not None]

    def note_lost(self, tier: int, lost: AbstractSet[OffloadKey] | None) -> None:
        """Note that a worker has lost chunks of a tier, or all for ``None``, for tasks that were answered and have not ended.

        Some workers may not have answered; or all have, and the end of the job is reported later.
        """
        for task in self._in_flight.values():
            if task.tier == tier and task.num_answers:
                task.lost.update(task.keys if lost is None else (key for key in task.keys if key in lost))

    def note_written(self, tier: int, written: Iterable[OffloadKey]) -> None:
        """Note that all workers have stored chunks since they were lost, for tasks that have not ended."""
        losing = [task for task in self._in_flight.values() if task.lost and task.tier == tier]
        there = frozenset(written) if losing else ()
        for task in losing:
            task.lost.difference_update(there)

    def _notes(self, keys: Sequence[OffloadKey]) -> tuple[Note, ...]:
        """Return what else is known of chunks, or nothing if that is nothing."""
        notes = tuple(self.notes_of(keys))
        if self.granted:
            notes = tuple(
                replace(note, retention=self.retention_of(key))
                for key, note in zip(keys, notes or repeat(NO_NOTE), strict=False)
            )
        if self._epoch:  # no later engine will ask what private chunks are
            notes = tuple(
                replace(note, details=NO_DETAILS) if note.details is not NO_DETAILS and self.is_private(key) else note
                for key, note in zip(keys, notes, strict=False)  # no notes at all where there is nothing to say
            )
        return notes if any(note is not NO_NOTE for note in notes) else ()

    def names(self, keys: Sequence[_SomeKey]) -> tuple[_SomeKey, ...]:
        """Return the names of chunks in the tiers: their keys, or if private, digests of epoch, or weights, and key."""
        return tuple(map(self._name, keys) if self._epoch else keys)

    def _name(self, key: _SomeKey) -> _SomeKey:
        if key is None:
            return key
        if not self.is_private(key):
            return key
        # As long as the key, and in the same group.
        block_hash, group = split_key(key)
        lasting = self._lasting.get(namespace_of_key(key))
        secret = self._epoch + key if lasting is None else lasting + offload_key(block_hash, group)
        name = offload_key(blake2b(secret, digest_size=len(block_hash)).digest(), group)
        self._key_of[name] = key
        if len(self._key_of) > _MAX_NAMES:
            self._key_of.popitem(last=False)
        return name

    def _count(self, task: TierTask, change: int) -> None:
        place = task.tier, ACCESS_OF[task.kind]
        self._num_chunks[place] += change * len(task.keys)
        self._num_jobs[place] += change * (task.kind not in SHOW_NOTHING)


# --- a clock that counts only the time in which an engine steps -------------------------------------------------------

PAUSE_S: Final = 2.0
"""Seconds without a look at the clock after which the engine counts as not stepping.

Well above the time that an engine with nothing to compute sleeps between steps while transfers run.
"""


class SteppedClock:
    """Monotonic time that stands still while the engine does not step.

    An idle engine may not step for hours, and a process may be stopped. Jobs that ended meanwhile are reported only in the
    next steps. So deadlines are in this time: they pass only while reports can arrive.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._time = 0.0
        self._num_in_flight = 0
        self._looked_at = clock()

    def __call__(self) -> float:
        """Return the seconds since the clock was made, without pauses."""
        now = self._clock()
        if self._num_in_flight or now - self._looked_at < PAUSE_S:
            self._time += now - self._looked_at
        self._looked_at = now
        return self._time

    def begin_step(self) -> float:
        """Note that the workers get a step; time counts until ``end_step``, however long it takes. Steps may overlap."""
        now = self()
        self._num_in_flight += 1
        return now

    def end_step(self) -> float:
        """Note that the workers have reported a step."""
        now = self()
        self._num_in_flight = max(0, self._num_in_flight - 1)
        return now
