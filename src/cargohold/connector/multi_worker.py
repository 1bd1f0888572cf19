"""Worker side of a composed connector, and the messages between its two sides."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, make_dataclass
from typing import Any

from cargohold.protocol import (
    NOTHING_ENDED,
    NOTHING_TO_REPORT,
    EmptyMetadata,
    Hook,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorTransferResults,
    KVConnectorWorker,
    KVConnectorWorkerMetadata,
    Stats,
    TransferOutcome,
    WorkerConnectorGuard,
    WorkerHookDispatcher,
    add_stats,
)
from cargohold.protocol.metrics import of_connector


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

    children: tuple[KVConnectorMetadata | None, ...] = ()
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

    worker_meta: KVConnectorWorkerMetadata | None = None
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
        stopped: positions of the children that have stopped in this step, as requested.
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


_NOTHING_TO_DO = MultiMetadata()


class MultiConnectorWorker(WorkerHookDispatcher):
    """Runs the children's worker sides side by side, each contained.

    Args:
        children: the children's worker sides, in the same order as their scheduler sides.
    """

    name = "multi"

    def __init__(self, children: Sequence[KVConnectorWorker]) -> None:
        self._children = [WorkerConnectorGuard(child) for child in children]
        self.metadata_type = metadata_type_for([child.metadata_type for child in children])
        self._metadata = _NOTHING_TO_DO
        self._outputs: list[KVConnectorOutput] = []
        # Ended requests, and the children that still keep their blocks on this worker.
        self._keepers: dict[str, set[int]] = {}
        # Requests whose loads have not ended on this worker; on other workers they may have.
        self._loading: set[str] = set()

    def dispatch(self, hook: Hook, args: tuple[Any, ...]) -> Any:
        """To all children."""
        return hook.merge([getattr(child, hook.name)(*args) for child in self._children])

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Pass each child its own message; stop the children that are to stop."""
        assert isinstance(connector_metadata, MultiMetadata)
        self._metadata = connector_metadata
        for request_id, keepers in connector_metadata.new_sends.items():
            self._keepers[request_id] = set(keepers)
        self._loading.update(connector_metadata.new_loads)
        for at in connector_metadata.stop:
            self._children[at].stop()
        for at, child in enumerate(self._children):
            own = connector_metadata.children[at] if connector_metadata.children else None
            # From another process, the message to a child that declares no type arrives as a dict.
            is_empty = own is None or (isinstance(own, dict) and not own)
            child.bind_connector_metadata(EmptyMetadata() if is_empty else own)

    def get_transfer_results(self, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        """Return what ended in any child. A request that several children keep is reported when all have released it."""
        self._outputs = [child.collect(finished_req_ids) for child in self._children]
        metadata = self._metadata
        is_quiet = all(output is NOTHING_TO_REPORT for output in self._outputs)
        if is_quiet and not (self._keepers or metadata.fail_loads or metadata.fail_step):
            return NOTHING_ENDED  # most steps
        received: set[str] = set()
        failed: set[str] = set()
        jobs: dict[int, TransferOutcome] = {}
        for at, output in enumerate(self._outputs):
            received |= output.finished_recving
            failed |= output.failed_recving
            jobs |= {compose_job_id(at, ident, len(self._children)): end for ident, end in output.jobs.items()}
            for request_id in output.finished_sending:
                self._keepers.get(request_id, set()).discard(at)
        for keepers in self._keepers.values():
            keepers.difference_update(self._metadata.stop)
        sent = {request_id for request_id, keepers in self._keepers.items() if not keepers}
        for request_id in sent:
            del self._keepers[request_id]
        self._loading -= received
        given_up = self._loading.intersection(self._metadata.fail_loads)
        self._loading -= given_up
        return KVConnectorTransferResults(
            finished_sending=frozenset(sent),
            finished_recving=frozenset(received | given_up),
            failed_recving=frozenset(failed | given_up),
            jobs=jobs,
            expected_finished_count=max(output.expected_finished_count for output in self._outputs),
            step_failed=self._metadata.fail_step or any(output.step_failed for output in self._outputs),
        )

    def get_block_ids_with_load_errors(self) -> AbstractSet[int]:
        """Return the ids of blocks that any child could not load."""
        return frozenset[int]().union(*(output.invalid_block_ids for output in self._outputs))

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return each child's own report; ``None`` if no child has one and none has stopped."""
        metas = [output.kv_connector_worker_meta for output in self._outputs]
        errors = [child.take_error() for child in self._children]
        if self._metadata.stop or any(said is not None for said in (*metas, *errors)):
            reports = [ChildReport(meta, error) for meta, error in zip(metas, errors, strict=True)]
            return MultiWorkerMetadata(tuple(reports), self._metadata.stop)
        return None

    def get_kv_connector_stats(self) -> Stats:
        """Return all children's counters, with the child's name in front."""
        stats: Stats = {}
        for child, output in zip(self._children, self._outputs, strict=False):
            if output.kv_connector_stats:
                stats = add_stats(stats, of_connector(child.name, output.kv_connector_stats))
        return stats

    def clear_connector_metadata(self) -> None:
        """Let all children forget this step's message."""
        self._metadata = _NOTHING_TO_DO
        self._outputs = []
        super().clear_connector_metadata()

    def shutdown(self) -> None:
        """Stop all children."""
        for child in self._children:
            child.stop()
