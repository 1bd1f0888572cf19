"""Simulated copies in the place of those that others' connectors make with CUDA: the rest of these connectors runs as it is.

Replaced are two parts of vLLM: the worker of ``CPUOffloadingSpec``, and host memory, copy backend, streams and events of
``SimpleCPUOffloadWorker``. Copies of one direction end in the order in which they were begun, as on a stream; each takes as
many polls as the seed says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import Mock, patch

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

from cargohold.lab.simulation.faults import Fault
from cargohold.lab.simulation.fingerprints import GARBAGE_BYTE
from cargohold.lab.simulation.transfers import ByteRows
from cargohold.lab.vllm.others.world import surroundings
from cargohold.transfer import CopyJob, Direction

_LATEST: Final = 20
"""Most polls by which an end is reported late."""


@dataclass(slots=True)
class Copy:
    """A copy.

    Attributes:
        job: the blocks on the device, and the rows of host memory.
        ways: bytes of the source and of the destination, of each block.
        polls_left: polls after which it has ended.
        has_failed: whether it leaves garbage behind.
        has_ended: whether it has ended.
    """

    job: CopyJob
    ways: Sequence[tuple[ByteRows, ByteRows]]
    polls_left: int
    has_failed: bool
    has_ended: bool = False


class CopyStream:
    """One connector's copies on one worker: a first-in-first-out queue for each direction.

    Args:
        rank: the worker.
        device, host: bytes of each block, and of each row.
    """

    def __init__(self, rank: int, device: Any, host: Any) -> None:
        self._world = world = surroundings()
        self._memories = device, host
        self._noted = world.copies[rank]
        world.num_streams += 1
        is_first = world.num_streams <= len(world.copies)
        self._random = world.new_random("copies" if is_first else f"copies of {world.num_streams}", rank)
        self._queues: dict[Direction, deque[Copy]] = {Direction.STORE: deque(), Direction.LOAD: deque()}

    def begin(self, ident: int, direction: Direction, pairs: Sequence[tuple[int, int]]) -> Copy:
        """Begin to copy: ``ident`` is the connector's number for it, and ``pairs`` has a block and a row each."""
        pairs = [(block, row) for block, row in pairs if block]  # block 0 is for positions whose KV is not kept
        job = CopyJob(ident, direction, tuple(block for block, _ in pairs), tuple(row for _, row in pairs), 60.0)
        self._noted.begin(job)
        polls, source = self._random.choice(self._world.polls), self._world.source
        if source.strikes(Fault.LATE):
            polls += source.random.randint(1, _LATEST)
        device, host = self._memories
        ways = [(device[block], host[row]) for block, row in pairs]
        if direction is Direction.LOAD:
            ways = [(destination, origin) for origin, destination in ways]
        copy = Copy(job, ways, polls, source.strikes(Fault.FAILED))
        self._queues[direction].append(copy)
        return copy

    def poll(self, direction: Direction) -> list[Copy]:
        """Let time pass. Returns the copies that have ended."""
        queue, world = self._queues[direction], self._world
        if not queue or world.source.strikes(Fault.LATE_WORKER) or (world.is_slow() and self._random.random() < 0.9):
            return []
        queue[0].polls_left -= 1
        ended = []
        while queue and queue[0].polls_left <= 0:
            ended.append(self._end(queue))
        return ended

    def wait(self, direction: Direction, idents: set[int] | None = None) -> list[Copy]:
        """Carry out all copies up to the last one of ``idents``, or all there are. Returns them."""
        queue = self._queues[direction]
        places = [at for at, copy in enumerate(queue) if idents is None or copy.job.job_id in idents]
        return [self._end(queue) for _ in range(max(places, default=-1) + 1)]

    def wait_for_all(self) -> list[Copy]:
        return [copy for direction in Direction for copy in self.wait(direction)]

    def _end(self, queue: deque[Copy]) -> Copy:
        copy = queue.popleft()
        for origin, destination in copy.ways:
            destination[:] = GARBAGE_BYTE if copy.has_failed else origin
        self._noted.end(copy.job)
        copy.has_ended = True
        return copy


# --- OffloadingConnector ----------------------------------------------------------------------------------------------


class SimulatedOffloadingWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM ships no types
    """Copies between the paged KV and rows of host memory, which lie in chunks. Others' ranks, and files, may share these.

    Args:
        spec: vLLM's sizes of host memory.
        caches: the paged KV as vLLM describes it to workers of offloading.
    """

    def __init__(self, spec: Any, caches: Any) -> None:
        assert len(caches.tensors) == 1, "all simulated layers are over the same bytes"
        device = caches.tensors[0].tensor.numpy().view(np.uint8)
        rank, width = spec.config.parallel.rank, device.shape[1]
        self._blocks_per_chunk = spec.blocks_per_chunk
        chunks = surroundings().regions.get(spec.config.engine_id)
        if chunks is None:
            chunks = np.zeros((spec.num_chunks, spec.kv_bytes_per_chunk), np.uint8)
        begin = rank * spec.cpu_page_size_per_worker
        own = chunks[:, begin : begin + spec.blocks_per_chunk * width]
        self._stream = CopyStream(rank, device, [row for chunk in own for row in chunk.reshape(-1, width)])
        self._waited_for: list[Copy] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Begin to copy blocks to chunks."""
        self._stream.begin(job_id, Direction.STORE, self._pairs(src_spec, dst_spec))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Begin to copy chunks to blocks."""
        self._stream.begin(job_id, Direction.LOAD, self._pairs(dst_spec, src_spec))
        return True

    def get_finished(self) -> list[Any]:
        """The copies that have ended since the last call."""
        ended, self._waited_for = self._waited_for, []
        for direction in Direction:
            ended += self._stream.poll(direction)
        return [TransferResult(copy.job.job_id, not copy.has_failed, 1, 1e-6) for copy in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Carry out these copies now."""
        for direction in Direction:
            self._waited_for += self._stream.wait(direction, set(job_ids))

    def shutdown(self) -> None:
        """Carry out all copies."""
        self._waited_for += self._stream.wait_for_all()

    def _pairs(self, on_device: Any, on_host: Any) -> list[tuple[int, int]]:
        """Block and row of everything that is copied.

        Per group, the first chunk may be copied from its middle on, and the last one in part::

            blocks_per_chunk 3, block_indices 4, group_sizes 4       row of the chunk    0 1 2   0 1 2
                                                                     blocks                b b   b b
        """
        blocks, chunks = map(int, on_device.block_ids), map(int, on_host.block_ids)
        per_chunk = self._blocks_per_chunk
        pairs: list[tuple[int, int]] = []
        for size, index in zip(map(int, on_device.group_sizes), map(int, on_device.block_indices), strict=True):
            first = index % per_chunk
            num_chunks = -(-(first + size) // per_chunk) if size else 0
            rows = [chunk * per_chunk + at for chunk in islice(chunks, num_chunks) for at in range(per_chunk)]
            pairs += zip(islice(blocks, size), rows[first : first + size], strict=True)
        assert not [*blocks, *chunks], "a copy of more blocks or chunks than its groups have"
        return pairs


def _simulated_worker(spec: Any, caches: Any) -> SimulatedOffloadingWorker:
    """In the place of ``CPUOffloadingSpec.get_worker``, which refuses to work without CUDA."""
    return SimulatedOffloadingWorker(spec, caches)


# --- SimpleCPUOffloadConnector ----------------------------------------------------------------------------------------


class SimulatedBackend:
    """In the place of ``DmaCopyBackend``: without its thread, so what was launched is on its stream at once.

    Args:
        stream: the stream.
    """

    def __init__(self, stream: CopyStream) -> None:
        self._stream = stream
        self.shutdown = stream.wait_for_all

    def launch_copy(  # vLLM calls it so
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[Any],
        wait_event: Any = None,  # forward passes are over when copies begin
    ) -> None:
        """Begin to copy."""
        direction = Direction.STORE if is_store else Direction.LOAD
        blocks, rows = (src_blocks, dst_blocks) if is_store else (dst_blocks, src_blocks)
        copy = self._stream.begin(event_idx, direction, list(zip(blocks, rows, strict=True)))
        events_list.append((event_idx, _Event(self._stream, copy)))


@dataclass(frozen=True, slots=True)
class _Event:
    """In the place of the ``torch.Event`` after a copy."""

    stream: CopyStream
    copy: Copy

    def query(self) -> bool:
        """Let time pass; whether the copy has ended."""
        if not self.copy.has_ended:
            self.stream.poll(self.copy.job.direction)
        return self.copy.has_ended

    def synchronize(self) -> None:
        """Carry out the copy now, and those before it."""
        self.stream.wait(self.copy.job.direction, {self.copy.job.job_id})


def _simulated_memory(worker: Any, caches: Any, bytes_per_block: int, _device: Any) -> None:
    """In the place of ``SimpleCPUOffloadWorker._init_cpu_mode``, which allocates memory for CUDA and begins a thread."""
    assert len(caches) == 1, "all simulated layers are over the same bytes"
    device = next(iter(caches.values())).numpy().view(np.uint8)
    host = np.zeros((worker.num_cpu_blocks, bytes_per_block), np.uint8)
    worker._backend = SimulatedBackend(CopyStream(worker.vllm_config.parallel_config.rank, device, host))


def _torch_without_cuda() -> Any:
    """PyTorch with streams and events that do nothing: what is in order on the device is so here by itself."""
    stream = Mock(spec_set=["priority_range"])
    stream.priority_range.return_value = 0, 0
    cuda = SimpleNamespace(Stream=stream, current_stream=Mock())
    return SimpleNamespace(**{**vars(torch), "cuda": cuda, "Event": Mock(return_value=Mock(spec_set=["record"]))})


@contextmanager
def simulated_copies() -> Iterator[None]:
    """Within the ``with`` block, connectors of vLLM that copy with CUDA have their copies simulated."""
    with (
        patch.object(CPUOffloadingSpec, "get_worker", _simulated_worker),
        patch.object(SimpleCPUOffloadWorker, "_init_cpu_mode", _simulated_memory),
        patch("vllm.v1.simple_kv_offload.worker.torch", _torch_without_cuda()),
    ):
        yield
