"""What the two sides of a composed connector tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from cargohold.protocol import ConnectorMetadata, EmptyMetadata, WorkerMetadata


@dataclass(frozen=True, slots=True)
class MultiMetadata:
    """One step's messages.

    Attributes:
        children: each child's own message, by position; ``None`` for one that is turned off.
        new_loads: requests whose asynchronous load starts in this step.
        new_sends: requests that ended in the last step, and the children that keep their blocks.
        stop: children whose workers are to stop, waiting for what they have in flight.
        fail_loads: requests whose loads by stopped children will never be reported; workers report them as failed.
        fail_step: a child that was to load KV for this very step has been turned off.
    """

    children: tuple[ConnectorMetadata | None, ...] = ()
    new_loads: tuple[str, ...] = ()
    new_sends: dict[str, tuple[int, ...]] = field(default_factory=dict)
    stop: tuple[int, ...] = ()
    fail_loads: tuple[str, ...] = ()
    fail_step: bool = False


@dataclass(frozen=True, slots=True)
class ChildReport:
    """What one child's workers say to its own scheduler side.

    Attributes:
        worker_meta: the child's own message.
        error: the rule that the child's worker side broke; it has stopped.
    """

    worker_meta: WorkerMetadata | None = None
    error: str | None = None

    def aggregate(self, other: ChildReport) -> ChildReport:
        """Both workers' reports."""
        mine, theirs = self.worker_meta, other.worker_meta
        # Each child's messages are of one type, so they know how to merge.
        merged: Any = theirs if mine is None else mine if theirs is None else mine.aggregate(theirs)
        errors = [error for error in (self.error, other.error) if error is not None]
        return ChildReport(merged, "; ".join(errors) or None)


@dataclass(frozen=True, slots=True)
class UndeclaredReport(ChildReport):
    """What another process sends for a child whose scheduler side declares no messages.

    Decoded as what it declares, a message would be an empty one: what it says would be missing, and nobody would know.
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
        children: by position.
        stopped: children that have stopped in this step, as they were told to.
    """

    children: tuple[ChildReport, ...]
    stopped: tuple[int, ...] = ()

    def aggregate(self, other: MultiWorkerMetadata) -> MultiWorkerMetadata:
        """Both workers' reports, child by child. All workers stop a child in the same step."""
        pairs = zip(self.children, other.children, strict=True)
        return MultiWorkerMetadata(tuple(mine.aggregate(theirs) for mine, theirs in pairs), self.stopped)


def metadata_type_for(children: Sequence[type]) -> type:
    """``MultiMetadata`` with the children's own types in it, so that an executor can decode it.

    A message to a child that declares none stays what it is; its guard refuses it.
    """
    types = tuple(Any if child is EmptyMetadata else child | None for child in children)
    return _specialized(MultiMetadata, tuple[types])  # type: ignore[valid-type]  # made here


def worker_metadata_type_for(children: Sequence[type]) -> type:
    """``MultiWorkerMetadata`` with the children's own types in it, so that an executor can decode it."""
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
    """One number for a child and its own job id, so that children need not agree on ids."""
    return job_id * num_children + child


def split_job_id(job_id: int, num_children: int) -> tuple[int, int]:
    """Child and its own job id."""
    return job_id % num_children, job_id // num_children
