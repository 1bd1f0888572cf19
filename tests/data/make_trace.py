"""Makes ``made_trace.jsonl``, a small block trace in which every policy has something to get right.

Four kinds of traffic are mixed: chats that grow turn by turn behind one of a few system prompts, a coding agent that sends its
whole context with every step and forks it now and then, long documents that are asked about twice or never again, and prompts
that share nothing. Run it with ``python -m tests.data.make_trace``; the same seed gives the same bytes.
"""

from __future__ import annotations

import json
import random
from itertools import count
from pathlib import Path

TRACE = Path(__file__).with_name("made_trace.jsonl")
BLOCK_TOKENS = 64
NUM_REQUESTS = 1_400


class Traffic:
    """Makes prompts as lists of block ids. An id stands for a block and all blocks before it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._ids = count()
        self._systems = [self._new(length) for length in (3, 5, 8)]
        self._chats: list[list[int]] = []
        self._agent = self._new(12)
        self._documents: list[list[int]] = []

    def next_prompt(self) -> list[int]:
        """The next request's blocks."""
        (make,) = self._random.choices((self._chat, self._step, self._question, self._new_prompt), (9, 6, 2, 3))
        return make()

    def _chat(self) -> list[int]:
        turns = self._chats
        if not turns or self._random.random() < 0.25:
            turns.append([*self._random.choice(self._systems)])
        # Recent conversations go on more often than old ones.
        at = max(0, len(turns) - 1 - int(self._random.expovariate(0.2)))
        chat = turns[at]
        chat += self._new(self._random.randint(1, 3))
        return chat

    def _step(self) -> list[int]:
        if self._random.random() < 0.04:
            self._agent = self._agent[: self._random.randint(4, len(self._agent))]
        self._agent += self._new(self._random.randint(0, 2))
        if len(self._agent) > 60:
            self._agent = [*self._agent[:12], *self._new(4)]
        return self._agent

    def _question(self) -> list[int]:
        if not self._documents or self._random.random() < 0.6:
            self._documents.append(self._new(self._random.randint(20, 50)))
        return [*self._random.choice(self._documents[-6:]), *self._new(1)]

    def _new_prompt(self) -> list[int]:
        return self._new(self._random.randint(1, 12))

    def _new(self, num_blocks: int) -> list[int]:
        return [next(self._ids) for _ in range(num_blocks)]


def make_trace(seed: int = 1) -> str:
    """The trace's lines."""
    generator, traffic, lines, now_ms = random.Random(seed), Traffic(seed), [], 0
    for _ in range(NUM_REQUESTS):
        now_ms += generator.randint(1, 2_000)
        blocks = traffic.next_prompt()
        request = {
            "timestamp_ms": now_ms,
            "input_length": len(blocks) * BLOCK_TOKENS - generator.randrange(BLOCK_TOKENS),
            "output_length": generator.randint(8, 120),
            "hash_ids": blocks,
        }
        lines.append(json.dumps(request, separators=(",", ":")) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    TRACE.write_text(make_trace(), encoding="utf-8")
