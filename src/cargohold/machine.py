"""What this machine allows."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),  # version 2
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1
)


def memory_limit_bytes(cgroup_limits: tuple[Path, ...] = _CGROUP_LIMITS) -> int:
    """Memory that this process may use: the machine's, or its control group's limit if that is lower."""
    limit = int(psutil.virtual_memory().total)
    for file in cgroup_limits:
        try:
            text = file.read_text().strip()
        except OSError:
            continue  # no such kind of control group here
        if text.isdigit():  # "max" means no limit
            limit = min(limit, int(text))
    return limit
