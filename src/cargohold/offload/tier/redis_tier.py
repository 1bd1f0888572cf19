"""The shared tier on Redis or Valkey, for small clusters.

A chunk is the value of ``cargohold:<namespace id>:<key>``; the value of ``cargohold:<namespace id>`` describes the namespace.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import redis

from cargohold.errors import ConfigError, TierError, one_line
from cargohold.offload.manager.base import OffloadKey
from cargohold.offload.tier.codec import ChunkCodec
from cargohold.offload.tier.config import SharedTierConfig
from cargohold.offload.tier.shared import SharedTier

logger = logging.getLogger(__name__)

PREFIX: Final = "cargohold:"
_AUTH_VARIABLE: Final = "REDISCLI_AUTH"
"""Environment variable with the password, as ``redis-cli`` has it. A URL's password shows in process lists and vLLM's log."""
_NO_KEYS: Final = tuple(bytes([number]) for number in range(16))
"""Keys that no chunk has, for trial commands: so many that hardly one node of a cluster is responsible for all of them."""
_NO_SUCH_DATABASE: Final = "DB index is out of range"


def open_client(config: SharedTierConfig) -> redis.Redis:
    """Make a client for the server that a URL names. Sends the server nothing.

    Raises:
        ConfigError: the URL cannot be understood.
    """
    # The package knows only schemes in small letters, and not those of Valkey.
    url = config.scheme.replace("valkey", "redis") + config.url[len(config.scheme) :]
    try:
        client = redis.Redis.from_url(
            url,
            password=os.environ.get(_AUTH_VARIABLE),  # unless the URL has one
            socket_timeout=config.request_timeout_s,
            socket_connect_timeout=config.request_timeout_s,
            # With protocol 3 the package does not check whether a connection still has the rest of an earlier answer. Then
            # every load on that connection would get another chunk, and delete its own as damaged.
            protocol=2,
        )
        pool = client.connection_pool
        # Made only for its checks: otherwise the package reports an unknown option only at the first connection.
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, redis.exceptions.RedisError) as error:
        raise ConfigError("url", config.shown_url, one_line(error)) from error
    if pool.connection_kwargs.get("decode_responses"):
        raise ConfigError(
            "url", config.shown_url, "decode_responses is not possible, because chunks are bytes and no text"
        )
    return client


class RedisTier(SharedTier):
    """A tier that keeps chunks as values of a Redis or Valkey server.

    Args:
        config: the tier's options.
        codec: makes and checks headers.
        chunk_bytes: bytes of the largest chunk.

    Raises:
        ConfigError: the URL cannot be understood, or the server refuses the credentials.
    """

    def __init__(self, config: SharedTierConfig, codec: ChunkCodec, chunk_bytes: int) -> None:
        super().__init__(codec, chunk_bytes)
        self._client = open_client(config)
        self._ttl_s = config.ttl_s
        self._prefix = f"{PREFIX}{codec.namespace.id}".encode()
        self._introduce(config)

    @staticmethod
    def check_place(config: SharedTierConfig) -> None:
        """Raise ``ConfigError`` for an invalid URL or options, without asking the server."""
        open_client(config).close()

    def probe(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Ask for all keys in one round trip."""
        with self._errors():
            return list(map(bool, self._of_each("exists", keys)))

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Delete values; the server frees them in the background."""
        with self._errors():
            self._of_each("unlink", keys)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _put(self, key: OffloadKey, value: bytearray) -> bool:
        with self._errors():
            try:
                self._client.set(self._name(key), memoryview(value), ex=self._ttl_s)
            except redis.exceptions.OutOfMemoryError:
                return False
        return True

    def _get(self, key: OffloadKey) -> memoryview | None:
        with self._errors():
            value = self._client.get(self._name(key))
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

    def _introduce(self, config: SharedTierConfig) -> None:
        """Store the description of the namespace, for ``cargohold cache``; also try whether the server permits all commands.

        Raises ``ConfigError`` if it does not. If the server does not answer, that is only logged.
        """
        try:
            self._client.set(self._prefix, json.dumps(self._codec.namespace.describe()))
            self._client.get(self._prefix)
            self._of_each("exists", _NO_KEYS)
            self._of_each("unlink", _NO_KEYS)
        except (redis.exceptions.AuthenticationError, redis.exceptions.NoPermissionError) as error:
            raise ConfigError("url", config.shown_url, f"the server refuses access: {one_line(error)}") from error
        except redis.exceptions.MovedError as error:
            reason = (
                "the server is one of several of a cluster, and has only some of the keys; name one that has them all"
            )
            raise ConfigError("url", config.shown_url, reason) from error
        except redis.exceptions.RedisError as error:
            if _NO_SUCH_DATABASE in str(error):
                raise ConfigError("url", config.shown_url, "the server has no such database") from error
            logger.warning("shared tier: the server does not answer yet: %s", one_line(error))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except redis.exceptions.RedisError as error:
            raise TierError(self.name, one_line(error)) from error
