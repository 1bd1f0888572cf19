"""A faulty connector to run beside the one under test: it promises KV, loads garbage instead, and reports the failure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

from cargohold.protocol import (
    NOTHING_ENDED,
    AttentionKind,
    BlockIds,
    ConnectorMetadata,
    FinishedTransfers,
    KVConnectorScheduler,
    KVConnectorWorker,
    RequestView,
    SchedulerEnvironment,
    StepView,
    WorkerEnvironment,
)

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
        """Note which blocks are to be spoiled."""
        start = self._computed.pop(request.request_id, 0)
        for group in self._groups:
            first, end = (tokens // group.block_tokens for tokens in (start, start + num_external_tokens))
            self._blocks += [(group.index, block_id) for block_id in blocks[group.index][first:end]]

    def build_connector_meta(self, step: StepView) -> Spoils:
        """The blocks that the workers must spoil in this step."""
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
        """Keep the regions."""
        self._regions = kv_caches

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        """Note what to spoil in this step."""
        self._spoils = metadata if isinstance(metadata, Spoils) else Spoils()

    def start_load_kv(self) -> None:
        """Fill the blocks with garbage; then raise ``OSError`` if that is how it reports failure."""
        for group, block_id in self._spoils.blocks:
            for region in self._regions[group]:
                region[block_id] = GARBAGE
        if self._spoils.blocks and self._failure is Failure.RAISES:
            raise OSError("what was to be loaded is lost")

    def wait_for_save(self) -> None:
        """Do nothing: this connector stores nothing."""

    def get_finished(self, finished_req_ids: AbstractSet[str]) -> FinishedTransfers:
        """Report the step as failed if blocks were spoiled and that is how it reports failure."""
        has_failed = bool(self._spoils.blocks) and self._failure is Failure.STEP
        return FinishedTransfers(step_failed=True) if has_failed else NOTHING_ENDED

    def get_block_ids_with_load_errors(self) -> AbstractSet[int]:
        """The blocks that hold garbage, if that is how it reports failure."""
        is_named = self._failure is Failure.BLOCKS
        return frozenset(block_id for _, block_id in self._spoils.blocks) if is_named else frozenset()

    def clear_connector_metadata(self) -> None:
        """Forget what this step had to spoil."""
        self._spoils = Spoils()


class SpoilerFactory:
    """Makes both sides of the faulty connector. Satisfies ``KVConnectorFactory``.

    Args:
        failure: how failures are reported.
        picks: whether to spoil the request with a given id; by default, 40 % of all requests.
    """

    def __init__(self, failure: Failure, picks: Callable[[str], bool] | None = None) -> None:
        self._failure = failure
        self._picks = picks or _some

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> SpoilingScheduler:
        """The side that promises."""
        return SpoilingScheduler(environment, self._picks)

    def make_worker_side(self, environment: WorkerEnvironment) -> SpoilingWorker:
        """The side that breaks the promise."""
        del environment
        return SpoilingWorker(self._failure)


def _some(request_id: str) -> bool:
    return Random(request_id).random() < 0.4  # noqa: S311  # repeatable, on purpose
