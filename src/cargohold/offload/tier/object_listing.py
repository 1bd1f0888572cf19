"""Lists the objects of a store that are ours, and limits their total size."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import obstore
from obstore.store import ObjectStore

from cargohold.offload.tier.shared_directory import delete_unfinished, directory_of, files_in

logger = logging.getLogger(__name__)

DESCRIPTION: Final = "namespace.json"
_OURS: Final = re.compile(
    rf"(?P<namespace>[0-9a-f]{{32}})/([0-9a-f]{{2}}/(?P<key>([0-9a-f]{{2}})+)|{re.escape(DESCRIPTION)})"
)
_LOOKS_PER_BUDGET: Final = 16
_KEPT: Final = 0.9
"""Fraction of the budget that is used after making room, so that room need not be made for every chunk."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One of our objects in a store.

    Attributes:
        path: its path in the store.
        namespace_id: id of its namespace.
        key: the chunk's key; empty if the object is the namespace's description.
        num_bytes: its size.
        written_s: time of writing, in seconds since 1970.
    """

    path: str
    namespace_id: str
    key: bytes
    num_bytes: int
    written_s: float


def list_ours(store: ObjectStore, prefix: str = "") -> Iterator[StoredObject]:
    """Yield our objects; other objects in the same store are left out. Raises the store's errors.

    Args:
        store: the store.
        prefix: start of the paths: empty, or a namespace's id and a slash.
    """
    directory = directory_of(store)
    if directory is None:
        pages = obstore.list(store, prefix or None)
        entries = (
            (str(one["path"]), int(one["size"]), one["last_modified"].timestamp()) for page in pages for one in page
        )
    else:
        entries = ((path, status.st_size, status.st_mtime) for path, status in files_in(directory, prefix))
    for path, num_bytes, written_s in entries:
        match = _OURS.fullmatch(path)
        if match is not None:
            yield StoredObject(path, match["namespace"], bytes.fromhex(match["key"] or ""), num_bytes, written_s)


def delete_if_there(store: ObjectStore, path: str) -> None:
    """Delete an object, unless another process has deleted it already. Raises the store's other errors."""
    try:
        obstore.delete(store, path)
    except FileNotFoundError:
        return


class StoreBudget:
    """Keeps the total size of our objects in a store below a limit, by deleting the chunks written longest ago. Thread-safe.

    The store is listed before the first chunk, whenever the limit seems to be reached, and each time a sixteenth of the limit
    was written here. So one engine alone never exceeds the limit; each further engine may exceed it by what it writes between
    two listings. With many objects a listing may take minutes: one thread makes it, and no other thread waits for it.

    Args:
        store: the bucket and prefix.
        max_bytes: maximum size of all namespaces in the store together.
    """

    def __init__(self, store: ObjectStore, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._is_looking = False
        # Bytes stored or being written. Full at first, so that the first chunk makes a listing.
        self._num_bytes = max_bytes
        self._unseen = 0  # bytes written since the last listing
        self._writing = 0
        self._new = 0  # bytes that a listing under way may not see

    @contextmanager
    def room_for(self, num_bytes: int) -> Iterator[bool]:
        """Make room for a chunk that is written inside the ``with``; yield whether there is room. Raises the store's errors.

        There is no room if the chunk is larger than the limit, or while another thread makes room in a full store.
        """
        is_granted = num_bytes <= self._max_bytes and self._reserve(num_bytes)
        try:
            yield is_granted
        finally:
            if is_granted:
                with self._lock:
                    self._writing -= num_bytes

    def _reserve(self, num_bytes: int) -> bool:
        with self._lock:
            is_full = self._num_bytes + num_bytes > self._max_bytes
            is_due = (self._unseen + num_bytes) * _LOOKS_PER_BUDGET > self._max_bytes
            must_look = (is_full or is_due) and not self._is_looking
            if must_look:
                self._is_looking = True
                self._new = self._writing
            else:
                return not is_full and self._grant(num_bytes)
        try:
            total = self._look(num_bytes)
            with self._lock:
                self._num_bytes, self._unseen = total + self._new, self._new
                return self._num_bytes + num_bytes <= self._max_bytes and self._grant(num_bytes)
        finally:
            self._is_looking = False

    def _grant(self, num_bytes: int) -> bool:
        self._num_bytes += num_bytes
        self._unseen += num_bytes
        self._writing += num_bytes
        self._new += num_bytes
        return True

    def _look(self, num_wanted: int) -> int:
        """List the store, and delete the oldest chunks if ``num_wanted`` bytes more would exceed the limit.

        Returns the bytes that our objects take then.
        """
        delete_unfinished(self._store)
        objects = list(list_ours(self._store))
        total = sum(known.num_bytes for known in objects)
        num_wanted += self._new
        if total + num_wanted > self._max_bytes:
            before = total
            limit = min(self._max_bytes - num_wanted, int(_KEPT * self._max_bytes))
            for known in sorted(objects, key=lambda found: found.written_s):
                if total <= limit:
                    break
                if known.key:
                    delete_if_there(self._store, known.path)
                    total -= known.num_bytes
            logger.info("shared tier: %d bytes of the oldest chunks were deleted to make room", before - total)
        return total
