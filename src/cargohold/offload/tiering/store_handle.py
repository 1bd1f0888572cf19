"""A store into host memory whose end lower tiers want to know of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cargohold.offload.manager.base import OffloadKey, StoreHandle


class WatchedStore:
    """Satisfies ``StoreHandle``.

    Args:
        handle: what host memory handed out.
        on_commit: told after the chunks are ready.
    """

    def __init__(self, handle: StoreHandle, on_commit: Callable[[Sequence[OffloadKey]], None]) -> None:
        self._handle = handle
        self._on_commit = on_commit

    @property
    def keys(self) -> Sequence[OffloadKey]:
        """The chunks to store."""
        return self._handle.keys

    @property
    def deferred(self) -> Sequence[OffloadKey]:
        """The chunks to offer again."""
        return self._handle.deferred

    @property
    def slots(self) -> Sequence[int]:
        """Where each goes."""
        return self._handle.slots

    def commit(self) -> None:
        """The bytes are there."""
        self._handle.commit()
        self._on_commit(self._handle.keys)

    def forfeit(self) -> None:
        """The bytes are not there."""
        self._handle.forfeit()
