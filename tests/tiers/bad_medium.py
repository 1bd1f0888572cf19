"""A file system that goes bad at any operation: it fails, tears writes, ends the process, or lets others intervene."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

import obstore
import pytest
from obstore import exceptions as store_errors

from cargohold.deadlines import GROWTH, ROOM
from cargohold.tiers.memory import PAGE_BYTES
from tests.tiers.common import in_thread

WAIT_S: Final = 60.0  # a bound on hangs, not a measure
_NOBODY: Final = 65534

_OPERATIONS: Final[dict[Any, tuple[str, ...]]] = {
    os: (
        *("open", "stat", "lstat", "fstat", "statvfs", "scandir", "listdir", "pread", "preadv", "pwrite", "pwritev"),
        *("posix_fallocate", "mkdir", "unlink", "rmdir", "replace", "utime"),
    ),
    io: ("open",),
    fcntl: ("flock",),
    obstore: ("put", "get", "head", "delete", "head_async"),
}


class Crash(BaseException):
    """Ends a call as ``kill -9`` would: nothing after it happens."""


class Kind(Enum):
    FAILS = "fails"
    """One operation fails."""
    BREAKS = "breaks"
    """An operation fails, and so do all after it."""
    TEARS = "tears"
    """An operation fails; if it is a write, a part of it is carried out before."""
    DIES = "dies"
    """The process ends at an operation; if it is a write, a part of it is carried out before."""
    MEANWHILE = "meanwhile"
    """Another process or thread does something just before an operation."""
    NO_FILES = "no files"
    """No more files can be opened from the start of the call on."""


@dataclass(frozen=True)
class Trouble:
    """What goes wrong during a call.

    Attributes:
        kind: what goes wrong.
        at: number of the operation on files at which it does, from 0; for ``NO_FILES``, how many more files can be opened.
        number: the ``errno`` of the error.
        part: the part of a write that is carried out, from 0 to 1.
    """

    kind: Kind
    at: int = 0
    number: int = errno.EIO
    part: float = 0.0


class BadMedium:
    """Stands between tiers and the files below a directory.

    Args:
        root: the directory. Operations elsewhere are left alone.
    """

    def __init__(self, root: Path) -> None:
        self._root = os.fspath(root)
        self._patch = pytest.MonkeyPatch()
        self._local = threading.local()
        self._trouble: Trouble | None = None
        self._meanwhile: Callable[[], None] | None = None
        self._num_seen = 0
        self.has_struck = False
        for module, names in _OPERATIONS.items():
            for name in names:
                self._patch.setattr(module, name, self._wrapped(name, getattr(module, name)))
        # Without waiting: others act only at operations, so nothing changes while somebody waits.
        self._patch.setattr("cargohold.tiers.disk.files.ROOM", replace(ROOM, plus_s=0.0))
        self._patch.setattr("cargohold.tiers.disk.tier.GROWTH", replace(GROWTH, plus_s=0.0))

    def close(self) -> None:
        """Leave the operations as they were."""
        self._patch.undo()

    @contextmanager
    def during(self, trouble: Trouble | None, meanwhile: Callable[[], None]) -> Iterator[None]:
        """Let trouble happen at operations within the ``with`` block; ``has_struck`` tells afterwards whether it has.

        Args:
            trouble: what goes wrong, if anything.
            meanwhile: what others do, for ``Kind.MEANWHILE``.
        """
        self._meanwhile, self._num_seen, self.has_struck = meanwhile, 0, False
        with self._without_files(trouble):
            self._trouble = trouble
            try:
                yield
            finally:
                self._trouble = None

    def intrude(self, act: Callable[[], None]) -> None:
        """Run ``act`` in a thread of its own, all of whose operations succeed, and wait for it."""

        def run() -> None:
            self._local.is_intruder = True
            act()

        in_thread(run, WAIT_S, "whoever came in between waits for who is at work")

    @contextmanager
    def _without_files(self, trouble: Trouble | None) -> Iterator[None]:
        if trouble is None or trouble.kind is not Kind.NO_FILES:
            yield
            return
        self.has_struck = True
        unused = os.dup(0)
        os.close(unused)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (unused + trouble.at, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    def _wrapped(self, name: str, really: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            trouble = self._trouble
            if trouble is None or not self._concerns(arguments):
                return really(*arguments, **options)
            at, self._num_seen = self._num_seen, self._num_seen + 1
            if at < trouble.at or trouble.kind is Kind.NO_FILES:
                return really(*arguments, **options)
            return self._strike(trouble, name, at, lambda *changed: really(*changed, **options), arguments)

        return operation

    def _concerns(self, arguments: tuple[Any, ...]) -> bool:
        if getattr(self._local, "is_intruder", False):
            return False
        place = arguments[0] if arguments else None
        if isinstance(place, str | os.PathLike):
            path = os.fspath(place)
            return not path.startswith("/") or path.startswith(self._root)
        return True

    def _strike(
        self, trouble: Trouble, name: str, at: int, really: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        is_first = at == trouble.at
        self.has_struck = True
        match trouble.kind:
            case Kind.MEANWHILE:
                if is_first and self._meanwhile is not None:
                    self.intrude(self._meanwhile)
                return really(*arguments)
            case Kind.FAILS if not is_first:
                return really(*arguments)
            case Kind.TEARS if not is_first:
                return really(*arguments)
            case Kind.TEARS:
                self._do_part(trouble, name, really, arguments)
            case Kind.DIES:
                if is_first:
                    self._do_part(trouble, name, really, arguments)
                raise Crash
            case _:
                pass
        if name == "head_async":
            return _fail_later(_error(name, trouble.number))
        raise _error(name, trouble.number)

    def _do_part(self, trouble: Trouble, name: str, really: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        match name:
            case "pwrite":
                number, data, at = arguments
                really(number, data[: int(trouble.part * len(data))], at)
            case "pwritev":
                number, parts, at = arguments
                # With direct I/O, only whole pages can be written.
                left = int(trouble.part * sum(map(len, parts))) // PAGE_BYTES * PAGE_BYTES
                for whole in parts:
                    really(number, [whole[:left]], at)
                    at, left = at + len(whole), max(0, left - len(whole))
            case "posix_fallocate":
                number, at, size = arguments
                if part := int(trouble.part * size):
                    really(number, at, part)
            case _:
                pass


def _error(name: str, number: int) -> Exception:
    if name in _OPERATIONS[obstore]:
        text = f"Generic LocalFileSystem error: {os.strerror(number)} (os error {number})"
        return store_errors.GenericError(text)
    return OSError(number, os.strerror(number))


async def _fail_later(error: Exception) -> None:
    raise error


@contextmanager
def ordinary_user(directory: Path) -> Iterator[None]:
    """Within the ``with`` block, be a user to whom permissions apply, and who owns ``directory``."""
    if os.geteuid():
        yield
        return
    os.chown(directory, _NOBODY, _NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def is_superuser() -> bool:
    """Whether this process can become the superuser, even if it is another user at the moment."""
    return os.getresuid()[2] == 0


@contextmanager
def superuser() -> Iterator[None]:
    """Within the ``with`` block, be the superuser, if this process can."""
    before = os.geteuid()
    if is_superuser():
        os.seteuid(0)
    try:
        yield
    finally:
        os.seteuid(before)


def open_files_in(directory: Path) -> list[str]:
    """Files below a directory that this process has open, deleted ones included."""
    found = []
    for number in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(number.readlink()))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return sorted(path for path in found if path.startswith(os.fspath(directory)))
