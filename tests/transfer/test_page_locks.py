"""Pages are locked as they come into use: whole pieces, each once, and all are unlocked at the end."""

from __future__ import annotations

import logging
import mmap
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.tiers import HostMemory
from cargohold.transfer.host_pages import PageLocks

PAGE = mmap.PAGESIZE
WAIT_S = 30.0


class Driver:
    """Locks pages when the test says so, and never twice."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []
        self.may_lock = threading.Event()
        self.may_lock.set()
        self.fault: str | None = None
        self.error: BaseException | None = None

    def lock(self, address: int, num_bytes: int) -> str | None:
        assert self.may_lock.wait(WAIT_S)
        self.calls.append((address, num_bytes))
        if self.error is not None:
            raise self.error
        if self.fault is None:
            assert address % PAGE == 0
            assert not any(
                address < start + length and start < address + num_bytes for start, length in self.locked.items()
            )
            self.locked[address] = num_bytes
        return self.fault

    def unlock(self, address: int) -> None:
        del self.locked[address]


def locks_of(memory: HostMemory, driver: Driver, piece_bytes: int = 1) -> PageLocks:
    return PageLocks(memory.rows, driver.lock, driver.unlock, piece_bytes)


@given(
    row_bytes=st.sampled_from([64, 96, 1000, PAGE // 2, PAGE, 3 * PAGE // 2, 5 * PAGE]),
    num_rows=st.integers(1, 300),
    piece_bytes=st.sampled_from([1, 3 * PAGE, 64 * PAGE]),
    runs=st.lists(st.tuples(st.integers(0, 299), st.integers(1, 300)), min_size=1, max_size=4),
)
def test_rows_are_locked_before_they_are_given(
    row_bytes: int, num_rows: int, piece_bytes: int, runs: list[tuple[int, int]]
) -> None:
    memory, driver = HostMemory(num_rows, row_bytes), Driver()
    locks = locks_of(memory, driver, piece_bytes)
    base = memory.rows.ctypes.data
    for first, wanted in runs:
        row = first % num_rows
        length = min(wanted, num_rows - row)
        covered: list[int] = []
        for start, count, is_locked in locks.parts(row, length):
            assert is_locked
            begin, end = base + start * row_bytes, base + (start + count) * row_bytes
            assert any(at <= begin and end <= at + size for at, size in list(driver.locked.items())), "in one piece"
            covered += range(start, start + count)
        assert covered == list(range(row, row + length))
    locks.close()
    assert not driver.locked
    assert sum(size for _, size in driver.calls) <= memory.rows.nbytes


def test_nothing_is_locked_before_it_is_wanted_and_a_little_ahead_then() -> None:
    memory, driver = HostMemory(40, PAGE), Driver()
    locks = locks_of(memory, driver)
    assert not driver.calls
    list(locks.parts(3, 1))
    base = memory.rows.ctypes.data
    assert driver.calls[0] == (base + 3 * PAGE, PAGE), "what is wanted comes first"
    list(locks.parts(30, 1))
    while len(driver.calls) < 35:
        pass  # the pieces up to four behind the last that was wanted
    locks.close()
    assert sorted(address for address, _ in driver.calls) == [base + page * PAGE for page in range(35)]


def test_pages_that_cannot_be_locked_are_said_to_be_so_and_no_others_are_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory, driver = HostMemory(8, PAGE), Driver()
    driver.fault = "CUDA error 2"
    locks = locks_of(memory, driver)
    with caplog.at_level(logging.WARNING):
        assert [is_locked for _, _, is_locked in locks.parts(0, 8)] == [False] * 8
    locks.close()
    assert len(driver.calls) == 1
    assert [record.message for record in caplog.records] == [
        "host memory cannot be page-locked (CUDA error 2): copies are slower, and the model waits for them"
    ]


def test_a_driver_that_throws_is_one_that_refuses() -> None:
    memory, driver = HostMemory(2, PAGE), Driver()
    driver.error = RuntimeError("no driver")
    locks = locks_of(memory, driver)
    assert [is_locked for _, _, is_locked in locks.parts(0, 2)] == [False, False]
    locks.close()


def test_a_driver_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cargohold.transfer.host_pages._MAX_WAIT_S", 0.01)
    memory, driver = HostMemory(4, PAGE), Driver()
    locks = locks_of(memory, driver)
    driver.may_lock.clear()
    with pytest.raises(RuntimeError, match="rows from 2 on were not locked in time"):
        list(locks.parts(2, 1))
    driver.may_lock.set()
    locks.close()
    assert not driver.locked


def test_a_piece_that_waits_for_another_is_locked_after_it() -> None:
    memory, driver = HostMemory(100, PAGE), Driver()
    locks = locks_of(memory, driver)
    driver.may_lock.clear()
    found: list[bool] = []
    asker = threading.Thread(target=lambda: found.extend(is_locked for _, _, is_locked in locks.parts(90, 2)))
    asker.start()
    driver.may_lock.set()
    asker.join(WAIT_S)
    assert found == [True, True]
    locks.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_thread_that_has_died() -> None:
    memory, driver = HostMemory(2, PAGE), Driver()
    driver.error = SystemExit()  # not an Exception: ends the thread
    locks = locks_of(memory, driver)
    with pytest.raises(RuntimeError, match="not locked in time"):
        list(locks.parts(0, 1))
    locks.close()


def test_the_first_piece_alone_is_locked_before_anything_is_copied() -> None:
    locked: list[int] = []
    another = threading.Event()

    def lock(address: int, _num_bytes: int) -> None:
        locked.append(address)
        if len(locked) > 1:
            another.set()

    memory = HostMemory(8, PAGE)
    locks = PageLocks(memory.rows, lock, lambda _: None, piece_bytes=PAGE)
    assert locks.lock_first()
    assert locks.lock_first(), "asked again, it is locked already"
    assert not another.wait(0.1), "a page is locked that nobody has asked for"
    locks.close()
    assert locked == [memory.rows.ctypes.data]
