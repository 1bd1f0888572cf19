"""The shared tier on object stores: S3 and stores compatible with it, Google's, Azure's, or a plain directory.

A chunk is the object ``<namespace id>/<first byte of the key>/<key>``, in hexadecimal.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import obstore
from obstore import exceptions as store_errors
from obstore.store import LocalStore, from_url

from cargohold.errors import ConfigError, TierError, one_line
from cargohold.offload.manager.base import OffloadKey
from cargohold.offload.tier.chunk_format import ChunkCodec
from cargohold.offload.tier.config import PARALLEL_PROBES, SharedTierConfig
from cargohold.offload.tier.disk.folders import DESCRIPTION_FILE
from cargohold.offload.tier.namespace import DESCRIPTION
from cargohold.offload.tier.object_listing import (
    delete_if_there,
    is_there,
    read_object,
    refuses_access,
    try_listing,
)
from cargohold.offload.tier.permissions import warn_of_readers, warn_of_writers
from cargohold.offload.tier.shared import SharedTier
from cargohold.offload.tier.shared_directory import DirectoryPlace, directory_of, is_full, make_directory
from cargohold.offload.tier.store_budget import StoreBudget
from cargohold.sparing_log import SparingLog

if TYPE_CHECKING:
    from obstore.store import ObjectStore

logger = logging.getLogger(__name__)

_NO_KEY: Final = b"\0"
_NO_CREDENTIALS: Final = (
    "169.254.169.254",
    "/latest/api/token",
    "metadata.google.internal",
    "/computeMetadata/",
    "/metadata/identity/",
)
"""Where machines in a cloud look for credentials if none were given. An error names one of these only in that case."""


def open_store(config: SharedTierConfig) -> ObjectStore:
    """Make a client of the store that a URL names; create the directory if it is one. Sends a remote store nothing.

    Raises:
        ConfigError: the URL is incomplete, or the directory cannot be used.
    """
    try:
        if config.directory is not None:
            make_directory(config.directory)
            return LocalStore(config.directory)
        limit = timedelta(seconds=config.request_timeout_s)
        # Options given here hide those of the environment. This one is needed for stores on one's own machines.
        may_use_http = any(os.environ.get(f"{cloud}_ALLOW_HTTP") == "true" for cloud in ("AWS", "AZURE", "GOOGLE"))
        client = {"timeout": limit, "connect_timeout": limit, "allow_http": may_use_http}
        retry = {"max_retries": 1, "retry_timeout": limit}
        return from_url(config.url, client_options=client, retry_config=retry)  # type: ignore[call-overload, no-any-return]  # its overloads are one per store, by literal options
    except (store_errors.BaseError, OSError, ValueError) as error:
        raise ConfigError("url", config.shown_url, f"the store cannot be used: {first_line(error)}") from error


class ObjectTier(SharedTier):
    """A tier that keeps chunks as objects of an object store.

    Args:
        config: the tier's options.
        codec: makes and checks headers.
        chunk_bytes: bytes of the largest chunk.
        num_shards: number of workers that share ``max_bytes``.

    Raises:
        ConfigError: the URL is incomplete, there is no such bucket, credentials are missing, wrong or lack a right, or a
            directory cannot be written to, or is a disk tier's.
    """

    def __init__(self, config: SharedTierConfig, codec: ChunkCodec, chunk_bytes: int, num_shards: int = 1) -> None:
        super().__init__(codec, chunk_bytes)
        self._store = open_store(config)
        self._directory = directory_of(self._store)
        self._budget = _budget_of(config, self._store, num_shards, self._max_value_bytes)
        self._prefix = codec.namespace.id
        self._place = _place_of(config, self._store, f"{self._prefix}/{DESCRIPTION}")
        self._obstacles = SparingLog(logger)
        _require_no_shard(config, self._prefix)
        self._introduce(config)
        if self._directory is not None and not codec.namespace.encryption:
            own = self._directory / self._prefix
            warn_of_writers(self.name, (self._directory, own))
            warn_of_readers(self.name, self._directory, own / DESCRIPTION)

    @staticmethod
    def check_place(config: SharedTierConfig) -> None:
        """Raise ``ConfigError`` for an invalid URL or options, without asking the store."""
        open_store(config)

    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Ask for each object: in a directory one after the other, of another store several at a time."""
        with self._errors():
            if self._directory is not None or len(keys) == 1:
                return self._ask_in_turn(keys)
            with asyncio.Runner() as runner:
                return runner.run(self._ask_together(keys))

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Delete objects."""
        with self._errors():
            for key in keys:
                delete_if_there(self._store, self._path(key))

    def close(self) -> None:
        """Do nothing: connections close when the store's client is garbage-collected."""

    def _put(self, key: OffloadKey, value: bytearray) -> bool:
        with self._errors():
            if self._budget is None:
                return self._write(self._path(key), value)
            self._require_place()  # where a mount has gone, room must neither be counted nor made
            with self._budget.room_for(len(value)) as has_room:
                return has_room and self._write(self._path(key), value)

    def _write(self, path: str, value: bytearray) -> bool:
        """Write an object; return whether there was room."""
        self._require_place()  # also after room was made, because that takes time
        try:
            # In one part: if an upload in several parts is broken off, its parts stay, cost money, and no listing shows them.
            obstore.put(self._store, path, value, use_multipart=False)
        except store_errors.GenericError as error:
            if self._directory is None:
                raise
            if has_obstacle(self._directory, path):
                self._obstacles.warning(
                    "%s tier: %s cannot be stored, because something that is not ours has its place", self.name, path
                )
            elif not is_full(error):
                raise
            return False
        return True

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
        """Create the directory, if it was deleted, for its owner only: the package would let everybody read it.

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
        slots = asyncio.Semaphore(PARALLEL_PROBES)

        async def exists(key: OffloadKey) -> bool:
            async with slots:
                try:
                    await obstore.head_async(self._store, self._path(key))
                except FileNotFoundError:
                    return False
                return True

        return await asyncio.gather(*map(exists, keys))

    def _introduce(self, config: SharedTierConfig) -> None:
        """Store the description of the namespace, for ``cargohold cache``; also try whether the store lets us do all we need.

        Raises ``ConfigError`` if it does not. If the store does not answer, that is only logged.
        """
        for purpose, attempt in self._trials(config):
            try:
                attempt()
            except (store_errors.BaseError, OSError, ValueError) as error:
                reason = self._refusal(config, purpose, error)
                if reason is not None:
                    raise ConfigError("url", config.shown_url, reason) from error
                logger.warning("shared tier: %s does not answer yet: %s", config.shown_url, first_line(error))
                return

    def _trials(self, config: SharedTierConfig) -> list[tuple[str, Callable[[], object]]]:
        """Return what to try at the start, each with what it is good for. The first one stores the description."""
        text = json.dumps(self._codec.namespace.describe(), indent=2).encode()
        absent = self._path(_NO_KEY)
        trials: list[tuple[str, Callable[[], object]]] = [
            ("writing", lambda: obstore.put(self._store, f"{self._prefix}/{DESCRIPTION}", text)),
            # Without the right to list, S3 denies access to absent objects: then no chunk could be asked for, or stored.
            ("reading, or for listing", lambda: is_there(self._store, absent)),
            ("deleting", lambda: delete_if_there(self._store, absent)),
        ]
        if config.num_max_bytes is not None:
            trials.append(("listing, which max_bytes needs", lambda: try_listing(self._store, self._prefix)))
        return trials

    def _refusal(self, config: SharedTierConfig, purpose: str, error: Exception) -> str | None:
        """Return why the tier can never work, if an error at the start says so; ``None`` if it may work later."""
        if lacks_credentials(error):
            return "no credentials were found in the environment"
        if refuses_access(error):
            return f"the store refuses access for {purpose}: {first_line(error)}"
        # Asking and deleting take absent objects for granted, and to write an object only the bucket must be there.
        if isinstance(error, FileNotFoundError) and self._directory is None:
            place = "container" if config.scheme == "az" else "bucket"
            return f"there is no such {place}; create it, or correct its name or the endpoint: {first_line(error)}"
        return None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (store_errors.BaseError, OSError, ValueError) as error:
            raise TierError(self.name, first_line(error)) from error


def _budget_of(config: SharedTierConfig, store: ObjectStore, num_shards: int, value_bytes: int) -> StoreBudget | None:
    """Return what keeps ``max_bytes``; ``None`` if there is no limit."""
    if config.num_max_bytes is None:
        return None
    return StoreBudget(store, config.num_max_bytes, num_shards, value_bytes)


def _place_of(config: SharedTierConfig, store: ObjectStore, mark: str) -> DirectoryPlace | None:
    """Return what watches a store's directory; ``None`` if the store is not a directory. Raises ``ConfigError``."""
    directory = directory_of(store)
    try:
        return None if directory is None else DirectoryPlace(directory, mark)
    except OSError as error:
        raise ConfigError("url", config.shown_url, f"the store cannot be used: {first_line(error)}") from error


def _require_no_shard(config: SharedTierConfig, namespace_id: str) -> None:
    """Raise ``ConfigError`` if a disk tier has its chunks where this namespace's would be."""
    if config.directory is not None and os.path.lexists(config.directory / namespace_id / DESCRIPTION_FILE):
        reason = f"a disk tier has its chunks there, in {namespace_id}; give each a directory of its own"
        raise ConfigError("url", config.shown_url, reason)


def has_obstacle(directory: Path, path: str) -> bool:
    """Whether no file can be written because a folder is in its place, or something else in the place of a folder above."""
    file = directory / path
    return file.is_dir() or any(
        os.path.lexists(folder) and not folder.is_dir() for folder in file.parents if folder.is_relative_to(directory)
    )


def lacks_credentials(error: Exception) -> bool:
    """Whether a store could not be asked because no credentials were given."""
    return any(place in str(error) for place in _NO_CREDENTIALS)


def first_line(error: Exception) -> str:
    """Return the text of an error without the debug text that the package appends."""
    text = str(error).partition("\n")[0]
    return text or one_line(error)
