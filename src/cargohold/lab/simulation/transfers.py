"""Copies in virtual time: some that a test finishes by hand, and links between paged KV and a tier that take time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from random import Random
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cargohold.cache.rows import plan_rows
from cargohold.protocol import Clock, KVCacheLayout, TransferOutcome, WorkerEnvironment
from cargohold.transfer import CopyJob, CopyResult, Direction, TransferWorker
from cargohold.transfer.port import ForwardingTransfers, GroupedTransfers, have_succeeded, share_stores

ByteRows = npt.NDArray[np.uint8]


def as_array(region: Any) -> ByteRows:
    """The same memory as a numpy array. Regions may be tensors, if the engine has connectors that need these."""
    array: ByteRows = region if isinstance(region, np.ndarray) else region.numpy()
    return array


def with_share(transfers: TransferWorker, environment: WorkerEnvironment, blocks_per_chunk: int) -> TransferWorker:
    """A worker's transfers, which copy its share of stores alone where others hold the same bytes."""
    num_replicas, plan = environment.layout.num_replicas, plan_rows(environment.layout)
    replica = environment.rank % num_replicas
    return share_stores(transfers, replica, num_replicas, blocks_per_chunk * plan.most, plan.per_block)


def empty_rows(num_slots: int, blocks_per_chunk: int, layout: KVCacheLayout) -> ByteRows:
    """Host memory for so many chunks of the largest group."""
    plan = plan_rows(layout)
    return np.zeros((num_slots * blocks_per_chunk * plan.most, plan.row_bytes), dtype=np.uint8)


def by_rows(
    kv_caches: Sequence[Sequence[Any]], layout: KVCacheLayout, make_transfers: Callable[[ByteRows], TransferWorker]
) -> TransferWorker:
    """Transfers between paged KV and rows, which may be parts of its blocks; ``make_transfers`` makes those of rows."""
    widest = as_array(max((regions[0] for regions in kv_caches), key=lambda region: int(region.shape[1])))
    plan = plan_rows(layout)
    if plan.is_even:
        return make_transfers(widest)
    # Blocks have no padding and rows divide them, so all parts are rows of one array.
    parts = widest.reshape(-1, plan.row_bytes)
    assert np.shares_memory(parts, widest), "blocks have padding"
    in_block = widest.shape[1] // plan.row_bytes
    return GroupedTransfers(
        make_transfers(parts), plan.per_block, lambda _group, block_id, at: block_id * in_block + at
    )


class HeldTransfers(TransferWorker):
    """Carries out each job at the next poll, or only on request: then the test decides when and how it ends.

    Args:
        region: the paged KV, as bytes.
        rows: the tier's memory.
        clock: virtual time.
        auto: whether jobs are carried out at the next poll, without a request.
    """

    def __init__(self, region: ByteRows, rows: ByteRows, clock: Clock, *, auto: bool = True) -> None:
        self._region = region
        self._rows = rows
        self._clock = clock
        self.auto = auto
        self.pending: list[CopyJob] = []
        self._submitted: dict[int, float] = {}
        self._results: list[CopyResult] = []
        self.on_copy: Callable[[CopyJob], None] = lambda _: None

    def submit(self, job: CopyJob) -> None:
        self.pending.append(job)
        self._submitted[job.job_id] = self._clock()

    def complete(
        self, job: CopyJob, outcome: TransferOutcome = TransferOutcome.DONE, bad_blocks: Iterable[int] = ()
    ) -> None:
        """Carry out a pending job now, or end it with another outcome without copying.

        ``bad_blocks`` are reported; if there are any, all other blocks are copied, whatever the outcome.
        """
        self.pending.remove(job)
        bad = frozenset(bad_blocks)
        if outcome is TransferOutcome.DONE or bad:
            self.on_copy(job)
            good = [(block, row) for block, row in zip(job.block_ids, job.rows, strict=True) if block not in bad]
            blocks, rows = [block for block, _ in good], [row for _, row in good]
            if job.direction is Direction.LOAD:
                self._region[blocks] = self._rows[rows]
            else:
                self._rows[rows] = self._region[blocks]
        duration_s = self._clock() - self._submitted.pop(job.job_id)
        self._results.append(CopyResult(job, outcome, bad, duration_s))

    def poll(self) -> list[CopyResult]:
        if self.auto:
            for job in list(self.pending):
                self.complete(job)
        results, self._results = self._results, []
        return results

    def finish_loads(self) -> bool:
        """Carry out the pending loads, unless the test decides when they end."""
        loads = [job for job in self.pending if job.direction is Direction.LOAD]
        if self.auto:
            for job in loads:
                self.complete(job)
        return self.auto or not loads

    def finish_stores(self) -> None:
        """Carry out the pending stores."""
        for job in list(self.pending):
            if job.direction is Direction.STORE:
                self.complete(job)

    def settle(self, within_s: float) -> bool:
        self.shutdown()
        return True

    def shutdown(self) -> None:
        for job in list(self.pending):
            self.complete(job, TransferOutcome.ABANDONED)


# --- keeps track of the blocks of one worker's paged KV that copies are reading or writing ----------------------------


class CopyConflictError(AssertionError):
    """A block was written while a copy read it, or read or reused while a copy wrote it."""


class CopiesInFlight:
    """The copies of one worker that have begun and have not been reported as ended.

    Args:
        rank: the worker, for messages.

    Attributes:
        num_jobs: number of copies in flight; with 0, callers can skip the checks.
        begun: the last copies that have begun, for timelines.
        half_loaded: blocks of loads that go on or have failed although a step computes with them. The step knows: it and its
            stores may read them, and nothing that comes of it may be used.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._read: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._reading: list[CopyJob] = []
        self._void: list[CopyJob] = []
        self._given_up: set[int] = set()
        self.num_jobs = 0
        self.begun: deque[CopyJob] = deque(maxlen=64)
        self.half_loaded: set[int] = set()
        self._is_mapped = True

    def unmap(self) -> None:
        """Note that the device's memory is taken away. Raises ``CopyConflictError`` if a copy is in flight."""
        self._is_mapped = False
        if self.num_jobs:
            raise CopyConflictError(f"worker {self._rank}: {self.num_jobs} copies go on in memory that is taken away")

    def map(self) -> None:
        """Note that the device's memory is there again."""
        self._is_mapped = True

    def begin(self, job: CopyJob) -> None:
        """Note that a copy begins. Raises ``CopyConflictError`` if it conflicts with another one."""
        if not self._is_mapped:
            raise CopyConflictError(f"worker {self._rank}: job {job.job_id} begins in memory that was taken away")
        is_load = job.direction is Direction.LOAD
        if not is_load and job.job_id in self._given_up:
            self._void.append(job)
            self.num_jobs += 1
            return
        what = f"a {job.direction.value} (job {job.job_id})"
        block_ids = job.block_ids if is_load else self._fully_loaded(job.block_ids)
        self._check(block_ids, self._written, f"{what} touches", "a load is writing")
        if is_load:
            self._check(job.block_ids, self._read, f"{what} overwrites", "a store is reading")
        counts = self._written if is_load else self._read
        if not is_load:
            self._reading.append(job)
        for block_id in job.block_ids:
            counts[block_id] = counts.get(block_id, 0) + 1
        self.num_jobs += 1
        self.begun.append(job)

    def end(self, job: CopyJob) -> None:
        """Note that a copy has ended and that this was reported."""
        counts = self._written if job.direction is Direction.LOAD else self._read
        if job in self._void:
            self._void.remove(job)
            self.num_jobs -= 1
            return
        if counts is self._read:
            self._reading.remove(job)
        for block_id in job.block_ids:
            if counts[block_id] == 1:
                del counts[block_id]
            else:
                counts[block_id] -= 1
        self.half_loaded.difference_update(job.block_ids)
        self.num_jobs -= 1

    def give_up_reads(self, job_ids: Iterable[int]) -> None:
        """Note that what stores read now is void, and what these jobs will read: their blocks may be reused."""
        self._given_up.update(job_ids)
        self._void += self._reading
        self._reading.clear()
        self._read.clear()

    def check_read(self, block_ids: Iterable[int], request_id: str) -> None:
        """Raise ``CopyConflictError`` if a forward pass must not read these blocks."""
        self._check(self._fully_loaded(block_ids), self._written, f"request {request_id} reads", "a load is writing")

    def check_write(self, block_ids: Iterable[int], request_id: str) -> None:
        """Raise ``CopyConflictError`` if a forward pass must not write these blocks."""
        self._check(block_ids, self._written, f"request {request_id} writes", "a load is writing")
        self._check(block_ids, self._read, f"request {request_id} overwrites", "a store is reading")

    def check_free(self, block_ids: Iterable[int], what: str) -> None:
        """Raise ``CopyConflictError`` if one of these blocks, which are free or were just allocated, is being copied."""
        self._check(block_ids, self._written, what, "a load is writing")
        self._check(block_ids, self._read, what, "a store is reading")

    def block_ids(self) -> set[int]:
        return {*self._read, *self._written}

    def _fully_loaded(self, block_ids: Iterable[int]) -> Iterable[int]:
        return set(block_ids) - self.half_loaded if self.half_loaded else block_ids

    def _check(self, block_ids: Iterable[int], counts: dict[int, int], who: str, by: str) -> None:
        if counts:
            for block_id in block_ids:
                if block_id in counts:
                    raise CopyConflictError(f"worker {self._rank}: {who} block {block_id}, which {by}")


class WatchedTransfers(ForwardingTransfers):
    """Notes which copies of another transfer worker are in flight.

    Args:
        inner: the transfer worker.
        copies: notes them.
    """

    def __init__(self, inner: TransferWorker, copies: CopiesInFlight) -> None:
        super().__init__(inner)
        self._copies = copies
        self._jobs: dict[int, CopyJob] = {}

    def submit(self, job: CopyJob) -> None:
        self._copies.begin(job)
        self._jobs[job.job_id] = job
        self.inner.submit(job)

    def poll(self) -> list[CopyResult]:
        results = self.inner.poll()
        for result in results:
            self._end(result.job)
        return results

    def finish_loads(self) -> bool:
        """Pass on. Loads that have arrived write nothing any more, even if they are reported later."""
        have_arrived = self.inner.finish_loads()
        for job in [job for job in self._jobs.values() if job.direction is Direction.LOAD]:
            if have_arrived:
                self._end(job)
            else:
                self._copies.half_loaded.update(job.block_ids)
        return have_arrived

    def finish_stores(self) -> None:
        """Pass on. Stores read nothing any more, even if they are reported later."""
        self.inner.finish_stores()
        for job in [job for job in self._jobs.values() if job.direction is Direction.STORE]:
            self._end(job)

    def settle(self, within_s: float) -> bool:
        """Pass on. Nothing is copied any more if all have ended, even if they are reported later."""
        is_settled = self.inner.settle(within_s)
        for job in list(self._jobs.values()) if is_settled else ():
            self._end(job)
        return is_settled

    def shutdown(self) -> None:
        """Pass on. Nothing is copied any more."""
        self.inner.shutdown()
        for job in list(self._jobs.values()):
            self._end(job)

    def _end(self, job: CopyJob) -> None:
        # Some copies end twice here: when they are waited for, and when they are reported.
        if self._jobs.pop(job.job_id, None) is not None:
            self._copies.end(job)


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """How fast a link is. Times are in virtual seconds.

    Attributes:
        latency_s: least time from submission to start; drawn for each job, up to twice as much.
        block_s: time per block.
        lanes: jobs carried out side by side, per direction. With more than one, or uneven latencies, jobs overtake each other.
    """

    latency_s: float = 0.0
    block_s: float = 0.0
    lanes: int = 1


@dataclass(slots=True)
class _Copy:
    """A job on its way.

    Attributes:
        job: the job.
        starts, ends: virtual times.
        num_moved: number of leading blocks that have been copied.
    """

    job: CopyJob
    starts: float
    ends: float
    num_moved: int = 0


MAX_WAIT_S: Final = 1.0
"""Maximum virtual time for which steps wait for their loads."""


class LinkTransfers(TransferWorker):
    """Carries out copies in virtual time. Satisfies the transfer port.

    Blocks of one job move at different moments between its start and its end, so that a change of blocks meanwhile spoils some
    of them.

    Args:
        region: the paged KV, as bytes.
        rows: the tier's memory, a row per block.
        clock: virtual time.
        profile: how fast the link is.
        random: source of random numbers, from the seed.

    Attributes:
        slowness: gives the factor by which jobs submitted now take longer.
    """

    def __init__(self, region: ByteRows, rows: ByteRows, clock: Clock, profile: LinkProfile, random: Random) -> None:
        self._region = region
        self._rows = rows
        self._clock = clock
        self._profile = profile
        self._random = random
        self._lanes = {direction: [0.0] * profile.lanes for direction in Direction}
        self._copies: list[_Copy] = []
        self._results: list[CopyResult] = []
        self.slowness: Callable[[], float] = lambda: 1.0

    def submit(self, job: CopyJob) -> None:
        """Give the job a place in the queue of its direction."""
        now = self._clock()
        lanes = self._lanes[job.direction]
        lane = min(range(len(lanes)), key=lanes.__getitem__)
        slowness = self.slowness()
        latency_s = self._profile.latency_s * (1 + self._random.random()) * slowness
        starts = max(now, lanes[lane]) + latency_s
        if starts - now > job.timeout_s:
            self._copies.append(_Copy(job, float("inf"), now + job.timeout_s))
            return
        ends = starts + self._profile.block_s * len(job.block_ids) * slowness
        lanes[lane] = ends
        self._copies.append(_Copy(job, starts, ends))

    def advance(self) -> None:
        """Move the blocks that are due by now, and end the jobs that are over. Mutates paged KV and tier."""
        if not self._copies:
            return
        now = self._clock()
        ended = []
        for copy in self._copies:
            if copy.ends <= now:
                ended.append(copy)
            elif copy.starts <= now and not copy.num_moved:
                self._move(copy, self._random.randrange(len(copy.job.block_ids) + 1))
        if ended:
            self._copies = [copy for copy in self._copies if copy.ends > now]
            for copy in sorted(ended, key=attrgetter("ends")):
                self._end(copy)

    def next_event(self) -> float:
        """Virtual time at which the next job starts or ends; infinity if nothing is in flight."""
        times = [copy.ends if copy.num_moved else min(copy.starts, copy.ends) for copy in self._copies]
        return min(times, default=float("inf"))

    def poll(self) -> list[CopyResult]:
        self.advance()
        results, self._results = self._results, []
        return results

    def finish_loads(self) -> bool:
        """Carry out the loads now, in no time, except those that would take too long: they go on."""
        now = self._clock()
        copies, self._copies = self._copies, []
        for copy in copies:
            if copy.job.direction is Direction.LOAD and copy.ends <= now + MAX_WAIT_S:
                self._end(copy)
            else:
                self._copies.append(copy)
        # Those that have ended keep the next ones from nothing.
        busy_until = max((copy.ends for copy in self._copies if copy.job.direction is Direction.LOAD), default=now)
        self._lanes[Direction.LOAD] = [min(until, busy_until) for until in self._lanes[Direction.LOAD]]
        return all(copy.job.direction is Direction.STORE for copy in self._copies) and have_succeeded(self._results)

    def finish_stores(self) -> None:
        """Carry out all stores now."""
        stores = [copy for copy in self._copies if copy.job.direction is Direction.STORE]
        self._copies = [copy for copy in self._copies if copy.job.direction is not Direction.STORE]
        for copy in stores:
            self._end(copy)
        self._lanes[Direction.STORE] = [self._clock()] * self._profile.lanes

    def settle(self, within_s: float) -> bool:
        """Let running jobs end now, in no time, and abandon the others."""
        self.shutdown()
        return True

    def shutdown(self) -> None:
        copies, self._copies = self._copies, []
        for copy in copies:
            if not copy.num_moved:
                copy.starts = float("inf")
            self._end(copy)

    def _end(self, copy: _Copy) -> None:
        outcome = TransferOutcome.DONE if copy.starts < float("inf") else TransferOutcome.ABANDONED
        if outcome is TransferOutcome.DONE:
            self._move(copy, len(copy.job.block_ids))
        # As if the copying itself took no time: so connectors often find that a step may wait for a load.
        self._results.append(CopyResult(copy.job, outcome, frozenset(), 0.0))

    def _move(self, copy: _Copy, up_to: int) -> None:
        if copy.num_moved < up_to:
            part = slice(copy.num_moved, up_to)
            move(copy.job.direction, self._region, copy.job.block_ids[part], self._rows, copy.job.rows[part])
            copy.num_moved = up_to


def move(
    direction: Direction, region: ByteRows, block_ids: Sequence[int], rows: ByteRows, row_ids: Sequence[int]
) -> None:
    """Copy each block to the row at the same place in ``row_ids``, or each row to its block."""
    if direction is Direction.LOAD:
        for block_id, row in zip(block_ids, row_ids, strict=True):
            region[block_id] = rows[row]
    else:
        for block_id, row in zip(block_ids, row_ids, strict=True):
            rows[row] = region[block_id]
