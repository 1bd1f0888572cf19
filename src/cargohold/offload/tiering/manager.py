"""The manager of host memory with tiers below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from cargohold.offload.manager.base import (
    CannotStore,
    LoadHandle,
    ManagerEvent,
    OffloadKey,
    OffloadManager,
    StoreHandle,
)
from cargohold.offload.tiering.lower_tiers import LowerTiers
from cargohold.offload.tiering.store_handle import WatchedStore


class TieringManager(OffloadManager):
    """Host memory's chunks: what this manager calls ready is there. Lower tiers hear of what is stored and used.

    Args:
        host: host memory's own manager.
        lower: the tiers below it, made for the same ``host``.
        stores_chains: whether chunks that are stored together follow each other in one prefix.
    """

    def __init__(self, host: OffloadManager, lower: LowerTiers, *, stores_chains: bool = True) -> None:
        self.capacity = host.capacity
        self.host = host
        self.lower = lower
        self._stores_chains = stores_chains

    @property
    def generation(self) -> int:
        """Changes also when something becomes known of a lower tier, or somebody has waited long enough."""
        return self.host.generation + self.lower.num_changes

    def lookup(self, keys: Sequence[OffloadKey]) -> bytes:
        """Presence in host memory."""
        return self.host.lookup(keys)

    def lookup_run(self, keys: Sequence[OffloadKey]) -> bytes:
        """Presence in host memory up to the first absent key."""
        return self.host.lookup_run(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """A request uses these chunks."""
        self.host.touch(keys)
        self.lower.note_used(keys)

    def prepare_load(self, keys: Sequence[OffloadKey]) -> LoadHandle:
        """Pin chunks in host memory."""
        return self.host.prepare_load(keys)

    def prepare_store(self, keys: Sequence[OffloadKey], parent: OffloadKey | None = None) -> StoreHandle | CannotStore:
        """Reserve slots in host memory; what is stored there will go further down."""
        handle = self.host.prepare_store(keys, parent)
        if isinstance(handle, CannotStore) or not handle.keys:
            return handle
        parents: dict[OffloadKey, OffloadKey | None] = dict.fromkeys(keys)
        if self._stores_chains:
            parents = dict(zip(keys, (parent, *keys), strict=False))
        return WatchedStore(handle, partial(self.lower.note_stored, parents=parents))

    def remove(self, keys: Iterable[OffloadKey]) -> None:
        """Forget chunks in host memory."""
        self.host.remove(keys)

    def reset(self) -> bool:
        """Forget everything, lower tiers included; ``False`` while a handle is out or a job of theirs is in flight."""
        if not self.lower.is_idle or not self.host.reset():
            return False
        self.lower.reset()
        return True

    def take_events(self) -> list[ManagerEvent]:
        """Host memory's."""
        return self.host.take_events()

    @property
    def num_ready(self) -> int:
        """Host memory's."""
        return self.host.num_ready

    @property
    def num_writing(self) -> int:
        """Host memory's, what is being brought up included."""
        return self.host.num_writing

    @property
    def num_removed(self) -> int:
        """Host memory's."""
        return self.host.num_removed

    @property
    def num_leaving(self) -> int:
        """Host memory's."""
        return self.host.num_leaving

    @property
    def num_pins(self) -> int:
        """Host memory's, what is being written down included."""
        return self.host.num_pins

    def check(self) -> None:
        """Verify every invariant of host memory and of the tiers below."""
        self.host.check()
        self.lower.check()
