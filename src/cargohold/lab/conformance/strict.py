"""Wrappers around a connector under test that demand more of it than engines do, and a faulty one to run next to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any, Final, cast

from cargohold.engine.core.request import Request, RequestStatus, SchedulerStep, StepOutput
from cargohold.engine.executor import Worker, merge_outputs
from cargohold.engine.ranks.step_codec import StepCodec
from cargohold.lab.simulation.replica import SimulatedEngine, SimulatedExecutor
from cargohold.protocol import (
    NOTHING_ENDED,
    AttentionKind,
    BlockIds,
    CacheReport,
    ClassFactory,
    ForwardingScheduler,
    Hint,
    HintOutcome,
    KVConnectorFactory,
    KVConnectorMetadata,
    KVConnectorScheduler,
    KVConnectorTransferResults,
    KVConnectorWorker,
    KVEvent,
    RequestView,
    SchedulerContext,
    SchedulerEnvironment,
    StepView,
)


class EarlyView:
    """A request whose last generated token is not known yet while it runs. All else is as in the request.

    Args:
        request: the request, with all of its tokens.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_known = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    @property
    def num_tokens(self) -> int:
        """While the request runs, one less than it has, but never less than was shown before."""
        request = self._request
        is_early = request.status is RequestStatus.RUNNING and request.num_output_tokens > 0
        self._num_known = max(self._num_known, request.num_tokens - is_early)
        return self._num_known

    @property
    def all_token_ids(self) -> Sequence[int]:
        return self._request.all_token_ids[: self.num_tokens]

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The hashes of the blocks that known tokens fill."""
        return self._request.block_hashes[: self.num_tokens // self._request.hash_block_tokens]


# --- wrappers around a connector under test ---------------------------------------------------------------------------

_CHANGING: Final = frozenset({"touch_ids", "free_ids"})
"""Methods of a scheduler context that change references."""


class StrictScheduler(ForwardingScheduler):
    """Asks the connector for matched tokens twice, and asserts that looking up changes nothing that others can observe.

    Around a look-up, the answer for the request asked for before it is the same, blocks are neither touched nor freed, and no
    event appears. Nor does the connector change the steps that it is shown.

    Args:
        inner: the connector.
        plans_early: whether the connector sees requests as an engine shows them that plans each step before the tokens of the
            last one are known; see ``EarlyView``.
    """

    def __init__(self, inner: KVConnectorScheduler, *, plans_early: bool) -> None:
        super().__init__(inner)
        self._plans_early = plans_early
        self._views: dict[str, EarlyView] = {}  # by request, the same one for as long as it is alive
        self.is_looking_up = False
        self._events: list[KVEvent] = []
        # The look-up before, while the request still waits and no step was built: its answer must not change.
        self._before: tuple[RequestView, int, tuple[int | None, bool]] | None = None

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        """Pass on, so that blocks can be neither touched nor freed in a look-up."""
        super().bind_scheduler_context(cast("SchedulerContext", _ReadOnlyInLookUps(context, self)))

    def on_new_request(self, request: RequestView) -> None:
        super().on_new_request(self._shown(request))

    def on_hints(self, request: RequestView, hints: Sequence[Hint]) -> Sequence[HintOutcome]:
        return self.inner.on_hints(self._shown(request) if request.request_id else request, hints)

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Ask twice; the answers must be equal, and nothing else may change."""
        request = self._shown(request)
        self._events += self.inner.take_events()
        first = self._ask(request, num_computed_tokens)
        second = self._ask(request, num_computed_tokens)
        assert first == second, f"get_num_new_matched_tokens answered {first}, and asked again {second}"
        if self._before is not None and self._before[0].request_id != request.request_id:
            other, num_computed, before = self._before
            after = self._ask(other, num_computed)
            assert after == before, f"a look-up changed another request's answer from {before} to {after}"
        events = list(self.inner.take_events())
        assert not events, f"a look-up has sent events: {events}"
        self._before = request, num_computed_tokens, second
        return second

    def take_events(self) -> Iterable[KVEvent]:
        """Pass on, with those from before look-ups."""
        before, self._events = self._events, []
        return [*before, *self.inner.take_events()]

    def _ask(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.is_looking_up = True
        try:
            return self.inner.get_num_new_matched_tokens(request, num_computed_tokens)
        finally:
            self.is_looking_up = False

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        self._before = None
        super().update_state_after_alloc(self._shown(request), blocks, num_external_tokens)

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:
        self._before = None
        return super().request_finished(self._shown(request), block_ids)

    def explain(self, request_id: str) -> CacheReport:
        self._views.pop(request_id, None)
        return super().explain(request_id)

    def build_connector_meta(self, step: StepView) -> KVConnectorMetadata:
        """Pass on; the connector must leave the step as it was."""
        self._before = None
        before = deepcopy(step)
        metadata = self.inner.build_connector_meta(step)
        assert step == before, "build_connector_meta changed the step"
        return metadata

    def _shown(self, request: RequestView) -> RequestView:
        if not self._plans_early:
            return request
        return cast("RequestView", self._views.setdefault(request.request_id, EarlyView(cast("Request", request))))


class _ReadOnlyInLookUps:
    """A scheduler context that refuses to change references while a look-up is in progress."""

    def __init__(self, context: SchedulerContext, connector: StrictScheduler) -> None:
        self._context = context
        self._connector = connector

    def __getattr__(self, name: str) -> Any:
        assert name not in _CHANGING or not self._connector.is_looking_up, f"get_num_new_matched_tokens called {name}"
        return getattr(self._context, name)


def strict(factory: KVConnectorFactory, *, plans_early: bool = False) -> KVConnectorFactory:
    """A factory whose scheduler sides are those of another one in a ``StrictScheduler``."""
    return ClassFactory(
        lambda environment: StrictScheduler(factory.make_scheduler_side(environment), plans_early=plans_early),
        factory.make_worker_side,
    )


class CodedExecutor(SimulatedExecutor):
    """An executor that encodes and decodes every message, as if the workers lived in other processes.

    Args:
        engine: the engine whose executor it replaces.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        super().__init__(engine.executor.workers, engine.scheduler.connector.get_finished_count())
        self._outputs = StepCodec.for_outputs_of(engine.scheduler.connector)
        self._steps = [StepCodec(side.metadata_type) for side in engine.worker_sides]

    def execute(self, step: SchedulerStep) -> StepOutput:
        data = self._outputs.encode_step(step)
        outputs = [
            self._through_bytes(worker, codec, data) for worker, codec in zip(self.workers, self._steps, strict=True)
        ]
        return merge_outputs(self.aggregator, outputs)

    def _through_bytes(self, worker: Worker, codec: StepCodec, data: bytes) -> StepOutput:
        output = worker.execute(codec.decode_step(data))
        return self._outputs.decode_output(codec.encode_output(output))


GARBAGE = 0xA5


class Failure(Enum):
    """How the failure of a step's loads is reported to connectors that store from the step."""

    STEP = "step_failed"
    """The worker reports that nothing computed in the step can be trusted."""
    BLOCKS = "invalid_block_ids"
    """The worker names the blocks that hold garbage."""
    RAISES = "raises"
    """The faulty connector raises while it loads, and is turned off."""


@dataclass(frozen=True)
class Spoils:
    """Metadata of one step: what to spoil.

    Attributes:
        blocks: pairs of a group's index and the id of a block in it that is to be filled with garbage.
    """

    blocks: tuple[tuple[int, int], ...] = ()


class SpoilingScheduler(KVConnectorScheduler):
    """Promises to load the next few tokens of requests that it picks.

    Args:
        environment: the engine. If any KV-cache group is not full attention, nothing is promised.
        picks: whether to spoil the request with this id; always the same for the same id.
    """

    name = "spoiler"

    def __init__(self, environment: SchedulerEnvironment, picks: Callable[[str], bool]) -> None:
        self._groups = environment.layout.groups
        self._picks = picks
        self._num_tokens = math.lcm(*(group.block_tokens for group in self._groups))
        self._is_able = all(group.kind is AttentionKind.FULL for group in self._groups)
        self._computed: dict[str, int] = {}
        self._blocks: list[tuple[int, int]] = []

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int, bool]:
        """Promise a few tokens, never all of them: the rest is computed in the same step, with garbage in front of it."""
        promised = num_computed_tokens + self._num_tokens
        if not self._is_able or not self._picks(request.request_id) or num_computed_tokens % self._num_tokens:
            return 0, False
        self._computed[request.request_id] = num_computed_tokens
        return (self._num_tokens if promised < request.num_tokens else 0), False

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:
        start = self._computed.pop(request.request_id, 0)
        for group in self._groups:
            first, end = (tokens // group.block_tokens for tokens in (start, start + num_external_tokens))
            self._blocks += [(group.index, block_id) for block_id in blocks[group.index][first:end]]

    def build_connector_meta(self, step: StepView) -> Spoils:
        blocks, self._blocks = tuple(self._blocks), []
        return Spoils(blocks)


class SpoilingWorker(KVConnectorWorker):
    """Fills blocks with garbage, and reports that it could not load them.

    Args:
        failure: how it reports that.
    """

    name = "spoiler"
    metadata_type = Spoils

    def __init__(self, failure: Failure) -> None:
        self._failure = failure
        self._spoils = Spoils()

    def register_kv_caches(self, kv_caches: Sequence[Sequence[Any]]) -> None:
        self._regions = kv_caches

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._spoils = connector_metadata if isinstance(connector_metadata, Spoils) else Spoils()

    def start_load_kv(self) -> None:
        """Fill the blocks with garbage; then raise ``OSError`` if that is how it reports failure."""
        for group, block_id in self._spoils.blocks:
            for region in self._regions[group]:
                region[block_id] = GARBAGE
        if self._spoils.blocks and self._failure is Failure.RAISES:
            raise OSError("what was to be loaded is lost")

    def wait_for_save(self) -> None:
        """Do nothing: this connector stores nothing."""

    def get_transfer_results(self, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        """Report the step as failed if blocks were spoiled and that is how it reports failure."""
        has_failed = bool(self._spoils.blocks) and self._failure is Failure.STEP
        return KVConnectorTransferResults(step_failed=True) if has_failed else NOTHING_ENDED

    def get_block_ids_with_load_errors(self) -> AbstractSet[int]:
        """The blocks that hold garbage, if that is how it reports failure."""
        is_named = self._failure is Failure.BLOCKS
        return frozenset(block_id for _, block_id in self._spoils.blocks) if is_named else frozenset()

    def clear_connector_metadata(self) -> None:
        self._spoils = Spoils()


def spoiler(failure: Failure, picks: Callable[[str], bool] | None = None) -> KVConnectorFactory:
    """Makes both sides of the faulty connector; by default, it spoils 40 % of all requests."""
    picks = picks or (lambda request_id: Random(request_id).random() < 0.4)  # noqa: S311  # repeatable, on purpose
    return ClassFactory(lambda environment: SpoilingScheduler(environment, picks), lambda _: SpoilingWorker(failure))
