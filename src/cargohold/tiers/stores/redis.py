"""The shared tier on Redis or Valkey, for small clusters.

A chunk is the value of ``cargohold:<namespace id>:<key>``; the value of ``cargohold:<namespace id>`` describes the namespace.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import redis

from cargohold.cache.manager import OffloadKey
from cargohold.errors import ConfigError, TierError, one_line
from cargohold.tiers import places
from cargohold.tiers.config import REQUEST_S, Opening
from cargohold.tiers.inventory import NAME, PIECE_BYTES, StoredObject, StoreInventory
from cargohold.tiers.namespace import MAX_DESCRIPTION_BYTES
from cargohold.tiers.port import StoreOutcome
from cargohold.tiers.stores.base import SharedTier

logger = logging.getLogger(__name__)

PREFIX: Final = "cargohold:"
_AUTH_VARIABLE: Final = "REDISCLI_AUTH"
"""Environment variable with the password, as ``redis-cli`` has it. A URL's password shows in process lists and vLLM's log."""
_NO_KEYS: Final = tuple(bytes([number]) for number in range(16))
"""Keys that no chunk has, for trial commands: so many that hardly one node of a cluster is responsible for all of them."""
_NO_SUCH_DATABASE: Final = "DB index is out of range"
_FAILURES: Final = (redis.exceptions.RedisError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What the package raises: its own errors, and whatever it stumbles on in an answer that no server gives."""


def open_client(url: str, request_s: float = REQUEST_S) -> redis.Redis:
    """Make a client for the server that a URL names, which waits so long for each answer. Sends the server nothing.

    Raises:
        ConfigError: the URL cannot be understood.
    """
    # The package knows only schemes in small letters, and not those of Valkey.
    scheme, shown = places.scheme_of(url), places.without_secrets(url)
    url = scheme.replace("valkey", "redis") + url[len(scheme) :]
    try:
        client = redis.Redis.from_url(
            url,
            password=os.environ.get(_AUTH_VARIABLE),  # unless the URL has one
            socket_timeout=request_s,
            socket_connect_timeout=request_s,
            # With protocol 3 the package does not check whether a connection still has the rest of an earlier answer. Then
            # every load on that connection would get another chunk, and delete its own as damaged.
            protocol=2,
        )
        pool = client.connection_pool
        # Made only for its checks: otherwise the package reports an unknown option only at the first connection.
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, redis.exceptions.RedisError) as error:
        raise ConfigError("url", shown, one_line(error)) from error
    if pool.connection_kwargs.get("decode_responses"):
        raise ConfigError("url", shown, "decode_responses is not possible, because chunks are bytes and no text")
    return client


class RedisTier(SharedTier):
    """A tier that keeps chunks as values of a Redis or Valkey server.

    Args:
        url: names the server.
        ttl_s: age in seconds at which the server deletes chunks; ``None`` for never.
        opening: what this worker keeps there. The server keeps the limit of all its clients.

    Raises:
        ConfigError: the URL cannot be understood, or the server refuses the credentials.
    """

    def __init__(self, url: str, ttl_s: int | None, opening: Opening) -> None:
        super().__init__(opening.codec, opening.chunk_bytes)
        self._client = open_client(url, opening.request_s)
        self._ttl_s = ttl_s
        self._prefix = f"{PREFIX}{opening.codec.namespace.id}".encode()
        self._introduce(places.without_secrets(url))

    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Ask for all keys in one round trip."""
        with self._errors():
            return list(map(bool, self._of_each("exists", keys)))

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Delete values; the server frees them in the background."""
        with self._errors():
            self._of_each("unlink", keys)

    def close(self) -> None:
        self._client.close()

    def _put(self, key: OffloadKey, value: memoryview) -> StoreOutcome:
        with self._errors():
            try:
                self._client.set(self._name(key), value, ex=self._ttl_s)
            except redis.exceptions.OutOfMemoryError:
                return StoreOutcome.REFUSED
        return StoreOutcome.STORED

    def _get(self, key: OffloadKey) -> memoryview | None:
        with self._errors():
            name = self._name(key)
            # Nothing longer is one of our chunks, and it could be too large for our memory.
            value = self._client.getrange(name, 0, self._max_value_bytes)
            if not value and not self._client.exists(name):
                return None
        return memoryview(value) if isinstance(value, bytes) else None

    def _of_each(self, command: Literal["exists", "unlink"], keys: Sequence[OffloadKey]) -> list[Any]:
        """Send a command for each key by itself, in one round trip, and return the answers.

        A cluster, even of one node, does not take one command with several keys.
        """
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                getattr(pipeline, command)(self._name(key))
            # An error raised by the package itself would have the key's bytes in front of the server's text.
            answers = pipeline.execute(raise_on_error=False)
        for answer in answers:
            if isinstance(answer, redis.exceptions.RedisError):
                raise answer
        return answers

    def _name(self, key: OffloadKey) -> bytes:
        return b"%b:%b" % (self._prefix, key)

    def _introduce(self, shown: str) -> None:
        """Store the description of the namespace, for ``cargohold cache``; also try whether the server permits all commands.

        Raises ``ConfigError`` if it does not. If the server does not answer, that is only logged.
        """
        try:
            self._client.set(self._prefix, self._description())
            self._client.getrange(self._prefix, 0, 0)
            self._of_each("exists", _NO_KEYS)
            self._of_each("unlink", _NO_KEYS)
        except (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise ConfigError("url", shown, f"the server refuses access: {one_line(error)}") from error
        except redis.exceptions.MovedError as error:
            reason = (
                "the server is one of several of a cluster, and has only some of the keys; name one that has them all"
            )
            raise ConfigError("url", shown, reason) from error
        except _FAILURES as error:
            if _NO_SUCH_DATABASE in str(error):
                raise ConfigError("url", shown, "the server has no such database") from error
            logger.warning("shared tier: the server does not answer yet as it should: %s", one_line(error))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            raise TierError(self.name, one_line(error)) from error


# --- the inventory, which does not know when values were used last: a server does not say -----------------------------

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
            yield
        except _FAILURES as error:
            raise TierError(NAME, one_line(error)) from error

    def _listed(self, namespace_id: str) -> Iterator[StoredObject]:
        """As for ``StoreInventory``. Others may use the same prefix."""
        found = self._client.scan_iter(match=f"{PREFIX}{namespace_id}*", count=1000)
        seen: set[str] = set()  # while a server moves its keys, a scan returns some names twice
        for name in (bytes(each).decode(_ENCODING) for each in found):
            match = _OURS.fullmatch(name)
            if match is not None and name not in seen:
                seen.add(name)
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
        """Return ``num_bytes`` bytes of a value from ``start``, or as many as there are."""
        found: object = self._client.getrange(name.encode(_ENCODING), start, start + num_bytes - 1)
        return found if isinstance(found, bytes) else b""


def open_inventory(url: str) -> RedisInventory:
    """Make the inventory of a server's database. Raises as ``open_client``."""
    return RedisInventory(open_client(url))
