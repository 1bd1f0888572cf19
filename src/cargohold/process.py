"""This process and those it starts: the memory they may use, Ctrl-C, garbage collection, and a pool for parallel work."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Any, Final, ParamSpec, TypeVar

import psutil

if sys.platform != "win32":
    import resource


ENGINE: Final = "CARGOHOLD_ENGINE"
"""Environment variable with which a server's first process says to the others which engine they are: a digest of options."""


@cache
def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Memory that this process may use: the machine's, or the lowest limit of its control groups if that is less.

    Looked up once: a limit that is moved while the process runs is not noticed.

    Args:
        root: where the system's ``proc`` and ``sys`` are.
    """
    return min([int(psutil.virtual_memory().total), *_cgroup_limits(root)])


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that is free here now, without that of other programs being swapped; what only caches files counts as free.

    Args:
        root: where the system's ``proc`` and ``sys`` are.
    """
    free = [int(psutil.virtual_memory().available)]
    for limit in _limit_files(root):
        with suppress(OSError, ValueError, KeyError):  # there is no such group, or it has no limit
            free.append(_free_in_group(limit))
    return max(0, min(free))


def _free_in_group(limit: Path) -> int:
    """Bytes that a control group may take beyond what its processes hold, by the file with its limit."""
    usage, prefix = ("memory.current", "") if limit.name == "memory.max" else ("memory.usage_in_bytes", "total_")
    stat = dict(line.split() for line in limit.with_name("memory.stat").read_text(encoding="ascii").splitlines())
    cached = sum(int(stat[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
    return int(limit.read_text(encoding="ascii")) - int(limit.with_name(usage).read_text(encoding="ascii")) + cached


def allow_open_files(num_files: int) -> int:
    """Let this process have so many open files, or as many as the system allows; returns how many it may have."""
    if sys.platform == "win32":  # which has no such limit
        return num_files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        wanted = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
        with suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return num_files if soft == resource.RLIM_INFINITY else min(num_files, soft)


def leaves_files(number: int) -> bool:
    """Whether a quarter of the files that this process may have open is left, by the number of the one opened last.

    The system gives the lowest number that is free.
    """
    if sys.platform == "win32":
        return True
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most == resource.RLIM_INFINITY or number < most - most // 4


def can_share_memory() -> bool:
    """Whether processes of one user on this machine can share memory that has no name: on Linux, with ``/proc``."""
    return hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


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


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold back the first Ctrl-C until the block is left; a second one interrupts at once.

    Does nothing outside the main thread, or where the program handles Ctrl-C itself.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def remember(_signal: int, _frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt


@contextmanager
def held_back_in_processes() -> Iterator[None]:
    """Hold back Ctrl-C while processes are started: in this process until the block is left, in the new ones for longer.

    They inherit a blocked SIGINT, which they have to unblock or ignore. A Python process that Ctrl-C reaches before it could
    decide about that prints a traceback.
    """
    with deferred_interrupt():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # started processes inherit the mask
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


_LOOK_S: Final = 0.001
_MOST_LOOKS: Final = 1000


def interrupt_thread(thread: threading.Thread) -> None:
    """Raise ``KeyboardInterrupt`` in a thread, at its next line of Python: what Ctrl-C does to the main thread alone.

    Until a thread that is being started runs, Python 3.11 takes it for the one that starts it. It would be interrupted
    instead, and its starter would wait for it for ever. So this waits until no thread is being started.
    """
    for _ in range(_MOST_LOOKS):
        # The thread that wakes up has the interpreter for some milliseconds, in which no other thread can start one.
        time.sleep(_LOOK_S)
        if all(one.ident is not None for one in threading.enumerate()):
            break
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))


@contextmanager
def collected_in_one_go() -> Iterator[None]:
    """Collect garbage only once, at the end of the block. For work that makes hardly any before its end."""
    try:
        with _off():
            yield
    finally:
        if gc.isenabled():
            with deferred_interrupt():
                gc.collect(0)  # looks only at objects made meanwhile, not at older ones


@contextmanager
def made_for_good() -> Iterator[None]:
    """Never look for garbage among what there is at the end of the block.

    For a process of our own that loads a model. Its libraries consist of some 600,000 objects that stay to the end. Looking at
    each of them again and again takes a fifth of the time to import them, and a quarter of a second whenever it happens later.
    Garbage made in the block is collected once, at its end: it would stay as well, with everything that it refers to.
    """
    with _off():
        try:
            yield
        finally:
            with deferred_interrupt():
                gc.collect()
                gc.freeze()


@contextmanager
def _off() -> Iterator[None]:
    """Collect nothing by itself inside the block; afterwards, as before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


P = ParamSpec("P")
T = TypeVar("T")


class WorkerPool(ProcessPoolExecutor):
    """A pool of processes, each started when there is work for it.

    They end when the pool is left or this process ends for whatever reason, even in the middle of work.

    Args:
        num_processes: most processes at a time.
        start: called first in each process, if given.
        arguments: arguments of ``start``.
    """

    def __init__(self, num_processes: int, start: Callable[..., None] | None = None, *arguments: Any) -> None:
        context = get_context("spawn")  # libraries with threads may have been imported here
        self._their_end, self._lifeline = context.Pipe(duplex=False)
        super().__init__(num_processes, context, initializer=_begin, initargs=(self._their_end, start, arguments))

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a function called in one of the processes."""
        # The base class starts processes here. Its ``__init__`` has already made locks, and so started the process that
        # keeps track of them: starting that one here would unblock Ctrl-C.
        with held_back_in_processes():
            return super().submit(fn, *args, **kwargs)

    def __exit__(self, *_: object) -> None:
        """End all processes at once: the results of unfinished work, which may take minutes, are not needed."""
        self._lifeline.close()
        self.shutdown(cancel_futures=True)
        self._their_end.close()


def _begin(lifeline: Connection, start: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    # A terminal sends SIGINT to the parent and all of these processes; the parent decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    if start is not None:
        start(*arguments)


def _end_with(lifeline: Connection) -> None:
    """End this process when the other end of the pipe is closed, or its process has ended."""
    wait([lifeline])
    os._exit(1)
