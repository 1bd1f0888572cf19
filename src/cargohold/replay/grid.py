"""Replays of many policies and sizes, in parallel processes that share the workload's memory."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cargohold.errors import CargoholdError
from cargohold.replay.replaying import Capacities, check_policies, replay
from cargohold.replay.results import INFINITE, OPTIMUM, ReplayResult
from cargohold.replay.tiers import DEFAULT_DISK_POLICY
from cargohold.replay.workload import Workload
from cargohold.worker_pool import WorkerPool

_ARRAYS: Final = ("chunks", "prompt_ends", "ends", "prompt_tokens", "reused_blocks")


@dataclass(frozen=True, slots=True)
class Task:
    """Replays that one process does together.

    Attributes:
        policy: name of a policy or bound.
        capacities: the sizes to replay.
        disk_policy: policy of a second tier.
    """

    policy: str
    capacities: tuple[Capacities, ...]
    disk_policy: str = DEFAULT_DISK_POLICY


def plan_tasks(
    policies: Sequence[str], capacities: Sequence[Capacities], disk_policy: str = DEFAULT_DISK_POLICY
) -> list[Task]:
    """Divide the replays of all policies at all sizes into tasks. Raises ``ConfigError`` for a policy that does not exist."""
    check_policies(policies)
    sizes = tuple(dict.fromkeys(capacities))
    tasks: list[Task] = []
    for policy in dict.fromkeys(policies):
        if policy == INFINITE:
            tasks.append(Task(policy, sizes[:1]))
        elif policy == OPTIMUM:
            tasks.append(Task(policy, sizes))  # what it computes about the future serves all sizes
        else:
            tasks += [Task(policy, (size,), disk_policy) for size in sizes]
    return tasks


def run_tasks(workload: Workload, tasks: Sequence[Task], num_processes: int = 1) -> Generator[list[ReplayResult]]:
    """Yield the results of each task as tasks end. If it is closed early, processes that still replay are ended.

    Args:
        workload: the requests.
        tasks: what to replay.
        num_processes: processes to use; with 1, everything is replayed in this process.

    Raises:
        ConfigError: a tier has no slot, or the optimum is asked for where ids form no trie.
        CargoholdError: a process died.
    """
    if num_processes <= 1 or len(tasks) <= 1:
        for task in tasks:
            yield list(replay(workload, task.policy, task.capacities, task.disk_policy))
        return
    with _shared(workload) as (paths, rest):
        try:
            with WorkerPool(min(num_processes, len(tasks)), _start_process, paths, rest) as pool:
                for future in as_completed([pool.submit(_run_task, task) for task in tasks]):
                    yield future.result()
        except BrokenProcessPool as error:
            raise CargoholdError("a replay process died; was it out of memory? Use fewer with --jobs") from error


@contextmanager
def _shared(workload: Workload) -> Iterator[tuple[dict[str, str], Workload]]:
    """Write the workload's arrays to files that other processes can map into memory.

    Yields the paths of the files by array, and the workload with empty arrays.
    """
    paths: dict[str, str] = {}
    with ExitStack() as files:
        for name in _ARRAYS:
            # The file has no name, so that nothing is left however this process ends. Other processes open it through /proc.
            file = files.enter_context(tempfile.TemporaryFile())
            np.save(file, getattr(workload, name))
            file.flush()
            paths[name] = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        empty: Mapping[str, Any] = {name: getattr(workload, name)[:0] for name in _ARRAYS}
        yield paths, dataclasses.replace(workload, **empty)


_workload: Workload | None = None
"""In a process of the pool, the workload that all its tasks replay."""


def _start_process(paths: dict[str, str], rest: Workload) -> None:
    global _workload  # noqa: PLW0603  # how a pool gives its processes something once
    arrays: Mapping[str, Any] = {name: np.load(path, mmap_mode="r") for name, path in paths.items()}
    _workload = dataclasses.replace(rest, **arrays)


def _run_task(task: Task) -> list[ReplayResult]:
    assert _workload is not None
    return list(replay(_workload, task.policy, task.capacities, task.disk_policy))
