"""The inventory of an object store, or of a shared directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from obstore import exceptions as store_errors
from obstore.store import ObjectStore

from cargohold.errors import TierError
from cargohold.tiers.inventory import PIECE_BYTES, Holding
from cargohold.tiers.stores.directory import (
    delete_if_there,
    delete_unfinished,
    list_ours,
    read_description,
    read_pieces,
)
from cargohold.tiers.stores.inventory import NAME, StoredObject, StoreInventory
from cargohold.tiers.stores.objects import first_line, lacks_credentials


class ObjectInventory(StoreInventory):
    """The namespaces in an object store.

    Args:
        store: the bucket and prefix.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def remove(self, namespace_id: str) -> None:
        """Delete every object of a namespace."""
        super().remove(namespace_id)
        with self._session():
            delete_unfinished(self._store, f"{namespace_id}/", older_than_s=0.0)

    def tidy(self) -> int:
        """Delete files that killed writers have left."""
        with self._session():
            return delete_unfinished(self._store)

    def trim(self, namespace_id: str, num_bytes: int) -> int:
        """Delete the oldest chunks; engines that want them compute instead."""
        gone = 0
        with self._session():
            for chunk in self._oldest(namespace_id, num_bytes):
                self._delete(chunk.path)
                gone += chunk.num_bytes
        return gone

    def bytes_to_trim(self, holding: Holding, num_bytes: int) -> int:
        """See ``Inventory``."""
        with self._session():
            return sum(chunk.num_bytes for chunk in self._oldest(holding.id, num_bytes))

    def _oldest(self, namespace_id: str, num_bytes: int) -> Iterator[StoredObject]:
        """Yield the chunks of a namespace stored longest ago, until they have ``num_bytes``."""
        for chunk in sorted(self._chunks(namespace_id), key=lambda found: found.written_s):
            if num_bytes <= 0:
                return
            yield chunk
            num_bytes -= chunk.num_bytes

    @contextmanager
    def _session(self) -> Iterator[None]:
        try:
            yield
        except (store_errors.BaseError, OSError, ValueError) as error:
            reason = "no credentials were found in the environment" if lacks_credentials(error) else first_line(error)
            raise TierError(NAME, reason) from error

    def _listed(self, namespace_id: str) -> Iterator[StoredObject]:
        yield from list_ours(self._store, namespace_id and f"{namespace_id}/")

    def _pieces(self, chunk: StoredObject) -> Iterator[memoryview]:
        return read_pieces(self._store, chunk.path, PIECE_BYTES)

    def _description(self, namespace_id: str) -> bytes:
        return read_description(self._store, namespace_id)

    def _delete(self, path: str) -> None:
        delete_if_there(self._store, path)
