"""Memory that direct I/O can use, with and without huge pages."""

from __future__ import annotations

import mmap
import threading

import pytest

from cargohold.tiers.memory import HUGE_PAGE_BYTES, PAGE_BYTES, Staging, address_of, bounce_buffer, padded

SIZES = [1, PAGE_BYTES, 10_000, 1024**2 - 1, 1024**2, 2 * 1024**2 + 1, 5 * 1024**2]


@pytest.mark.parametrize("size", SIZES)
def test_it_is_aligned_and_large_enough(size: int) -> None:
    view = Staging(size).view
    assert len(view) == padded(size)
    assert address_of(view) % (HUGE_PAGE_BYTES if size >= 1024**2 else PAGE_BYTES) == 0
    view[:1] = view[-1:] = b"x"
    assert view[0] == view[-1] == ord("x")


@pytest.mark.parametrize("lack", ["python", "kernel"])
def test_a_system_without_huge_pages_will_do(lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lack == "python":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 10_000, raising=False)  # advice that no kernel knows
    view = Staging(3 * 1024**2).view
    view[:] = bytes(len(view))
    assert address_of(view) % PAGE_BYTES == 0


def in_new_thread(sizes: list[int]) -> list[tuple[int, int]]:
    """Addresses and lengths of what a thread is given, one request after the other."""
    given: list[tuple[int, int]] = []

    def run() -> None:
        for size in sizes:
            view = bounce_buffer(size)
            view[:] = bytes(len(view))
            given.append((address_of(view), len(view)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return given


def test_a_thread_is_given_whole_pages_as_many_as_it_asks_for_and_mostly_the_same() -> None:
    given = in_new_thread([10_000, 1, PAGE_BYTES + 1, 0, 100_000, 10_000])
    assert [size for _, size in given] == [
        3 * PAGE_BYTES,
        PAGE_BYTES,
        2 * PAGE_BYTES,
        0,
        25 * PAGE_BYTES,
        3 * PAGE_BYTES,
    ]
    addresses = [address for address, size in given if size]
    assert len(set(addresses[:3])) == len(set(addresses[3:])) == 1
    assert all(address % PAGE_BYTES == 0 for address in addresses)


def test_threads_do_not_share_what_they_are_given() -> None:
    own = bounce_buffer(PAGE_BYTES)
    own[:] = b"x" * PAGE_BYTES
    in_new_thread([PAGE_BYTES])
    assert own == b"x" * PAGE_BYTES
