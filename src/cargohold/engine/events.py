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

A follower that has missed messages asks for them at a second address; see ``ReplayServer``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec

from cargohold.errors import ConfigError, SparingLog
from cargohold.protocol import AllBlocksCleared, AttentionKind, BlockRemoved, BlockStored, Clock, KVCacheGroup, KVEvent

logger = logging.getLogger(__name__)

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


# --- messages that followers have missed -------------------------------------------------------------------------------


MAX_RECEIVED_BYTES: Final = 4096
"""Largest message accepted. Followers send only topics and numbers; without a limit, anyone could fill our memory."""
MAX_REPLAYED_MESSAGES: Final = 10_000
MAX_REPLAYED_BYTES: Final = 64 * 1024**2
"""Most messages kept for followers that have missed some, and most bytes of them."""
SEQUENCE_BYTES: Final = 8
LINGER_MS: Final = 200
GONE_AFTER_MS: Final = 30_000
"""The system closes a connection whose other end takes nothing for so long, and what was queued for it is freed."""
_MAX_FOLLOWERS: Final = 64
"""Followers that are answered at the same time; others wait until one has its answer, or is given up."""
_MAX_QUEUED: Final = 16
"""Messages queued for each follower; the others wait in the buffer, where there is one of each for all."""
_MAX_UNREAD: Final = 4
"""Requests of one follower that wait to be read."""
_SEND_BUFFER_BYTES: Final = 64 * 1024
_PATIENCE_S: Final = 5.0
"""How long a follower may take nothing before it is given up."""
_PAUSE_S: Final = 0.005
"""Pause after a turn in which no follower took anything."""
_END_OF_REPLAY: Final = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)


class ReplayBuffer:
    """The latest messages, for followers that have missed some. Thread-safe.

    Args:
        max_messages: maximum number of messages kept.
        max_bytes: maximum number of bytes kept in their payloads.
        all_cleared: payload of a message that stands for those that are kept no more.
    """

    def __init__(
        self, max_messages: int = MAX_REPLAYED_MESSAGES, max_bytes: int = MAX_REPLAYED_BYTES, all_cleared: bytes = b""
    ) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._messages: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._all_cleared = all_cleared
        # Messages with lower numbers than this were dropped, if there were any.
        self._num_dropped_to = 0
        self.next_sequence = 0

    def add(self, sequence: int, payload: bytes) -> None:
        """Keep a message, whose number follows that of the one before; drop the oldest ones if there are too many."""
        with self._lock:
            self._messages.append((sequence, payload))
            self.next_sequence = sequence + 1
            self._num_bytes += len(payload)
            while len(self._messages) > self._max_messages or self._num_bytes > self._max_bytes:
                dropped, its_payload = self._messages.popleft()
                self._num_dropped_to = dropped + 1
                self._num_bytes -= len(its_payload)

    def since(self, first: int, most: int | None = None) -> list[tuple[int, bytes]]:
        """Return the messages from sequence number ``first`` on, at most ``most``; ``all_cleared`` first if some are gone."""
        with self._lock:
            # The number may be any of eight bytes.
            start = min(max(0, first - self._messages[0][0]), len(self._messages)) if self._messages else 0
            missed = list(islice(self._messages, start, None if most is None else start + most))
            if first < self._num_dropped_to:
                missed.insert(0, (self._num_dropped_to - 1, self._all_cleared))
            return missed


class ReplayServer:
    """Answers followers that have missed messages, in a thread of its own.

    A follower asks with a DEALER socket; the request is an empty frame and the first sequence number that it wants, in eight
    bytes. It gets each message that is still kept, as an empty frame, topic, number and payload, and then an end mark: empty
    topic and payload, and minus one for the number. This is vLLM's protocol. If messages before these are kept no more, an
    ``AllBlocksCleared`` comes first: a follower that missed removals must not rely on what it knows.

    Followers take turns, some messages each, and none is waited for: one that reads slowly gets its messages as it takes them,
    and one that takes none for a while is given up. So its answer costs others nothing, and no more memory than a few messages.

    Args:
        endpoint: where to bind, such as ``tcp://*:5558`` or ``ipc:///run/kv-replay``.
        buffer: the messages.
        topic: first frame of every message.
        patience_s: how long a follower may take nothing before it is given up.

    Raises:
        ConfigError: the endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, buffer: ReplayBuffer, topic: bytes, *, patience_s: float = _PATIENCE_S) -> None:
        zmq = import_zmq("kv_events_replay_endpoint", endpoint)
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.MAXMSGSIZE, MAX_RECEIVED_BYTES),
            (zmq.LINGER, LINGER_MS),
            (zmq.SNDHWM, _MAX_QUEUED),
            (zmq.RCVHWM, _MAX_UNREAD),
            (zmq.SNDBUF, _SEND_BUFFER_BYTES),
            (zmq.TCP_MAXRT, GONE_AFTER_MS),
            (zmq.ROUTER_MANDATORY, 1),  # says when a follower is gone, or has no room
        ):
            socket.setsockopt(option, value)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            self._context.term()
            raise ConfigError("kv_events_replay_endpoint", endpoint, f"it cannot be bound: {error}") from error
        self.endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        answers = _Answers(zmq, socket, buffer, topic, patience_s)
        self._thread = threading.Thread(target=answers.run, name="cargohold-kv-replay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the socket; the address is free then. May be called twice."""
        self._context.term()  # ends the wait of the thread, which closes the socket
        self._thread.join()


@dataclass(slots=True)
class _Answer:
    """An answer to one follower.

    Attributes:
        first: the next message to send.
        end: number after that of the last one: later ones go to all followers.
        moved: when it last took something.
        is_ended: whether the end mark was sent, too.
    """

    first: int
    end: int
    moved: float
    is_ended: bool = False


class _Answers:
    """The answers that are being given, in turns.

    Args:
        zmq: the module.
        socket: a ROUTER socket; belongs to the thread that calls ``run``.
        buffer: the messages.
        topic: first frame of every message.
        patience_s: how long a follower may take nothing.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        zmq: Any,
        socket: Any,
        buffer: ReplayBuffer,
        topic: bytes,
        patience_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._zmq = zmq
        self._socket = socket
        self._buffer = buffer
        self._topic = topic
        self._patience_s = patience_s
        self._clock = clock
        self._answers: dict[bytes, _Answer] = {}
        self._log = SparingLog(logger)  # followers decide how many lines there are

    def run(self) -> None:
        """Answer until the socket's context is terminated."""
        with self._socket:
            try:
                while True:
                    self._take_requests()
                    if self._answers and not self._take_turns():
                        time.sleep(_PAUSE_S)
            except self._zmq.ContextTerminated:
                return

    def _take_requests(self) -> None:
        """Begin to answer followers; if there is nothing else to do, wait for one."""
        while len(self._answers) < _MAX_FOLLOWERS and self._socket.poll(0 if self._answers else None):
            follower, *request = self._socket.recv_multipart()
            if len(request) == 2 and not request[0] and len(request[1]) == SEQUENCE_BYTES:
                first, end = int.from_bytes(request[1], "big"), self._buffer.next_sequence
                self._answers[follower] = _Answer(first, end, self._clock())  # asked again, it starts over
            # Anything else does not come from a follower.

    def _take_turns(self) -> bool:
        """Send each follower what it has room for. Returns whether any had."""
        has_moved, now = False, self._clock()
        for follower, answer in list(self._answers.items()):
            try:
                moved = self._send(follower, answer)
            except self._zmq.ContextTerminated:
                raise
            except self._zmq.ZMQError:  # it has gone
                del self._answers[follower]
                continue
            if answer.is_ended:
                del self._answers[follower]
            elif moved:
                answer.moved = now
            elif now - answer.moved > self._patience_s:
                self._log.warning("kv events: a follower that missed some does not read the answer: it is dropped")
                del self._answers[follower]
            has_moved |= moved
        return has_moved

    def _send(self, follower: bytes, answer: _Answer) -> bool:
        """Send the next messages, or the end mark if there are no more; whether there was room for any."""
        first = answer.first
        messages = [one for one in self._buffer.since(first, _MAX_QUEUED) if one[0] < answer.end]
        try:
            for sequence, payload in messages:
                self._send_one(follower, self._topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload)
                answer.first = sequence + 1
            if not messages:
                self._send_one(follower, b"", _END_OF_REPLAY, b"")
                answer.is_ended = True
        except self._zmq.Again:  # it has no room
            return answer.first > first
        return True

    def _send_one(self, follower: bytes, topic: bytes, sequence: bytes, payload: bytes) -> None:
        self._socket.send_multipart((follower, b"", topic, sequence, payload), flags=self._zmq.DONTWAIT)


def import_zmq(key: str, value: object) -> Any:
    """Return the module ``zmq``. Raises ``ConfigError`` that names the option if it is not installed."""
    try:
        import zmq  # noqa: PLC0415  # an optional extra
    except ImportError as error:
        raise ConfigError(key, value, "install what it needs: pip install 'cargohold[events]'") from error
    return zmq
