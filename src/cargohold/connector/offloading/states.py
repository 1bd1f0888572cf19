"""Presence of one request's chunks in one group; implements ``cargohold.blocks.UnitStates``."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from cargohold.blocks import ABSENT, NOT_YET
from cargohold.cache.keys import ChunkKeys
from cargohold.cache.manager import OffloadKey, OffloadManager
from cargohold.tiers.scheduler_side import UNKNOWN, LowerTiers

_LEAST_WIDTH: Final = 16
_UNKNOWN_IS_NOT_YET = bytes.maketrans(bytes([UNKNOWN]), bytes([NOT_YET]))


class HostStates:
    """Presence in the manager's own tier."""

    def __init__(self, manager: OffloadManager, keys: ChunkKeys) -> None:
        self._manager = manager
        self._keys = keys.keys

    def run(self, first: int, end: int) -> bytes:
        """Return the states of chunks ``[first, end)``, up to the first absent one."""
        return self._manager.lookup_run(self._keys[first:end])

    def window(self, first: int, end: int) -> bytes:
        """Return the states of chunks ``[first, end)``."""
        return self._manager.lookup(self._keys[first:end])


class DeepStates:
    """Presence in host memory or any tier below.

    Args:
        host: the manager of host memory.
        lower: the tiers below.
        keys: the request's chunks.
        unknown: mutated: chunks are added that a lower tier must be asked for first. They count as "not yet".
        skipped: indices of tiers that are not to be asked.
    """

    def __init__(
        self,
        host: OffloadManager,
        lower: LowerTiers,
        keys: ChunkKeys,
        unknown: list[OffloadKey],
        skipped: Container[int] = (),
    ) -> None:
        self._host = host
        self._lower = lower
        self._skipped = skipped
        self._keys = keys.keys
        self._unknown = unknown

    def run(self, first: int, end: int) -> bytes:
        """Return the states of chunks ``[first, end)``, up to the first absent one."""
        states = bytearray()
        # Chunks of one tier mostly lie together, so the width doubles while they do. Where they do not, it is small, so that
        # few chunks are looked up in vain.
        width = _LEAST_WIDTH
        while (at := first + len(states)) < end:
            keys = self._keys[at : min(at + width, end)]
            found = self._host.lookup_run(keys)
            states += found
            if len(found) == len(keys):
                width *= 2
                continue
            rest = keys[len(found) :]
            num_absent = _num_leading(self._host.lookup(rest), ABSENT)
            below = self._ask(rest[:num_absent], up_to_absent=True)
            states += below
            if len(below) < num_absent:
                break
            width = 2 * width if num_absent == len(rest) else _LEAST_WIDTH
        return bytes(states)

    def window(self, first: int, end: int) -> bytes:
        """Return the states of chunks ``[first, end)``."""
        keys = self._keys[first:end]
        states = bytearray(self._host.lookup(keys))
        absent = [at for at, state in enumerate(states) if state == ABSENT]
        for at, state in zip(absent, self._ask([keys[at] for at in absent]), strict=True):
            states[at] = state
        return bytes(states)

    def _ask(self, keys: Sequence[OffloadKey], *, up_to_absent: bool = False) -> bytes:
        """Return the states that the tiers below give for chunks that host memory lacks."""
        states = self._lower.lookup(keys, up_to_absent=up_to_absent, skipped=self._skipped)
        if UNKNOWN in states:
            self._unknown += [key for key, state in zip(keys, states, strict=False) if state == UNKNOWN]
        return states.translate(_UNKNOWN_IS_NOT_YET)


def _num_leading(states: bytes, state: int) -> int:
    return len(states) - len(states.lstrip(bytes([state])))
