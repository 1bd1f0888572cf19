"""Memory that direct I/O can use, with and without huge pages."""

from __future__ import annotations

import mmap

import pytest

from cargohold.offload.tier import staging
from cargohold.offload.tier.staging import HUGE_PAGE_BYTES, PAGE_BYTES, Staging, address_of

SIZES = [1, PAGE_BYTES, 10_000, 1024**2 - 1, 1024**2, 2 * 1024**2 + 1, 5 * 1024**2]


@pytest.mark.parametrize("size", SIZES)
def test_it_is_aligned_and_large_enough(size: int) -> None:
    view = Staging(size).view
    assert len(view) == staging.padded(size)
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
