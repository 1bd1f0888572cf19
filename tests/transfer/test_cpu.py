"""Background copies on a CPU, under schedules that the test controls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.lab.simulation import VirtualClock
from cargohold.protocol import TransferOutcome
from cargohold.tiers import HostMemory
from cargohold.transfer import CopyJob, CopyResult, Direction, TransferWorker
from cargohold.transfer.cpu import SHARE_S, CpuTransferWorker
from cargohold.transfer.port import consecutive_runs

NUM_BLOCKS, NUM_ROWS, BLOCK_BYTES = 12, 20, 64
WAIT_S = 30.0


class Gate:
    """Lets copies through one at a time, when the test says so."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.may_pass = threading.Semaphore(0)
        self.is_open = threading.Event()
        self.fails = False

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        if not self.is_open.is_set():
            self.arrived.release()
            assert self.may_pass.acquire(timeout=WAIT_S)
        if self.fails:
            raise OSError("injected")
        target[...] = source

    def open(self) -> None:
        self.is_open.set()
        self.may_pass.release()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(np, "copyto", gate.copy)
    return gate


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def device() -> np.ndarray:
    return np.arange(NUM_BLOCKS * BLOCK_BYTES, dtype=np.uint64).astype(np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES)


@pytest.fixture
def host() -> HostMemory:
    memory = HostMemory(NUM_ROWS, BLOCK_BYTES)
    memory.rows[:] = 255 - np.arange(NUM_ROWS, dtype=np.uint8)[:, None]
    return memory


@pytest.fixture
def worker(device: np.ndarray, host: HostMemory, clock: VirtualClock) -> Iterator[CpuTransferWorker]:
    worker = CpuTransferWorker([device], host.rows, clock)
    yield worker
    worker.shutdown()


def job(job_id: int, direction: Direction, blocks: list[int], rows: list[int], timeout_s: float = 10.0) -> CopyJob:
    return CopyJob(job_id, direction, tuple(blocks), tuple(rows), timeout_s)


def results_of(worker: TransferWorker, count: int) -> list[CopyResult]:
    """Poll until so many jobs have ended."""
    results: list[CopyResult] = []
    deadline = threading.Event()
    for _ in range(int(WAIT_S * 1000)):
        results += worker.poll()
        if len(results) >= count:
            return results
        deadline.wait(0.001)
    raise AssertionError(f"{len(results)} of {count} jobs ended")


def test_a_store_and_a_load_bring_the_same_bytes_back(
    worker: CpuTransferWorker, device: np.ndarray, host: HostMemory
) -> None:
    before = device.copy()
    worker.submit(job(1, Direction.STORE, [3, 4, 5, 9], [7, 8, 0, 19]))
    assert [(result.job.job_id, result.outcome) for result in results_of(worker, 1)] == [(1, TransferOutcome.DONE)]
    assert np.array_equal(host.rows[[7, 8, 0, 19]], before[[3, 4, 5, 9]])
    device[:] = 0
    worker.submit(job(2, Direction.LOAD, [1, 2, 11, 6], [7, 8, 0, 19]))
    results_of(worker, 1)
    assert np.array_equal(device[[1, 2, 11, 6]], before[[3, 4, 5, 9]])
    assert not device[[0, 3, 4, 5, 7, 8, 9, 10]].any(), "nothing else was written"


def test_a_block_in_several_regions_is_one_row(host: HostMemory, clock: VirtualClock) -> None:
    storage = np.arange(NUM_BLOCKS * BLOCK_BYTES, dtype=np.uint64).astype(np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES)
    regions = [storage[:, :24], storage[:, 24:32].copy(), storage[:, 32:]]
    worker = CpuTransferWorker(regions, host.rows, clock)
    worker.submit(job(1, Direction.STORE, [5, 6], [2, 3]))
    results_of(worker, 1)
    assert np.array_equal(host.rows[[2, 3]], storage[[5, 6]])
    for region in regions:
        region[:] = 0
    worker.submit(job(2, Direction.LOAD, [1], [3]))
    results_of(worker, 1)
    worker.shutdown()
    assert np.array_equal(np.concatenate([region[1] for region in regions]), host.rows[3])


def test_the_caller_does_not_wait_for_stores(gate: Gate, worker: CpuTransferWorker) -> None:
    worker.submit(job(1, Direction.STORE, [1], [1]))
    assert gate.arrived.acquire(timeout=WAIT_S)
    assert worker.poll() == []
    gate.open()
    assert len(results_of(worker, 1)) == 1


def test_a_load_goes_before_the_rest_of_a_store(
    gate: Gate, worker: CpuTransferWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.submit(job(1, Direction.STORE, [1, 3, 5], [1, 3, 5]))  # three runs
    assert gate.arrived.acquire(timeout=WAIT_S)
    worker.submit(job(2, Direction.STORE, [7], [7]))
    worker.submit(job(3, Direction.LOAD, [9], [9]))
    gate.open()
    assert [result.job.job_id for result in results_of(worker, 3)] == [3, 1, 2]


@pytest.fixture
def idle_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A background thread that gets no time."""

    ended, shutdown = threading.Event(), CpuTransferWorker.shutdown

    def end(worker: CpuTransferWorker) -> None:
        ended.set()
        shutdown(worker)

    monkeypatch.setattr(CpuTransferWorker, "_run", lambda _: ended.wait(WAIT_S))
    monkeypatch.setattr(CpuTransferWorker, "shutdown", end)


def test_a_load_ends_in_one_poll_even_if_the_background_thread_gets_no_time(
    idle_thread: None, worker: CpuTransferWorker, device: np.ndarray, host: HostMemory
) -> None:
    worker.submit(job(1, Direction.LOAD, [1, 3, 5], [2, 4, 6]))
    assert [result.outcome for result in worker.poll()] == [TransferOutcome.DONE]
    assert np.array_equal(device[[1, 3, 5]], host.rows[[2, 4, 6]])


def test_poll_copies_for_a_bounded_time(
    idle_thread: None, worker: CpuTransferWorker, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []

    def slow_copy(target: np.ndarray, source: np.ndarray) -> None:
        copied.append(source)
        clock.advance(0.7 * SHARE_S)

    monkeypatch.setattr(np, "copyto", slow_copy)
    worker.submit(job(1, Direction.LOAD, [1, 3, 5, 7, 9], [1, 3, 5, 7, 9]))  # five runs
    counts = []
    while not worker.poll():
        counts.append(len(copied))
    assert counts == [2, 4]


def test_poll_copies_no_stores(idle_thread: None, worker: CpuTransferWorker) -> None:
    worker.submit(job(1, Direction.STORE, [1], [1]))
    assert worker.poll() == []


def test_poll_does_not_wait_for_a_copy_that_hangs(gate: Gate, worker: CpuTransferWorker) -> None:
    worker.submit(job(1, Direction.LOAD, [1], [1]))
    assert gate.arrived.acquire(timeout=WAIT_S)
    assert worker.poll() == []
    gate.open()
    assert len(results_of(worker, 1)) == 1


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_load_that_is_interrupted_between_its_runs_has_failed(
    idle_thread: None,
    worker: CpuTransferWorker,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
) -> None:
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(np, "copyto", fail)
        worker.submit(job(1, Direction.LOAD, [1, 3, 5], [1, 3, 5]))
        results = []
        with suppress(KeyboardInterrupt):
            results += worker.poll()
    results += worker.poll()
    assert [result.outcome for result in results] == [TransferOutcome.FAILED]


def test_a_copy_that_fails_is_reported_and_the_next_goes_on(gate: Gate, worker: CpuTransferWorker) -> None:
    gate.fails = True
    worker.submit(job(1, Direction.LOAD, [1], [1]))
    assert gate.arrived.acquire(timeout=WAIT_S)
    gate.may_pass.release()
    (failed,) = results_of(worker, 1)
    assert failed.outcome is TransferOutcome.FAILED
    gate.fails = False
    gate.open()
    worker.submit(job(2, Direction.LOAD, [1], [1]))
    assert results_of(worker, 1)[0].outcome is TransferOutcome.DONE


def test_a_job_that_waits_too_long_is_abandoned(
    gate: Gate, worker: CpuTransferWorker, clock: VirtualClock, device: np.ndarray
) -> None:
    before = device.copy()
    worker.submit(job(1, Direction.LOAD, [1], [1], timeout_s=100))
    assert gate.arrived.acquire(timeout=WAIT_S)
    worker.submit(job(2, Direction.LOAD, [2], [2], timeout_s=5))
    clock.advance(6)
    gate.open()
    outcomes = {result.job.job_id: result.outcome for result in results_of(worker, 2)}
    assert outcomes == {1: TransferOutcome.DONE, 2: TransferOutcome.ABANDONED}
    assert np.array_equal(device[2], before[2]), "an abandoned load writes nothing"


def test_jobs_behind_a_copy_that_does_not_end_are_abandoned_when_it_is_time(
    gate: Gate, worker: CpuTransferWorker, clock: VirtualClock, device: np.ndarray
) -> None:
    before = device.copy()
    worker.submit(job(1, Direction.STORE, [1], [1], timeout_s=5))
    assert gate.arrived.acquire(timeout=WAIT_S)
    for job_id, direction in ((2, Direction.LOAD), (3, Direction.STORE)):
        worker.submit(job(job_id, direction, [2], [2], timeout_s=5))
    assert not worker.poll()
    clock.advance(6)
    assert {result.job.job_id: result.outcome for result in worker.poll()} == {
        2: TransferOutcome.ABANDONED,
        3: TransferOutcome.ABANDONED,
    }
    gate.open()
    (result,) = results_of(worker, 1)
    assert (result.job.job_id, result.outcome) == (1, TransferOutcome.DONE)
    assert np.array_equal(device[2], before[2]), "an abandoned load writes nothing"


def test_shutdown_ends_the_running_job_and_abandons_the_others(
    gate: Gate, worker: CpuTransferWorker, device: np.ndarray
) -> None:
    before = device.copy()
    worker.submit(job(1, Direction.LOAD, [1], [1]))
    worker.submit(job(2, Direction.LOAD, [2], [2]))
    assert gate.arrived.acquire(timeout=WAIT_S)
    stopper = threading.Thread(target=worker.shutdown)
    stopper.start()
    gate.open()
    stopper.join(WAIT_S)
    assert not stopper.is_alive()
    outcomes = {result.job.job_id: result.outcome for result in worker.poll()}
    assert outcomes in (
        {1: TransferOutcome.DONE, 2: TransferOutcome.ABANDONED},
        {1: TransferOutcome.DONE, 2: TransferOutcome.DONE},  # the first ended before shutdown was seen
    )
    assert outcomes[2] is TransferOutcome.DONE or np.array_equal(device[2], before[2])


def test_finish_loads_copies_loads_before_stores_that_were_submitted_earlier(
    gate: Gate, worker: CpuTransferWorker, device: np.ndarray, host: HostMemory
) -> None:
    host.rows[5] = 55
    worker.submit(job(1, Direction.STORE, [1], [1]))
    assert gate.arrived.acquire(timeout=WAIT_S)
    worker.submit(job(2, Direction.LOAD, [2], [5]))
    worker.submit(job(3, Direction.STORE, [3], [3]))
    answers: SimpleQueue[bool] = SimpleQueue()
    waiter = threading.Thread(target=lambda: answers.put(worker.finish_loads()))
    waiter.start()
    gate.open()
    assert answers.get(timeout=WAIT_S)
    waiter.join(WAIT_S)
    assert (device[2] == 55).all()


def test_finish_loads_gives_up_if_another_copy_does_not_end(
    gate: Gate, worker: CpuTransferWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cargohold.transfer.cpu.MAX_WAIT_S", 0.01)
    worker.submit(job(1, Direction.STORE, [1], [1]))
    assert gate.arrived.acquire(timeout=WAIT_S)
    worker.submit(job(2, Direction.LOAD, [2], [5]))
    assert not worker.finish_loads()
    gate.open()
    monkeypatch.undo()
    assert worker.finish_loads()


def test_finish_loads_tells_that_a_load_has_failed(gate: Gate, worker: CpuTransferWorker) -> None:
    gate.fails = True
    gate.open()
    worker.submit(job(1, Direction.LOAD, [1], [1]))
    assert not worker.finish_loads()
    gate.fails = False
    assert [result.outcome for result in worker.poll()] == [TransferOutcome.FAILED]
    worker.submit(job(2, Direction.LOAD, [2], [2]))
    assert worker.finish_loads()


def test_finish_stores_waits_for_stores_alone(gate: Gate, worker: CpuTransferWorker) -> None:
    worker.submit(job(1, Direction.STORE, [1], [1]))
    assert gate.arrived.acquire(timeout=WAIT_S)
    waiter = threading.Thread(target=worker.finish_stores)
    waiter.start()
    assert waiter.is_alive()
    gate.open()
    waiter.join(WAIT_S)
    assert not waiter.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_jobs_of_a_dead_thread_are_reported_as_failed(
    worker: CpuTransferWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying: SimpleQueue[threading.Thread] = SimpleQueue()

    def die(*_: object) -> None:
        dying.put(threading.current_thread())
        raise SystemExit  # not an Exception: ends the thread

    monkeypatch.setattr(np, "copyto", die)
    worker.submit(job(1, Direction.STORE, [1], [1]))
    dying.get(timeout=WAIT_S).join(WAIT_S)
    worker.submit(job(2, Direction.LOAD, [1], [1]))
    outcomes = {result.job.job_id: result.outcome for result in worker.poll()}
    assert outcomes == {1: TransferOutcome.FAILED, 2: TransferOutcome.FAILED}
    worker.finish_stores()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12),
    st.integers(1, 5),
)
def test_runs_cover_every_pair_in_order(pairs: list[tuple[int, int]], max_length: int) -> None:
    runs = list(consecutive_runs([block for block, _ in pairs], [row for _, row in pairs], max_length))
    assert [(block + at, row + at) for block, row, length in runs for at in range(length)] == pairs
    assert all(length <= max_length for _, _, length in runs)


def test_neighbours_are_copied_together() -> None:
    assert list(consecutive_runs([3, 4, 5, 7], [8, 9, 10, 11], 99)) == [(3, 8, 3), (7, 11, 1)]


def test_host_memory_is_committed_only_when_written() -> None:
    before = psutil.Process().memory_info().rss
    memory = HostMemory(1 << 12, 1 << 20)  # 4 GiB
    memory.rows[1234, :8] = 7
    assert memory.rows[1234, :9].tolist() == [7] * 8 + [0]
    assert psutil.Process().memory_info().rss - before < 1 << 27
