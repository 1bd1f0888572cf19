"""Messages with KV events, kept for followers that have missed some, and sent again to those that ask.

A follower asks with a DEALER socket; the request is an empty frame and the first sequence number that it wants, in eight bytes.
It gets each message that is still kept, as an empty frame, topic, number and payload, and then an end mark: empty topic and
payload, and minus one for the number. This is vLLM's protocol. If messages before these are kept no more, an
``AllBlocksCleared`` comes first: a follower that missed removals must not rely on what it knows.

Followers take turns, some messages each, and none is waited for: one that reads slowly gets its messages as it takes them, and
one that takes none for a while is given up. So its answer costs others nothing, and no more memory than a few messages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from cargohold.errors import ConfigError, SparingLog
from cargohold.protocol import Clock

logger = logging.getLogger(__name__)

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
