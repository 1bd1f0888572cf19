"""Presence of one request's chunks of one group; see ``cargohold.blocks.UnitStates``."""

from __future__ import annotations

from collections.abc import Sequence

from cargohold.blocks import ABSENT, NOT_YET, READY
from cargohold.offload.keys import ChunkKeys
from cargohold.offload.manager.base import OffloadKey, OffloadManager
from cargohold.offload.tiering import UNKNOWN, LowerTiers

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
        keys = self._keys[first:end]
        num_ready = len(self._host.lookup_run(keys))
        return bytes([READY]) * num_ready + self._states(keys[num_ready:], ends_at_absent=True)

    def window(self, first: int, end: int) -> bytes:
        """Every one."""
        return self._states(self._keys[first:end], ends_at_absent=False)

    def _states(self, keys: Sequence[OffloadKey], *, ends_at_absent: bool) -> bytes:
        states = bytearray(self._host.lookup(keys))
        for at, key in enumerate(keys):
            if states[at] == ABSENT:
                states[at] = self._lower.lookup(key)
                if states[at] == UNKNOWN:
                    self._unknown.append(key)
                elif ends_at_absent and states[at] == ABSENT:
                    del states[at:]
                    break
        return bytes(states.translate(_UNKNOWN_IS_NOT_YET))
