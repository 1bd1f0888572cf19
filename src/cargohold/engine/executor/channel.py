"""Frames of bytes between two processes, with a deadline on everything."""

from __future__ import annotations

import os
import socket
import struct
import time
import weakref
from typing import Final

_LENGTH = struct.Struct("!Q")

_ends: Final[weakref.WeakSet[Channel]] = weakref.WeakSet()
"""The ends that this process uses, or hands over to another one."""


def _let_go_as_child() -> None:
    """Close all ends in a forked child, which inherits them: else nobody would learn that its parent is gone."""
    for end in list(_ends):
        end.close()
    _ends.clear()


os.register_at_fork(after_in_child=_let_go_as_child)


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end of a stream socket that carries frames. A child that is forked from its process cannot use it.

    Args:
        sock: a connected stream socket; owned by the channel from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        _ends.add(self)

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends, private to this process and those it hands one to."""
        left, right = socket.socketpair()
        return cls(left), cls(right)

    def __reduce__(self) -> tuple[type[Channel], tuple[socket.socket]]:
        return Channel, (self._socket,)  # multiprocessing hands sockets over to the processes it starts

    def fileno(self) -> int:
        """The socket's descriptor, for ``multiprocessing.connection.wait``."""
        return self._socket.fileno()

    def send(self, frame: bytes, timeout_s: float | None = None) -> None:
        """Send a frame. Raises ``TimeoutError`` if the other end does not take it in time, ``ChannelClosedError`` if gone."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(_LENGTH.pack(len(frame)))
            self._socket.sendall(frame)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosedError("the other end is gone") from error

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for a frame. Raises like ``send``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        return self._read(length, deadline)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self, length: int, deadline: float | None) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            # A socket's timeout begins again with every piece.
            self._socket.settimeout(None if deadline is None else _time_until(deadline))
            try:
                count = self._socket.recv_into(view)
            except ConnectionResetError as error:
                raise ChannelClosedError("the other end is gone") from error
            if count == 0:
                raise ChannelClosedError("the other end is gone")
            view = view[count:]
        return bytes(data)


def _time_until(deadline: float) -> float:
    """Seconds until a time on the monotonic clock. Raises ``TimeoutError`` if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
