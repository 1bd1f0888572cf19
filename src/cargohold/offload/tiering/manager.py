"""The manager of host memory with tiers below it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cargohold.offload.manager.base import (
    OffloadKey,
    OffloadManager,
    StoreHandle,
    StoreOffer,
)
from cargohold.offload.manager.forwarding import ForwardingManager
from cargohold.offload.tiering.lower_tiers import LowerTiers
from cargohold.offload.tiering.store_handle import WatchedStore


class TieringManager(ForwardingManager):
    """Host memory's chunks: what this manager calls ready is there. Lower tiers hear of what is stored and used.

    Args:
        host: host memory's own manager; from now on it refuses nothing, as what it refused would be missing below, too.
        lower: the tiers below it, made for the same ``host``.
    """

    def __init__(self, host: OffloadManager, lower: LowerTiers) -> None:
        super().__init__(host)
        host.admit_all()
        self.lower = lower

    @property
    def host(self) -> OffloadManager:
        """Host memory's own manager."""
        return self.inner

    @property
    def generation(self) -> int:
        """Changes also when something becomes known of a lower tier, or somebody has waited long enough."""
        return self.host.generation + self.lower.num_changes

    @property
    def num_removed(self) -> int:
        """Chunks that were in host memory and have gone."""
        return self.host.num_removed - self.lower.num_never_there

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """A request uses these chunks."""
        self.host.touch(keys)
        self.lower.note_used(keys)

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> StoreHandle:
        """Reserve slots in host memory; what is stored there will go further down."""
        return self._watched(self.host.prepare_stores(offers), offers)

    def reset(self) -> bool:
        """Forget everything, lower tiers included; ``False`` while a slot is being filled, or chunks are held for somebody.

        What is being written down does not stand in the way: a slow medium may take long for that.
        """
        if self.lower.is_bringing_up or not self.host.reset():
            return False
        self.lower.reset()
        return True

    def _watched(self, handle: StoreHandle, offers: Sequence[StoreOffer]) -> StoreHandle:
        """The handle, which lower tiers hear of when it is committed."""
        if not handle.keys:
            return handle
        parents: dict[OffloadKey, OffloadKey | None] = {}
        for keys, parent in offers:
            parents.update(zip(keys, (parent, *keys), strict=False))
        return WatchedStore(handle, partial(self.lower.note_stored, parents=parents))

    def check(self) -> None:
        """Verify every invariant of host memory and of the tiers below."""
        self.host.check()
        self.lower.check()
