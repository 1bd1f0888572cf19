"""A store into host memory that tells lower tiers when it is committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cargohold.offload.manager.base import OffloadKey, StoreHandle


class WatchedStore:
    """Wraps a store handle of host memory. Satisfies ``StoreHandle``.

    Args:
        handle: the handle from host memory's manager.
        on_commit: called with the chunks' keys once they are ready.
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
        """The slot of each chunk."""
        return self._handle.slots

    def commit(self) -> None:
        """Commit the handle, then call ``on_commit``."""
        self._handle.commit()
        self._on_commit(self._handle.keys)

    def forfeit(self) -> None:
        """Forfeit the handle."""
        self._handle.forfeit()
