"""Keeps chunks in lower tiers that host memory gives back: the tiers see no use of them, and would evict them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from cargohold.offload.manager.base import OffloadKey
from cargohold.offload.tier.config import WriteMode
from cargohold.offload.tier.jobs import JobKind
from cargohold.offload.tiering.tasks import TaskTable, TierTask
from cargohold.offload.tiering.tier_state import TierState, parents_in

LOOK_AFTER_S = 600.0
"""Chunks in use are probed in each tier once in this many seconds, and written again where they are gone."""
TOUCH_S = 10.0
"""Tiers with an index are told of the use of each chunk once in this many seconds."""


class Upkeep:
    """Probes the tiers for chunks in use, and tells them of their use.

    More chunks than a tier takes in one job go in several jobs, the end of a prefix first, so that it counts as used earlier
    than the start and is evicted first. A tier where each chunk has its price is asked for a few at a time: nobody waits for
    the answers, and requests that wait for others should not stand behind thousands of these.

    Args:
        tiers: the tiers; mutated.
        tasks: the table that jobs are added to.
    """

    def __init__(self, tiers: Sequence[TierState], tasks: TaskTable) -> None:
        self._tiers = tiers
        self._tasks = tasks
        # Per tier: chunks to probe later, with their parents, and whether a probe has not ended. Without one, nothing waits.
        self._waiting: list[dict[OffloadKey, OffloadKey | None]] = [{} for _ in tiers]
        self._is_probing = [False for _ in tiers]

    def note_used(self, kept: Sequence[OffloadKey], keys: Sequence[OffloadKey]) -> None:
        """Learn that a request uses ``keys``, in prefix order, of which it gets ``kept`` from host memory."""
        for at, tier in enumerate(self._tiers):
            if tier.is_readable:
                if tier.options.write_mode is not WriteMode.BACK:
                    self._look_after(at, tier, kept, keys)
                if tier.options.has_index:
                    self._tell(at, tier, kept)

    def _look_after(self, at: int, tier: TierState, kept: Sequence[OffloadKey], keys: Sequence[OffloadKey]) -> None:
        asked = self._not_asked_for(tier, kept)
        if not asked:
            return
        parents = parents_in(keys)
        if tier.options.num_asked_at_once is None:
            for part in reversed(tier.parts(asked)):
                self._probe(at, part, parents)
            return
        waiting = self._waiting[at]
        room = tier.options.max_asked_chunks - len(waiting)
        waiting.update({key: parents[key] for key in asked[:room]})
        if not self._is_probing[at]:
            self._probe_next(at)

    def note_ended(self, at: int, *, is_done: bool) -> None:
        """Learn that a probe of tier ``at`` has ended, and whether it was carried out; begin the next one, if one waits.

        If it was not, what waits is forgotten. What is still not heard of is asked for again when it is used.
        """
        self._is_probing[at] = False
        if not is_done:
            self._waiting[at].clear()
        self._probe_next(at)

    def _probe_next(self, at: int) -> None:
        tier, waiting = self._tiers[at], self._waiting[at]
        size = min(tier.options.num_asked_at_once or 1, tier.options.max_asked_chunks)
        asked: Sequence[OffloadKey] = ()
        while waiting and not asked:
            part = {key: waiting.pop(key) for key in list(islice(waiting, size))}
            asked = self._not_asked_for(tier, list(part))  # requests may have asked for the others meanwhile
            if asked:
                self._is_probing[at] = True
                self._probe(at, asked, part)

    def _probe(self, at: int, asked: Sequence[OffloadKey], parents: Mapping[OffloadKey, OffloadKey | None]) -> None:
        self._tiers[at].probing.update(asked)
        self._tasks.want(TierTask(JobKind.PROBE, at, asked, [parents[key] for key in asked], owner=self))

    def _not_asked_for(self, tier: TierState, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        return [key for key in tier.presence.not_heard_of(keys, LOOK_AFTER_S) if not tier.is_asked_for(key)]

    def _tell(self, at: int, tier: TierState, kept: Sequence[OffloadKey]) -> None:
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
                self._tasks.want(TierTask(JobKind.TOUCH, at, part))
