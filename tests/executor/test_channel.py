"""Frames between processes."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from threading import Thread

import pytest

from cargohold.engine.ranks.processes import Channel


def test_a_frame_has_one_deadline_however_many_pieces_it_comes_in() -> None:
    """Found by reading: each piece began the time again."""
    ours, theirs = socket.socketpair()

    def drip() -> None:
        with suppress(OSError):  # until nobody listens
            theirs.sendall((100).to_bytes(8, "big"))
            for _ in range(100):
                theirs.sendall(b"x")
                time.sleep(0.05)

    channel, sender = Channel(ours), Thread(target=drip)
    sender.start()
    try:
        with pytest.raises(TimeoutError):
            channel.receive(0.5)
    finally:
        channel.close()
        sender.join()
        theirs.close()
