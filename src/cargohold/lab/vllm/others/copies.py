"""Simulated copies in the place of those that others' connectors make with CUDA: the rest of these connectors runs as it is.

Replaced are two parts of vLLM: the worker of ``CPUOffloadingSpec``, and the copy backend, streams and events of
``SimpleCPUOffloadWorker``. Copies of one direction end in the order in which they were begun, as on a stream; each takes as
many polls as the seed says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from cargohold.lab.simulation.faults import Fault, FaultSource
from cargohold.lab.simulation.fingerprints import GARBAGE_BYTE
from cargohold.lab.simulation.transfers import ByteRows, CopiesInFlight
from cargohold.transfer import CopyJob, Direction

_SIMPLE: Final = "vllm.v1.simple_kv_offload.worker"
_LATEST: Final = 20
"""Most polls by which an end is reported late."""


@dataclass(slots=True)
class CopyRoom:
    """What simulated copies are made in.

    Attributes:
        seed: random numbers are drawn from it.
        polls: how many polls a copy may take.
        copies: per rank, the copies in flight.
        source: decides when faults strike.
        is_slow: whether copies hardly go on at the moment.
        scratch: a folder for connectors' files.
        rank: the worker that is being made.
        num_made: connectors made so far, by rank.
        regions: host memory that several parts of a connector share, by the id of its engine.
    """

    seed: int
    polls: Sequence[int]
    copies: Sequence[CopiesInFlight]
    source: FaultSource
    is_slow: Callable[[], bool]
    scratch: str = ""
    rank: int = 0
    num_made: int = 0
    regions: dict[str, ByteRows] = field(default_factory=dict)

    def new_random(self, what: str) -> Random:
        """Random numbers for a part of the worker that is being made."""
        return Random(f"{self.seed}/{what} {self.rank}")  # noqa: S311  # repeatable, on purpose

    def new_stream(self) -> CopyStream:
        """The copies of one more connector on the worker that is being made."""
        self.num_made += 1
        name = "copies" if self.num_made <= len(self.copies) else f"copies of {self.num_made}"
        return CopyStream(self, self.copies[self.rank], self.new_random(name))


ROOM: ContextVar[CopyRoom] = ContextVar("room")
"""Where connectors that vLLM makes find what surrounds their copies: vLLM itself cannot pass it on."""


@dataclass(slots=True)
class _Copy:
    """A copy in flight.

    Attributes:
        job: its blocks on the device.
        source, destination: all rows of either side.
        pairs: row of the source and row of the destination, for each block.
        polls_left: polls after which it has ended.
        has_failed: whether it leaves garbage behind.
    """

    job: CopyJob
    source: Any
    destination: Any
    pairs: Sequence[tuple[int, int]]
    polls_left: int
    has_failed: bool


class CopyStream:
    """One connector's copies on one worker: a first-in-first-out queue for each direction.

    Args:
        room: what surrounds it.
        copies: notes what is being copied.
        random: how long copies take.
    """

    def __init__(self, room: CopyRoom, copies: CopiesInFlight, random: Random) -> None:
        self._room = room
        self._copies = copies
        self._random = random
        self._queues: dict[Direction, deque[_Copy]] = {Direction.STORE: deque(), Direction.LOAD: deque()}

    def begin(self, ident: int, direction: Direction, pairs: Sequence[tuple[int, int]], device: Any, host: Any) -> None:
        """Begin to copy.

        Args:
            ident: the connector's own number for the copy.
            direction: which way.
            pairs: block on the device and row in host memory.
            device, host: all blocks and rows.
        """
        pairs = [(block, row) for block, row in pairs if block]  # block 0 is for positions whose KV is not kept
        job = CopyJob(ident, direction, tuple(block for block, _ in pairs), tuple(row for _, row in pairs), 60.0)
        self._copies.begin(job)
        polls, source = self._random.choice(self._room.polls), self._room.source
        if source.strikes(Fault.LATE):
            polls += source.random.randint(1, _LATEST)
        is_load = direction is Direction.LOAD
        ways = [(row, block) for block, row in pairs] if is_load else pairs
        memories = (host, device) if is_load else (device, host)
        self._queues[direction].append(_Copy(job, *memories, ways, polls, source.strikes(Fault.FAILED)))

    def poll(self, direction: Direction) -> Iterator[tuple[int, bool]]:
        """Let time pass; yields number and success of each copy that has ended."""
        queue, source = self._queues[direction], self._room.source
        if not queue or source.strikes(Fault.LATE_WORKER) or (self._room.is_slow() and self._random.random() < 0.9):
            return
        queue[0].polls_left -= 1
        while queue and queue[0].polls_left <= 0:
            yield self._end(queue.popleft())

    def wait(self, direction: Direction, idents: set[int] | None = None) -> Iterator[tuple[int, bool]]:
        """Carry out all copies up to the last one of ``idents``, or all there are; yields them as ``poll`` does."""
        queue = self._queues[direction]
        places = [at for at, copy in enumerate(queue) if idents is None or copy.job.job_id in idents]
        for _ in range(max(places, default=-1) + 1):
            yield self._end(queue.popleft())

    def _end(self, copy: _Copy) -> tuple[int, bool]:
        sources, destinations = [source for source, _ in copy.pairs], [destination for _, destination in copy.pairs]
        copy.destination[destinations] = GARBAGE_BYTE if copy.has_failed else copy.source[sources]
        self._copies.end(copy.job)
        return copy.job.job_id, not copy.has_failed


# --- OffloadingConnector ----------------------------------------------------------------------------------------------


class _Rows:
    """Rows of host memory that lie in chunks, whose bytes may be shared with other ranks, and with files.

    Args:
        chunks: of one rank; shape ``(chunks, blocks per chunk, bytes per block)``.
    """

    def __init__(self, chunks: ByteRows) -> None:
        self._chunks = chunks

    def __getitem__(self, rows: Sequence[int]) -> ByteRows:
        return self._chunks[np.divmod(rows, self._chunks.shape[1])]

    def __setitem__(self, rows: Sequence[int], contents: Any) -> None:
        self._chunks[np.divmod(rows, self._chunks.shape[1])] = contents


class SimulatedOffloadingWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM ships no types
    """Copies between the paged KV and rows of host memory.

    Args:
        caches: the paged KV as vLLM describes it to workers of offloading.
        spec: vLLM's sizes of host memory.
    """

    def __init__(self, caches: Any, spec: Any) -> None:
        assert len(caches.tensors) == 1, "all simulated layers are over the same bytes"
        self._device = caches.tensors[0].tensor.numpy().view(np.uint8)
        self._blocks_per_chunk = spec.blocks_per_chunk
        room, width = ROOM.get(), self._device.shape[1]
        memory = room.regions.get(spec.config.engine_id)
        if memory is None:
            memory = np.zeros((spec.num_chunks, spec.kv_bytes_per_chunk), np.uint8)
        begin = spec.config.parallel.rank * spec.cpu_page_size_per_worker
        own = memory[:, begin : begin + spec.blocks_per_chunk * width]
        self._host = _Rows(as_strided(own, (len(own), spec.blocks_per_chunk, width), (own.strides[0], width, 1)))
        self._stream = ROOM.get().new_stream()
        self._waited_for: list[tuple[int, bool]] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Begin to copy blocks to chunks."""
        self._stream.begin(job_id, Direction.STORE, self._pairs(src_spec, dst_spec), self._device, self._host)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Begin to copy chunks to blocks."""
        self._stream.begin(job_id, Direction.LOAD, self._pairs(dst_spec, src_spec), self._device, self._host)
        return True

    def get_finished(self) -> list[Any]:
        """The copies that have ended since the last call."""
        ended, self._waited_for = self._waited_for, []
        for direction in Direction:
            ended += self._stream.poll(direction)
        return [TransferResult(ident, is_done, 1, 1e-6) for ident, is_done in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Carry out these copies now."""
        for direction in Direction:
            self._waited_for += self._stream.wait(direction, set(job_ids))

    def shutdown(self) -> None:
        """Carry out all copies."""
        for direction in Direction:
            self._waited_for += self._stream.wait(direction)

    def _pairs(self, on_device: Any, on_host: Any) -> list[tuple[int, int]]:
        """Block and row of everything that is copied.

        Per group, the first chunk may be copied from its middle on, and the last one in part::

            blocks_per_chunk 3, block_indices 4, group_sizes 4       row of the chunk    0 1 2   0 1 2
                                                                     blocks                b b   b b
        """
        blocks, chunks = (
            iter([int(block) for block in on_device.block_ids]),
            iter([int(chunk) for chunk in on_host.block_ids]),
        )
        pairs: list[tuple[int, int]] = []
        for size, index in zip(on_device.group_sizes, on_device.block_indices, strict=True):
            place, chunk = int(index) % self._blocks_per_chunk, -1
            for at in range(int(size)):
                if at == 0 or place == self._blocks_per_chunk:
                    chunk, place = next(chunks), place % self._blocks_per_chunk
                pairs.append((next(blocks), chunk * self._blocks_per_chunk + place))
                place += 1
        assert next(blocks, None) is None, "a copy of more blocks than its groups have"
        assert next(chunks, None) is None, "a copy of more chunks than its groups have"
        return pairs


def _simulated_worker(spec: Any, caches: Any) -> Any:
    """In the place of ``CPUOffloadingSpec.get_worker``, which refuses to work without CUDA."""
    return SimulatedOffloadingWorker(caches, spec)


# --- SimpleCPUOffloadConnector ----------------------------------------------------------------------------------------


class _Event:
    """In the place of ``torch.Event``. Of copies, it is asked whether they have ended; the rest is in order as it is."""

    def __init__(
        self, backend: SimulatedBackend | None = None, ident: int = 0, direction: Direction = Direction.STORE
    ) -> None:
        self._backend = backend
        self._ident = ident
        self._direction = direction

    def record(self, stream: Any) -> None:
        """Do nothing: forward passes are over when copies begin."""

    def query(self) -> bool:
        """Let time pass; whether the copy has ended."""
        return self._backend is None or self._backend.has_ended(self._ident, self._direction)

    def synchronize(self) -> None:
        """Carry out the copy now."""
        if self._backend is not None:
            self._backend.finish(self._ident, self._direction)


class SimulatedBackend:
    """In the place of ``DmaCopyBackend``: without its thread, so what was launched is on its stream at once."""

    def init(self, gpu_caches: Any, cpu_caches: Any, *streams: Any) -> None:
        """Take the memory."""
        assert len(gpu_caches) == 1, "all simulated layers are over the same bytes"
        self._device, self._host = (
            next(iter(caches.values())).numpy().view(np.uint8) for caches in (gpu_caches, cpu_caches)
        )
        self._stream = ROOM.get().new_stream()
        self._ended: set[tuple[Direction, int]] = set()

    def launch_copy(  # vLLM calls it so
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[Any],
        wait_event: Any = None,
    ) -> None:
        """Begin to copy."""
        direction = Direction.STORE if is_store else Direction.LOAD
        blocks, rows = (src_blocks, dst_blocks) if is_store else (dst_blocks, src_blocks)
        self._stream.begin(event_idx, direction, list(zip(blocks, rows, strict=True)), self._device, self._host)
        events_list.append((event_idx, _Event(self, event_idx, direction)))

    def has_ended(self, ident: int, direction: Direction) -> bool:
        """Let time pass; whether a copy has ended."""
        if (direction, ident) not in self._ended:
            self._ended |= {(direction, ended) for ended, _ in self._stream.poll(direction)}
        return (direction, ident) in self._ended

    def finish(self, ident: int, direction: Direction) -> None:
        """Carry out a copy now, and those before it."""
        self._ended |= {(direction, ended) for ended, _ in self._stream.wait(direction, {ident})}

    def shutdown(self) -> None:
        """Carry out all copies."""
        for direction in Direction:
            self._ended |= {(direction, ended) for ended, _ in self._stream.wait(direction)}


class _Stream:
    """In the place of ``torch.cuda.Stream``."""

    def __init__(self, priority: int = 0) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority."""
        return 0, 0


class _TorchWithoutCuda:
    """PyTorch, but for streams and events."""

    cuda = SimpleNamespace(Stream=_Stream, current_stream=_Stream)
    Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


# --- all of them ------------------------------------------------------------------------------------------------------


@contextmanager
def simulated_copies() -> Iterator[None]:
    """Within the ``with`` block, connectors of vLLM that copy with CUDA copy in ``ROOM`` instead."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(CPUOffloadingSpec, "get_worker", _simulated_worker))
        stack.enter_context(patch(f"{_SIMPLE}.torch", _TorchWithoutCuda()))
        stack.enter_context(patch(f"{_SIMPLE}.DmaCopyBackend", SimulatedBackend))
        yield
