"""Tiers of ``TieringOffloadingSpec`` on files: its own managers, names and files, without its threads and shared memory.

What their threads do is done when their results are asked for, some polls later; jobs overtake each other, as in a pool of
threads. To a tier that is full nothing is stored, and from one that is gone nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager

from cargohold.lab.simulation.faults import Fault
from cargohold.lab.vllm.others.world import surroundings

_TIERING: Final = "vllm.v1.kv_offload.tiering"
_flush: Final = AsyncLookupManager.flush


class SimulatedRegion:
    """In the place of ``SharedOffloadRegion``: host memory of all ranks, in this process."""

    def __init__(self, engine_id: str, num_chunks: int, rank: int | None, kv_bytes_per_chunk: int, **_: Any) -> None:
        chunks = np.zeros((num_chunks, kv_bytes_per_chunk), np.uint8)
        self.chunks = surroundings().regions.setdefault(engine_id, chunks)

    def create_kv_memoryview(self) -> memoryview:
        return self.chunks.data

    def cleanup(self) -> None:
        """Do nothing: the memory goes with the run."""


@dataclass(slots=True)
class _Job:
    """A job of a tier.

    Attributes:
        ident: the tier's number for it.
        tasks: what it does.
        polls_left: polls after which it has ended.
        fault: what makes it fail.
    """

    ident: int
    tasks: list[Callable[[], None]]
    polls_left: int
    fault: Fault


class SimulatedPool:
    """In the place of ``DualQueueThreadPool``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._world = surroundings()
        self._random = self._world.new_random("files")
        self._jobs: list[_Job] = []
        self._ended: list[tuple[int, bool, float]] = []

    def enqueue_load(self, job_id: int, n_tasks: int, tasks: list[Callable[[], None]]) -> None:
        """Take a job that reads files."""
        self._jobs.append(_Job(job_id, tasks, self._random.choice(self._world.polls), Fault.GONE))

    def enqueue_store(self, job_id: int, n_tasks: int, tasks: list[Callable[[], None]]) -> None:
        """Take a job that writes files."""
        self._jobs.append(_Job(job_id, tasks, self._random.choice(self._world.polls), Fault.FULL))

    def get_finished(self) -> list[tuple[int, bool, float]]:
        """Let time pass; number, success and seconds of each job that has ended."""
        for job in list(self._jobs):
            job.polls_left -= 1
            if job.polls_left <= 0:
                self._end(job)
        ended, self._ended = self._ended, []
        return ended

    def wait_idle(self) -> None:
        """Carry out all jobs."""
        for job in list(self._jobs):
            self._end(job)

    def shutdown(self, wait: bool = True) -> None:
        self._jobs.clear()

    def _end(self, job: _Job) -> None:
        self._jobs.remove(job)
        is_done = not self._world.source.strikes(job.fault)
        try:
            for task in job.tasks if is_done else ():
                task()
        except OSError:  # as theirs does: a file that is not there fails the job, and nothing else
            is_done = False
        self._ended.append((job.ident, is_done, 1e-6))


class _Thread:
    """In the place of the thread that looks for files: it works when a request waits for it."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self._target = target
        self._longest = max(surroundings().polls)
        self._random = surroundings().new_random("look-ups")

    def start(self) -> None:
        """Do nothing yet."""

    def join(self) -> None:
        """Work through the queue, up to the word that it ends."""
        self._target()

    def is_late(self) -> bool:
        """Whether the answers of this step come later."""
        return self._random.random() * self._longest > 1


def _flush_and_look(lookups: Any) -> None:
    """In the place of ``AsyncLookupManager.flush``, after which its thread would go to work."""
    _flush(lookups)
    if not lookups._thread.is_late():
        lookups._lookup_queue.put(None)
        lookups._thread.join()


@contextmanager
def simulated_files() -> Iterator[None]:
    """Within the ``with`` block, tiers on files work without threads, and without bypassing the page cache."""
    with (
        patch(f"{_TIERING}.spec.SharedOffloadRegion", SimulatedRegion),
        patch(f"{_TIERING}.fs.manager.DualQueueThreadPool", SimulatedPool),
        patch(f"{_TIERING}.fs.manager.probe_o_direct", lambda path: False),
        patch(f"{_TIERING}.async_lookup.threading", SimpleNamespace(Thread=_Thread)),
        patch.object(AsyncLookupManager, "flush", _flush_and_look),
    ):
        yield
