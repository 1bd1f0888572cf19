"""The inventory of a Redis or Valkey server."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import redis

from cargohold.errors import TierError, one_line
from cargohold.tiers.inventory import PIECE_BYTES, Holding, Inventory, Verification, check_value, in_short, remarks_on
from cargohold.tiers.namespace import MAX_DESCRIPTION_BYTES, as_facts, parse_description
from cargohold.tiers.stores.redis import PREFIX, answers_understood, is_wrong_type

_NAME = "shared"
_ID_CHARS = 32
_OURS = re.compile(re.escape(PREFIX.encode()) + rb"[0-9a-f]{%d}(:.+)?" % _ID_CHARS, re.DOTALL)


@dataclass(slots=True)
class _Count:
    num_chunks: int = 0
    num_bytes: int = 0


class RedisInventory(Inventory):
    """The namespaces on a server, which does not tell when they were used last.

    Args:
        client: connected to the database.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def holdings(self) -> list[Holding]:
        """Return the namespaces that a scan of all keys shows; bytes are those of the values."""
        counts: dict[str, _Count] = {}
        with _redis_errors():
            for name in self._names(""):
                count = counts.setdefault(_namespace_of(name), _Count())
                if _key_of(name):
                    count.num_chunks += 1
                with _other_types_left_out():
                    count.num_bytes += int(self._client.strlen(name))
            return [self._describe(namespace_id, count) for namespace_id, count in sorted(counts.items())]

    def verify(self, namespace_id: str, *, delete: bool) -> Iterator[Verification]:
        """Fetch and check every value."""
        with _redis_errors():
            for name in self._names(f"{namespace_id}:"):
                finding = check_value(self._pieces(name), namespace_id, _key_of(name))
                if finding is Verification.DAMAGED:
                    if not self._client.exists(name):
                        continue  # deleted meanwhile, perhaps between two pieces
                    if delete:
                        self._client.unlink(name)
                yield finding

    def remove(self, namespace_id: str) -> None:
        """Delete every value of a namespace."""
        with _redis_errors():
            for name in self._names(namespace_id):
                self._client.unlink(name)

    def _names(self, start: str) -> Iterator[bytes]:
        """Yield our names that begin with ``PREFIX`` and ``start``, each once. Others may use the same prefix."""
        found = map(bytes, self._client.scan_iter(match=f"{PREFIX}{start}*", count=1000))
        seen: set[bytes] = set()  # while a server moves its keys, a scan returns some names twice
        for name in found:
            if _OURS.fullmatch(name) and name not in seen:
                seen.add(name)
                yield name

    def _describe(self, namespace_id: str, count: _Count) -> Holding:
        facts = self._facts(namespace_id)
        remark = in_short(remarks_on(facts))
        return Holding(namespace_id, facts, count.num_chunks, count.num_bytes, None, is_in_use=False, remark=remark)

    def _facts(self, namespace_id: str) -> dict[str, str]:
        return as_facts(parse_description(self._read(f"{PREFIX}{namespace_id}".encode(), 0, MAX_DESCRIPTION_BYTES + 1)))

    def _pieces(self, name: bytes) -> Iterator[memoryview]:
        """Yield a value's bytes in pieces, of which only the last one may be shorter or empty."""
        for start in itertools.count(step=PIECE_BYTES):
            piece = self._read(name, start, PIECE_BYTES)
            yield memoryview(piece)
            if len(piece) < PIECE_BYTES:
                return

    def _read(self, name: bytes, start: int, num_bytes: int) -> bytes:
        """Return ``num_bytes`` bytes of a value from ``start``, or as many as there are; none if it is no string."""
        found: object = b""
        with _other_types_left_out():
            found = self._client.getrange(name, start, start + num_bytes - 1)
        return found if isinstance(found, bytes) else b""


def _namespace_of(name: bytes) -> str:
    return name[len(PREFIX) :][:_ID_CHARS].decode("ascii", "replace")


def _key_of(name: bytes) -> bytes:
    """Return the chunk's key from its name; empty for the namespace's description."""
    return name[len(PREFIX) + _ID_CHARS + 1 :]


@contextmanager
def _other_types_left_out() -> Iterator[None]:
    """End the ``with`` if it asks about a value that is a list, a hash or the like, which somebody put in a chunk's place."""
    try:
        yield
    except redis.exceptions.ResponseError as error:
        if not is_wrong_type(error):
            raise


@contextmanager
def _redis_errors() -> Iterator[None]:
    try:
        with answers_understood():
            yield
    except redis.exceptions.RedisError as error:
        raise TierError(_NAME, one_line(error)) from error
