"""Helpers of several tests of the offloading connector."""

from __future__ import annotations

from typing import Any

from cargohold.blocks import extend_hashes, root_hash
from cargohold.cache.manager import offload_key
from cargohold.lab.simulation import SimulatedEngine
from cargohold.protocol import HintEnd

HOLDS: dict[str, dict[str, Any]] = {
    "touch": {},
    "lock": {"with_context": False},
    "request": {"with_context": False, "applies_locks": False},
}


def keys_of(tokens: list[int], num_chunks: int, blocks_per_chunk: int = 1) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, 4, root_hash())
    return [offload_key(block_hash, 0) for block_hash in hashes[blocks_per_chunk - 1 :: blocks_per_chunk]][:num_chunks]


def broken_rule(engine: SimulatedEngine) -> str:
    """The rule for which the connector was turned off, if it was."""
    broken = engine.scheduler.connector.broken
    return "" if broken is None else broken.rule


def ends(engine: SimulatedEngine) -> list[HintEnd]:
    """How hints have ended since the last call."""
    return [event.end for event in engine.scheduler.connector.take_hint_events()]
