"""A connector to stand beside another: it promises KV within the step, brings garbage, and says so."""

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
    """How a step can fail for those who stored from it."""

    STEP = "step_failed"
    """The step says that it is not to be trusted."""
    BLOCKS = "invalid_block_ids"
    """It names the blocks that hold garbage."""
    RAISES = "raises"
    """The connector that was to load raises, and is turned off."""


@dataclass(frozen=True)
class Spoils:
    """One step's orders.

    Attributes:
        blocks: pairs of a group and a block in it that is to hold garbage.
    """

    blocks: tuple[tuple[int, int], ...] = ()


class SpoilingScheduler(KVConnectorScheduler):
    """Promises the next few tokens of requests that it picks.

    Args:
        environment: the engine. Where not all is full attention, it promises nothing.
        picks: by request id, whose step is to be spoiled; always the same for the same id.
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
        """A few tokens, and never all: the rest is computed in the same step, with garbage in front of it."""
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
        """This step's orders."""
        blocks, self._blocks = tuple(self._blocks), []
        return Spoils(blocks)


class SpoilingWorker(KVConnectorWorker):
    """Fills blocks with garbage, and says that it could not load them.

    Args:
        failure: how it says so.
    """

    name = "spoiler"
    metadata_type = Spoils

    def __init__(self, failure: Failure) -> None:
        self._failure = failure
        self._spoils = Spoils()

    def register_kv_caches(self, kv_caches: Sequence[Sequence[Any]]) -> None:
        """Keep them."""
        self._regions = kv_caches

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        """Take the orders."""
        self._spoils = metadata if isinstance(metadata, Spoils) else Spoils()

    def start_load_kv(self) -> None:
        """Spoil."""
        for group, block_id in self._spoils.blocks:
            for region in self._regions[group]:
                region[block_id] = GARBAGE
        if self._spoils.blocks and self._failure is Failure.RAISES:
            raise OSError("what was to be loaded is lost")

    def wait_for_save(self) -> None:
        """It keeps nothing."""

    def get_finished(self, finished_req_ids: AbstractSet[str]) -> FinishedTransfers:
        """Whether this step is to be trusted."""
        has_failed = bool(self._spoils.blocks) and self._failure is Failure.STEP
        return FinishedTransfers(step_failed=True) if has_failed else NOTHING_ENDED

    def get_block_ids_with_load_errors(self) -> AbstractSet[int]:
        """The blocks that hold garbage."""
        is_named = self._failure is Failure.BLOCKS
        return frozenset(block_id for _, block_id in self._spoils.blocks) if is_named else frozenset()

    def clear_connector_metadata(self) -> None:
        """Forget the orders."""
        self._spoils = Spoils()


class SpoilerFactory:
    """Makes both sides. Satisfies ``KVConnectorFactory``.

    Args:
        failure: how steps fail.
        picks: by request id, whose step is to be spoiled; some of all requests if it is not given.
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
