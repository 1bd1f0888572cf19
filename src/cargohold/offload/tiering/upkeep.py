"""Keeps chunks in lower tiers that host memory gives back: the tiers see no use of them, and would evict them."""

from __future__ import annotations

from collections.abc import Sequence

from cargohold.offload.manager.base import OffloadKey
from cargohold.offload.tier.config import WriteMode
from cargohold.offload.tiering.lower_tier import LowerTier, parents_in
from cargohold.offload.tiering.task import ProbeTask, TouchTask
from cargohold.offload.tiering.tasks import TaskTable

LOOK_AFTER_S = 600.0
"""Chunks in use are probed in each tier once in this many seconds, and written again where they are gone."""
TOUCH_S = 10.0
"""Tiers with an index are told of the use of each chunk once in this many seconds."""


class Upkeep:
    """Probes the tiers for chunks in use, and tells them of their use.

    More chunks than a tier takes in one job go in several jobs, the end of a prefix first, so that it counts as used earlier
    than the start and is evicted first.

    Args:
        tiers: the tiers; mutated.
        tasks: the table that jobs are added to.
    """

    def __init__(self, tiers: Sequence[LowerTier], tasks: TaskTable) -> None:
        self._tiers = tiers
        self._tasks = tasks

    def note_used(self, kept: Sequence[OffloadKey], keys: Sequence[OffloadKey]) -> None:
        """Learn that a request uses ``keys``, in prefix order, of which it gets ``kept`` from host memory."""
        for at, tier in enumerate(self._tiers):
            if tier.is_readable:
                if tier.options.write_mode is not WriteMode.BACK:
                    self._look_after(at, tier, kept, keys)
                if tier.options.has_index:
                    self._tell(at, tier, kept)

    def _look_after(self, at: int, tier: LowerTier, kept: Sequence[OffloadKey], keys: Sequence[OffloadKey]) -> None:
        asked = [key for key in tier.presence.not_heard_of(kept, LOOK_AFTER_S) if not tier.is_asked_for(key)]
        if not asked:
            return
        parents = parents_in(keys)
        tier.probing.update(asked)
        for part in reversed(tier.parts(asked)):
            self._tasks.want(ProbeTask(at, part, rewrites={key: parents[key] for key in part}))

    def _tell(self, at: int, tier: LowerTier, kept: Sequence[OffloadKey]) -> None:
        """Tell the tier of the use of all chunks that it is thought to have, if it was not told of one of them lately.

        It is told of all of them: if only of some, the start of a prefix might count as used before its end, and be evicted
        first.
        """
        is_told = tier.touching | tier.probing  # a probe tells the tier of a chunk's use, too
        last = zip(kept, tier.presence.last(kept), strict=True)
        known = [key for key, is_there in last if is_there and key not in is_told]
        if tier.presence.not_heard_of(known, TOUCH_S):
            tier.touching.update(known)
            for part in reversed(tier.parts(known)):
                self._tasks.want(TouchTask(at, part))
