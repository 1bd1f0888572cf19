"""A manager of host memory that tells the tiers below it what the connector would tell them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cargohold.cache.manager import (
    ForwardingManager,
    OffloadKey,
    OffloadManager,
    SlotReservation,
    StoreOffer,
)
from cargohold.tiers.scheduler_side.lower_tiers import LowerTiers


class TieringManager(ForwardingManager):
    """Manages host memory's chunks, and tells lower tiers which chunks are stored and used. ``READY`` means in host memory.

    Args:
        host: host memory's own manager. Its ``admit_all`` is called, because chunks that it refused would be missing in the
            lower tiers, too.
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
    def num_removed(self) -> Counter[str]:
        """Numbers of chunks that were in host memory and have gone, by reason."""
        return Counter(self.host.num_removed) - Counter(evicted=self.lower.fetches.num_never_there)

    def touch(self, keys: Sequence[OffloadKey]) -> int:
        """Mark chunks as used, in host memory and in the lower tiers. Return how many leading ones host memory has."""
        num_ready = self.host.touch(keys)
        self.lower.note_used(keys)
        return num_ready

    def prepare_stores(self, offers: Sequence[StoreOffer]) -> SlotReservation:
        """Reserve slots in host memory; chunks that are committed there will be written down."""
        return self._watched(self.host.prepare_stores(offers), offers)

    def reset(self) -> bool:
        """Forget all chunks, in lower tiers too. ``False`` while a slot is being filled, or chunks are held for a request.

        Writes to lower tiers do not prevent a reset: on a slow medium they may take long.
        """
        if self.lower.is_fetching or not self.host.reset():
            return False
        self.lower.reset()
        return True

    def _watched(self, handle: SlotReservation, offers: Sequence[StoreOffer]) -> SlotReservation:
        """Wrap a handle so that lower tiers are told when it is committed."""
        if not handle.keys:
            return handle
        parents: dict[OffloadKey, OffloadKey | None] = {}
        for offer in offers:
            parents.update(zip(offer.keys, (offer.parent, *offer.keys), strict=False))

        def end(_: SlotReservation, is_written: bool) -> None:
            if is_written:
                handle.commit()
                self.lower.note_new_in_host(handle.keys, parents)
            else:
                handle.forfeit()

        return SlotReservation(handle.keys, handle.slots, end, handle.deferred)

    def check(self) -> None:
        """Verify every invariant of host memory and of the tiers below."""
        self.host.check()
        self.lower.check()
