"""Publishes KV events over ZeroMQ, in the message formats that KV-aware routers in the field already read.

A message has three frames: topic, sequence number (eight bytes, big-endian), and a msgpack payload::

    [timestamp, [event, ...], data_parallel_rank]

    event: {"type": "BlockStored", "block_hashes": [int, ...], "parent_block_hash": int | None, "token_ids": [int, ...],
            "block_size": int, "lora_id": int | None, "medium": str, "lora_name": str | None,
            "extra_keys": [[str | bytes | [str, int], ...] | None, ...] | None, "group_idx": int,
            "kv_cache_spec_kind": str, "kv_cache_spec_sliding_window": int | None, "locality": "LOCAL" | "REMOTE" | None}
         | {"type": "BlockRemoved", "block_hashes": [int, ...], "medium": str, "group_idx": int,
            "locality": "LOCAL" | "REMOTE" | None}
         | {"type": "AllBlocksCleared"}

This is the format of vLLM's KV event publisher (``vllm.distributed.kv_events``), where hashes are the last 64 bits of the
digests by default. With ``wire="array"``, an event is the list of these values in the same order, as vLLM sent it until 2026.

Numbers begin with the microseconds since 1970, and the first event of all is an ``AllBlocksCleared``. So a follower that knew
an engine at this address before its restart sees a gap, not old numbers again, asks for what it missed, and forgets the rest.

A follower that has missed messages asks for them at a second address; see ``cargohold.engine.event_replay``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from cargohold.engine.event_replay import (
    GONE_AFTER_MS,
    LINGER_MS,
    MAX_RECEIVED_BYTES,
    SEQUENCE_BYTES,
    ReplayBuffer,
    ReplayServer,
    import_zmq,
)
from cargohold.errors import ConfigError
from cargohold.protocol import AllBlocksCleared, AttentionKind, BlockRemoved, BlockStored, KVCacheGroup, KVEvent

WIRE_MAP: Final = "map"
WIRE_ARRAY: Final = "array"
WIRES: Final = (WIRE_MAP, WIRE_ARRAY)
"""How an event is written: a map of names and values, or the values alone."""

MAX_QUEUED_MESSAGES = 10_000
"""Messages queued for each follower, one per step. A step that computes thousands of tokens makes tens of kilobytes."""
_NUMBERS_PER_S: Final = 1_000_000
"""No engine sends so many messages in a second, so the next one at the same address begins with a higher number."""
_ALL_CLEARED: Final = {"type": "AllBlocksCleared"}
_HASH_BYTES = 8
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
        wire: ``map`` or ``array``: how an event is written.
        replay_endpoint: where followers ask for messages that they have missed; ``None`` if they cannot.
        data_parallel_rank: which engine replica this is.
        wall_clock: seconds since the epoch.

    Raises:
        ConfigError: the packages are missing, or an endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        groups: Sequence[KVCacheGroup],
        *,
        topic: str = "",
        wire: str = WIRE_MAP,
        replay_endpoint: str | None = None,
        data_parallel_rank: int = 0,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        zmq = import_zmq("kv_events_endpoint", endpoint)
        self._encode = msgspec.msgpack.Encoder().encode
        self._topic = topic.encode()
        self._as_array = wire == WIRE_ARRAY
        self._rank = data_parallel_rank
        self._groups = groups
        self._wall_clock = wall_clock
        self._first = self._sequence = int(wall_clock() * _NUMBERS_PER_S)
        # Followers within this process have to share its context. For others the publisher has its own, whose end waits until
        # the address is free.
        self._own_context = None if endpoint.startswith("inproc:") else zmq.Context()
        self._socket = (self._own_context or zmq.Context.instance()).socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_RECEIVED_BYTES)
        self._socket.setsockopt(zmq.TCP_MAXRT, GONE_AFTER_MS)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)  # also for a socket that is never closed
        self._buffer: ReplayBuffer | None = None
        self._replays: ReplayServer | None = None
        try:
            self._socket.bind(endpoint)
            if replay_endpoint is not None:
                self._buffer = ReplayBuffer(all_cleared=self._payload([_ALL_CLEARED]))
                self._replays = ReplayServer(replay_endpoint, self._buffer, self._topic)
        except zmq.ZMQError as error:
            self._close(linger_ms=0)
            raise ConfigError("kv_events_endpoint", endpoint, f"it cannot be bound: {error}") from error
        except ConfigError:
            self._close(linger_ms=0)
            raise
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = None if self._replays is None else self._replays.endpoint
        self._dont_wait = zmq.DONTWAIT

    def publish(self, events: Iterable[KVEvent]) -> None:
        """Send events as one message; send nothing if there are none."""
        messages = [_as_message(event, self._groups) for event in events]
        if not messages:
            return
        if self._sequence == self._first:
            messages.insert(0, _ALL_CLEARED)
        payload = self._payload(messages)
        frames = (self._topic, self._sequence.to_bytes(SEQUENCE_BYTES, "big"), payload)
        if self._buffer is not None:
            self._buffer.add(self._sequence, payload)
        self._socket.send_multipart(frames, flags=self._dont_wait)
        self._sequence += 1

    def _payload(self, messages: Sequence[dict[str, Any]]) -> bytes:
        payloads = [list(message.values()) for message in messages] if self._as_array else messages
        return self._encode([self._wall_clock(), payloads, self._rank])

    def close(self) -> None:
        """Close the sockets after queued messages had a moment to go out; the addresses are free then. May be called twice."""
        self._close(linger_ms=LINGER_MS)

    def _close(self, linger_ms: int) -> None:
        if self._replays is not None:
            self._replays.close()
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
            return _ALL_CLEARED


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
