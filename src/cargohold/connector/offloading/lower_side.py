"""The scheduler side of the tiers below host memory: requests on one hand, workers on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cargohold.connector.offloading.events import TierEvents
from cargohold.connector.offloading.messages import TierReport
from cargohold.connector.offloading.pacing import StepPace
from cargohold.connector.offloading.recall import Recalls
from cargohold.offload.manager.base import OffloadManager
from cargohold.offload.tiering import LowerTiers, TierCommand
from cargohold.protocol import (
    MEDIUM_STORAGE,
    KVConnectorOutput,
    KVEvent,
    SchedulerEnvironment,
    Stats,
    StepView,
    TransferOutcome,
)


class LowerSide:
    """Passes on what lower tiers are to do, and what became of it.

    Args:
        lower: what is known of the tiers.
        manager: what host memory holds.
        environment: the engine.
        chunk_tokens: tokens per chunk, per group.
        only_if_faster: whether chunks are left where they are when computing them is faster.
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
        self.recalls = Recalls(manager, lower, self._pace if only_if_faster else None)
        self._events = [
            TierEvents(tier, MEDIUM_STORAGE, chunk_tokens, tier.options.locality)
            for tier in lower.tiers
            if environment.emits_events
        ]

    def begin_step(self, step: StepView, new_id: Callable[[], int]) -> tuple[tuple[TierCommand, ...], tuple[int, ...]]:
        """What the workers are to start in this step, and which jobs they are to give up."""
        self._pace.begin(step)
        self.tiers.clock.begin_step()
        self.recalls.note_step()
        return self.tiers.take_commands(new_id), self.tiers.take_cancelled()

    def end_step(self) -> None:
        """The workers have reported."""
        self._pace.end()
        self.tiers.clock.end_step()

    def note_answers(self, output: KVConnectorOutput) -> None:
        """What some or all workers say of their jobs; whether a job has ended on all of them is said elsewhere."""
        if isinstance(output.worker_meta, TierReport):
            for job_id, answer in output.worker_meta.answers.items():
                self.tiers.note_answers(job_id, answer.succeeded, answer.num_workers)
            for at in output.worker_meta.tiers_off:
                self.tiers.turn_off(at)

    def end(self, job_id: int, outcome: TransferOutcome) -> bool:
        """All workers have ended a job; ``False`` if it is none of the lower tiers'."""
        return self.tiers.end(job_id, outcome)

    @property
    def has_pending_work(self) -> bool:
        """Whether chunks stored lately wait to be written, and not for long."""
        return self.tiers.is_settling

    def take_events(self) -> Iterator[KVEvent]:
        """What became known of the tiers' contents."""
        for events in self._events:
            yield from events.take()

    def take_stats(self) -> Stats:
        """Counters since the last call."""
        return dict(self.tiers.take_stats())
