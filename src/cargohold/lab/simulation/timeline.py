"""What happens in a run, step by step, for people."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from cargohold.engine.core.request import RequestStatus, SchedulerStep, StepOutput
from cargohold.lab.simulation.connectors import offloading_sides
from cargohold.lab.simulation.replica import Replica
from cargohold.protocol import KVConnectorOutput


class Timeline:
    """A timeline that records nothing, for runs that no one looks at."""

    def note(self, now: float, what: str) -> None:
        """Record what happened between steps, at virtual time ``now``."""

    def step(self, now: float, engine: Replica, step: SchedulerStep, output: StepOutput) -> None:
        """Record a step that was made by virtual time ``now``."""


NO_TIMELINE = Timeline()


class RecentTimeline(Timeline):
    """Keeps the last lines. Consecutive steps without tokens in which nothing changes share a line.

    Args:
        num_lines: number of lines to keep.
    """

    def __init__(self, num_lines: int = 60) -> None:
        self._lines: deque[str] = deque(maxlen=num_lines)
        self._last = ""
        self._num_alike = 0

    def lines(self) -> list[str]:
        """The lines, oldest first."""
        return list(self._lines)

    def note(self, now: float, what: str) -> None:
        self._last = ""
        self._lines.append(f"{now:8.3f} s            {what}")

    def step(self, now: float, engine: Replica, step: SchedulerStep, output: StepOutput) -> None:
        """Record a step: what requests computed, which of them wait, what is in flight, and what was reported."""
        parts = [*_batch(step), *_waiting(engine), *_jobs(engine), *_report(output.connector)]
        if step.drop_connector:
            parts.append("connector is dropped")
        if output.connector_error:
            parts.append(f"error: {output.connector_error}")
        pool = engine.scheduler.kv.pool
        parts.append(f"{pool.num_free_blocks} of {pool.num_usable_blocks} free")
        self._add(f"{now:8.3f} s step {engine.num_steps:4d}  ", "; ".join(parts), is_idle=not step.scheduled)

    def _add(self, when: str, what: str, *, is_idle: bool) -> None:
        """Add a line for a step; if it is like the steps before, update the line that counts them."""
        self._num_alike = self._num_alike + 1 if is_idle and what == self._last else 0
        self._last = what
        if self._num_alike == 0:
            self._lines.append(f"{when}{what}")
            return
        if self._num_alike > 1:
            self._lines.pop()
        self._lines.append(f"{when}and {self._num_alike} step(s) more like that")


def _batch(step: SchedulerStep) -> Iterator[str]:
    for share in step.scheduled:
        end = share.num_computed_tokens + share.num_scheduled_tokens
        sample = "" if share.sample is None else "+1"
        yield f"{share.request_id} computes [{share.num_computed_tokens}, {end}){sample}"
    if step.preempted_req_ids:
        yield f"preempted {_ids(step.preempted_req_ids)}"
    if step.finished_req_ids:
        yield f"ended {_ids(step.finished_req_ids)}"


def _waiting(engine: Replica) -> Iterator[str]:
    waiting = [request.request_id for request in engine.scheduler.waiting_requests()]
    loading = [name for name, request in engine.requests.items() if request.status is RequestStatus.LOADING]
    if waiting:
        yield f"waiting {' '.join(waiting)}"
    if loading:
        yield f"loading {' '.join(loading)}"


def _jobs(engine: Replica) -> Iterator[str]:
    for side, _ in offloading_sides(engine.scheduler.connector):
        for load in side.jobs.loads():
            yield f"{side.name} load {load.job_id} into {_ids(load.block_ids)}"
        for store in side.jobs.stores():
            yield f"{side.name} store {store.job_id} of {_ids(store.block_ids)}"


def _report(report: KVConnectorOutput) -> Iterator[str]:
    if report.jobs:
        ended = " ".join(f"{job_id}:{outcome.name.lower()}" for job_id, outcome in report.jobs.items())
        yield f"jobs ended {ended}"
    if report.finished_recving:
        yield f"received {_ids(report.finished_recving)}"
    if report.failed_recving:
        yield f"load failed of {_ids(report.failed_recving)}"
    if report.finished_sending:
        yield f"sent {_ids(report.finished_sending)}"
    if report.invalid_block_ids:
        yield f"invalid blocks {_ids(report.invalid_block_ids)}"
    if report.step_failed:
        yield "the step is not to be trusted"


def _ids(ids: object) -> str:
    assert isinstance(ids, frozenset | tuple)
    return " ".join(str(ident) for ident in (sorted(ids) if isinstance(ids, frozenset) else ids))
