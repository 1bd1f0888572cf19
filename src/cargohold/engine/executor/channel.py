"""Frames of bytes between two processes, with a deadline on everything."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("!Q")


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end of a stream socket that carries frames.

    Args:
        sock: a connected stream socket; owned by the channel from now on.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends, private to this process and those it hands one to."""
        left, right = socket.socketpair()
        return cls(left), cls(right)

    def __getstate__(self) -> dict[str, socket.socket]:
        return {"_socket": self._socket}  # multiprocessing hands sockets over to the processes it starts

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
        self._socket.settimeout(timeout_s)
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except ConnectionResetError as error:
                raise ChannelClosedError("the other end is gone") from error
            if count == 0:
                raise ChannelClosedError("the other end is gone")
            view = view[count:]
        return bytes(data)
