"""Limits the total size of our objects in a store, by deleting the chunks written longest ago.

The workers of an engine keep a limit together without talking to each other. Each writes no more than its *share* between two
listings, and leaves room for a share of every other worker::

    | what the listing shows | what this worker has written since | a share of each other worker |   <= the limit

Take the worker whose listing is the latest. What the others have written since then, they have also written since their own
last listings, so it is a share of each at most. So the limit is kept whoever lists, and when.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from obstore import exceptions as store_errors
from obstore.store import ObjectStore

from cargohold.errors import one_line
from cargohold.offload.tier.object_listing import StoredObject, delete_if_there, list_ours, refuses_access
from cargohold.offload.tier.shared_directory import delete_unfinished, directory_of
from cargohold.units import format_bytes

logger = logging.getLogger(__name__)

_LOOKS_PER_BUDGET: Final = 16
_SHARES_PER_BUDGET: Final = 4
"""The shares of several workers are this part of the limit together. With smaller ones, listings take so much of the time that
half of the chunks are refused meanwhile, and a chunk counts only if all workers have stored it."""
_KEPT: Final = 0.9
"""Fraction of the budget that is used after making room, so that room need not be made for every chunk."""


class StoreBudget:
    """Keeps the total size of our objects in a store below a limit, by deleting the chunks written longest ago. Thread-safe.

    The store is listed before the first chunk, whenever the limit seems to be reached, and before more than a share is written.
    The shares of several workers are a quarter of the limit together; a worker alone looks after each sixteenth. So one engine
    alone never exceeds the limit; each further engine may exceed it by what its workers write between two listings. With many
    objects a listing may take minutes: one thread makes it, and no other thread waits for it.

    Chunks that may not be deleted, such as another user's, are passed over. If nothing else is left to delete, chunks are
    refused, and the store is listed again only when a share has been refused.

    Args:
        store: the bucket and prefix.
        max_bytes: maximum size of all namespaces in the store together.
        num_workers: number of workers of this engine that keep the limit, each with a ``StoreBudget`` of its own.
        value_bytes: bytes of the largest object that a worker writes. A share is at least so large.
    """

    def __init__(self, store: ObjectStore, max_bytes: int, num_workers: int = 1, value_bytes: int = 0) -> None:
        if num_workers == 1:
            self._share = max_bytes  # nobody else needs room, so it may write on while it looks
            self._due = max_bytes // _LOOKS_PER_BUDGET
        else:
            self._share = max(max_bytes // (_SHARES_PER_BUDGET * num_workers), value_bytes)
            self._due = self._share // 2  # the other half can be written while it looks
        self._store = store
        self._max_bytes = max_bytes - (num_workers - 1) * self._share
        self._lock = threading.Lock()
        self._is_looking = False
        # Bytes stored or being written. Full at first, so that the first chunk makes a listing.
        self._num_bytes = self._max_bytes
        self._unseen = 0  # bytes written since the last listing
        self._writing = 0
        self._new = 0  # bytes that a listing under way may not see
        self._to_refuse = 0  # bytes to refuse before the next listing, because the last one found nothing to delete
        self._told: set[str] = set()  # namespaces of which was logged that they cannot be deleted
        self._has_told_full = False

    @contextmanager
    def room_for(self, num_bytes: int) -> Iterator[bool]:
        """Make room for a chunk that is written inside the ``with``; yield whether there is room. Raises the store's errors.

        There is no room if the chunk is larger than the limit, if nothing can be deleted, or while another thread makes room.
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
            if is_full and self._to_refuse > 0:
                self._to_refuse -= num_bytes
                return False
            is_due = self._unseen + num_bytes > self._due
            would_help = self._writing + num_bytes <= self._share
            must_look = (is_full or is_due) and would_help and not self._is_looking
            if not must_look:
                return self._grant(num_bytes)
            self._is_looking = True
            self._new = self._writing
        try:
            total = self._look(num_bytes)
            with self._lock:
                self._num_bytes, self._unseen = total + self._new, self._new
                return self._grant(num_bytes)
        finally:
            self._is_looking = False

    def _grant(self, num_bytes: int) -> bool:
        """Take a chunk into account, if it exceeds neither the limit nor the share; return whether it does not."""
        if self._num_bytes + num_bytes > self._max_bytes or self._unseen + num_bytes > self._share:
            return False
        self._num_bytes += num_bytes
        self._unseen += num_bytes
        self._writing += num_bytes
        self._new += num_bytes
        return True

    def _look(self, num_wanted: int) -> int:
        """List the store, and delete the oldest chunks if ``num_wanted`` bytes more would exceed the limit.

        Returns the bytes that our objects take then, with the unfinished files that may not be deleted yet.
        """
        delete_unfinished(self._store)
        objects = list(list_ours(self._store))
        total = sum(known.num_bytes for known in objects)
        num_wanted += self._new
        if total + num_wanted > self._max_bytes:
            total = self._delete_oldest(objects, total, self._max_bytes - num_wanted)
        is_stuck = total + num_wanted > self._max_bytes
        self._to_refuse = self._due if is_stuck else 0
        if is_stuck and not self._has_told_full:
            self._has_told_full = True
            logger.warning(
                "shared tier: no more chunks are stored, because %s are taken and nothing more may be deleted",
                format_bytes(total),
            )
        return total

    def _delete_oldest(self, objects: list[StoredObject], total: int, most: int) -> int:
        """Delete the oldest of ``objects``, which have ``total`` bytes, until ``most`` are left; return how many are left.

        Passes over what may not be deleted. Deletes a little more than that, if there is more, for the chunks to come.
        """
        before, stuck = total, 0
        closed: set[str] = set()  # namespaces in which nothing may be deleted
        for known in sorted(objects, key=lambda found: found.written_s):
            if total <= min(most, stuck + int(_KEPT * (self._max_bytes - stuck))):
                break
            if known.key and known.namespace_id not in closed and self._delete(known, closed):
                total -= known.num_bytes
            else:
                stuck += known.num_bytes
        if total < before:
            logger.info("shared tier: %d bytes of the oldest chunks were deleted to make room", before - total)
        return total

    def _delete(self, known: StoredObject, closed: set[str]) -> bool:
        """Delete an object; return whether that is allowed. Raises the store's other errors.

        Where each attempt is a request to a server, adds a namespace in which it is not allowed to ``closed``. In a directory,
        an attempt costs little, and each file can be another user's.
        """
        try:
            delete_if_there(self._store, known.path)
        except (store_errors.BaseError, OSError) as error:
            if not refuses_access(error):
                raise
            self._tell(known, error)
            if directory_of(self._store) is None:
                closed.add(known.namespace_id)
            return False
        return True

    def _tell(self, known: StoredObject, error: Exception) -> None:
        """Log, once per namespace, why a chunk cannot be deleted."""
        if known.namespace_id not in self._told:
            self._told.add(known.namespace_id)
            reason = one_line(error)
            logger.warning("shared tier: %s may not be deleted to make room, so it stays: %s", known.path, reason)
