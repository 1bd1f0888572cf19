"""What happens in a run, step by step, for people."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from cargohold.engine.core.request import RequestStatus, SchedulerStep, StepOutput
from cargohold.lab.simulation.replica import Replica
from cargohold.lab.simulation.transfers import CopiesInFlight
from cargohold.transfer import Direction

LEGEND: Final = """\
Every line is one step of the scheduler, or what a client did before it. "r1 8-12 in 3 4 5" computes tokens 8 to 12 of
request r1, whose block table is 3 4 5; with several KV-cache groups, "/" is between their tables, and block 0 keeps nothing.
Copies are those that begin in this step: "3 4 <- 8 9" loads rows 8 and 9 of host memory into blocks 3 and 4, "->" stores.
"""
_HEAD: Final = "time, s  | step | computes | waits | copies | free"


class Timeline:
    """A timeline that records nothing, for runs that no one looks at."""

    def note(self, now: float, what: str) -> None:
        """Record what happened between steps, at virtual time ``now``."""

    def step(self, now: float, engine: Replica, step: SchedulerStep, output: StepOutput) -> None:
        """Record a step that was made by virtual time ``now``."""


NO_TIMELINE = Timeline()


class RecentTimeline(Timeline):
    """Keeps the last lines of a table. Consecutive steps without tokens in which nothing changes share a line.

    Args:
        num_lines: number of lines to keep.
    """

    def __init__(self, num_lines: int = 60) -> None:
        self._lines: deque[str] = deque(maxlen=num_lines)
        self._last = ""
        self._num_alike = 0

    def lines(self) -> list[str]:
        """What lines mean, and the lines, oldest first."""
        return [*LEGEND.splitlines(), _HEAD, *self._lines]

    def note(self, now: float, what: str) -> None:
        self._last = ""
        self._lines.append(f"{now:8.3f} | {what}")

    def step(self, now: float, engine: Replica, step: SchedulerStep, output: StepOutput) -> None:
        """Record a step: what requests computed, which of them wait, which copies began, and what was reported."""
        pool, report = engine.scheduler.kv.pool, output.connector
        loading = {name for name, request in engine.requests.items() if request.status is RequestStatus.LOADING}
        waiting = [request.request_id for request in engine.scheduler.waiting_requests()]
        cells = (
            ", ".join(_computed(step)),
            ", ".join(f"{name} for its load" if name in loading else name for name in waiting),
            ", ".join(_begun(engine.copies)) or "-",
            f"{pool.num_free_blocks} of {pool.num_usable_blocks}",
        )
        reported = {
            "preempted": step.preempted_req_ids,
            "loaded": report.finished_recving,
            "load failed": report.failed_recving,
            "sent": report.finished_sending,
            "ended": [f"job {job_id} {outcome.name.lower()}" for job_id, outcome in report.jobs.items()],
            "bad blocks": report.invalid_block_ids,
            "not to be trusted": ["the step"] if report.step_failed else (),
            "error": [output.connector_error] if output.connector_error else (),
            "dropped": ["the connector"] if step.drop_connector else (),
        }
        what = " | ".join(cells) + "".join(
            f"; {word} {', '.join(sorted(map(str, which)))}" for word, which in reported.items() if which
        )
        self._num_alike = self._num_alike + 1 if not step.scheduled and what == self._last else 0
        self._last = what
        if self._num_alike > 1:
            self._lines.pop()
        what = what if not self._num_alike else f"and {self._num_alike} step(s) more like that"
        self._lines.append(f"{now:8.3f} | {engine.num_steps:4d} | {what}")


def _computed(step: SchedulerStep) -> Iterator[str]:
    for share in step.scheduled:
        end = share.num_computed_tokens + share.num_scheduled_tokens
        tables = " / ".join(" ".join(map(str, table)) for table in share.block_ids)
        yield f"{share.request_id} {share.num_computed_tokens}-{end - 1} in {tables}"


def _begun(ranks: Sequence[CopiesInFlight]) -> Iterator[str]:
    """Copies that have begun since the last call."""
    for rank, copies in enumerate(ranks):
        while copies.begun:
            job = copies.begun.popleft()
            arrow = "<-" if job.direction is Direction.LOAD else "->"
            where = f" on rank {rank}" if len(ranks) > 1 else ""
            yield f"{' '.join(map(str, job.block_ids))} {arrow} {' '.join(map(str, job.rows))}{where}"
