"""Jobs between device and host memory.

Jobs are messages to the workers and their answers, and transfers in flight, with the requests they belong to, and the blocks
and slots they hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import ClassVar

from cargohold.cache.manager import ChunkKeys, ChunkPins, OffloadKey, SlotReservation
from cargohold.deadlines import Patience
from cargohold.protocol import (
    Clock,
    KVConnectorSchedulerOutput,
    SchedulerContext,
)
from cargohold.transfer import CopyJob


@dataclass(frozen=True, slots=True)
class LoadJob(CopyJob):
    """A job that fills blocks of a request from the tier.

    Attributes:
        request_id: the request that waits for it.
        is_in_step: whether this very step computes the request: it waits for the load, and the load has no end of its own.
    """

    request_id: str = ""
    is_in_step: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether what it was to read was gone when it was planned: it has no rows, and fails."""
        return bool(self.block_ids) and not self.rows


@dataclass(frozen=True, slots=True)
class OffloadingMetadata:
    """One step's jobs.

    Attributes:
        loads: jobs to start at once.
        stores: jobs to start after the forward pass. Their blocks are held until all workers have ended them.
        saves: jobs to carry out before this step writes anything: it may overwrite their blocks, whose KV was evicted.
        finish_stores: whether all stores must have read their sources before this step overwrites blocks, because these
            sources are not held.
        release: ended requests whose blocks no store reads any more; workers report them as ``finished_sending``.
        given_up_loads: ids of loads that no request waits for. Workers whose copy has not ended report their requests'
            loads as failed now, and the job when its copy has ended.
        worker_message: what the part on the workers of what lies below is to do.
    """

    loads: tuple[LoadJob, ...] = ()
    stores: tuple[CopyJob, ...] = ()
    saves: tuple[CopyJob, ...] = ()
    finish_stores: bool = False
    release: tuple[str, ...] = ()
    given_up_loads: tuple[int, ...] = ()
    worker_message: Sequence[object] = ()


NOTHING_TO_DO = OffloadingMetadata()


@dataclass(frozen=True, slots=True)
class Load:
    """A load in flight.

    Attributes:
        job_id: id of the job.
        request_id: the request that waits for it.
        handle: pins on the chunks that it reads.
        num_computed_tokens: number of leading tokens that were on the device before it.
        block_ids: destinations, held until the load has ended on all workers.
        block_keys: the chunk that fills each destination, parallel to ``block_ids``.
        block_starts: position of each destination's first token in the request, parallel to ``block_ids``.
        origins: one byte per token, the number of the tier that it came from: 0 is host memory.
        is_first: whether the request had not been admitted before; only then its tokens are counted in the stats.
        is_in_step: whether the step in which it began waits for it.
        is_end_shared: whether the engine keeps windows and states at its end for others, and not at a later place.
    """

    job_id: int
    request_id: str
    handle: ChunkPins
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    block_keys: Sequence[OffloadKey]
    block_starts: Sequence[int]
    origins: bytes
    is_first: bool
    is_in_step: bool = False
    is_end_shared: bool = True

    @property
    def num_tokens(self) -> int:
        """Number of leading tokens that are on the device after it."""
        return self.num_computed_tokens + len(self.origins)

    def count(self, tiers: Sequence[str], num_tokens: int, known: range = range(0)) -> Counter[str]:
        """Count its first ``num_tokens`` tokens by tier, without those that are ``known``; tiers without any are left out."""
        first, end = (min(max(at, 0), num_tokens) for at in (known.start, known.stop))
        counted = self.origins[:first] + self.origins[end:num_tokens]
        counts = {name: counted.count(at) for at, name in enumerate(tiers)}
        return Counter({name: count for name, count in counts.items() if count})


@dataclass(slots=True)
class Store:
    """A store in flight.

    Attributes:
        job_id: id of the job.
        request_ids: requests whose blocks it reads, some of which may have ended; empty if it reads free blocks, whose
            requests are not known.
        handle: slots reserved for the chunks that it writes.
        block_ids: sources, held until the store has ended on all workers, or is given up.
        is_save: whether it saves what the device is about to lose, or has just lost.
        is_spoiled: whether its chunks must never be found: a step failed that may have computed its blocks, or it was given up.
        keys: the chunks that it writes; a set, because every admission asks whether its next chunk is among them.
    """

    job_id: int
    request_ids: AbstractSet[str]
    handle: SlotReservation
    block_ids: tuple[int, ...]
    is_save: bool = False
    is_spoiled: bool = False
    keys: AbstractSet[OffloadKey] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = frozenset(self.handle.keys)


class JobTable:
    """The jobs in flight. Ids are never used again.

    Args:
        clock: monotonic time in seconds.
        max_store_blocks: maximum number of device blocks that stores in flight may hold.
        blocks_per_chunk: device blocks that make a chunk.

    Attributes:
        max_store_blocks: as given.
        num_store_blocks: number of device blocks that stores in flight hold.
        num_stuck_blocks: number of device blocks that stuck jobs hold.
        loading: how many loads that requests wait for read each chunk.
        version: changes whenever the answer of ``load_of_any`` or ``load_up_to`` may have changed.
    """

    def __init__(self, clock: Clock, max_store_blocks: int, blocks_per_chunk: int = 1) -> None:
        self._clock = clock
        self.max_store_blocks = max_store_blocks
        self._blocks_per_chunk = blocks_per_chunk
        self._patience = Patience(clock)
        self._next_id = 0
        # The time at which each job began, stuck ones left out; oldest first.
        self._since: dict[int, float] = {}
        self._loads: dict[int, Load] = {}
        self._stores: dict[int, Store] = {}
        self.loading: Counter[OffloadKey] = Counter()
        self.version = 0
        self.num_store_blocks = 0
        # Loads whose requests do not wait for them any more.
        self._given_up: set[int] = set()
        self.num_stuck_blocks = 0

    def __bool__(self) -> bool:
        return bool(self._loads or self._stores)

    def __len__(self) -> int:
        return len(self._loads) + len(self._stores)

    @property
    def num_loads(self) -> int:
        """Number of loads in flight."""
        return len(self._loads)

    @property
    def num_stuck(self) -> int:
        """Number of jobs in flight that no request waits for any longer, because they did not end in time."""
        return len(self) - len(self._since)

    @property
    def num_awaited(self) -> int:
        """Number of jobs in flight that are not stuck."""
        return len(self._since)

    @property
    def num_storable_blocks(self) -> int:
        """Number of further device blocks that stores may hold now."""
        return max(0, self.max_store_blocks - self.num_store_blocks)

    @property
    def num_storable_chunks(self) -> int:
        """Number of further chunks that stores may hold now, by their device blocks."""
        return self.num_storable_blocks // self._blocks_per_chunk

    def new_id(self) -> int:
        """Return an id for a new job."""
        self._next_id += 1
        return self._next_id

    def add_load(self, load: Load) -> None:
        """Add a load that begins now."""
        self._loads[load.job_id] = load
        self._since[load.job_id] = self._clock()
        self.version += 1
        self.loading.update(load.handle.keys)

    def add_store(self, store: Store) -> None:
        """Add a store that begins now."""
        self._stores[store.job_id] = store
        self._since[store.job_id] = self._clock()
        self.num_store_blocks += len(store.block_ids)

    def end(self, job_id: int) -> tuple[Load | Store | None, float | None]:
        """Remove a job that has ended.

        Returns:
            The job, ``None`` if it is not in flight; and when it began, ``None`` if it was given up before.
        """
        since = self._since.pop(job_id, None)
        job: Load | Store | None = self._loads.pop(job_id, None) or self._stores.pop(job_id, None)
        if job is None:
            return None, None
        if since is None:
            self.num_stuck_blocks -= len(job.block_ids)
        if isinstance(job, Store):
            self.num_store_blocks -= len(job.block_ids)
        else:
            since = since if self._give_up(job) else None
            self._given_up.discard(job_id)
        return job, since

    def take_overdue(self, after_s: float) -> list[Load | Store]:
        """Return the jobs that have not ended ``after_s`` seconds after they began. Call it once in every step.

        They are stuck from now on: in flight until they end, but not awaited. The oldest must be found overdue at several
        steps; see ``Patience``.
        """
        if not self._since:
            return []
        oldest, since = next(iter(self._since.items()))
        overdue = oldest if self._clock() - since > after_s else None
        if not self._patience.has_run_out(overdue, after_s):
            return []
        end = self._clock() - after_s
        return [self._note_stuck(job_id) for job_id, since in list(self._since.items()) if since < end]

    def _note_stuck(self, job_id: int) -> Load | Store:
        del self._since[job_id]
        load = self._loads.get(job_id)
        if load is not None:
            self._give_up(load)
        job: Load | Store = load or self._stores[job_id]
        self.num_stuck_blocks += len(job.block_ids)
        return job

    def give_up_loads(self) -> list[Load]:
        """Let no request wait for the loads in flight; return those that a request waited for. They hold their blocks."""
        return [load for load in self._loads.values() if self._give_up(load)]

    def _give_up(self, load: Load) -> bool:
        """Let no request wait for a load; return whether a request did."""
        was_awaited = load.job_id not in self._given_up
        if was_awaited:
            self._given_up.add(load.job_id)
            self._forget_loading(load.handle.keys)
        return was_awaited

    def is_loading(self, job_id: int) -> bool:
        """Whether this job is a load in flight that its request waits for."""
        return job_id in self._loads and job_id not in self._given_up

    def load_of_any(self, keys: Sequence[OffloadKey]) -> int | None:
        """Return the id of a load of at least one of these chunks; ``None`` if none of them is being loaded."""
        if self.loading.keys().isdisjoint(keys):
            return None
        wanted = set(keys)
        return next(
            job_id
            for job_id, load in self._loads.items()
            if job_id not in self._given_up and not wanted.isdisjoint(load.handle.keys)
        )

    def load_up_to(self, keys: Sequence[ChunkKeys], first_token: int, num_tokens: int) -> int | None:
        """Return the id of a load whose end is shared, after ``first_token`` and at most at ``num_tokens``, with these chunks.

        That of the longest if there are several; ``None`` if there is none.
        """
        ending: dict[int, int] = {}
        for job_id, load in self._loads.items():
            if load.is_end_shared and first_token < load.num_tokens <= num_tokens and job_id not in self._given_up:
                ends = {of.keys[load.num_tokens // of.chunk_tokens - 1] for of in keys}
                if not ends.isdisjoint(load.handle.keys):
                    ending[load.num_tokens] = job_id
        return ending[max(ending)] if ending else None

    def _forget_loading(self, keys: Sequence[OffloadKey]) -> None:
        self.version += 1
        for key in keys:
            count = self.loading[key] - 1
            if count:
                self.loading[key] = count
            else:
                del self.loading[key]

    def loads(self) -> Iterable[Load]:
        """Return the loads in flight."""
        return self._loads.values()

    def stores(self) -> Iterable[Store]:
        """Return the stores in flight."""
        return self._stores.values()

    def give_up_stores(self) -> list[int]:
        """Make all stores in flight void; return the blocks that they held, which they read no more to any use."""
        held: list[int] = []
        for store in self._stores.values():
            held += store.block_ids
            if store.job_id not in self._since:
                self.num_stuck_blocks -= len(store.block_ids)
            store.is_spoiled, store.block_ids = True, ()
        self.num_store_blocks = 0
        return held

    def is_coming(self, key: OffloadKey) -> bool:
        """Whether a store in flight brings this chunk."""
        return any(key in store.keys and not store.is_spoiled for store in self._stores.values())

    def is_storing(self, request_id: str) -> bool:
        """Whether a store in flight reads a request's blocks."""
        return any(request_id in store.request_ids for store in self._stores.values())


# --- holding a copy's blocks while it runs ----------------------------------------------------------------------------


class BlockHolder(ABC):
    """Holds and releases blocks on behalf of jobs.

    Attributes:
        outlives_requests: whether a hold survives the end of the request whose blocks are held.
    """

    outlives_requests: ClassVar[bool] = True

    @abstractmethod
    def hold(self, block_ids: Sequence[int]) -> None:
        """Keep these blocks from being reused until they are released. Holds add up."""

    @abstractmethod
    def release(self, block_ids: Sequence[int]) -> None:
        """Give back what ``hold`` took."""

    def take_report(self) -> KVConnectorSchedulerOutput | None:
        """Return the locks and unlocks for the scheduler since the last call; ``None`` if there are none."""
        return None


class TouchHolder(BlockHolder):
    """Holds by taking references on the engine's block pool."""

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context

    def hold(self, block_ids: Sequence[int]) -> None:
        """Touch the blocks."""
        self._context.touch_ids(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Free the blocks."""
        self._context.free_ids(block_ids)


class LockHolder(BlockHolder):
    """Holds by asking the scheduler to lock and unlock blocks, for engines that have no context but apply locks.

    A lock is applied at the end of the step in which the copy is planned. Until then the request itself holds the blocks.
    """

    def __init__(self) -> None:
        self._lock: list[int] = []
        self._unlock: list[int] = []

    def hold(self, block_ids: Sequence[int]) -> None:
        """Lock the blocks at the end of this step."""
        self._lock += block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Unlock the blocks at the end of this step; locks are applied first."""
        self._unlock += block_ids

    def take_report(self) -> KVConnectorSchedulerOutput | None:
        """Return the locks and unlocks since the last call; ``None`` if there are none."""
        if not (self._lock or self._unlock):
            return None
        report = KVConnectorSchedulerOutput(tuple(self._lock), tuple(self._unlock))
        self._lock, self._unlock = [], []
        return report


class RequestHolder(BlockHolder):
    """Holds nothing: the request's own references must last until its copies have ended."""

    outlives_requests = False

    def hold(self, block_ids: Sequence[int]) -> None:
        """Do nothing: the request holds the blocks."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Do nothing: the request gives its blocks back itself."""
