"""What this machine, or the container around this process, gives it: memory, limits, users, places, disks; and what to set."""

from __future__ import annotations

import os
import platform
import re
import resource
import shlex
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Final

import psutil

from cargohold import __version__
from cargohold.cache import OffloadKey
from cargohold.cache.manager import offload_key
from cargohold.errors import CargoholdError, one_line
from cargohold.option_values import format_bytes
from cargohold.process import available_memory_bytes, memory_limit_bytes
from cargohold.tiers import DiskTierConfig, Namespace, Tier, open_tier
from cargohold.tiers.port import LoadOutcome, StoreOutcome

MEASURED_BYTES: Final = 256 << 20
_FILES_WANTED: Final = 4096
_SHARED_WANTED: Final = 1 << 29
_CHUNK_BYTES: Final = 4 << 20
_THREADS: Final = 8


class Level(Enum):
    """How good a finding is."""

    OK = "ok"
    NOTE = "note"
    SET = "set"
    """There is something to set or to install."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer.

    Attributes:
        area: what it is about.
        level: how good it is.
        found: what is there.
        advice: what to do; empty if nothing.
    """

    area: str
    level: Level
    found: str
    advice: str = ""


def judged(area: str, is_good: bool, found: str, advice: str, otherwise: Level = Level.NOTE) -> Finding:
    """A finding whose advice is needed only if it is not good."""
    return Finding(area, Level.OK, found) if is_good else Finding(area, otherwise, found, advice)


def findings() -> Iterator[Finding]:
    """What can be seen without writing anything, except disks."""
    yield from _system()
    yield from _user()
    yield from _limits()


def _system() -> Iterator[Finding]:
    python = f"Cargohold {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield judged("system", sys.platform == "linux", python, "Only Linux is tested.")
    limit, machine = memory_limit_bytes(), int(psutil.virtual_memory().total)
    of = f" by its control group, of the machine's {format_bytes(machine)}" if limit < machine else ""
    yield Finding(
        "memory",
        Level.OK,
        f"{format_bytes(limit)} for this process{of}; {format_bytes(available_memory_bytes())} free, {os.cpu_count()} cores",
        "host_bytes is at most this, less the engine's own memory. In a container: resources.limits.memory, or --memory.",
    )


def _user() -> Iterator[Finding]:
    """Who this process is, and where it may write: containers run as users without a name, with a read-only root."""
    root = ", the root is read-only" if os.statvfs("/").f_flag & os.ST_RDONLY else ""
    places = Path("/tmp"), Path(os.environ.get("HOME") or "/")  # noqa: S108  # looked at only
    closed = [str(place) for place in places if not _is_writable(place)]
    writable = f"{', '.join(closed)} cannot be written" if closed else "temporary files and its home can be written"
    found = f"user {os.geteuid()}, group {os.getegid()}{root}; {writable}"
    advice = "vLLM and PyTorch keep what they compile there: mount an emptyDir on /tmp, and set HOME=/tmp/home"
    yield judged("user", not closed, found, advice, Level.SET)


def _is_writable(place: Path) -> bool:
    """Whether files can be made in a directory, or it can be made."""
    existing = _existing(place)
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _limits() -> Iterator[Finding]:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = locked == resource.RLIM_INFINITY
    shown = "unlimited" if is_unlimited else format_bytes(locked)
    advice = (
        "For GPUs: ulimit -l unlimited, --ulimit memlock=-1, in Kubernetes LimitMEMLOCK of the runtime. CPUs need none."
    )
    yield judged("pinned memory", is_unlimited, f"RLIMIT_MEMLOCK is {shown}", advice)
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = files == resource.RLIM_INFINITY or files >= _FILES_WANTED
    advice = f"Large disk tiers and servers need more: ulimit -n {max(_FILES_WANTED, min(most, 65536))}"
    yield judged("open files", is_enough, f"{files:,} at most", advice, Level.SET)
    shared = Path("/dev/shm")  # noqa: S108  # looked at only
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        advice = (
            "Cargohold uses none of it, but vLLM's workers do: --shm-size=1g, or in Kubernetes an emptyDir with "
            "medium: Memory on /dev/shm"
        )
        yield judged("shared memory", free >= _SHARED_WANTED, f"{format_bytes(free)} free in {shared}", advice)
    pages = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if pages.is_file():
        (chosen,) = re.findall(r"\[(\w+)\]", pages.read_text(encoding="ascii"))
        advice = f"For latent attention on several GPUs: echo advise > {pages}, on the node"
        yield judged("shared memory", chosen not in ("never", "deny"), f"huge pages: {chosen}", advice)


# --- disks ------------------------------------------------------------------------------------------------------------

_POOR_FILE_SYSTEMS: Final = MappingProxyType(
    {
        "overlay": "It is lost with the container: mount a volume there",
        "tmpfs": "It is memory, and counts towards the container's limit: mount a disk there",
        "nfs": "It is on the network: use it as a shared store, --shared file://...",
        "cifs": "It is on the network: use it as a shared store, --shared file://...",
    }
)


def check_disk(place: Path, measure: Callable[[Path], tuple[float, float]] | None) -> Finding:
    """What a disk tier in a directory could have.

    Args:
        place: the directory, or one that does not exist yet, in one that does.
        measure: measures bytes per second written and read in a directory; ``None`` for no measurement.
    """
    existing = _existing(place)
    if not _is_writable(place):
        is_read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        reason = "is read-only" if is_read_only else "cannot be written" if existing.is_dir() else "is no directory"
        advice = "Mount a volume there that this user may write to: securityContext.fsGroup, or chown on the machine."
        return Finding("disk", Level.SET, f"{place}: {existing} {reason}", advice)
    usage, kind = shutil.disk_usage(existing), file_system(existing)
    if not usage.total:
        return Finding(
            "disk", Level.SET, f"{place}: its file system, {kind}, keeps no files", "Give a directory on a disk."
        )
    found = f"{place}: {format_bytes(usage.free)} free of {format_bytes(usage.total)}, {kind}"
    if (mode := existing.stat().st_mode) & stat.S_IWOTH and not mode & stat.S_ISVTX:
        advice = f"KV must be private: chmod o-w {shlex.quote(str(existing))}"
        return Finding("disk", Level.SET, f"{found}; others can write to it", advice)
    advice = next((said for name, said in _POOR_FILE_SYSTEMS.items() if kind.startswith(name)), "")
    if not advice and existing != place.absolute():
        advice = f"It is not there, and would be made in {existing}: is a mount missing?"
    if measure is not None and usage.free < 4 * MEASURED_BYTES:
        found += "; too little to measure"
    elif measure is not None:
        try:
            written, read = measure(existing)
        except (CargoholdError, OSError) as error:
            return Finding("disk", Level.SET, f"{found}; a disk tier does not work there", one_line(error))
        found += f"; a disk tier writes {written / 1e9:.2f} GB/s and reads {read / 1e9:.2f} GB/s"
    return judged("disk", not advice, found, advice)


def _existing(place: Path) -> Path:
    """The place, or the one above in which it would be made."""
    return next(path for path in (place.absolute(), *place.absolute().parents) if os.path.lexists(path))


def file_system(place: Path) -> str:
    """The kind of the file system of a directory, such as ``ext4``, as the system's list of mounts names it."""
    wanted, found = place.resolve(), {"": "unknown"}
    for mount in psutil.disk_partitions(all=True):
        if wanted.is_relative_to(mount.mountpoint):
            found[mount.mountpoint] = mount.fstype
    return found[max(found, key=len)]


def measure_disk(directory: Path) -> tuple[float, float]:
    """Write chunks to a disk tier in a temporary directory below ``directory`` and read them; returns bytes per second of both.

    Raises:
        CargoholdError, OSError: the directory or its file system cannot be used.
    """
    namespace = Namespace(label="doctor", weights="", config="", dtype="", layout="", split="rank 0 of 1")
    keys = [offload_key(sha256(number.to_bytes(4)).digest(), 0) for number in range(MEASURED_BYTES // _CHUNK_BYTES)]
    payload = memoryview(os.urandom(_CHUNK_BYTES))
    with tempfile.TemporaryDirectory(prefix="cargohold-doctor-", dir=directory) as place:
        config = DiskTierConfig(directory=place, max_bytes=2 * MEASURED_BYTES, reserve_bytes=0)
        tier = open_tier(config, namespace, [_CHUNK_BYTES])
        try:
            with ThreadPoolExecutor(_THREADS) as threads:
                start = time.perf_counter()
                stored = list(threads.map(lambda key: tier.store(key, payload), keys))
                between = time.perf_counter()
                loaded = list(threads.map(lambda key: _load(tier, key), keys))
                end = time.perf_counter()
        finally:
            tier.close()
    if set(stored) != {StoreOutcome.STORED} or set(loaded) != {LoadOutcome.LOADED}:
        raise OSError("not all chunks came back")
    return MEASURED_BYTES / (between - start), MEASURED_BYTES / (end - between)


def _load(tier: Tier, key: OffloadKey) -> LoadOutcome:
    return tier.load(key, memoryview(bytearray(_CHUNK_BYTES)))
