"""Keeps alive in the tiers what host memory keeps giving back: they see no use of it, and would evict it."""

from __future__ import annotations

from collections.abc import Sequence

from cargohold.offload.manager.base import OffloadKey
from cargohold.offload.tier.config import WriteMode
from cargohold.offload.tier.jobs import JobKind
from cargohold.offload.tiering.lower_tier import LowerTier
from cargohold.offload.tiering.task import TierTask
from cargohold.offload.tiering.tasks import TaskTable

LOOK_AFTER_S = 600.0
"""Chunks in use are looked for in each tier as often as that, and written again where they are gone."""
TOUCH_S = 10.0
"""Tiers that want to hear of use hear of each chunk's as often as that."""


class Upkeep:
    """Asks after chunks in use, and tells of their use.

    What is more than a tier takes at a time goes in parts, the end of a prefix first: it is to count as used before its start.

    Args:
        tiers: the tiers; mutated.
        tasks: where jobs are wanted.
    """

    def __init__(self, tiers: Sequence[LowerTier], tasks: TaskTable) -> None:
        self._tiers = tiers
        self._tasks = tasks

    def note_used(self, kept: Sequence[OffloadKey], keys: Sequence[OffloadKey]) -> None:
        """A request uses ``keys``, in prefix order, and has ``kept`` of them from host memory."""
        for at, tier in enumerate(self._tiers):
            if tier.is_usable:
                if tier.options.write_mode is not WriteMode.BACK:
                    self._look_after(at, tier, kept, keys)
                if tier.options.has_index:
                    self._tell(at, tier, kept)

    def _look_after(self, at: int, tier: LowerTier, kept: Sequence[OffloadKey], keys: Sequence[OffloadKey]) -> None:
        asked = [key for key in tier.presence.not_heard_of(kept, LOOK_AFTER_S) if not tier.is_asked_for(key)]
        if not asked:
            return
        parents = dict(zip(keys, (None, *keys), strict=False))
        tier.probing.update(asked)
        for part in reversed(tier.parts(asked)):
            self._tasks.want(TierTask(JobKind.PROBE, at, part, rewrites={key: parents[key] for key in part}))

    def _tell(self, at: int, tier: LowerTier, kept: Sequence[OffloadKey]) -> None:
        """Tell of the use of all that the tier is thought to have, if it has not heard of some of it lately.

        All: if it heard of a part only, the start of a prefix would count as used before its end, and be evicted first.
        """
        is_told = tier.touching | tier.probing  # who is asked for a chunk hears of its use
        last = zip(kept, tier.presence.last(kept), strict=True)
        known = [key for key, is_there in last if is_there and key not in is_told]
        if tier.presence.not_heard_of(known, TOUCH_S):
            tier.touching.update(known)
            for part in reversed(tier.parts(known)):
                self._tasks.want(TierTask(JobKind.TOUCH, at, part))
