"""Copies on streams: on a CUDA device where there is one, and on one made of CPU memory, whose streams the test runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import gpu
from cargohold.lab.simulation import VirtualClock
from cargohold.protocol import TransferOutcome
from cargohold.tiers import HostMemory
from cargohold.transfer import CopyJob, CopyResult, Direction
from cargohold.transfer.cpu import make_transfer_worker
from cargohold.transfer.cuda import CudaTransferWorker, StagedCopies
from cargohold.transfer.links import Link
from tests.devices import needs_cuda
from tests.transfer.fake_cuda import FakeCuda

NUM_BLOCKS, NUM_ROWS = 12, 20
DONE, FAILED = TransferOutcome.DONE, TransferOutcome.FAILED

Widths = tuple[int, ...]
ONE_REGION: Widths = (96,)
SEVERAL: Widths = (64, 8, 24)
ODD: Widths = (3, 64, 5)


def regions_of(widths: Widths, device: str = "cpu") -> list[torch.Tensor]:
    """Views as an engine has them, with something between the blocks; no byte is like its neighbours."""
    whole = [torch.arange(NUM_BLOCKS * (width + 8), dtype=torch.int64) * 37 % 251 for width in widths]
    shaped = [bytes_.to(torch.uint8).reshape(NUM_BLOCKS, -1).to(device) for bytes_ in whole]
    return [each[:, :width] for each, width in zip(shaped, widths, strict=True)]


def contents(regions: list[torch.Tensor], blocks: list[int]) -> torch.Tensor:
    return torch.cat([region[blocks] for region in regions], dim=1).cpu()


def job(job_id: int, direction: Direction, blocks: list[int], rows: list[int]) -> CopyJob:
    return CopyJob(job_id, direction, tuple(blocks), tuple(rows), 10.0)


def outcomes(results: list[CopyResult]) -> list[tuple[int, TransferOutcome]]:
    return [(result.job.job_id, result.outcome) for result in results]


LINKS = ("runs", "batch")


class Bench:
    """A worker on a device of CPU memory."""

    def __init__(self, cuda: FakeCuda, widths: Widths) -> None:
        self.cuda = cuda
        self.regions = regions_of(widths)
        self.memory = HostMemory(NUM_ROWS, sum(widths))
        self.memory.rows[:] = 7
        self.rows = torch.from_numpy(self.memory.rows)
        cuda.put(*self.regions)
        self.worker = CudaTransferWorker(self.regions, self.memory, buffer_bytes=3 * sum(widths))
        for lane in self.worker._lanes.values():
            if isinstance(lane.copies, StagedCopies):
                cuda.put(lane.copies._buffer)

    def compute(self, block: int, value: int) -> None:
        """The model writes a block."""
        for region in self.regions:
            self.cuda.compute.add(partial(region[block].fill_, value))

    def finish(self) -> list[CopyResult]:
        """Everything that was enqueued happens."""
        for stream in self.cuda.streams:
            stream.synchronize()
        return self.worker.poll()


@contextlib.contextmanager
def bench_of(widths: Widths, link: str = "runs", *, refuses_locks: bool = False) -> Iterator[Bench]:
    def chosen(links: list[Link], *_: object) -> dict[Direction, Link]:
        names = [each.name for each in links]
        return dict.fromkeys(Direction, links[names.index(link) if link in names else 0])

    with pytest.MonkeyPatch.context() as monkeypatch, FakeCuda() as cuda:
        cuda.refuses_locks = refuses_locks
        cuda.install(monkeypatch)
        monkeypatch.setattr("cargohold.transfer.cuda.fastest_link", chosen)
        bench = Bench(cuda, widths)
        yield bench
        bench.worker.shutdown()
        assert cuda.num_locked_bytes == 0, "pages stay locked"


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("widths", [ONE_REGION, SEVERAL, ODD])
def test_copies_wait_for_what_the_model_computes_before_and_for_nothing_after(widths: Widths, link: str) -> None:
    with bench_of(widths, link) as bench:
        for block in (3, 4, 9):
            bench.compute(block, block)
        bench.worker.submit(job(1, Direction.STORE, [3, 4, 9, 0], [8, 9, 0, 15]))
        first = contents(bench.regions, [0])
        assert bench.worker.poll() == []
        _, loads, stores = bench.cuda.streams
        while stores.advance() or loads.advance():
            pass
        assert bench.worker.poll() == [], "the model has not computed anything"
        bench.cuda.compute.synchronize()
        bench.compute(5, 99)  # a later step is not waited for
        while stores.advance():
            pass
        assert outcomes(bench.worker.poll()) == [(1, DONE)]
        assert bench.rows[[8, 9, 0]].tolist() == [[block] * sum(widths) for block in (3, 4, 9)]
        assert torch.equal(bench.rows[[15]], first)
        bench.worker.submit(job(2, Direction.LOAD, [1, 2, 6, 7, 5], [8, 0, 15, 1, 9]))
        assert outcomes(bench.finish()) == [(2, DONE)]
        assert torch.equal(contents(bench.regions, [1, 2, 6, 7, 5]), bench.rows[[8, 0, 15, 1, 9]])
        assert bench.cuda.num_waits == 0, "nobody was held up"


def test_the_benchmark_measures_each_way_over_the_link_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the ways that were not chosen, nobody could see that a choice was wrong."""
    monkeypatch.setattr(
        gpu, "make_transfer_worker", lambda regions, memory, _clock: CudaTransferWorker(regions, memory)
    )
    with bench_of(SEVERAL, "batch") as bench:
        measured = [
            (name, *(gpu.link_name(worker, direction) for direction in Direction), chosen)
            for name, worker, chosen in gpu.each_way(bench.regions, HostMemory(NUM_ROWS, sum(SEVERAL)))
        ]
    assert measured == [(name, name, name, dict.fromkeys(Direction, "batch")) for name in LINKS]


class Model:
    """What blocks and rows hold in the order in which things were asked for; nothing that a job uses is used by another."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.blocks = {block: contents(bench.regions, [block])[0] for block in range(NUM_BLOCKS)}
        self.rows = {row: bench.rows[row].clone() for row in range(NUM_ROWS)}
        self.running: dict[int, CopyJob] = {}
        self.num_done = 0

    def compute(self, block: int) -> None:
        self.num_done += 1
        self.bench.compute(block, self.num_done % 251)
        self.blocks[block] = torch.full_like(self.blocks[block], self.num_done % 251)

    def compute_a_free_one(self, seed: int) -> None:
        for block in chosen(self.free_blocks, seed, 1):
            self.compute(block)

    def compute_one_that_is_stored(self, seed: int) -> None:
        """Blocks that are being stored may be written, before anybody has heard that they were, once the model waits."""
        self.bench.worker.finish_stores()
        stores = [job for job in self.running.values() if job.direction is Direction.STORE]
        for block in chosen([block for job in stores for block in job.block_ids], seed, 1):
            self.compute(block)

    def submit(self, direction: Direction, seed: int, count: int) -> None:
        pairs = list(zip(chosen(self.free_blocks, seed, count), chosen(self.free_rows, seed // 7, count), strict=False))
        if not pairs:
            return
        self.num_done += 1
        new = job(self.num_done, direction, [block for block, _ in pairs], [row for _, row in pairs])
        self.running[new.job_id] = new
        self.bench.worker.submit(new)
        for block, row in pairs:
            if direction is Direction.STORE:
                self.rows[row] = self.blocks[block]
            else:
                self.blocks[block] = self.rows[row]

    def take(self, results: list[CopyResult]) -> None:
        """Jobs ended: where they wrote is what they were asked to write."""
        for result in results:
            assert result.outcome is DONE
            ended = self.running.pop(result.job.job_id)
            if ended.direction is Direction.STORE:
                assert torch.equal(
                    self.bench.rows[list(ended.rows)], torch.stack([self.rows[row] for row in ended.rows])
                )
            else:
                there = contents(self.bench.regions, list(ended.block_ids))
                assert torch.equal(there, torch.stack([self.blocks[block] for block in ended.block_ids]))

    def check(self) -> None:
        assert not self.running
        assert torch.equal(self.bench.rows, torch.stack(list(self.rows.values())))
        everything = contents(self.bench.regions, list(range(NUM_BLOCKS)))
        assert torch.equal(everything, torch.stack(list(self.blocks.values())))

    @property
    def free_blocks(self) -> list[int]:
        used = {block for job in self.running.values() for block in job.block_ids}
        return [block for block in self.blocks if block not in used]

    @property
    def free_rows(self) -> list[int]:
        used = {row for job in self.running.values() for row in job.rows}
        return [row for row in self.rows if row not in used]


def chosen(free: list[int], seed: int, count: int) -> list[int]:
    """Some of them, neighbours mostly, in an order that jumps now and then."""
    start = seed % max(1, len(free))
    return (free[start:] + free[:start])[:: 1 if seed % 3 else 2][:count]


SEEDS = st.integers(0, 10**6)
ACTIONS: st.SearchStrategy[Callable[[Model], object]] = st.one_of(
    SEEDS.map(lambda seed: lambda model: model.compute_a_free_one(seed)),
    SEEDS.map(lambda seed: lambda model: model.compute_one_that_is_stored(seed)),
    st.tuples(st.sampled_from(list(Direction)), SEEDS, st.integers(1, 7)).map(
        lambda options: lambda model: model.submit(*options)
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=30).map(lambda turns: lambda model: model.bench.cuda.run(turns)),
    st.just(lambda model: model.take(model.bench.worker.poll())),
)


@given(st.sampled_from([ONE_REGION, SEVERAL, ODD]), st.sampled_from(LINKS), st.lists(ACTIONS, max_size=40))
def test_whatever_the_streams_do_first_every_byte_arrives(
    widths: Widths, link: str, actions: list[Callable[[Model], object]]
) -> None:
    with bench_of(widths, link) as bench:
        model = Model(bench)
        for act in actions:
            act(model)
        model.take(bench.finish())
        model.check()
        assert bench.cuda.num_waits == 0, "nobody was held up"


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("widths", [ONE_REGION, SEVERAL, ODD])
def test_the_model_waits_for_the_loads_of_its_step_and_the_caller_does_not(widths: Widths, link: str) -> None:
    with bench_of(widths, link) as bench:
        bench.worker.submit(job(1, Direction.LOAD, [1, 2, 6], [8, 0, 15]))
        assert bench.worker.finish_loads()
        assert bench.worker.poll() == [], "nothing was copied yet"
        seen: list[torch.Tensor] = []
        bench.cuda.compute.add(lambda: seen.append(contents(bench.regions, [1, 2, 6])))
        bench.compute(2, 99)
        for _ in range(50):
            bench.cuda.compute.advance()
        assert not seen, "the model waits"
        bench.cuda.compute.synchronize()
        assert torch.equal(seen[0], bench.rows[[8, 0, 15]])
        assert outcomes(bench.finish()) == [(1, DONE)]
        assert (contents(bench.regions, [2]) == 99).all(), "and overwrites only then"
        assert bench.cuda.num_waits == 0, "nobody was held up"


def test_the_model_is_told_of_a_load_that_cannot_be_enqueued() -> None:
    with bench_of(SEVERAL) as bench:
        bench.cuda.fails_in = 1
        bench.worker.submit(job(1, Direction.LOAD, [1, 2], [8, 0]))
        bench.cuda.fails_in = None
        assert not bench.worker.finish_loads()
        assert outcomes(bench.worker.poll()) == [(1, FAILED)]
        bench.worker.submit(job(2, Direction.LOAD, [1, 2], [8, 0]))
        assert bench.worker.finish_loads()
        assert outcomes(bench.finish()) == [(2, DONE)]


@pytest.mark.parametrize("link", LINKS)
def test_without_locked_pages_copies_hold_their_caller_up_and_arrive(
    link: str, caplog: pytest.LogCaptureFixture
) -> None:
    with bench_of(SEVERAL, link, refuses_locks=True) as bench:
        bench.compute(3, 33)
        bench.worker.submit(job(1, Direction.STORE, [3, 5], [2, 4]))
        assert bench.cuda.num_waits == 2
        assert outcomes(bench.finish()) == [(1, DONE)]
        assert bench.rows[2].tolist() == [33] * sum(SEVERAL)
    assert "cannot be page-locked (CUDA error 2)" in caplog.text


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("direction", list(Direction))
def test_a_job_that_cannot_be_enqueued_has_failed_and_writes_nothing_afterwards(
    direction: Direction, link: str
) -> None:
    with bench_of(SEVERAL, link) as bench:
        bench.worker.submit(job(1, direction, [0, 1], [0, 1]))
        bench.cuda.fails_in = 4  # in the second half of the next
        bench.worker.submit(job(2, direction, [3, 4, 5, 6], [6, 7, 8, 9]))
        bench.cuda.fails_in = None
        assert outcomes(bench.worker.poll()) == [(1, DONE), (2, FAILED)]
        before = bench.rows.clone(), contents(bench.regions, list(range(NUM_BLOCKS)))
        assert bench.finish() == []
        assert torch.equal(bench.rows, before[0])
        assert torch.equal(contents(bench.regions, list(range(NUM_BLOCKS))), before[1])
        bench.worker.submit(job(3, direction, [3], [6]))
        assert outcomes(bench.finish()) == [(3, DONE)]


def test_jobs_of_a_device_that_has_failed_have_failed() -> None:
    with bench_of(ONE_REGION) as bench:
        bench.worker.submit(job(1, Direction.STORE, [0], [0]))
        bench.worker.submit(job(2, Direction.LOAD, [1], [1]))
        bench.cuda.is_broken = True
        assert sorted(outcomes(bench.worker.poll())) == [(1, FAILED), (2, FAILED)]
        assert bench.worker.poll() == []
        bench.worker.submit(job(3, Direction.STORE, [2], [2]))
        assert outcomes(bench.worker.poll()) == [(3, FAILED)]


def test_shutdown_waits_for_what_was_begun() -> None:
    with bench_of(SEVERAL) as bench:
        bench.compute(3, 33)
        bench.worker.submit(job(1, Direction.STORE, [3], [0]))
        bench.worker.shutdown()
        assert outcomes(bench.worker.poll()) == [(1, DONE)]
        assert bench.rows[0].tolist() == [33] * sum(SEVERAL)
        assert bench.cuda.num_locked_bytes == 0


# --- on a device --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("widths", [ONE_REGION, SEVERAL, ODD])
def test_on_a_device_bytes_come_back(widths: Widths) -> None:
    regions, memory = regions_of(widths, "cuda"), HostMemory(NUM_ROWS, sum(widths))
    worker = make_transfer_worker(regions, memory, VirtualClock())
    assert isinstance(worker, CudaTransferWorker)
    before = contents(regions, list(range(NUM_BLOCKS)))
    worker.submit(job(1, Direction.STORE, [3, 4, 9, 0], [8, 9, 0, 15]))
    torch.cuda.synchronize()
    assert outcomes(worker.poll()) == [(1, DONE)]
    rows = torch.from_numpy(memory.rows)
    assert torch.equal(rows[[8, 9, 0, 15]], before[[3, 4, 9, 0]])
    worker.submit(job(2, Direction.LOAD, [1, 2, 11, 6], [8, 9, 0, 15]))
    torch.cuda.synchronize()
    assert outcomes(worker.poll()) == [(2, DONE)]
    assert torch.equal(contents(regions, [1, 2, 11, 6]), before[[3, 4, 9, 0]])
    untouched = [0, 3, 4, 5, 7, 8, 9, 10]
    assert torch.equal(contents(regions, untouched), before[untouched])
    worker.shutdown()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("num_regions", [1, 8])
def test_on_a_device_the_model_waits_for_the_loads_of_its_step(num_regions: int) -> None:
    width = (1 << 20) // num_regions
    regions = [torch.zeros((64, width), dtype=torch.uint8, device="cuda") for _ in range(num_regions)]
    memory = HostMemory(64, width * num_regions)
    memory.rows[:] = np.arange(1, 65, dtype=np.uint8)[:, None]
    worker = make_transfer_worker(regions, memory, VirtualClock())
    for value in range(1, 6):
        for region in regions:
            region.fill_(0)
        worker.submit(job(value, Direction.LOAD, list(range(64)), list(range(64))))
        assert worker.finish_loads()
        seen = [region.clone() for region in regions]
        for region in regions:
            region.fill_(99)
        torch.cuda.synchronize()
        (result,) = worker.poll()
        assert result.outcome is DONE
        assert 0 < result.duration_s < 1
        for there, region in zip(seen, regions, strict=True):
            assert (there.cpu() == torch.arange(1, 65, dtype=torch.uint8)[:, None]).all()
            assert (region == 99).all()
    worker.shutdown()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("num_regions", [1, 8])
def test_on_a_device_stores_see_what_the_model_wrote_before_and_nobody_waits_for_it(num_regions: int) -> None:
    width = (1 << 20) // num_regions
    regions = [torch.zeros((256, width), dtype=torch.uint8, device="cuda") for _ in range(num_regions)]
    memory = HostMemory(256, width * num_regions)
    worker = make_transfer_worker(regions, memory, VirtualClock())
    worker.submit(job(0, Direction.STORE, list(range(256)), list(range(256))))  # locks all pages
    torch.cuda.synchronize()
    worker.poll()
    for value in range(1, 6):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # a long step
        for region in regions:
            region.fill_(value)
        worker.submit(job(value, Direction.STORE, list(range(256)), list(range(256))))
        assert worker.poll() == [], "submitting did not wait for the step"
        worker.finish_stores()
        for region in regions:
            region.fill_(99)  # the next step overwrites it
        torch.cuda.synchronize()
        assert outcomes(worker.poll()) == [(value, DONE)]
        assert (memory.rows == value).all()
    worker.shutdown()
