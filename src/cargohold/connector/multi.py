"""Several connectors as one: loads from the first child that has a hit, stores to all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from cargohold.connector.multi_worker import (
    MultiConnectorWorker,
    MultiMetadata,
    MultiWorkerMetadata,
    split_job_id,
    worker_metadata_type_for,
)
from cargohold.errors import ConfigError, RequestError, option_path
from cargohold.protocol import (
    BlockIds,
    CacheReport,
    ConnectorGuard,
    Hook,
    HookDispatcher,
    KVConnectorFactory,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorScheduler,
    KVConnectorSchedulerOutput,
    KVConnectorTransferResults,
    KVConnectorWorker,
    RequestView,
    SchedulerEnvironment,
    Stats,
    StepView,
    WorkerEnvironment,
    add_stats,
)
from cargohold.protocol.metrics import of_connector, part_of_connector


class MultiConnectorScheduler(HookDispatcher):
    """Composes any number of connectors; a child may itself be composed.

    * A request is loaded by the first child that has something for it. "Not yet" from a child counts as an answer: children
      after it are not asked.
    * Every child is notified of every request, step and end, and stores what it wants.
    * A request that several children keep is released when all of them are done.
    * A child that breaks a rule is turned off; the others go on.

    Objects that a child hands over are neither kept nor changed, so the child may reuse them.

    Args:
        children: the children, most preferred first.
        environment: facts about the engine.
    """

    name = "multi"

    def __init__(self, children: Sequence[KVConnectorScheduler], environment: SchedulerEnvironment) -> None:
        if not children:
            raise ConfigError("offload", [], "the list is empty; to offload nothing, pass None")
        layout = environment.layout
        self.children = [ConnectorGuard(child, layout.num_blocks, len(layout.groups)) for child in children]
        self.worker_metadata_type = worker_metadata_type_for([child.worker_metadata_type for child in children])
        # Per waiting request, the child that has something for it, and whether it would load asynchronously.
        self._chosen: dict[str, tuple[int, bool]] = {}
        # Per request, the child that loads for it asynchronously.
        self._loading: dict[str, int] = {}
        self._new_loads: list[str] = []
        self._loading_in_step: set[int] = set()
        self._sending: dict[str, tuple[int, ...]] = {}
        self._new_sends: dict[str, tuple[int, ...]] = {}
        self._unlocks_of_stopped: list[int] = []

    # --- requests come and go -----------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        """Announce the request to all children. If one refuses it, the children before it are notified that it ended."""
        for at, child in enumerate(self.children):
            try:
                child.on_new_request(request)
            except RequestError:
                for earlier in self.children[:at]:
                    earlier.request_finished(request, ())
                    earlier.explain(request.request_id)
                raise

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        """Tell all children. If their parameters have equal names, those of more preferred children win."""
        self._chosen.pop(request.request_id, None)
        answers = [child.request_finished(request, block_ids) for child in self.children]
        keepers = tuple(at for at, (keeps, _) in enumerate(answers) if keeps)
        if keepers:
            self._sending[request.request_id] = self._new_sends[request.request_id] = keepers
        params: dict[str, Any] = {}
        for _, of_child in answers:
            params = {**(of_child or {}), **params}
        return bool(keepers), params or None

    def explain(self, request_id: str) -> CacheReport:
        """Return all children's reports merged: tokens per tier are summed, notes have the child's name in front."""
        reports = [(child.name, child.explain(request_id)) for child in self.children]
        restored = sum([Counter(report.restored_tokens) for _, report in reports], Counter())
        return CacheReport(restored, tuple(f"{name}: {note}" for name, report in reports for note in report.notes))

    # --- one step -----------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the answer of the first child that does not answer 0; notify the others of the load."""
        self._chosen.pop(request.request_id, None)
        for at, child in enumerate(self.children):
            num_tokens, is_async = child.get_num_new_matched_tokens(request, num_computed_tokens)
            if num_tokens is None:
                return None, False
            if num_tokens:
                self._chosen[request.request_id] = at, is_async
                for other in self.children[:at] + self.children[at + 1 :]:
                    other.expect_tokens(request, num_computed_tokens + num_tokens)
                return num_tokens, is_async
        return 0, False

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        """Let the chosen child plan the load; tell the others that there is nothing to load."""
        choice = self._chosen.pop(request.request_id, None) if num_external_tokens else None
        chosen, is_async = choice or (None, False)
        if chosen is not None and is_async:
            self._loading[request.request_id] = chosen
            self._new_loads.append(request.request_id)
        elif chosen is not None:
            self._loading_in_step.add(chosen)
        for at, child in enumerate(self.children):
            child.update_state_after_alloc(request, blocks, num_external_tokens if at == chosen else 0)

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        """Return all children's messages, and which children are to stop."""
        metadata = [child.build_connector_meta(step) for child in self.children]
        messages = tuple(
            of_child if child.broken is None else None for child, of_child in zip(self.children, metadata, strict=True)
        )
        broken = {at for at, child in enumerate(self.children) if child.broken is not None}
        stop = {at for at, child in enumerate(self.children) if child.stop_workers()}
        new_sends, self._new_sends = self._new_sends, {}
        new_loads, self._new_loads = tuple(self._new_loads), []
        loading_in_step, self._loading_in_step = self._loading_in_step, set()
        return MultiMetadata(
            children=messages,
            new_loads=new_loads,
            new_sends=new_sends,
            stop=tuple(sorted(stop)),
            fail_loads=tuple(sorted(ident for ident, child in self._loading.items() if child in stop)),
            fail_step=not loading_in_step.isdisjoint(broken),
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Pass each child its part of the output; turn off children whose workers broke a rule."""
        meta = connector_output.kv_connector_worker_meta
        assert meta is None or isinstance(meta, MultiWorkerMetadata)
        for at in range(len(self.children)):
            own = self._own_output(at, connector_output, meta)
            if not own.is_empty():
                self.children[at].update_connector_output(own)
        for request_id in connector_output.finished_recving:
            self._loading.pop(request_id, None)
        for request_id in connector_output.finished_sending:
            self._sending.pop(request_id, None)
        if meta is not None:
            self._learn_of_errors(meta)

    def report_to_scheduler(self) -> KVConnectorSchedulerOutput | None:
        """Return all children's locks and unlocks, in new tuples."""
        reports = [report for child in self.children if (report := child.report_to_scheduler()) is not None]
        locks = tuple(chain.from_iterable(report.block_ids_to_lock for report in reports))
        stopped, self._unlocks_of_stopped = self._unlocks_of_stopped, []
        unlocks = (*stopped, *chain.from_iterable(report.block_ids_to_unlock for report in reports))
        return KVConnectorSchedulerOutput(locks, unlocks) if locks or unlocks else None

    # --- on demand ----------------------------------------------------------------------------------------------------

    def has_pending_work(self) -> bool:
        """Whether any child has pending work, or keeps blocks of which the workers do not know yet."""
        return bool(self._new_sends) or super().has_pending_work()

    def get_kv_connector_stats(self) -> Stats:
        """Return all children's counters, with the child's name in front; counters of equal names are summed."""
        stats: Stats = {}
        for child in self.children:
            stats = add_stats(stats, of_connector(child.name, child.get_kv_connector_stats()))
        return stats

    def get_finished_count(self) -> int | None:
        """Return the count on which the children agree. Raises ``ConfigError`` if they do not agree."""
        counts = {child.get_finished_count() for child in self.children}
        if len(counts) > 1:
            raise ConfigError(
                "offload", sorted(map(str, counts)), "composed connectors must expect equally many reports"
            )
        return counts.pop()

    # --- inside -------------------------------------------------------------------------------------------------------

    def dispatch(self, hook: Hook, args: tuple[Any, ...]) -> Any:
        """Ask every child, whatever the others answer, and merge the answers as the table of hooks says."""
        return hook.merge([getattr(child, hook.name)(*args) for child in self.children])

    def _own_output(self, at: int, output: KVConnectorOutput, meta: MultiWorkerMetadata | None) -> KVConnectorOutput:
        """Return the part of the workers' output that concerns child ``at``."""
        jobs = ((*split_job_id(composed, len(self.children)), outcome) for composed, outcome in output.jobs.items())
        own = KVConnectorTransferResults(
            finished_sending=frozenset(i for i in output.finished_sending if at in self._sending.get(i, ())),
            finished_recving=frozenset(i for i in output.finished_recving if self._loading.get(i) == at),
            failed_recving=frozenset(i for i in output.failed_recving if self._loading.get(i) == at),
            jobs={job_id: outcome for child, job_id, outcome in jobs if child == at},
            step_failed=output.step_failed,
            spoiled_requests=output.spoiled_requests,
        )
        # Blocks that one child could not load spoil stores of other children from the same step: all children learn of them.
        worker_meta = None if meta is None else meta.children[at].worker_meta
        stats = part_of_connector(self.children[at].name, output.kv_connector_stats)
        return KVConnectorOutput.of(own, output.invalid_block_ids, worker_meta, stats)

    def _learn_of_errors(self, meta: MultiWorkerMetadata) -> None:
        for at, report in enumerate(meta.children):
            if report.error is not None:
                self.children[at].break_off(report.error)
        for at in meta.stopped:
            # The child has no transfers in flight on any worker now.
            self._unlocks_of_stopped += self.children[at].release().block_ids_to_unlock


Side = TypeVar("Side", KVConnectorScheduler, KVConnectorWorker)


@dataclass(frozen=True, slots=True)
class MultiConnectorFactory:
    """Makes a composed connector. Satisfies ``cargohold.protocol.KVConnectorFactory``.

    Attributes:
        children: factories of the connectors, most preferred first.
    """

    children: tuple[KVConnectorFactory, ...]

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> MultiConnectorScheduler:
        """Make the scheduler side. Raises the error of a child that cannot work in this environment; no child is left open."""
        with _all_or_none(self.children, lambda child: child.make_scheduler_side(environment)) as sides:
            return MultiConnectorScheduler(sides, environment)

    def make_worker_side(self, environment: WorkerEnvironment) -> MultiConnectorWorker:
        """Make the worker side. Raises the error of a child that cannot be opened; no child is left open."""
        with _all_or_none(self.children, lambda child: child.make_worker_side(environment)) as sides:
            return MultiConnectorWorker(sides)


@contextmanager
def _all_or_none(
    children: Sequence[KVConnectorFactory], make: Callable[[KVConnectorFactory], Side]
) -> Iterator[list[Side]]:
    """Make the sides and yield them; if anything raises, then or inside the ``with``, shut down those that were made."""
    with ExitStack() as on_failure:
        sides: list[Side] = []
        for at, child in enumerate(children):
            with option_path(f"connectors[{at}]."):
                side = make(child)
            on_failure.callback(side.shutdown)
            sides.append(side)
        yield sides
        on_failure.pop_all()
