"""The inventory of a store that several engines share: what is the same for all stores that can be listed."""

from __future__ import annotations

import errno
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Final

from cargohold.option_values import format_bytes
from cargohold.tiers.chunk_format import HEADER_BYTES, unpack_header
from cargohold.tiers.inventory import (
    Holding,
    Inventory,
    Verification,
    check_value,
    in_short,
    noted,
    raise_noted,
    remarks_on,
)
from cargohold.tiers.namespace import as_facts, parse_description

NAME: Final = "shared"
PACKED: Final = "packed"
"""In the description of a namespace: how its chunks are packed, if they are. Not a part of its identity."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One of our objects or values in a store.

    Attributes:
        path: its path or name in the store.
        namespace_id: id of its namespace.
        key: the chunk's key; empty if the object is no whole chunk, but the namespace's description, or unfinished.
        num_bytes: its size.
        written_s: time of writing, in seconds since 1970; 0 if the store does not tell.
        is_unfinished: whether it is a file that is still being written, or that a killed process left.
    """

    path: str
    namespace_id: str
    key: bytes
    num_bytes: int
    written_s: float = 0.0
    is_unfinished: bool = False

    @property
    def age(self) -> tuple[float, str]:
        """Orders objects, those written longest ago first."""
        return self.written_s, self.path


class StoreInventory(Inventory):
    """The namespaces that a listing of the store shows."""

    def holdings(self) -> list[Holding]:
        """Return the namespaces; their bytes are those of all objects."""
        found: defaultdict[str, list[StoredObject]] = defaultdict(list)
        with self._session():
            for stored in self._listed(""):
                found[stored.namespace_id].append(stored)
            holdings = [self._describe(name, objects) for name, objects in sorted(found.items())]
        return sorted(holdings, key=lambda holding: holding.last_used_s or 0.0)

    def verify(self, namespace_id: str, *, delete: bool) -> Iterator[Verification]:
        """Fetch and check every chunk."""
        troubles: list[str] = []
        with self._session():
            for chunk in self._chunks(namespace_id):
                with noted(troubles, chunk.path):
                    finding = self._check(chunk)
                    if finding is Verification.DAMAGED and delete:
                        with noted(troubles, chunk.path):
                            self._delete(chunk.path)
                    if finding is not None:
                        yield finding
        raise_noted(NAME, troubles)

    def remove(self, namespace_id: str) -> None:
        """Delete every object of a namespace."""
        with self._session():
            for stored in self._listed(namespace_id):
                self._delete(stored.path)

    def _chunks(self, namespace_id: str) -> list[StoredObject]:
        return [stored for stored in self._listed(namespace_id) if stored.key]

    def _check(self, chunk: StoredObject) -> Verification | None:
        """Verify a chunk; return ``None`` if it was deleted meanwhile. Raises the store's errors."""
        try:
            return check_value(self._pieces(chunk), chunk.namespace_id, chunk.key)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return Verification.DAMAGED  # a bad place on the medium; the other chunks may well be good

    def _describe(self, namespace_id: str, objects: Sequence[StoredObject]) -> Holding:
        facts: dict[str, str] = {}
        remarks: list[str] = []
        with noted(remarks, namespace_id):
            facts = as_facts(parse_description(self._description(namespace_id)))
            remarks += remarks_on(facts)
        plain_part = self._plain_part(objects) if PACKED in facts else 0
        left_bytes = sum(stored.num_bytes for stored in objects if stored.is_unfinished)
        if left_bytes:
            remarks.append(
                f"{format_bytes(left_bytes)} are unfinished; `cargohold cache prune` deletes what is left of them"
            )
        return Holding(
            id=namespace_id,
            facts=facts,
            num_chunks=sum(bool(stored.key) for stored in objects),
            num_bytes=sum(stored.num_bytes for stored in objects) - left_bytes,
            last_used_s=max(stored.written_s for stored in objects) or None,
            is_in_use=False,
            remark=in_short(remarks),
            plain_bytes=int(plain_part * sum(stored.num_bytes for stored in objects if stored.key)),
        )

    def _plain_part(self, objects: Sequence[StoredObject]) -> float:
        """Return how many times as long a chunk was before it was packed, by looking at one; 0 if that fails."""
        with suppress(StopIteration, ValueError, OSError):
            newest = max((stored for stored in objects if stored.key), key=lambda stored: stored.written_s)
            start = next(self._pieces(newest))
            header = unpack_header(start[:HEADER_BYTES])
            return 0 if header is None else header.plain_bytes / header.num_bytes
        return 0

    @abstractmethod
    def _session(self) -> AbstractContextManager[None]:
        """Surrounds all that one call asks the store; raises ``TierError`` for the store's errors."""

    @abstractmethod
    def _listed(self, namespace_id: str) -> Iterator[StoredObject]:
        """Yield our objects, each once; those of one namespace, unless ``namespace_id`` is empty."""

    @abstractmethod
    def _pieces(self, chunk: StoredObject) -> Iterator[memoryview]:
        """Yield a chunk's bytes in pieces, the first no shorter than a header. Raises ``FileNotFoundError`` if it is gone."""

    @abstractmethod
    def _description(self, namespace_id: str) -> bytes:
        """Return the description of a namespace; empty if there is none."""

    @abstractmethod
    def _delete(self, path: str) -> None:
        """Delete an object, unless it is gone."""
