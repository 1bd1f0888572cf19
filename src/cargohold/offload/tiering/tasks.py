"""The jobs of all lower tiers: waiting to be handed out, in flight, ended."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from cargohold.offload.tiering.task import TierTask, WriteTask
from cargohold.protocol import Clock

GRACE_S = 1.0
"""Workers end a job at its deadline by themselves. This many seconds later the tier is blamed for the job."""
GRACE_CHECKS = 3
"""A tier is not blamed before this many steps have found the job overdue, so that workers had an occasion to report it."""


class TaskTable:
    """The tasks that wait to be handed out to workers, and those in flight.

    Args:
        clock: time in which the engine steps.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wanted: deque[TierTask] = deque()
        self._in_flight: dict[int, TierTask] = {}
        self._cancelled: list[int] = []
        # Number of chunks in probes, touches and loads in flight, per tier.
        self._num_asked: Counter[int] = Counter()

    def __bool__(self) -> bool:
        return bool(self._wanted or self._in_flight)

    def __iter__(self) -> Iterator[TierTask]:
        yield from self._wanted
        yield from self._in_flight.values()

    def want(self, task: TierTask) -> None:
        """Add a task that waits to be handed out."""
        self._wanted.append(task)

    def take_wanted(self) -> Sequence[TierTask]:
        """Remove and return the tasks that wait to be handed out, the oldest first."""
        wanted, self._wanted = self._wanted, deque()
        return wanted

    def begin(self, job_id: int, task: TierTask, timeout_s: float) -> None:
        """Note that a task is handed out now under ``job_id``, and set its deadline."""
        task.begun_at = self._clock()
        task.deadline = task.begun_at + timeout_s
        self._in_flight[job_id] = task
        if not isinstance(task, WriteTask):
            self._num_asked[task.tier] += len(task.keys)

    def get(self, job_id: int) -> TierTask | None:
        """Return a job in flight; ``None`` if there is none with that id."""
        return self._in_flight.get(job_id)

    def end(self, job_id: int) -> TierTask | None:
        """Remove and return a job that all workers have reported; ``None`` if it is not in flight."""
        task = self._in_flight.pop(job_id, None)
        if task is not None and not isinstance(task, WriteTask):
            self._num_asked[task.tier] -= len(task.keys)
        return task

    def num_asked(self, tier: int) -> int:
        """Return the number of chunks in a tier's probes, touches and loads in flight."""
        return self._num_asked[tier]

    def cancel(self, is_meant: Callable[[TierTask], bool], *, in_flight: bool = True) -> None:
        """Cancel the tasks that ``is_meant`` selects, those ``in_flight`` too. They end like all others, only sooner."""
        for task in self._wanted:
            task.is_cancelled |= is_meant(task)
        if not in_flight:
            return
        for job_id, task in self._in_flight.items():
            if not task.is_cancelled and is_meant(task):
                task.is_cancelled = True
                self._cancelled.append(job_id)

    def take_cancelled(self) -> tuple[int, ...]:
        """Return the ids of jobs that were cancelled since the last call and are still in flight."""
        cancelled, self._cancelled = self._cancelled, []
        return tuple(job_id for job_id in cancelled if job_id in self._in_flight)

    def newly_late(self) -> list[TierTask]:
        """Cancel and return the jobs that are newly found to be late. Call it once in every step.

        A job is late if it was in flight ``GRACE_S`` after its deadline at ``GRACE_CHECKS`` calls.
        """
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
