"""The scheduler side of the tiers below host memory: links ``LowerTiers`` with the connector's steps and its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cargohold.cache.manager import OffloadManager
from cargohold.connector.offloading.messages import TierReport
from cargohold.connector.offloading.prefetch import Prefetcher
from cargohold.connector.offloading.prefetch_plan import StepPace
from cargohold.connector.offloading.shared import TierEvents
from cargohold.protocol import (
    MEDIUM_STORAGE,
    KVConnectorOutput,
    KVEvent,
    SchedulerEnvironment,
    Stats,
    StepView,
    TransferOutcome,
)
from cargohold.tiers.scheduler_side import LowerTiers, TierCommand


class LowerSide:
    """Passes jobs of lower tiers to the workers, and the workers' reports to the tiers.

    Args:
        lower: the tiers below host memory.
        manager: the manager of host memory.
        environment: facts about the engine.
        chunk_tokens: tokens per chunk, per group.
        only_if_faster: whether to fetch chunks only if that is expected to be faster than computing them.
    """

    def __init__(
        self,
        lower: LowerTiers,
        manager: OffloadManager,
        environment: SchedulerEnvironment,
        chunk_tokens: Sequence[int],
        *,
        only_if_faster: bool,
    ) -> None:
        self.tiers = lower
        self._pace = StepPace(environment.clock, environment.max_step_tokens)
        self.prefetcher = Prefetcher(manager, lower, self._pace if only_if_faster else None, environment.max_num_seqs)
        self._events = [
            TierEvents(tier, MEDIUM_STORAGE, chunk_tokens, tier.options.locality)
            for tier in lower.tiers
            if environment.emits_events
        ]

    def begin_step(self, step: StepView, new_id: Callable[[], int]) -> tuple[tuple[TierCommand, ...], tuple[int, ...]]:
        """Begin a step; return the jobs that the workers are to start in it, and the ids of jobs that they are to give up."""
        self._pace.begin(step)
        self.tiers.clock.begin_step()
        self.prefetcher.note_step(len(step.scheduled))
        return self.tiers.take_commands(new_id), self.tiers.take_cancelled()

    def end_step(self) -> None:
        """End a step: the workers have reported it, and all jobs that ended in it have been ended here."""
        self._pace.end()
        self.tiers.clock.end_step()
        self.prefetcher.note_answered()

    def note_answers(self, output: KVConnectorOutput) -> None:
        """Take in what some or all workers say of their jobs' chunks. ``end`` tells when a job has ended on all workers."""
        if isinstance(output.worker_meta, TierReport):
            if output.worker_meta.namespace:
                self.tiers.namespace = output.worker_meta.namespace
            for job_id, (succeeded, num_workers) in output.worker_meta.answers.items():
                self.tiers.note_answers(job_id, succeeded, num_workers)
            for (rank, at), health in output.worker_meta.health.items():
                self.tiers.note_health(rank, at, health)

    def end(self, job_id: int, outcome: TransferOutcome) -> bool:
        """End a job that all workers have ended. Returns ``False`` if it is not a job of the lower tiers."""
        return self.tiers.end(job_id, outcome)

    @property
    def has_pending_work(self) -> bool:
        """Whether the engine should keep stepping for lower tiers; see ``LowerTiers.is_settling``."""
        return self.tiers.is_settling

    def take_events(self) -> Iterator[KVEvent]:
        """Yield the events since the last call: chunks that a tier was found to have, or not to have any more."""
        for events in self._events:
            yield from events.take()

    def take_stats(self) -> Stats:
        """Return counters since the last call."""
        return dict(self.tiers.take_stats())
