"""Which way between device and host memory is chosen, and that each one carries every byte on a real device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cargohold.tiers import HostMemory
from cargohold.transfer import Direction
from cargohold.transfer.host_pages import PageLocks, lock_pages, unlock_pages
from cargohold.transfer.links import Link, RunLink, cuda_links, fastest_link
from tests.devices import needs_cuda

LOAD, STORE = Direction.LOAD, Direction.STORE


class OtherLink(RunLink):
    name = "other"


@pytest.fixture
def links() -> list[Link]:
    rows = torch.zeros((4, 8), dtype=torch.uint8)
    locks = PageLocks(HostMemory(4, 8).rows, lambda *_: None, lambda _: None)
    locks.close()
    plain = RunLink(rows, locks)
    return [plain, OtherLink(rows, locks)]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"runs": 1.0, "other": 2.0}, "runs"),
        ({"runs": 2.0, "other": 1.0}, "other"),
        ({"runs": 2.0, "other": None}, "runs"),
    ],
)
def test_the_fastest_link_that_works_is_chosen(
    links: list[Link], times: dict[str, float | None], expected: str
) -> None:
    def measure(link: Link, _direction: Direction, _rows: Sequence[int]) -> float:
        time_s = times[link.name]
        if time_s is None:
            raise RuntimeError("invalid argument")
        return time_s

    chosen = fastest_link(links, 100, 4096, measure)
    assert {direction: link.name for direction, link in chosen.items()} == {LOAD: expected, STORE: expected}


def test_each_direction_has_the_link_that_is_fastest_for_it(links: list[Link]) -> None:
    chosen = fastest_link(links, 100, 8, lambda link, way, _: 1.0 + (link.name == "runs") * (way is LOAD))
    assert {direction: link.name for direction, link in chosen.items()} == {LOAD: "other", STORE: "runs"}


@given(num_rows=st.integers(0, 300), row_bytes=st.integers(1, 2**28))
def test_trials_stay_within_the_rows_that_they_may_use(num_rows: int, row_bytes: int) -> None:
    rows = torch.zeros((1, 8), dtype=torch.uint8)
    locks = PageLocks(HostMemory(1, 8).rows, lambda *_: None, lambda _: None)
    locks.close()
    links: list[Link] = [RunLink(rows, locks), OtherLink(rows, locks)]

    def measure(_link: Link, _direction: Direction, tried: Sequence[int]) -> float:
        assert 0 <= min(tried) <= max(tried) < num_rows
        assert len(set(tried)) == len(tried) >= 2
        return 1.0

    assert set(fastest_link(links, num_rows, row_bytes, measure)) == {LOAD, STORE}


# --- on a device --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("row_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("at", range(2))
def test_on_a_device_each_link_carries_every_byte(at: int, row_bytes: int) -> None:
    device = torch.device("cuda:0")
    memory = HostMemory(64, row_bytes)
    rows = torch.from_numpy(memory.rows)
    locks = PageLocks(memory.rows, partial(lock_pages, device), unlock_pages)
    links = cuda_links(rows, locks, device)
    if at >= len(links):
        pytest.skip(f"this device and its driver have only {', '.join(link.name for link in links)}")
    region = torch.randint(256, (64, row_bytes), dtype=torch.uint8, device=device)
    before = region.cpu()
    blocks, places = random.Random(1).sample(range(64), 40), random.Random(2).sample(range(64), 40)
    blocks[7:9], places[7:9] = _neighbours(blocks), _neighbours(places)
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]  # torch's own is not annotated
        links[at].copy(STORE, region, blocks, places)
        torch.cuda.synchronize()
        assert torch.equal(rows[places], before[blocks])
        region.zero_()
        links[at].copy(LOAD, region, blocks, places)
        torch.cuda.synchronize()
    assert torch.equal(region.cpu()[blocks], before[blocks])
    others = sorted(set(range(64)) - set(blocks))
    assert not region.cpu()[others].any()
    locks.close()


def _neighbours(numbers: list[int]) -> list[int]:
    """Two that are neighbours and not yet used."""
    free = sorted(set(range(64)) - set(numbers[:7]) - set(numbers[9:]))
    return next([one, other] for one, other in pairwise(free) if other == one + 1)
