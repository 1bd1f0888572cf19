"""Limits of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

import psutil


@cache
def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may use: the machine's, or the lowest limit of its control groups if that is less.

    Looked up once: a limit that is moved while the process runs is not noticed.

    Args:
        root: where the system's ``proc`` and ``sys`` are.
    """
    return min([int(psutil.virtual_memory().total), *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    for file in _limit_files(root):
        try:
            text = file.read_text(encoding="ascii").strip()
        except OSError:
            continue  # the root group has no limit; and a container sees its own group as the root
        if text.isdigit():  # "max" means no limit
            yield int(text)


def _limit_files(root: Path) -> Iterator[Path]:
    """Files with the memory limits of this process's control group and of all groups around it; not all of them exist."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", maxsplit=2)
        group = PurePosixPath(path)
        for around in (group, *group.parents):
            if not controllers:  # version 2
                yield mount / str(around).lstrip("/") / "memory.max"
            elif "memory" in controllers.split(","):  # version 1
                yield mount / "memory" / str(around).lstrip("/") / "memory.limit_in_bytes"
