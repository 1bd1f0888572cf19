"""Workers that hold the same bytes: shared memory, and stores that are shared out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.lab.simulation.faults import VirtualClock
from cargohold.lab.simulation.transfers import HeldTransfers
from cargohold.protocol import Exchange, TransferOutcome
from cargohold.tiers import HostMemory
from cargohold.transfer import CopyJob, Direction, TransferWorker
from cargohold.transfer.port import share_stores

NUM_BLOCKS, NUM_ROWS, ROW_BYTES = 12, 24, 16


class Group:
    """Workers with the same blocks and the same rows, whose copies a test ends one by one."""

    def __init__(self, num_workers: int, rows_per_slot: int) -> None:
        self.region = np.arange(NUM_BLOCKS * ROW_BYTES, dtype=np.uint8).reshape(NUM_BLOCKS, ROW_BYTES)
        self.rows = np.zeros((NUM_ROWS, ROW_BYTES), dtype=np.uint8)
        self.regions = [self.region.copy() for _ in range(num_workers)]
        self.inner = [HeldTransfers(region, self.rows, VirtualClock(), auto=False) for region in self.regions]
        self.workers = [share_stores(inner, at, num_workers, rows_per_slot) for at, inner in enumerate(self.inner)]

    def submit(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> None:
        blocks, rows = tuple(block for block, _ in pairs), tuple(row for _, row in pairs)
        for worker in self.workers:
            worker.submit(CopyJob(1, direction, blocks, rows, 1.0))

    def end_all(self) -> None:
        for inner in self.inner:
            for job in list(inner.pending):
                inner.complete(job)


PAIRS = st.lists(
    st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_ROWS - 1)), unique_by=lambda pair: pair[1], min_size=1
)


@given(num_workers=st.integers(1, 5), rows_per_slot=st.integers(1, 3), pairs=PAIRS)
def test_each_row_of_a_store_is_written_by_one_worker_and_all_workers_load_all_rows(
    num_workers: int, rows_per_slot: int, pairs: list[tuple[int, int]]
) -> None:
    group = Group(num_workers, rows_per_slot)
    group.submit(Direction.STORE, pairs)
    writers = Counter(row for inner in group.inner for job in inner.pending for row in job.rows)
    assert writers == Counter(row for _, row in pairs)
    slots = [{row // rows_per_slot for job in inner.pending for row in job.rows} for inner in group.inner]
    assert sum(map(len, slots)) == len(set().union(*slots)), "a chunk is written by one worker"
    group.end_all()
    results = [worker.poll() for worker in group.workers]
    assert [len(ended) for ended in results] == [1] * num_workers, "each worker reports the job once"
    assert sum(len(ended[0].job.block_ids) for ended in results) == len(pairs), "each block is counted once"
    for region in group.regions:
        region[:] = 0
    into = list(dict(pairs))  # any blocks, each once
    loads = list(zip(into, (row for _, row in pairs), strict=False))
    group.submit(Direction.LOAD, loads)
    group.end_all()
    source = {row: block for block, row in pairs}
    for region in group.regions:
        for block, row in loads:
            assert (region[block] == group.region[source[row]]).all()


def test_a_worker_without_a_share_has_ended_while_others_copy() -> None:
    group = Group(3, 2)
    group.submit(Direction.STORE, [(0, 2), (1, 3)])
    assert [[result.outcome for result in worker.poll()] for worker in group.workers] == [
        [TransferOutcome.DONE],
        [],
        [TransferOutcome.DONE],
    ]


def test_a_worker_that_fails_its_share_says_so() -> None:
    group = Group(2, 1)
    group.submit(Direction.STORE, [(0, 0), (1, 1)])
    for inner, outcome in zip(group.inner, (TransferOutcome.DONE, TransferOutcome.FAILED), strict=True):
        inner.complete(inner.pending[0], outcome)
    assert [worker.poll()[0].outcome for worker in group.workers] == [TransferOutcome.DONE, TransferOutcome.FAILED]


def test_the_only_worker_is_left_as_it_is() -> None:
    inner: TransferWorker = Group(1, 1).inner[0]
    assert share_stores(inner, 0, 1, 1) is inner


# --- memory -----------------------------------------------------------------------------------------------------------


def together(num_workers: int, start: Callable[[int, Exchange], object]) -> list[object]:
    """What ``start`` returns, or raises, for each of the workers, which are threads here."""
    barrier, told = Barrier(num_workers, timeout=30), [b""] * num_workers

    def run(at: int) -> object:
        def exchange(message: bytes) -> Sequence[bytes]:
            told[at] = message
            barrier.wait()
            heard = list(told)
            barrier.wait()
            return heard

        try:
            return start(at, exchange)
        except OSError as error:
            return error

    with ThreadPoolExecutor(num_workers) as pool:
        return list(pool.map(run, range(num_workers)))


def test_what_one_worker_writes_all_read_and_no_file_is_left_behind() -> None:
    memories = together(3, lambda _, exchange: HostMemory(8, 4096, exchange))
    assert all(isinstance(memory, HostMemory) and memory.is_shared for memory in memories)
    first, *others = (memory.rows for memory in memories if isinstance(memory, HostMemory))
    for at, rows in enumerate((first, *others)):
        rows[at] = at + 1
    for rows in others:
        assert (rows == first).all()
        assert (rows[:3, 0] == [1, 2, 3]).all()
    assert not list(Path("/dev/shm").glob("*cargohold*"))


@pytest.mark.parametrize("who", [0, 1])
def test_if_one_worker_cannot_share_memory_all_say_why(who: int) -> None:
    """It may be the one whose memory all would take, or another one."""

    def start(at: int, exchange: Exchange) -> object:
        def garbled(message: bytes) -> Sequence[bytes]:
            told = exchange(message)
            return (
                [told[0].partition(b"/")[0] + b"/proc/self/fd/-1"]
                if message.startswith(b"8 rows") and at == who
                else told
            )

        return HostMemory(8, 4096, garbled)

    errors = together(2, start)
    assert all(isinstance(error, OSError) and f"worker {who}: " in str(error) for error in errors)


def test_a_worker_without_memory_to_offer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError("no memory today")

    monkeypatch.setattr(os, "memfd_create", refuse)
    errors = together(2, lambda _, exchange: HostMemory(8, 4096, exchange))
    assert all(isinstance(error, OSError) and "worker 0: no memory today" in str(error) for error in errors)


def test_workers_whose_rows_differ_do_not_share() -> None:
    errors = together(2, lambda at, exchange: HostMemory(8, 4096, exchange) if at else HostMemory(16, 2048, exchange))
    reason = "worker 1: it has 8 rows of 4096 bytes, and worker 0 has 16 rows of 2048 bytes"
    assert all(isinstance(error, OSError) and reason in str(error) for error in errors)
