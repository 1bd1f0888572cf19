"""What is enqueued for a job, on a device that does everything at once: rows over several pieces of pages, any widths."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cargohold.tiers import HostMemory
from cargohold.transfer import Direction
from cargohold.transfer.cuda import BlockCopies, DirectCopies, StagedCopies, num_buffer_rows
from cargohold.transfer.host_pages import PageLocks
from cargohold.transfer.links import Addresses, BatchLink, RunLink

NUM_BLOCKS, NUM_ROWS = 9, 14
HALF_PAGE = mmap.PAGESIZE // 2

Pairs = st.lists(st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_ROWS - 1)), min_size=1, max_size=9).map(
    lambda pairs: list(zip({block: 0 for block, _ in pairs}, {row: 0 for _, row in pairs}, strict=False))
)


def copy_at_once(targets: Addresses, sources: Addresses, sizes: Addresses, _stream: object) -> None:
    for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


@pytest.fixture(autouse=True, scope="module")
def _stream() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(cuda_stream=None))
        yield


@given(
    widths=st.lists(st.integers(1, 31), min_size=1, max_size=4),  # in all less than half a page
    gap=st.sampled_from([0, 1, 8]),
    unit=st.sampled_from([1, 2, 4, 8, 16]),
    buffer_rows=st.integers(0, 5),
    pairs=Pairs,
    direction=st.sampled_from(list(Direction)),
)
def test_every_byte_goes_to_its_place_and_no_other(
    widths: list[int], gap: int, unit: int, buffer_rows: int, pairs: list[tuple[int, int]], direction: Direction
) -> None:
    # The last one fills rows up to half a page, so that a piece of locked pages is two rows.
    spans = [width * unit for width in widths]
    spans.append(HALF_PAGE - sum(spans))
    row_bytes = sum(spans)
    regions = [torch.randint(256, (NUM_BLOCKS, span + gap), dtype=torch.uint8)[:, :span] for span in spans]
    memory = HostMemory(NUM_ROWS, row_bytes)
    rows = torch.from_numpy(memory.rows)
    rows[:] = torch.randint(256, rows.shape, dtype=torch.uint8)
    locks = PageLocks(memory.rows, lambda *_: None, lambda _: None, piece_bytes=1)
    whole = torch.cat(regions, dim=1)
    plain = RunLink(rows, locks)
    links = (plain, BatchLink(rows, locks, copy_at_once, plain))
    copies: list[tuple[BlockCopies, list[torch.Tensor]]] = []
    for link in links:
        copies.append((StagedCopies(regions, link, buffer_of(buffer_rows * row_bytes, row_bytes)), regions))
        copies.append((DirectCopies(whole, link), [whole]))
    blocks, places = [block for block, _ in pairs], [row for _, row in pairs]
    started = rows.clone(), whole.clone()
    for plan, parts in copies:
        rows.copy_(started[0])
        for part, before in zip(parts, torch.split(started[1], [part.shape[1] for part in parts], dim=1), strict=True):
            part.copy_(before)
        plan.enqueue(direction, blocks, places)
        expected_rows, expected_blocks = started[0].clone(), started[1].clone()
        if direction is Direction.STORE:
            expected_rows[places] = expected_blocks[blocks]
        else:
            expected_blocks[blocks] = expected_rows[places]
        assert torch.equal(rows, expected_rows)
        assert torch.equal(torch.cat(parts, dim=1), expected_blocks)
    locks.close()


def buffer_of(num_bytes: int, row_bytes: int) -> torch.Tensor:
    return torch.empty((num_buffer_rows(num_bytes, row_bytes, NUM_ROWS), row_bytes), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("widths", "element"),
    [((64, 128), torch.int64), ((64, 12), torch.int32), ((64, 2), torch.int16), ((64, 3), torch.uint8)],
)
def test_kernels_move_the_widest_elements_that_fit(widths: tuple[int, int], element: torch.dtype) -> None:
    memory = HostMemory(NUM_ROWS, sum(widths))
    locks = PageLocks(memory.rows, lambda *_: None, lambda _: None)
    regions = [torch.zeros((NUM_BLOCKS, width), dtype=torch.uint8) for width in widths]
    copies = StagedCopies(regions, RunLink(torch.from_numpy(memory.rows), locks), buffer_of(1, sum(widths)))
    assert {tensor.dtype for pair in copies._pairs for tensor in pair} == {element}
    assert len(copies._buffer) == 1, "no less than one row"
    locks.close()
