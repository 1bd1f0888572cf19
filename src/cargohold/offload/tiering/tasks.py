"""The jobs of all lower tiers: wanted, in flight, ended."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from cargohold.offload.tier.jobs import JobKind
from cargohold.offload.tiering.task import TierTask
from cargohold.protocol import Clock

GRACE_S = 1.0
"""Workers end a job at its deadline by themselves. After this much more the tier is blamed."""
GRACE_CHECKS = 3
"""But not before they had an occasion to report."""


class TaskTable:
    """Who is waiting to be handed out, and who has been.

    Args:
        clock: time in which the engine steps.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wanted: deque[TierTask] = deque()
        self._in_flight: dict[int, TierTask] = {}
        self._cancelled: list[int] = []
        # Chunks of jobs in flight that are no stores, per tier.
        self._num_asked: Counter[int] = Counter()

    def __bool__(self) -> bool:
        return bool(self._wanted or self._in_flight)

    def __iter__(self) -> Iterator[TierTask]:
        yield from self._wanted
        yield from self._in_flight.values()

    def want(self, task: TierTask) -> None:
        """Hand it out when there is an occasion."""
        self._wanted.append(task)

    def take_wanted(self) -> Sequence[TierTask]:
        """What is to be handed out now, the oldest first."""
        wanted, self._wanted = self._wanted, deque()
        return wanted

    def begin(self, job_id: int, task: TierTask, timeout_s: float) -> None:
        """It is handed out."""
        task.deadline = self._clock() + timeout_s
        self._in_flight[job_id] = task
        if task.kind is not JobKind.STORE:
            self._num_asked[task.tier] += len(task.keys)

    def get(self, job_id: int) -> TierTask | None:
        """A job in flight."""
        return self._in_flight.get(job_id)

    def end(self, job_id: int) -> TierTask | None:
        """All workers have reported it."""
        task = self._in_flight.pop(job_id, None)
        if task is not None and task.kind is not JobKind.STORE:
            self._num_asked[task.tier] -= len(task.keys)
        return task

    def num_asked(self, tier: int) -> int:
        """Chunks that are being asked for in a tier, loaded from it, or of whose use it is told."""
        return self._num_asked[tier]

    def cancel(self, is_meant: Callable[[TierTask], bool]) -> None:
        """These are not needed any more. They end like all others, only sooner."""
        for task in self._wanted:
            task.is_cancelled |= is_meant(task)
        for job_id, task in self._in_flight.items():
            if not task.is_cancelled and is_meant(task):
                task.is_cancelled = True
                self._cancelled.append(job_id)

    def take_cancelled(self) -> tuple[int, ...]:
        """Jobs in flight that were cancelled since the last call, and have not ended."""
        cancelled, self._cancelled = self._cancelled, []
        return tuple(job_id for job_id in cancelled if job_id in self._in_flight)

    def newly_late(self) -> list[TierTask]:
        """Jobs in flight that are found to be late; they are cancelled. Call it once in every step."""
        now = self._clock()
        late: list[TierTask] = []
        for task in self._in_flight.values():
            if now > task.deadline + GRACE_S:
                task.num_overdue_checks += 1
                if task.num_overdue_checks == GRACE_CHECKS:
                    task.is_late = True
                    late.append(task)
        if late:
            self.cancel(lambda task: task.is_late)
        return late
