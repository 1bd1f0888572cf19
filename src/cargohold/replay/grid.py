"""Replays of many policies and sizes, in parallel processes that share the workload's memory."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
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
        capacities: the sizes.
        disk_policy: of a second tier.
    """

    policy: str
    capacities: tuple[Capacities, ...]
    disk_policy: str = DEFAULT_DISK_POLICY


def plan_tasks(
    policies: Sequence[str], capacities: Sequence[Capacities], disk_policy: str = DEFAULT_DISK_POLICY
) -> list[Task]:
    """What to replay. Raises ``ConfigError`` for a policy that does not exist."""
    check_policies(policies)
    sizes = tuple(dict.fromkeys(capacities))
    tasks: list[Task] = []
    for policy in dict.fromkeys(policies):
        if policy == INFINITE:
            tasks.append(Task(policy, sizes[:1]))
        elif policy == OPTIMUM:
            tasks.append(Task(policy, sizes))  # what it learns of the future serves all sizes
        else:
            tasks += [Task(policy, (size,), disk_policy) for size in sizes]
    return tasks


def run_tasks(workload: Workload, tasks: Sequence[Task], num_processes: int = 1) -> Generator[list[ReplayResult]]:
    """The results of each task, as they come. Closed early, it ends the processes that still replay.

    Args:
        workload: the requests.
        tasks: what to replay.
        num_processes: 1 stays in this process.

    Raises:
        ConfigError: a tier has no slot, or the optimum is asked for where ids form no trie.
        CargoholdError: a process died.
    """
    if num_processes <= 1 or len(tasks) <= 1:
        for task in tasks:
            yield list(replay(workload, task.policy, task.capacities, task.disk_policy))
        return
    with tempfile.TemporaryDirectory(prefix="cargohold-replay-") as directory:
        shared = _share(workload, Path(directory))
        try:
            with WorkerPool(min(num_processes, len(tasks)), _start_process, directory, shared) as pool:
                for future in as_completed([pool.submit(_run_task, task) for task in tasks]):
                    yield future.result()
        except BrokenProcessPool as error:
            raise CargoholdError("a replay process died; was it out of memory? Use fewer with --jobs") from error


def _share(workload: Workload, directory: Path) -> Workload:
    """Write the arrays to files that processes map into their memory; the rest is returned."""
    for name in _ARRAYS:
        np.save(directory / f"{name}.npy", getattr(workload, name))
    empty: Mapping[str, Any] = {name: getattr(workload, name)[:0] for name in _ARRAYS}
    return dataclasses.replace(workload, **empty)


_workload: Workload | None = None
"""In a process of the pool: what all its tasks replay."""


def _start_process(directory: str, workload: Workload) -> None:
    global _workload  # noqa: PLW0603  # how a pool gives its processes something once
    arrays: Mapping[str, Any] = {name: np.load(Path(directory) / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
    _workload = dataclasses.replace(workload, **arrays)


def _run_task(task: Task) -> list[ReplayResult]:
    assert _workload is not None
    return list(replay(_workload, task.policy, task.capacities, task.disk_policy))
