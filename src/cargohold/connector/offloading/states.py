"""Presence of one request's chunks of one group; see ``cargohold.blocks.UnitStates``."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from cargohold.blocks import ABSENT, NOT_YET, READY
from cargohold.offload.keys import ChunkKeys
from cargohold.offload.manager.base import OffloadKey, OffloadManager
from cargohold.offload.tiering import UNKNOWN, LowerTiers

_LEAST_WIDTH: Final = 16
_UNKNOWN_IS_NOT_YET = bytes.maketrans(bytes([UNKNOWN]), bytes([NOT_YET]))


class HostStates:
    """Presence in the manager's own tier."""

    def __init__(self, manager: OffloadManager, keys: ChunkKeys) -> None:
        self._manager = manager
        self._keys = keys.keys

    def run(self, first: int, end: int) -> bytes:
        """Up to the first absent one."""
        return self._manager.lookup_run(self._keys[first:end])

    def window(self, first: int, end: int) -> bytes:
        """Every one."""
        return self._manager.lookup(self._keys[first:end])


class ExpectedStates:
    """Presence in the manager's own tier when what is being stored has arrived.

    Args:
        manager: what the tier holds.
        keys: the request's chunks.
        storing: chunks on their way to the tier.
    """

    def __init__(self, manager: OffloadManager, keys: ChunkKeys, storing: AbstractSet[OffloadKey]) -> None:
        self._manager = manager
        self._keys = keys.keys
        self._storing = storing

    def run(self, first: int, end: int) -> bytes:
        """Every one: behind the first absent one nothing matters, and it is asked for once in a request's life."""
        return self.window(first, end)

    def window(self, first: int, end: int) -> bytes:
        """Every one."""
        keys = self._keys[first:end]
        states = self._manager.lookup(keys)
        return bytes(READY if key in self._storing else at for key, at in zip(keys, states, strict=True))


class DeepStates:
    """Presence in host memory or any tier below.

    Args:
        host: host memory.
        lower: the tiers below.
        keys: the request's chunks.
        unknown: gets the chunks that no tier was asked about: they count as "not yet".
    """

    def __init__(self, host: OffloadManager, lower: LowerTiers, keys: ChunkKeys, unknown: list[OffloadKey]) -> None:
        self._host = host
        self._lower = lower
        self._keys = keys.keys
        self._unknown = unknown

    def run(self, first: int, end: int) -> bytes:
        """Up to the first absent one."""
        states = bytearray()
        # Chunks of one tier mostly lie together. Where they do not, little is looked at in vain.
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
        """Every one."""
        keys = self._keys[first:end]
        states = bytearray(self._host.lookup(keys))
        absent = [at for at, state in enumerate(states) if state == ABSENT]
        for at, state in zip(absent, self._ask([keys[at] for at in absent]), strict=True):
            states[at] = state
        return bytes(states)

    def _ask(self, keys: Sequence[OffloadKey], *, up_to_absent: bool = False) -> bytes:
        """What the tiers below say of chunks that host memory lacks."""
        states = self._lower.lookup(keys, up_to_absent=up_to_absent)
        if UNKNOWN in states:
            self._unknown += [key for key, state in zip(keys, states, strict=False) if state == UNKNOWN]
        return states.translate(_UNKNOWN_IS_NOT_YET)


def _num_leading(states: bytes, state: int) -> int:
    return len(states) - len(states.lstrip(bytes([state])))
