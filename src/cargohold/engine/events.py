"""Publishes KV events over ZeroMQ, in the message format that KV-aware routers in the field already read.

A message has three frames: topic, sequence number (eight bytes, big-endian, from 0), and a msgpack payload::

    [timestamp, [event, ...], data_parallel_rank]

    event: {"type": "BlockStored", "block_hashes": [int, ...], "parent_block_hash": int | None, "token_ids": [int, ...],
            "block_size": int, "lora_id": int | None, "medium": str, "lora_name": str | None,
            "extra_keys": [[str | bytes | [str, int], ...] | None, ...] | None, "group_idx": int,
            "kv_cache_spec_kind": str, "kv_cache_spec_sliding_window": int | None, "locality": "LOCAL" | "REMOTE" | None}
         | {"type": "BlockRemoved", "block_hashes": [int, ...], "medium": str, "group_idx": int,
            "locality": "LOCAL" | "REMOTE" | None}
         | {"type": "AllBlocksCleared"}

This is the format of vLLM's KV event publisher (``vllm.distributed.kv_events``), where hashes are the last 64 bits of the
digests by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from cargohold.errors import ConfigError
from cargohold.protocol import AllBlocksCleared, AttentionKind, BlockRemoved, BlockStored, KVCacheGroup, KVEvent

MAX_QUEUED_MESSAGES = 10_000
"""Messages queued for each follower, one per step. A step that computes thousands of tokens makes tens of kilobytes."""
_MAX_RECEIVED_BYTES = 4096
"""Largest message accepted. Followers send only topics; without a limit, anybody who connects could fill our memory."""
_HASH_BYTES = 8
_LINGER_MS = 200
_KINDS: Final = {
    AttentionKind.FULL: "full_attention",
    AttentionKind.SLIDING_WINDOW: "sliding_window",
    AttentionKind.CHUNKED_LOCAL: "chunked_local_attention",
    AttentionKind.RECURRENT: "mamba",
}
"""Names of kinds in events. By them, routers know which groups' events tell how much of a prefix is there."""


class ZmqEventPublisher:
    """A ZeroMQ PUB socket. Sending never blocks: what a slow subscriber has no room for is dropped, and it sees the gap.

    Args:
        endpoint: where to bind, such as ``tcp://*:5557`` or ``ipc:///run/kv-events``.
        groups: the KV-cache groups that events are of.
        topic: first frame of every message.
        data_parallel_rank: which engine replica this is.
        wall_clock: seconds since the epoch.

    Raises:
        ConfigError: the packages are missing, or the endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        groups: Sequence[KVCacheGroup],
        *,
        topic: str = "",
        data_parallel_rank: int = 0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        try:
            import zmq  # noqa: PLC0415  # an optional extra
        except ImportError as error:
            raise ConfigError(
                "kv_events_endpoint", endpoint, "install what it needs: pip install 'cargohold[events]'"
            ) from error
        self._encode = msgspec.msgpack.Encoder().encode
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._groups = groups
        self._wall_clock = wall_clock
        self._sequence = 0
        # Followers within this process have to share its context. For others the publisher has its own, whose end waits until
        # the address is free.
        self._own_context = None if endpoint.startswith("inproc:") else zmq.Context[zmq.Socket[bytes]]()
        self._socket: zmq.Socket[bytes] = (self._own_context or zmq.Context.instance()).socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_RECEIVED_BYTES)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)  # also for a socket that nobody closes
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._close(linger_ms=0)
            raise ConfigError("kv_events_endpoint", endpoint, f"it cannot be bound: {error}") from error
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._dont_wait = zmq.DONTWAIT

    def publish(self, events: Iterable[KVEvent]) -> None:
        """Send events as one message; send nothing if there are none."""
        messages = [_as_message(event, self._groups) for event in events]
        if messages:
            payload = self._encode([self._wall_clock(), messages, self._rank])
            frames = (self._topic, self._sequence.to_bytes(8, "big"), payload)
            self._socket.send_multipart(frames, flags=self._dont_wait)
            self._sequence += 1

    def close(self) -> None:
        """Close the socket after giving queued messages a moment to go out; the address is free then. May be called twice."""
        self._close(linger_ms=_LINGER_MS)

    def _close(self, linger_ms: int) -> None:
        self._socket.close(linger=linger_ms)
        if self._own_context is not None:
            self._own_context.term()


def _as_message(event: KVEvent, groups: Sequence[KVCacheGroup]) -> dict[str, Any]:
    match event:
        case BlockStored():
            group = groups[event.group]
            is_window = group.kind is AttentionKind.SLIDING_WINDOW
            return {
                "type": "BlockStored",
                "block_hashes": [_hash_number(block_hash) for block_hash in event.block_hashes],
                "parent_block_hash": None if event.parent_block_hash is None else _hash_number(event.parent_block_hash),
                "token_ids": list(event.token_ids),
                "block_size": event.block_tokens,
                "lora_id": None if event.adapter is None else event.adapter.number,
                "medium": event.medium,
                "lora_name": None if event.adapter is None else event.adapter.name,
                "extra_keys": [keys or None for keys in event.extra_keys] or None,
                "group_idx": event.group,
                "kv_cache_spec_kind": _KINDS[group.kind],
                "kv_cache_spec_sliding_window": group.window_tokens if is_window else None,
                "locality": event.locality,
            }
        case BlockRemoved():
            return {
                "type": "BlockRemoved",
                "block_hashes": [_hash_number(block_hash) for block_hash in event.block_hashes],
                "medium": event.medium,
                "group_idx": event.group,
                "locality": event.locality,
            }
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _hash_number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-_HASH_BYTES:], "big")


# --- keeps KV events until they are taken -----------------------------------------------------------------------------

MAX_KEPT_EVENTS: Final = 100_000
"""About 80 MB. One step that computes long prompts makes hundreds of events."""


class KeptEvents:
    """Keeps events up to a limit, because a program may have stopped taking them.

    When there are too many, all of them are dropped. The events taken next then begin with one for each of their media, which
    says that it was cleared. So an index of the events may lack prefixes that a medium holds, but never has others.

    Args:
        limit: most events to keep.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: list[KVEvent] = []
        self._dropped_media: set[str] = set()

    def add(self, events: Sequence[KVEvent]) -> None:
        """Add the events of a step."""
        self._events += events
        if len(self._events) > self._limit:
            self._dropped_media.update(event.medium for event in self._events)
            self._events = []

    def take(self) -> list[KVEvent]:
        """Events since the last call, in order."""
        events = [*map(AllBlocksCleared, sorted(self._dropped_media)), *self._events]
        self._events = []
        self._dropped_media.clear()
        return events
