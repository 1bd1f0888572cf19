"""A router's index: follows the KV events of replicas, and knows which has how much of a prompt, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

WEIGHTS = {"GPU": 1.0, "CPU": 0.8, "STORAGE": 0.5}
"""What a token is worth that is on the device, in host memory, on disk: the part of computing it that it saves."""
_EVENTS_WITHIN_MS = 40


@dataclass
class Replica:
    """What the router knows of one replica.

    Attributes:
        socket: where its events come in.
        children: by the hash of a block (``None`` at the start of a prompt), the blocks that follow it: tokens to hash.
        media: by hash, the media that hold the block.
        block_tokens: tokens per block.
        num_tokens: tokens of all prompts that it was given.
    """

    socket: zmq.Socket[bytes]
    children: dict[int | None, dict[tuple[int, ...], int]] = field(default_factory=dict)
    media: dict[int, set[str]] = field(default_factory=dict)
    block_tokens: int = 0
    num_tokens: int = 0

    def follow(self) -> None:
        """Take in the events that have come, and those that come in the next moment."""
        while self.socket.poll(_EVENTS_WITHIN_MS):
            _, _, payload = self.socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                self.block_tokens = size = event["block_size"]
                parent = event["parent_block_hash"]
                for at, block in enumerate(event["block_hashes"]):
                    tokens = tuple(event["token_ids"][at * size : (at + 1) * size])
                    self.children.setdefault(parent, {})[tokens] = block
                    self.media.setdefault(block, set()).add(event["medium"])
                    parent = block
            case "BlockRemoved":
                for block in event["block_hashes"]:
                    self.media.get(block, set()).discard(event["medium"])
            case "AllBlocksCleared":
                self.children.clear()
                self.media.clear()

    def found(self, token_ids: Sequence[int]) -> dict[str, int]:
        """Return how many leading tokens of a prompt it has, by the fastest medium that has them."""
        found = dict.fromkeys(WEIGHTS, 0)
        block: int | None = None
        for start in range(0, len(token_ids) - self.block_tokens + 1, self.block_tokens or len(token_ids) + 1):
            block = self.children.get(block, {}).get(tuple(token_ids[start : start + self.block_tokens]))
            medium = None if block is None else next((name for name in WEIGHTS if name in self.media[block]), None)
            if medium is None:
                break
            found[medium] += self.block_tokens
        return found


class Router:
    """Sends each prompt to the replica that saves most by what it has; else to the one that was given least so far.

    Args:
        endpoints: where the replicas publish their events.
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._context = zmq.Context()
        self.replicas = []
        for endpoint in endpoints:
            socket = self._context.socket(zmq.SUB)
            socket.subscribe(b"")
            socket.connect(endpoint)
            self.replicas.append(Replica(socket))

    def choose(self, token_ids: Sequence[int]) -> int:
        """Return the number of the replica that gets a prompt."""
        for replica in self.replicas:
            replica.follow()
        saved = [
            sum(WEIGHTS[medium] * count for medium, count in replica.found(token_ids).items())
            for replica in self.replicas
        ]
        best = max(range(len(saved)), key=lambda at: (saved[at], -self.replicas[at].num_tokens))
        self.replicas[best].num_tokens += len(token_ids)
        return best

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)
