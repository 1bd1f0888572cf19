"""What vLLM's layouts, its workers and its sleep ask of copies, with the same code on CPU tensors and on a CUDA device."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from cargohold.cache.rows import plan_rows
from cargohold.connector.kernel.jobs import OffloadingMetadata
from cargohold.connector.kernel.worker import KernelWorker
from cargohold.integrations.vllm.regions import regions_of
from cargohold.protocol import AttentionKind, KVCacheGroup, KVCacheLayout, TransferOutcome
from cargohold.tiers import HostMemory
from cargohold.transfer import Direction
from cargohold.transfer.cpu import make_grouped_transfers, make_transfer_worker
from cargohold.transfer.port import CopyJob
from tests.devices import DEVICES
from tests.forks import fork_server
from tests.transfer.test_vllm_layouts import PATIENCE_S, carry_out

NUM_BLOCKS = 24


# --- groups of different sizes over the same bytes --------------------------------------------------------------------


@dataclass(frozen=True)
class Layers:
    """Layers that are alike, one behind the other in a block: how many, what each fills, and where the next one begins."""

    count: int
    width: int
    page: int
    dtype: torch.dtype = torch.uint8


LAYOUTS = {
    "latent rows and windows, as of DeepSeek V4": (
        (Layers(3, 37_376, 37_440), Layers(3, 8_448, 8_640)),
        (Layers(4, 37_376, 37_440),),
        (Layers(2, 32_768, 32_832, torch.float32),),
    ),
    "padded states, as of LFM2": ((Layers(4, 32_768, 32_768, torch.bfloat16),), (Layers(3, 8_192, 32_768),)),
    "packed and overlaid, as of Gemma-3": tuple((Layers(count, 4_096, 4_096, torch.bfloat16),) for count in (5, 4, 3)),
}


class Overlaid:
    """Groups whose blocks all begin at the same byte."""

    def __init__(self, groups: Sequence[Sequence[Layers]], device: str) -> None:
        ends = [sum(layers.count * layers.page for layers in group) for group in groups]
        self.memory = torch.randint(256, (NUM_BLOCKS, max(ends)), dtype=torch.uint8, device=device)
        self.places = [list(_places(group)) for group in groups]
        self.caches = [
            {
                f"group{number}.layer{at}": self.memory[:, start : start + layers.width].view(layers.dtype)
                for at, (start, layers) in enumerate(places)
            }
            for number, places in enumerate(self.places)
        ]
        sizes = [sum(layers.width for _, layers in places) for places in self.places]
        of_groups = [
            KVCacheGroup(number, AttentionKind.FULL, 16, tuple(cache), block_bytes=size)
            for number, (cache, size) in enumerate(zip(self.caches, sizes, strict=True))
        ]
        self.layout = KVCacheLayout(tuple(of_groups), NUM_BLOCKS, max(ends), 16)


def _places(group: Sequence[Layers]) -> list[tuple[int, Layers]]:
    each = [layers for layers in group for _ in range(layers.count)]
    return list(zip(accumulate((layers.page for layers in each), initial=0), each, strict=False))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_of_groups_of_different_sizes_come_back_and_nothing_else_changes(name: str, device: str) -> None:
    paged = Overlaid(LAYOUTS[name], device)
    plan = plan_rows(paged.layout)
    assert not plan.is_even
    numbers = [group for group in range(len(paged.caches)) for _ in range(3)]
    rng = random.Random(name)  # repeatable, on purpose
    sources, targets = (rng.sample(range(1, NUM_BLOCKS), len(numbers)) for _ in range(2))
    num_rows = sum(plan.per_block[number] for number in numbers)
    host, rows = HostMemory(num_rows + 9, plan.row_bytes), tuple(rng.sample(range(num_rows + 9), num_rows))
    regions = [regions_of(cache, NUM_BLOCKS) for cache in paged.caches]
    transfers = make_grouped_transfers(regions, plan.per_block, host, time.monotonic)
    stored = paged.memory.clone()
    carry_out(transfers, CopyJob(1, Direction.STORE, tuple(sources), rows, PATIENCE_S, tuple(numbers)))
    torch.bitwise_not(paged.memory, out=paged.memory)
    expected = paged.memory.clone()
    for number, source, target in zip(numbers, sources, targets, strict=True):
        for start, layers in paged.places[number]:
            expected[target, start : start + layers.width] = stored[source, start : start + layers.width]
    carry_out(transfers, CopyJob(2, Direction.LOAD, tuple(targets), rows, PATIENCE_S, tuple(numbers)))
    transfers.shutdown()
    assert torch.equal(paged.memory, expected)


# --- workers with the same pages --------------------------------------------------------------------------------------


def _share(at: int, device: str, connection: Connection) -> None:
    """A worker: stores its blocks, and loads those of the other one."""

    def exchange(message: object) -> list[bytes]:
        connection.send(message)
        heard: list[bytes] = connection.recv()
        return heard

    memory = HostMemory(8, 1 << 16, exchange)
    region = torch.full((8, 1 << 16), at + 1, dtype=torch.uint8, device=device)
    worker = make_transfer_worker([region], memory, time.monotonic)
    own, others = (tuple(range(4 * who, 4 * who + 4)) for who in (at, 1 - at))
    carry_out(worker, CopyJob(1, Direction.STORE, (0, 1, 2, 3), own, PATIENCE_S))
    exchange("stored")
    carry_out(worker, CopyJob(2, Direction.LOAD, (4, 5, 6, 7), others, PATIENCE_S))
    exchange([sorted(set(region[part].flatten().tolist())) for part in (slice(4), slice(4, 8))])
    worker.shutdown()


@pytest.mark.parametrize("device", DEVICES)
def test_two_processes_copy_to_and_from_the_same_pages(device: str) -> None:
    """On a CUDA device, each of them locks the pages."""
    # A fork would bring a CUDA runtime that does not work.
    context = fork_server() if device == "cpu" else multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(2)]
    workers = [context.Process(target=_share, args=(at, device, pairs[at][1]), daemon=True) for at in range(2)]
    for worker, (_, theirs) in zip(workers, pairs, strict=True):
        worker.start()
        theirs.close()
    told: list[object] = []
    for _ in range(4):  # two of them open the memory
        told = [ours.recv() for ours, _ in pairs]
        for ours, _ in pairs:
            ours.send(told)
    for worker in workers:
        worker.join(PATIENCE_S)
        assert worker.exitcode == 0
    assert told == [[[1], [2]], [[2], [1]]]


# --- sleep ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_copies_end_before_the_device_sleeps_and_none_touches_its_memory_until_it_wakes(device: str) -> None:
    region = torch.full((NUM_BLOCKS, 1 << 16), 7, dtype=torch.uint8, device=device)
    memory = HostMemory(NUM_BLOCKS, 1 << 16)
    worker = KernelWorker(lambda groups: make_transfer_worker(groups[0], memory, time.monotonic))
    worker.register_kv_caches([[region]])
    everything = tuple(range(NUM_BLOCKS))

    def store(job_id: int) -> None:
        worker.bind_connector_metadata(
            OffloadingMetadata(stores=(CopyJob(job_id, Direction.STORE, everything, everything, PATIENCE_S),))
        )
        worker.wait_for_save()

    if region.is_cuda:
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # so that the copies are still under way
    store(1)
    worker.unregister_kv_caches()
    region.fill_(99)  # taken away, and used by somebody else
    store(2)
    ended = worker.get_transfer_results(frozenset()).jobs
    assert ended == {1: ended[1], 2: TransferOutcome.ABANDONED}
    # What has not begun may be given up; on a CPU that is all of it.
    assert set(np.unique(memory.rows)) <= ({7} if ended[1] is TransferOutcome.DONE else {0, 7})
    worker.restore_kv_caches()
    store(3)
    deadline = time.monotonic() + PATIENCE_S
    while not (ended := worker.get_transfer_results(frozenset()).jobs):
        assert time.monotonic() < deadline, "the copy did not end"
    assert ended == {3: TransferOutcome.DONE}
    assert (memory.rows == 99).all()
    worker.shutdown()
