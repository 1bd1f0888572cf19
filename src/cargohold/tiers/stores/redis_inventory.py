"""The inventory of a Redis or Valkey server, which does not tell when values were used last."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import redis

from cargohold.errors import TierError, one_line
from cargohold.tiers.inventory import PIECE_BYTES
from cargohold.tiers.namespace import MAX_DESCRIPTION_BYTES
from cargohold.tiers.stores.inventory import NAME, StoredObject, StoreInventory
from cargohold.tiers.stores.redis import PREFIX, answers_understood, is_wrong_type

_OURS: Final = re.compile(re.escape(PREFIX) + "([0-9a-f]{32})(?::(.+))?", re.DOTALL)
_ENCODING: Final = "latin-1"
"""In which every name is text: chunks have their keys' bytes in their names."""


class RedisInventory(StoreInventory):
    """The namespaces on a server.

    Args:
        client: connected to the database.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    @contextmanager
    def _session(self) -> Iterator[None]:
        try:
            with answers_understood():
                yield
        except redis.exceptions.RedisError as error:
            raise TierError(NAME, one_line(error)) from error

    def _listed(self, namespace_id: str) -> Iterator[StoredObject]:
        """As for ``StoreInventory``. Others may use the same prefix."""
        found = self._client.scan_iter(match=f"{PREFIX}{namespace_id}*", count=1000)
        seen: set[str] = set()  # while a server moves its keys, a scan returns some names twice
        for name in (bytes(each).decode(_ENCODING) for each in found):
            match = _OURS.fullmatch(name)
            if match is not None and name not in seen:
                seen.add(name)
                num_bytes = 0
                with _other_types_left_out():
                    num_bytes = int(self._client.strlen(name.encode(_ENCODING)))
                yield StoredObject(name, match[1], (match[2] or "").encode(_ENCODING), num_bytes)

    def _pieces(self, chunk: StoredObject) -> Iterator[memoryview]:
        for start in itertools.count(step=PIECE_BYTES):
            piece = self._read(chunk.path, start, PIECE_BYTES)
            if len(piece) < PIECE_BYTES and not self._client.exists(chunk.path.encode(_ENCODING)):
                raise FileNotFoundError(chunk.path)  # perhaps since the last piece
            yield memoryview(piece)
            if len(piece) < PIECE_BYTES:
                return

    def _description(self, namespace_id: str) -> bytes:
        return self._read(f"{PREFIX}{namespace_id}", 0, MAX_DESCRIPTION_BYTES + 1)

    def _delete(self, path: str) -> None:
        self._client.unlink(path.encode(_ENCODING))

    def _read(self, name: str, start: int, num_bytes: int) -> bytes:
        """Return ``num_bytes`` bytes of a value from ``start``, or as many as there are; none if it is no string."""
        found: object = b""
        with _other_types_left_out():
            found = self._client.getrange(name.encode(_ENCODING), start, start + num_bytes - 1)
        return found if isinstance(found, bytes) else b""


@contextmanager
def _other_types_left_out() -> Iterator[None]:
    """End the ``with`` if it asks about a value that is a list, a hash or the like, which somebody put in a chunk's place."""
    try:
        yield
    except redis.exceptions.ResponseError as error:
        if not is_wrong_type(error):
            raise
