"""The shared tier on Redis or Valkey, for small clusters.

A chunk is the value of ``cargohold:<namespace id>:<key>``; the value of ``cargohold:<namespace id>`` describes the namespace.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import redis

from cargohold.cache.manager import OffloadKey
from cargohold.errors import ConfigError, TierError, one_line
from cargohold.tiers.chunk_format import ChunkCodec
from cargohold.tiers.port import StoreOutcome
from cargohold.tiers.stores.base import SharedTier
from cargohold.tiers.stores.options import SharedOptions

logger = logging.getLogger(__name__)

PREFIX: Final = "cargohold:"
_AUTH_VARIABLE: Final = "REDISCLI_AUTH"
"""Environment variable with the password, as ``redis-cli`` has it. A URL's password shows in process lists and vLLM's log."""
_NO_KEYS: Final = tuple(bytes([number]) for number in range(16))
"""Keys that no chunk has, for trial commands: so many that hardly one node of a cluster is responsible for all of them."""
_NO_SUCH_DATABASE: Final = "DB index is out of range"
_WRONG_TYPE: Final = "WRONGTYPE"
"""Start of the answer to a command for strings if the value is a list, a hash or the like."""
_ROOM_FOR_ANSWERS: Final = 1024**2
"""Bytes that an answer may have besides a chunk: short ones to many commands that were sent together, or an error's text."""
_STUMBLES: Final = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
_NO_CHUNK: Final = memoryview(b"")
"""Stands for a value that cannot be a chunk, so that it is treated as a damaged one."""


class TooLongError(redis.exceptions.RedisError):
    """An answer has more bytes than any that we ask for. What is left of it was not read, and the connection is closed."""


class LimitedSocket:
    """A connected socket with limits to whole requests: the answer must arrive in time, to its last byte, and not be too long.

    The timeout of a socket itself begins again with every byte that arrives. So a server that sends slowly enough never exceeds
    it. A request begins here with the first bytes that are sent after an answer.

    Args:
        connected: the socket, plain or with TLS. Its other methods can be called on this object, too.
        limit_s: seconds from the beginning of a request to the end of its answer.
        max_bytes: bytes of the longest answer; ``None`` for no limit.
    """

    def __init__(self, connected: socket.socket, limit_s: float, max_bytes: int | None) -> None:
        self._socket = connected
        self._limit_s = limit_s
        self._max_bytes = max_bytes
        self._is_sending = False
        self._ends_at = 0.0
        self._num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def sendall(self, data: bytes | memoryview) -> None:
        """As for sockets. Raises ``TimeoutError`` when the request's time is over."""
        if not self._is_sending:
            self._is_sending = True
            self._ends_at = time.monotonic() + self._limit_s
            self._num_bytes = 0
        self._allow_rest()
        self._socket.sendall(data)

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        """As for sockets. Raises ``TimeoutError`` when the request's time is over, and ``TooLongError``."""
        self._allow_rest()
        data = self._socket.recv(num_bytes, flags)
        self._note_received(len(data))
        return data

    def recv_into(self, buffer: bytearray) -> int:
        """As for sockets. Raises ``TimeoutError`` when the request's time is over, and ``TooLongError``."""
        self._allow_rest()
        num_bytes = self._socket.recv_into(buffer)
        self._note_received(num_bytes)
        return num_bytes

    def _allow_rest(self) -> None:
        """Let the next call wait for what is left of the request's time."""
        if self._socket.gettimeout() == 0:
            return  # the client only looks whether something has arrived, and must not wait
        rest_s = self._ends_at - time.monotonic()
        if rest_s <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(rest_s)

    def _note_received(self, num_bytes: int) -> None:
        self._is_sending = False
        self._num_bytes += num_bytes
        if self._max_bytes is not None and self._num_bytes > self._max_bytes:
            raise TooLongError(f"the server's answer has more than {self._max_bytes} bytes")


def open_client(config: SharedOptions, max_answer_bytes: int | None = None) -> redis.Redis:
    """Make a client for the server that a URL names. Sends the server nothing.

    Args:
        config: the options with the URL.
        max_answer_bytes: bytes of the longest answer, beyond which commands raise ``TooLongError``; ``None`` for no limit.

    Raises:
        ConfigError: the URL cannot be understood.
    """
    # The package knows only schemes in small letters, and not those of Valkey.
    url = config.scheme.replace("valkey", "redis") + config.url[len(config.scheme) :]
    try:
        client = redis.Redis.from_url(
            url,
            password=os.environ.get(_AUTH_VARIABLE),  # unless the URL has one
            socket_timeout=config.request_s,
            socket_connect_timeout=config.request_s,
            # With protocol 3 the package does not check whether a connection still has the rest of an earlier answer. Then
            # every load on that connection would get another chunk, and delete its own as damaged.
            protocol=2,
        )
        pool = client.connection_pool
        # The URL may have a shorter one.
        limit_s = min(config.request_s, pool.connection_kwargs["socket_timeout"])
        pool.connection_kwargs["redis_connect_func"] = _limiting(limit_s, max_answer_bytes)
        # Made only for its checks: otherwise the package reports an unknown option only at the first connection.
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, redis.exceptions.RedisError) as error:
        raise ConfigError("url", config.shown_url, one_line(error)) from error
    if pool.connection_kwargs.get("decode_responses"):
        raise ConfigError(
            "url", config.shown_url, "decode_responses is not possible, because chunks are bytes and no text"
        )
    return client


@contextmanager
def answers_understood() -> Iterator[None]:
    """Raise ``InvalidResponse``, as the package should, for whatever it stumbles on in an answer that no server gives."""
    try:
        yield
    except _STUMBLES as error:
        raise redis.exceptions.InvalidResponse(f"its answer makes no sense: {one_line(error)}") from error


def is_wrong_type(error: redis.exceptions.ResponseError) -> bool:
    """Whether a server answered that a value is no string, so that it cannot be a chunk."""
    return str(error).startswith(_WRONG_TYPE)


def _limiting(limit_s: float, max_bytes: int | None) -> Callable[[Any], None]:
    """Return a function that the package calls with each new connection, before anything is sent over it."""

    def limit(connection: Any) -> None:
        # The package has no option for this. It reads and writes through this attribute, with TLS and without.
        connection._sock = LimitedSocket(connection._sock, limit_s, max_bytes)  # noqa: SLF001
        connection.on_connect()

    return limit


class RedisTier(SharedTier):
    """A tier that keeps chunks as values of a Redis or Valkey server.

    Args:
        config: the tier's options.
        codec: makes and checks headers.
        chunk_bytes: bytes of the largest chunk.
        num_shards: number of workers. Makes no difference: the server keeps the limit of all its clients.

    Raises:
        ConfigError: the URL cannot be understood, or the server refuses the credentials.
    """

    def __init__(self, config: SharedOptions, codec: ChunkCodec, chunk_bytes: int, num_shards: int = 1) -> None:
        super().__init__(codec, chunk_bytes)
        del num_shards
        self._client = open_client(config, self._max_value_bytes + _ROOM_FOR_ANSWERS)
        self._ttl_s = config.ttl_s
        self._prefix = f"{PREFIX}{codec.namespace.id}".encode()
        self._introduce(config)

    @staticmethod
    def check_place(config: SharedOptions) -> None:
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
        self._client.close()

    def _put(self, key: OffloadKey, value: bytearray) -> StoreOutcome:
        with self._errors():
            try:
                self._client.set(self._name(key), memoryview(value), ex=self._ttl_s)
            except redis.exceptions.OutOfMemoryError:
                return StoreOutcome.REFUSED
        return StoreOutcome.STORED

    def _get(self, key: OffloadKey) -> memoryview | None:
        with self._errors():
            try:
                value = self._client.get(self._name(key))
            except TooLongError:
                return _NO_CHUNK
            except redis.exceptions.ResponseError as error:
                if not is_wrong_type(error):
                    raise
                return _NO_CHUNK
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

    def _introduce(self, config: SharedOptions) -> None:
        """Store the description of the namespace, for ``cargohold cache``; also try whether the server permits all commands.

        Raises ``ConfigError`` if it does not. If the server does not answer, that is only logged.
        """
        try:
            with answers_understood():
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
            logger.warning("shared tier: the server does not answer yet as it should: %s", one_line(error))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with answers_understood():
                yield
        except redis.exceptions.RedisError as error:
            raise TierError(self.name, one_line(error)) from error
