"""The shared tier on object stores: S3 and stores compatible with it, Google's, Azure's, or a plain directory.

A chunk is the object ``<namespace id>/<first byte of the key>/<key>``, in hexadecimal.

Limits the total size of our objects in a store, by deleting the chunks written longest ago.

The workers of an engine keep a limit together without talking to each other. Each writes no more than its *share* between two
listings, and leaves room for a share of every other worker::

    | what the listing shows | what this worker has written since | a share of each other worker |   <= the limit

Take the worker whose listing is the latest. What the others have written since then, they have also written since their own
last listings, so it is a share of each at most. So the limit is kept no matter which engine lists, and when.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Final

import obstore
from obstore import exceptions as store_errors
from obstore.store import LocalStore, ObjectStore, from_url

from cargohold.cache.manager import OffloadKey
from cargohold.errors import ConfigError, TierError, one_line
from cargohold.option_values import format_bytes
from cargohold.tiers import places
from cargohold.tiers.config import REQUEST_S, Opening
from cargohold.tiers.disk.root import DESCRIPTION_FILE
from cargohold.tiers.inventory import StoredObject
from cargohold.tiers.namespace import DESCRIPTION
from cargohold.tiers.places import PARALLEL_PROBES, warn_of_readers, warn_of_writers
from cargohold.tiers.port import StoreOutcome, TierUsage
from cargohold.tiers.stores.base import SharedTier
from cargohold.tiers.stores.directory import (
    DirectoryPlace,
    ObjectInventory,
    delete_if_there,
    delete_unfinished,
    directory_of,
    first_line,
    is_full,
    is_there,
    lacks_credentials,
    list_ours,
    make_directory,
    read_object,
    refuses_access,
    try_listing,
)

logger = logging.getLogger(__name__)

_LOOKS_PER_BUDGET: Final = 16
_SHARES_PER_BUDGET: Final = 4
"""The shares of several workers are this part of the limit together. With smaller ones, listings take so much of the time that
half of the chunks are refused meanwhile, and a chunk counts only if all workers have stored it."""
_KEPT: Final = 0.9
"""Fraction of the budget that is used after making room, so that room need not be made for every chunk."""
_MOST_REMEMBERED: Final = 50_000
"""Objects of which a listing keeps more than their size, the oldest: each takes half a kilobyte, and there may be millions."""
_OLDEST: Final = (float("-inf"), "")


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

    Attributes:
        is_full: whether nothing could be deleted when room was needed last. If not, what is refused may be granted in a moment.
    """

    def __init__(self, store: ObjectStore, max_bytes: int, num_workers: int = 1, value_bytes: int = 0) -> None:
        if num_workers == 1:
            self._share = max_bytes  # no other engine needs room, so it may write on while it looks
            self._due = max_bytes // _LOOKS_PER_BUDGET
        else:
            self._share = max(max_bytes // (_SHARES_PER_BUDGET * num_workers), value_bytes)
            self._due = self._share // 2  # the other half can be written while it looks
        self._store = store
        self._max_bytes = max_bytes - (num_workers - 1) * self._share
        self._lock = threading.Lock()
        self._is_looking = False
        # Bytes stored or being written. More than may be at first, so that a listing is made.
        self._num_bytes = self._max_bytes + 1
        self._unseen = 0  # bytes written since the last listing
        self._writing = 0
        self._new = 0  # bytes that a listing under way may not see
        self._to_refuse = 0  # bytes to refuse before the next listing, because the last one found nothing to delete
        self._told: set[str] = set()  # namespaces of which was logged that they cannot be deleted
        self._has_told_full = False
        self.is_full = False

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

    def look_ahead(self) -> None:
        """List the store before the first chunk comes, which would have to be put off. Raises the store's errors."""
        self._reserve(0)

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
        num_wanted += self._new
        total, oldest = self._list()
        if total + num_wanted > self._max_bytes:
            total = self._delete_oldest(oldest, total, self._max_bytes - num_wanted)
        is_stuck = total + num_wanted > self._max_bytes
        self.is_full = is_stuck
        self._to_refuse = self._due if is_stuck else 0
        if is_stuck and not self._has_told_full:
            self._has_told_full = True
            logger.warning(
                "shared tier: no more chunks are stored, because %s are taken and nothing more can be deleted",
                format_bytes(total),
            )
        return total

    def _list(self, behind: tuple[float, str] = _OLDEST) -> tuple[int, list[StoredObject]]:
        """Return the bytes of our objects, and the oldest of them after a place in the order of their ages."""
        total = 0

        def counted() -> Iterator[StoredObject]:
            nonlocal total
            for known in list_ours(self._store):
                total += known.num_bytes
                if known.age > behind:
                    yield known

        oldest = heapq.nsmallest(_MOST_REMEMBERED, counted(), key=lambda known: known.age)
        return total, oldest

    def _in_order(self, oldest: list[StoredObject]) -> Iterator[StoredObject]:
        """Yield our objects, the oldest first, beginning with those of a listing. Lists the store again for more."""
        while oldest:
            yield from oldest
            oldest = self._list(oldest[-1].age)[1] if len(oldest) == _MOST_REMEMBERED else []

    def _delete_oldest(self, oldest: list[StoredObject], total: int, most: int) -> int:
        """Delete the oldest objects of ``total`` bytes until ``most`` are left; return how many are left.

        Passes over what may not be deleted. Deletes a little more than that, if there is more, for the chunks to come.
        """
        before, stuck = total, 0
        closed: set[str] = set()  # namespaces in which nothing may be deleted
        for known in self._in_order(oldest):
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
            if known.namespace_id not in self._told:
                self._told.add(known.namespace_id)
                message = "shared tier: %s cannot be deleted to make room, so it stays: %s"
                logger.warning(message, known.path, one_line(error))
            if directory_of(self._store) is None:
                closed.add(known.namespace_id)
            return False
        return True


# --- the shared tier on object stores ---------------------------------------------------------------------------------

_NO_KEY: Final = b"\0"


def open_store(url: str, request_s: float = REQUEST_S) -> ObjectStore:
    """Make a client of the store that a URL names, which waits so long for each answer; create the directory if it is one.

    Sends a remote store nothing.

    Raises:
        ConfigError: the URL is incomplete, or the directory cannot be used.
    """
    try:
        directory = places.directory_of(url)
        if directory is not None:
            make_directory(directory)
            return LocalStore(directory)
        limit = timedelta(seconds=request_s)
        # Options given here hide those of the environment. This one is needed for stores on one's own machines.
        may_use_http = any(os.environ.get(f"{cloud}_ALLOW_HTTP") == "true" for cloud in ("AWS", "AZURE", "GOOGLE"))
        client = {"timeout": limit, "connect_timeout": limit, "allow_http": may_use_http}
        retry = {"max_retries": 1, "retry_timeout": limit}
        # The answer to a deletion of several objects would be read to its end, however long it is; that of one is not.
        options = {"disable_bulk_delete": "true"} if places.scheme_of(url) == "s3" else {}
        return from_url(url, config=options, client_options=client, retry_config=retry)  # type: ignore[call-overload, no-any-return]  # its overloads are one per store, by literal options
    except (store_errors.BaseError, OSError, ValueError) as error:
        raise _unusable(places.without_secrets(url), error) from error


def open_inventory(url: str) -> ObjectInventory:
    """Make the inventory of a store. Raises as ``open_store``."""
    return ObjectInventory(open_store(url))


class ObjectTier(SharedTier):
    """A tier that keeps chunks as objects of an object store.

    Args:
        url: names the store.
        max_bytes: maximum size of all chunks there; ``None`` for no limit.
        opening: what this worker keeps there.

    Raises:
        ConfigError: the URL is incomplete, there is no such bucket, credentials are missing, wrong or lack a right, or a
            directory cannot be written to, or is a disk tier's.
    """

    def __init__(self, url: str, max_bytes: int | None, opening: Opening) -> None:
        super().__init__(opening.codec, opening.chunk_bytes)
        self._shown_url = places.without_secrets(url)
        self._store = open_store(url, opening.request_s)
        self._directory = directory_of(self._store)
        self._budget = self._capacity_bytes = None
        if max_bytes is not None:
            self._capacity_bytes = max_bytes // opening.num_shards
            self._budget = StoreBudget(self._store, max_bytes, opening.num_shards, self._max_value_bytes)
        self._prefix = opening.codec.namespace.id
        self._place = self._find_place()
        self._introduce()
        if self._directory is not None and not opening.codec.namespace.encryption:
            own = self._directory / self._prefix
            warn_of_writers(self.name, (self._directory, own))
            warn_of_readers(self.name, self._directory, own / DESCRIPTION)

    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Ask for each object: in a directory one after the other, of another store several at a time."""
        with self._errors():
            if self._directory is not None or len(keys) == 1:
                return self._ask_in_turn(keys)
            with asyncio.Runner() as runner:
                return runner.run(self._ask_together(keys))

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        with self._errors():
            for key in keys:
                delete_if_there(self._store, self._path(key))

    def begin(self) -> None:
        """List a directory, or a store with a limit, in a thread of its own: that may take long, and no step waits for it."""
        if self._budget is not None or self._directory is not None:
            threading.Thread(target=self._look_ahead, name=f"cargohold-{self.name}-list", daemon=True).start()

    def _look_ahead(self) -> None:
        with suppress(TierError), self._errors():  # the first chunk tries again, and its job reports it
            if self._budget is None:
                delete_unfinished(self._store, f"{self._prefix}/")
            else:
                self._budget.look_ahead()

    def usage(self) -> TierUsage:
        """Return what this worker has stored, and its part of the limit."""
        return replace(super().usage(), capacity_bytes=self._capacity_bytes)

    def close(self) -> None:
        """Do nothing: connections close when the store's client is garbage-collected."""

    def _put(self, key: OffloadKey, value: memoryview) -> StoreOutcome:
        with self._errors():
            if self._budget is None:
                return self._write(self._path(key), value)
            self._require_place()  # where a mount has gone, room must neither be counted nor made
            with self._budget.room_for(len(value)) as has_room:
                if has_room:
                    return self._write(self._path(key), value)
            return StoreOutcome.REFUSED if self._budget.is_full else StoreOutcome.LATER

    def _write(self, path: str, value: memoryview) -> StoreOutcome:
        """Write an object, if there is room."""
        self._require_place()  # also after room was made, because that takes time
        try:
            # In one part: if an upload in several parts is broken off, its parts stay, cost money, and no listing shows them.
            obstore.put(self._store, path, value, use_multipart=False)
        except store_errors.GenericError as error:
            if self._directory is None or not is_full(error):
                raise
            self._damage.warning("%s tier: %s cannot be stored: %s", self.name, path, first_line(error))
            return StoreOutcome.REFUSED
        return StoreOutcome.STORED

    def _get(self, key: OffloadKey) -> memoryview | None:
        with self._errors():
            try:
                # Nothing larger is one of our chunks, and it could be too large for our memory.
                return read_object(self._store, self._path(key), self._max_value_bytes)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno == errno.EIO:
                    # A bad place on the disk must not fail every request that wants this chunk. Once it is deleted, the chunk
                    # is stored again, in another place.
                    with suppress(store_errors.BaseError, OSError):
                        delete_if_there(self._store, self._path(key))
                raise

    def _require_place(self) -> None:
        """Create the directory, if it was deleted, for its owner only: the package would let everyone read it.

        Raises ``OSError``, also if another file system is in the directory's place. Does nothing for other stores.
        """
        if self._place is not None:
            self._place.require()

    def _path(self, key: OffloadKey) -> str:
        name = key.hex()
        return f"{self._prefix}/{name[:2]}/{name}"

    def _ask_in_turn(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Ask for one object after the other. Those that cannot be asked for count as absent, unless it is all of them.

        So a folder that we may not enter does not hide the chunks in the others.
        """
        found, failures = [], []
        for key in keys:
            try:
                found.append(is_there(self._store, self._path(key)))
            except OSError as error:
                failures.append(error)
                found.append(False)
        if failures and len(failures) == len(keys):
            raise failures[0]
        return found

    async def _ask_together(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Ask for several objects at a time. When one cannot be asked for, asks for no more, and waits for those under way.

        Answers that come when the loop has been closed would each be logged, with a traceback.
        """
        slots, failures = asyncio.Semaphore(PARALLEL_PROBES), list[Exception]()

        async def exists(key: OffloadKey) -> bool:
            async with slots:
                try:
                    if not failures:
                        await obstore.head_async(self._store, self._path(key))
                        return True
                except FileNotFoundError:
                    pass
                except (store_errors.BaseError, OSError, ValueError) as error:
                    failures.append(error)
                return False

        found = await asyncio.gather(*map(exists, keys))
        if failures:
            raise failures[0]
        return found

    def _find_place(self) -> DirectoryPlace | None:
        """Return what watches a store's directory; ``None`` if the store is not one. Raises ``ConfigError``."""
        if self._directory is None:
            return None
        if os.path.lexists(self._directory / self._prefix / DESCRIPTION_FILE):
            reason = f"a disk tier has its chunks there, in {self._prefix}; give each its own directory"
            raise ConfigError("url", self._shown_url, reason)
        try:
            return DirectoryPlace(self._directory, f"{self._prefix}/{DESCRIPTION}")
        except OSError as error:
            raise _unusable(self._shown_url, error) from error

    def _introduce(self) -> None:
        """Store the description of the namespace, for ``cargohold cache``; also try whether the store lets us do all we need.

        Raises ``ConfigError`` if it does not. If the store does not answer, that is only logged.
        """
        for purpose, attempt in self._trials():
            try:
                attempt()
            except (store_errors.BaseError, OSError, ValueError) as error:
                reason = self._refusal(purpose, error)
                if reason is not None:
                    raise ConfigError("url", self._shown_url, reason) from error
                logger.warning("shared tier: %s does not answer yet: %s", self._shown_url, first_line(error))
                return

    def _trials(self) -> list[tuple[str, Callable[[], object]]]:
        """Return what to try at the start, each with what it is good for. The first one stores the description."""
        path = f"{self._prefix}/{DESCRIPTION}"

        absent = self._path(_NO_KEY)
        trials: list[tuple[str, Callable[[], object]]] = [
            ("writing", lambda: obstore.put(self._store, path, self._description())),
            # Without the right to list, S3 denies access to absent objects: then no chunk could be asked for, or stored.
            ("reading, or for listing", lambda: is_there(self._store, absent)),
            ("deleting", lambda: delete_if_there(self._store, absent)),
        ]
        if self._budget is not None:
            trials.append(("listing, which max_bytes needs", lambda: try_listing(self._store, self._prefix)))
        return trials

    def _refusal(self, purpose: str, error: Exception) -> str | None:
        """Return why the tier can never work, if an error at the start says so; ``None`` if it may work later."""
        if lacks_credentials(error):
            return "no credentials were found in the environment"
        if refuses_access(error):
            return f"the store refuses access for {purpose}: {first_line(error)}"
        # Asking and deleting take absent objects for granted, and to write an object only the bucket must be there.
        if isinstance(error, FileNotFoundError) and self._directory is None:
            place = "container" if places.scheme_of(self._shown_url) == "az" else "bucket"
            return f"there is no such {place}; create it, or correct its name or the endpoint: {first_line(error)}"
        return None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (store_errors.BaseError, OSError, ValueError) as error:
            raise TierError(self.name, first_line(error)) from error


def _unusable(shown_url: str, error: Exception) -> ConfigError:
    return ConfigError("url", shown_url, f"the store cannot be used: {first_line(error)}")
