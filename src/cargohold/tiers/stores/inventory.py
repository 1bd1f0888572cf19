"""The inventory of an object store, or of a shared directory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

from obstore import exceptions as store_errors
from obstore.store import ObjectStore

from cargohold.errors import TierError
from cargohold.tiers.inventory import (
    PIECE_BYTES,
    Holding,
    Inventory,
    Verification,
    check_value,
    in_short,
    noted,
    raise_noted,
    remarks_on,
)
from cargohold.tiers.namespace import DESCRIPTION, MAX_DESCRIPTION_BYTES, as_facts, parse_description
from cargohold.tiers.stores.directory import (
    StoredObject,
    delete_if_there,
    delete_unfinished,
    list_ours,
    read_object,
    read_pieces,
)
from cargohold.tiers.stores.objects import first_line, lacks_credentials

_NAME = "shared"


@dataclass(slots=True)
class _Namespace:
    chunks: list[StoredObject] = field(default_factory=list)
    others: list[StoredObject] = field(default_factory=list)

    @property
    def objects(self) -> Iterator[StoredObject]:
        return chain(self.chunks, self.others)


class ObjectInventory(Inventory):
    """The namespaces in an object store.

    Args:
        store: the bucket and prefix.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def holdings(self) -> list[Holding]:
        """Return the namespaces that a listing of the whole store shows."""
        with _object_errors():
            found = [self._describe(name, namespace) for name, namespace in self._namespaces("").items()]
        return sorted(found, key=lambda holding: holding.last_used_s or 0.0)

    def verify(self, namespace_id: str, *, delete: bool) -> Iterator[Verification]:
        """Fetch and check every object."""
        troubles: list[str] = []
        with _object_errors():
            for chunk in self._namespace(namespace_id).chunks:
                with noted(troubles, chunk.path):
                    finding = self._check(chunk)
                    if finding is Verification.DAMAGED and delete:
                        with noted(troubles, chunk.path):
                            delete_if_there(self._store, chunk.path)
                    if finding is not None:
                        yield finding
        raise_noted(_NAME, troubles)

    def remove(self, namespace_id: str) -> None:
        """Delete every object of a namespace."""
        with _object_errors():
            for known in self._namespace(namespace_id).objects:
                delete_if_there(self._store, known.path)
            delete_unfinished(self._store, f"{namespace_id}/", older_than_s=0.0)

    def trim(self, namespace_id: str, num_bytes: int) -> int:
        """Delete the oldest chunks; engines that want them compute instead."""
        gone = 0
        with _object_errors():
            delete_unfinished(self._store, f"{namespace_id}/")
            for chunk in self._oldest(namespace_id, num_bytes):
                delete_if_there(self._store, chunk.path)
                gone += chunk.num_bytes
        return gone

    def bytes_to_trim(self, holding: Holding, num_bytes: int) -> int:
        """See ``Inventory``. Unfinished files that ``trim`` would delete are not counted, as it does not count them either."""
        with _object_errors():
            return sum(chunk.num_bytes for chunk in self._oldest(holding.id, num_bytes))

    def _oldest(self, namespace_id: str, num_bytes: int) -> Iterator[StoredObject]:
        """Yield the chunks of a namespace stored longest ago, until they have ``num_bytes``."""
        for chunk in sorted(self._namespace(namespace_id).chunks, key=lambda found: found.written_s):
            if num_bytes <= 0:
                return
            yield chunk
            num_bytes -= chunk.num_bytes

    def _check(self, chunk: StoredObject) -> Verification | None:
        """Verify a chunk; return ``None`` if it was deleted meanwhile. Raises the store's errors."""
        try:
            return check_value(read_pieces(self._store, chunk.path, PIECE_BYTES), chunk.namespace_id, chunk.key)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return Verification.DAMAGED  # a bad place on the medium; the other chunks may well be good

    def _namespace(self, namespace_id: str) -> _Namespace:
        return self._namespaces(f"{namespace_id}/").get(namespace_id, _Namespace())

    def _namespaces(self, prefix: str) -> dict[str, _Namespace]:
        found: dict[str, _Namespace] = {}
        for known in list_ours(self._store, prefix):
            namespace = found.setdefault(known.namespace_id, _Namespace())
            (namespace.chunks if known.key else namespace.others).append(known)
        return found

    def _describe(self, name: str, namespace: _Namespace) -> Holding:
        facts: dict[str, str] = {}
        remarks: list[str] = []
        with noted(remarks, f"{name}/{DESCRIPTION}"):
            facts = self._facts(name)
            remarks += remarks_on(facts)
        return Holding(
            id=name,
            facts=facts,
            num_chunks=len(namespace.chunks),
            num_bytes=sum(known.num_bytes for known in namespace.objects),
            last_used_s=max((known.written_s for known in namespace.objects), default=None),
            is_in_use=False,
            remark=in_short(remarks),
        )

    def _facts(self, name: str) -> dict[str, str]:
        try:
            found = read_object(self._store, f"{name}/{DESCRIPTION}", MAX_DESCRIPTION_BYTES)
        except FileNotFoundError:
            return {}
        return as_facts(parse_description(bytes(found)))


@contextmanager
def _object_errors() -> Iterator[None]:
    try:
        yield
    except (store_errors.BaseError, OSError, ValueError) as error:
        reason = "no credentials were found in the environment" if lacks_credentials(error) else first_line(error)
        raise TierError(_NAME, reason) from error
