"""Tiers below host memory: media whose queues take virtual time and fail at random."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from cargohold.cache import OffloadKey
from cargohold.cache.retention import Retention
from cargohold.cache.rows import plan_rows
from cargohold.connector.config import EAGER, limits_in_chunks
from cargohold.connector.kernel.worker import WorkerPart
from cargohold.connector.offloading import OffloadConfig, OffloadingScheduler, OffloadingWorker
from cargohold.connector.offloading.factory import host_manager, scheduler_side
from cargohold.lab.simulation.faults import Fault, FaultSource, Spells
from cargohold.lab.simulation.fingerprints import GARBAGE_BYTE
from cargohold.lab.simulation.transfers import ByteRows, by_rows, empty_rows, with_share
from cargohold.protocol import KVCacheLayout, SchedulerEnvironment, WorkerEnvironment
from cargohold.tiers import Answer, BreakerConfig, JobKind, JobStatus, LoadOutcome, StoreOutcome, TierHealth, TierJob
from cargohold.tiers.chunk_format import NO_DETAILS, NO_NOTE, Note
from cargohold.tiers.health import MediumHealth
from cargohold.tiers.memory import Buffer, bytes_in, copy_bytes
from cargohold.tiers.port import ACCESS_OF, EMPTY, LISTED_AT_ONCE, NO_LOSSES, Access, Listing, Losses, TierUsage
from cargohold.tiers.scheduler_side import LowerTiers, TierOptions
from cargohold.tiers.scheduler_side.tier_state import TierState
from cargohold.tiers.worker import JobQueue, TierWorker
from cargohold.transfer import TransferWorker
from cargohold.transfer.compare import Comparer


class SimulatedMedium:
    """One worker's shard of a medium, which outlives engines.

    Attributes:
        chunks: contents of the chunks that are there, by key.
        notes: what else was said of them when they were stored.
        retained: what hints ask for chunks, in virtual time.
        inherited: chunks that an earlier engine has left.
        max_chunks: most chunks that it holds; the oldest are evicted first.
        lost: evicted chunks that were not reported to its worker.
    """

    def __init__(self, max_chunks: int = 10**9) -> None:
        self.chunks: dict[OffloadKey, bytes] = {}
        self.notes: dict[OffloadKey, Note] = {}
        self.retained: dict[OffloadKey, Retention] = {}
        self.inherited: frozenset[OffloadKey] = frozenset()
        self._numbers: dict[OffloadKey, int] = {}
        self._num_stored = 0
        self.max_chunks = max_chunks
        self.lost: list[OffloadKey] = []

    def open(self) -> None:
        """Begin to serve an engine."""
        self.lost.clear()  # what was not reported to an earlier engine
        self.inherited = frozenset(self.chunks)

    def access(self, job: TierJob, at: int, now: float) -> Answer:  # one per kind of job
        """Do what a job asks for with one of its chunks."""
        key = job.keys[at]
        chunk = self.chunks.get(key)
        if job.kind in LISTED_AT_ONCE:
            job.listing = self._list(key, job.kind)
            return True
        if job.kind in {JobKind.PROBE, JobKind.TOUCH, JobKind.CHECK}:
            return chunk is not None
        if job.kind is JobKind.REMOVE:
            if chunk is not None:
                self.lose(key)
            return True
        if job.kind is JobKind.RANK:
            if chunk is not None:
                self.retained[key] = job.notes[at].retention.on_clock(now)
            return True
        if job.kind is JobKind.STORE:
            if chunk is None:
                self._add(key, bytes_in(job.buffers[at]), job.notes[at] if job.notes else NO_NOTE, now)
            return StoreOutcome.STORED if chunk is None else StoreOutcome.PRESENT
        return self._load(key, job.buffers[at])

    def _load(self, key: OffloadKey, buffer: Buffer) -> LoadOutcome:
        chunk = self.chunks.get(key)
        if chunk is None:
            return LoadOutcome.ABSENT
        if len(chunk) != len(buffer):
            self.lose(key)
            return LoadOutcome.CORRUPT
        copy_bytes(buffer, memoryview(chunk))
        return LoadOutcome.LOADED

    def _add(self, key: OffloadKey, chunk: bytes, note: Note, now: float) -> None:
        self._num_stored += 1
        self.chunks[key], self.notes[key], self._numbers[key] = chunk, note, self._num_stored
        self.retained[key] = note.retention.on_clock(now)
        while len(self.chunks) > self.max_chunks:
            self.lose(min(self.chunks, key=lambda stored: self.retained[stored].level_at(now)))  # the oldest of these

    def lose(self, key: OffloadKey) -> None:
        """Evict a chunk."""
        del self.chunks[key]
        self.retained.pop(key, None)
        self.lost.append(key)

    def take_losses(self) -> Losses:
        """What was evicted since the last call."""
        lost, self.lost = self.lost, []
        return Losses(tuple(lost)) if lost else NO_LOSSES

    def lacking(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        return [key for key in keys if key not in self.chunks]

    def _list(self, cursor: bytes, kind: JobKind) -> Listing:
        """The next chunks, in the order of storing: each after the one before it in its prefix."""
        after = int.from_bytes(cursor, "little")
        keys = [key for key in self.chunks if self._numbers[key] > after]
        part = keys[: LISTED_AT_ONCE[kind]]
        cursor = self._numbers[part[-1]].to_bytes(8, "little") if len(keys) > len(part) else b""
        if kind is JobKind.LIST:
            return Listing(tuple(part), (), cursor)
        part = [key for key in part if self.notes[key].details != NO_DETAILS]
        return Listing(tuple(part), tuple(self.notes[key].details for key in part), cursor)

    def corrupt(self, key: OffloadKey) -> None:
        """Damage a chunk, in a way that a check would notice."""
        self.chunks[key] = self.chunks[key][:-1]


HANG_S = 60.0
"""Length in virtual seconds of the stretches for which ``Fault.HANGS`` is drawn."""
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class MediumPlan:
    """A tier below host memory.

    Attributes:
        options: how it is used.
        max_chunks: most chunks that it holds; the oldest are evicted first.
        latency_s: least virtual seconds that a job takes; drawn for each job, up to twice as much. A tier with an index takes
            none to be looked up.
        chunk_s: further seconds for each of the job's chunks.
    """

    options: TierOptions
    max_chunks: int
    latency_s: float
    chunk_s: float

    def describe(self) -> str:
        """A description in one line, for people."""
        options = self.options
        return (
            f"{options.name}: {options.locality}, {self.max_chunks} chunks, {self.latency_s:g} s + {self.chunk_s:g} s each, "
            f"admission={options.admission.value}, write={options.write_mode.value}, "
            f"max_daily_chunks={options.max_daily_chunks}, max_inflight_chunks={options.max_inflight_chunks}, "
            f"has_index={options.has_index}, is_listed={options.is_listed}, num_asked_at_once={options.num_asked_at_once}"
        )


@dataclass(slots=True)
class _PendingJob:
    job: TierJob
    ends: float


class LinkedQueue(JobQueue):
    """One worker's queue to its shard of a medium, in virtual time.

    Args:
        medium: the shard.
        plan: how fast the medium is.
        source: decides when a fault strikes, and tells the time.
        is_gone: returns whether every access fails at the moment.
        slowness: gives the factor by which jobs submitted now take longer.

    Attributes:
        is_uncertain: whether a job has ended of which its caller does not know how much of it was done.
    """

    def __init__(
        self,
        medium: SimulatedMedium,
        plan: MediumPlan,
        source: FaultSource,
        is_gone: Callable[[], bool],
        slowness: Callable[[], float],
    ) -> None:
        self._health = MediumHealth(plan.options.name, source.clock, BreakerConfig(), has_index=plan.options.has_index)
        self._medium = medium
        medium.open()
        self._plan = plan
        self._source = source
        self._is_gone = is_gone
        self._slowness = slowness
        self._hangs = {access: Spells(source, Fault.HANGS, HANG_S) for access in Access}
        self._pending: list[_PendingJob] = []
        self.is_uncertain = False
        self._ended: list[TierJob] = []

    def submit(self, job: TierJob) -> bool:
        """Take a job. Returns ``False`` if the queue is full, or the medium keeps failing."""
        if self._source.strikes(Fault.FULL) or not self._health.admit(job.kind):
            return False
        now, plan = self._source.clock(), self._plan
        job.queued_at = now
        access = ACCESS_OF[job.kind]
        takes_s = plan.latency_s * (1 + self._source.random.random()) + plan.chunk_s * len(job.keys)
        if access is Access.LOOK_UP and plan.options.has_index:
            takes_s = 0.0
        if self._source.strikes(Fault.LATE):
            takes_s += self._source.random.choice((0.05, 0.5, 3.0))
        takes_s *= self._slowness()
        self._pending.append(_PendingJob(job, _NEVER if self._hangs[access]() else now + takes_s))
        return True

    def poll(self) -> Sequence[TierJob]:
        """The jobs that ended or passed their deadline."""
        now = self._source.clock()
        for pending in [pending for pending in self._pending if min(pending.ends, pending.job.deadline) <= now]:
            if pending.job.status:
                continue  # one before it got its access suspended
            if pending.ends > pending.job.deadline:
                self._end(pending, JobStatus.EXPIRED, self._source.random.randrange(len(pending.job.keys) + 1))
            elif self._is_gone():
                self._end(pending, JobStatus.FAILED, 0)
            elif self._source.strikes(Fault.FAILED):
                self._end(pending, JobStatus.FAILED, self._source.random.randrange(len(pending.job.keys) + 1))
            else:
                self._end(pending, JobStatus.DONE, len(pending.job.keys))
        ended, self._ended = self._ended, []
        return ended

    def take_losses(self) -> Losses:
        return self._medium.take_losses() if self._plan.options.is_listed else NO_LOSSES

    def lacking(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        return self._medium.lacking(keys)

    def usage(self) -> TierUsage:
        """Nothing: fingerprints take no room."""
        return EMPTY

    def health(self) -> TierHealth:
        """The health of the medium, judged as a real queue does."""
        return self._health.report()

    def cancel(self, job_id: int) -> None:
        """End a job; part of it may have been done."""
        for pending in [pending for pending in self._pending if pending.job.job_id == job_id]:
            self._end(pending, JobStatus.CANCELLED, self._source.random.randrange(len(pending.job.keys) + 1))

    def shutdown(self) -> None:
        """End everything."""
        for pending in list(self._pending):
            self._end(pending, JobStatus.CANCELLED, 0)

    def next_event(self) -> float:
        """Virtual time at which the next job ends; infinity if there is none."""
        return min((min(pending.ends, pending.job.deadline) for pending in self._pending), default=_NEVER)

    def _end(self, pending: _PendingJob, status: JobStatus, num_done: int) -> None:
        """Carry out the first chunks of a job, spoil the buffers of the others, and judge the medium by it."""
        self._pending.remove(pending)
        self.is_uncertain |= status is not JobStatus.DONE
        job = pending.job
        for at, key in enumerate(job.keys):
            buffer = job.buffers[at] if job.buffers else None
            if at < num_done:
                if job.kind is JobKind.LOAD and key in self._medium.chunks and self._source.strikes(Fault.CORRUPT):
                    self._medium.corrupt(key)
                answer = job.answers[at] = self._medium.access(job, at, self._source.clock())
                if answer is StoreOutcome.STORED and self._source.strikes(Fault.TORN):
                    self._medium.corrupt(key)
                if pending.ends < _NEVER:  # what a medium that hangs has done stays unknown
                    self._health.note_answers(job, [answer])
            elif job.kind is JobKind.LOAD and buffer is not None:
                copy_bytes(buffer, memoryview(bytes([GARBAGE_BYTE]) * len(buffer)))
        job.status, job.reason = status, f"simulated: {status.value}"
        job.ended_at = min(pending.ends, job.deadline, self._source.clock())
        if (access := self._health.note_end(job)) is not None:
            for other in [other for other in self._pending if ACCESS_OF[other.job.kind] is access]:
                self._fail(other)
        self._ended.append(job)

    def _fail(self, pending: _PendingJob) -> None:
        """End a job because its access is suspended, without judging by it."""
        self.is_uncertain = True
        self._pending.remove(pending)
        pending.job.status = JobStatus.FAILED
        for buffer in pending.job.buffers if pending.job.kind is JobKind.LOAD else ():
            copy_bytes(buffer, memoryview(bytes([GARBAGE_BYTE]) * len(buffer)))
        self._ended.append(pending.job)


@dataclass(frozen=True, slots=True)
class ListedMedium:
    """A tier that lists its chunks, under an engine, for oracles.

    Attributes:
        tier: what the engine's scheduler side knows of it.
        lower: what the scheduler side knows of all tiers.
        shards: the shards of its medium.
        queues: the workers' queues to these.
        blocks_per_chunk: blocks in a chunk.
    """

    tier: TierState
    lower: LowerTiers
    shards: Sequence[SimulatedMedium]
    queues: Sequence[LinkedQueue]
    blocks_per_chunk: int

    @property
    def is_certain(self) -> bool:
        """Whether it is known of every job that has ended how much it has done."""
        return not any(queue.is_uncertain for queue in self.queues)

    def retention(self, key: OffloadKey) -> Retention | None:
        """What the first shard was asked for a chunk that this engine has stored; ``None`` for others."""
        (name,) = self.lower.tasks.names([key])
        return None if name in self.shards[0].inherited else self.shards[0].retained.get(name)

    def find(self, keys: Iterable[OffloadKey]) -> dict[OffloadKey, Note]:
        """Those of the chunks, and of all others whose key is known, that are on all shards, with what was noted of them."""
        lower = self.lower
        known = sorted({*keys, *(() if lower.tasks.is_renamed else self.shards[0].chunks)})
        names = dict(zip(known, lower.tasks.names(known), strict=True))
        notes = self.shards[0].notes
        return {key: notes[name] for key, name in names.items() if all(name in shard.chunks for shard in self.shards)}


NUM_SPARE: Final = 2
"""Slots of host memory that are spare for verification."""
MakeTransfers: TypeAlias = Callable[[ByteRows, ByteRows, WorkerEnvironment], TransferWorker]
"""Makes a worker's transfers from its paged KV, its shard of host memory, and its environment."""


class HostMemoryShards:
    """Host memory of simulated connectors, and the workers' copies between it and the device.

    Args:
        num_slots: chunks that it holds.
        make_transfers: makes a worker's transfers.
        watch: puts a wrapper around them that sees which blocks they copy.
        options: fields of ``OffloadConfig``; ``host_bytes`` means nothing here.
    """

    def __init__(
        self,
        num_slots: int,
        make_transfers: MakeTransfers,
        watch: Callable[[TransferWorker, int], TransferWorker],
        options: Mapping[str, Any],
    ) -> None:
        self.config = OffloadConfig(host_bytes="1GiB", **{"mode": EAGER, **options})
        self.num_slots = num_slots
        self._make_transfers = make_transfers
        self._watch = watch
        self.num_spare = 0 if self.config.verified_share is None else NUM_SPARE
        self._quotas = limits_in_chunks(self.config.quotas, num_slots, 1)
        self._rows: dict[int, ByteRows] = {}

    def rows(self, shard: int, layout: KVCacheLayout) -> ByteRows:
        """One shard: a worker's, or that of several that hold the same."""
        if shard not in self._rows:
            self._rows[shard] = empty_rows(self.num_slots + self.num_spare, self.config.blocks_per_chunk, layout)
        return self._rows[shard]

    def _transfers(self, environment: WorkerEnvironment) -> Callable[[Sequence[Sequence[Any]]], TransferWorker]:
        """What makes a worker's transfers once its paged KV is there."""
        layout = environment.layout
        rows = self.rows(environment.rank // layout.num_replicas, layout)

        def made(kv_caches: Sequence[Sequence[Any]]) -> TransferWorker:
            transfers = by_rows(kv_caches, layout, lambda parts: self._make_transfers(parts, rows, environment))
            return with_share(self._watch(transfers, environment.rank), environment, self.config.blocks_per_chunk)

        return made

    def make_worker(self, environment: WorkerEnvironment, part: WorkerPart | None = None) -> OffloadingWorker:
        """Make a worker side."""
        layout = environment.layout
        rows = self.rows(environment.rank // layout.num_replicas, layout)
        compare = Comparer(rows, layout, plan_rows(layout).per_block).compare
        return OffloadingWorker(self._transfers(environment), part, compare)


class TieredOffloading(HostMemoryShards):
    """Makes offloading connectors over media that outlive engines. Host memory does not. Satisfies ``KVConnectorFactory``.

    Args:
        num_slots: chunks that host memory holds.
        media: the tiers below, the fastest first.
        make_transfers: makes a worker's transfers between device and host memory.
        watch: puts a wrapper around them that sees which blocks they copy.
        make_queue: makes a worker's queue to its shard of a medium.
        options: fields of ``OffloadConfig``; ``host_bytes`` means nothing here.

    Attributes:
        plans: the tiers below.
        shards: the media's shards, by tier and number of the shard; made when a worker first opens them.
        lower, queues: of the engine made last, the lower tiers, and the queues per tier.
    """

    def __init__(
        self,
        num_slots: int,
        media: Sequence[MediumPlan],
        make_transfers: MakeTransfers,
        watch: Callable[[TransferWorker, int], TransferWorker],
        make_queue: Callable[[SimulatedMedium, MediumPlan], LinkedQueue],
        **options: Any,
    ) -> None:
        super().__init__(num_slots, make_transfers, watch, options)
        self.plans = media
        self._make_queue = make_queue
        self._num_epochs = 0
        self.shards: dict[tuple[int, int], SimulatedMedium] = {}
        self.lower: LowerTiers
        self.queues: list[list[LinkedQueue]] = []

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> OffloadingScheduler:
        """A scheduler side with an empty host memory."""
        emits_events = environment.emits_events
        host = host_manager(self.config, environment.layout, self.num_slots, self._quotas, record_events=emits_events)
        options = [plan.options for plan in self.plans]
        side = scheduler_side(
            self.config, environment, host, options, num_spare=self.num_spare, new_epoch=self._next_epoch
        )
        assert side.lower is not None
        self.lower, self.queues, self._rows = side.lower, [[] for _ in options], {}
        return side

    def make_worker_side(self, environment: WorkerEnvironment) -> OffloadingWorker:
        """A worker side with an empty host memory, and the rank's shards of the media."""
        shard, replica = divmod(environment.rank, environment.layout.num_replicas)
        rows, per_chunk = self.rows(shard, environment.layout), self.config.blocks_per_chunk
        queues: dict[str, JobQueue] = {plan.options.name: JobQueue() for plan in self.plans}
        for at, plan in enumerate(() if replica else self.plans):
            queue = queues[plan.options.name] = self._make_queue(self.shard(at, shard), plan)
            self.queues[at].append(queue)
        tiers = TierWorker(queues, rows, per_chunk, environment.clock, environment.rank)
        return self.make_worker(environment, tiers)

    def listed_media(self) -> Iterator[ListedMedium]:
        """Yield the tiers that list their chunks, under the engine made last."""
        for at, (tier, queues) in enumerate(zip(self.lower.tiers, self.queues, strict=True)):
            if tier.options.is_listed:
                shards = [self.shard(at, shard) for shard in range(len(queues))]
                yield ListedMedium(tier, self.lower, shards, queues, self.config.blocks_per_chunk)

    def open_namespace(self) -> None:
        """Engines made from now on find nothing of what was stored so far."""
        self.shards.clear()

    def _next_epoch(self) -> bytes:
        self._num_epochs += 1
        return self._num_epochs.to_bytes(8, "little")

    def shard(self, tier: int, shard: int) -> SimulatedMedium:
        return self.shards.setdefault((tier, shard), SimulatedMedium(self.plans[tier].max_chunks))
