"""Messages between the two sides of a composed connector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from cargohold.protocol import ConnectorMetadata, EmptyMetadata, WorkerMetadata


@dataclass(frozen=True, slots=True)
class MultiMetadata:
    """One step's message to the workers. Children are named by their position.

    Attributes:
        children: each child's own message, by position; ``None`` for a child that is turned off.
        new_loads: requests whose asynchronous load starts in this step.
        new_sends: requests that ended in the last step, and the children that keep their blocks.
        stop: children whose workers are to stop, after waiting for their transfers in flight.
        fail_loads: requests whose loads by stopped children will never be reported; workers report them as failed.
        fail_step: whether a child that was to load KV for this very step has been turned off.
    """

    children: tuple[ConnectorMetadata | None, ...] = ()
    new_loads: tuple[str, ...] = ()
    new_sends: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stop: tuple[int, ...] = ()
    fail_loads: tuple[str, ...] = ()
    fail_step: bool = False


@dataclass(frozen=True, slots=True)
class ChildReport:
    """The report of one child's workers to its scheduler side.

    Attributes:
        worker_meta: the child's own message.
        error: the rule that the child's worker side broke; that side has stopped. ``None`` if it broke none.
    """

    worker_meta: WorkerMetadata | None = None
    error: str | None = None

    def aggregate(self, other: ChildReport) -> ChildReport:
        """Return both workers' reports of the child, merged."""
        mine, theirs = self.worker_meta, other.worker_meta
        # Each child's messages are of one type, so they know how to merge.
        merged: Any = theirs if mine is None else mine if theirs is None else mine.aggregate(theirs)
        errors = [error for error in (self.error, other.error) if error is not None]
        return ChildReport(merged, "; ".join(errors) or None)


@dataclass(frozen=True, slots=True)
class UndeclaredReport(ChildReport):
    """The report from another process for a child whose scheduler side declares no messages.

    If a message were decoded as the declared ``EmptyMetadata``, its contents would silently be lost. So a message becomes an
    error here.
    """

    worker_meta: Any = None

    def __post_init__(self) -> None:
        if self.worker_meta:
            rule = "its workers send messages, and its scheduler side declares no worker_metadata_type"
            object.__setattr__(self, "error", f"{self.error}; {rule}" if self.error else rule)
        object.__setattr__(self, "worker_meta", None)


@dataclass(frozen=True, slots=True)
class MultiWorkerMetadata:
    """One step's reports.

    Attributes:
        children: the report of each child, by position.
        stopped: positions of the children that have stopped in this step, as they were told to.
    """

    children: tuple[ChildReport, ...]
    stopped: tuple[int, ...] = ()

    def aggregate(self, other: MultiWorkerMetadata) -> MultiWorkerMetadata:
        """Merge both workers' reports, child by child. All workers stop a child in the same step."""
        pairs = zip(self.children, other.children, strict=True)
        return MultiWorkerMetadata(tuple(mine.aggregate(theirs) for mine, theirs in pairs), self.stopped)


def metadata_type_for(children: Sequence[type]) -> type:
    """Return a ``MultiMetadata`` type with the children's own types in it, so that an executor can decode it.

    A message to a child that declares no type is not decoded further; the child's guard refuses it.
    """
    types = tuple(Any if child is EmptyMetadata else child | None for child in children)
    return _specialized(MultiMetadata, tuple[types])  # type: ignore[valid-type]  # made here


def worker_metadata_type_for(children: Sequence[type]) -> type:
    """Return a ``MultiWorkerMetadata`` type with the children's own types in it, so that an executor can decode it."""
    reports = tuple(
        UndeclaredReport
        if child is EmptyMetadata
        else make_dataclass("ChildReport", [("worker_meta", child | None, None)], bases=(ChildReport,), frozen=True)
        for child in children
    )
    return _specialized(MultiWorkerMetadata, tuple[reports])  # type: ignore[valid-type]  # made here


def _specialized(kind: type, children: object) -> type:
    return make_dataclass(kind.__name__, [("children", children)], bases=(kind,), frozen=True)


def compose_job_id(child: int, job_id: int, num_children: int) -> int:
    """Make one job id from a child's position and its own job id, so that children need not agree on ids."""
    return job_id * num_children + child


def split_job_id(job_id: int, num_children: int) -> tuple[int, int]:
    """Return the child's position and its own job id."""
    return job_id % num_children, job_id // num_children
