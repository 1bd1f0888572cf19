"""Keeping a copy's blocks from being reused while it runs: three ways, by what the engine offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from cargohold.protocol import KVConnectorSchedulerOutput, SchedulerContext


class BlockHolder(ABC):
    """Holds and releases blocks on behalf of jobs."""

    @abstractmethod
    def hold(self, block_ids: Sequence[int]) -> None:
        """Nobody may reuse these blocks until they are released. Holds add up."""

    @abstractmethod
    def release(self, block_ids: Sequence[int]) -> None:
        """Give back what ``hold`` took."""

    def take_report(self) -> KVConnectorSchedulerOutput | None:
        """What the scheduler must be told of it."""
        return None

    @property
    def outlives_requests(self) -> bool:
        """Whether a hold survives the end of the request whose blocks they are."""
        return True


class TouchHolder(BlockHolder):
    """Holds by taking references on the engine's block pool."""

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context

    def hold(self, block_ids: Sequence[int]) -> None:
        """Touch."""
        self._context.touch([self._context.get_block(block_id) for block_id in block_ids])

    def release(self, block_ids: Sequence[int]) -> None:
        """Free."""
        self._context.free_blocks([self._context.get_block(block_id) for block_id in block_ids])


class LockHolder(BlockHolder):
    """Holds by asking the scheduler to lock and unlock, for engines without a context that apply such reports.

    A lock is applied at the end of the step in which the copy is planned. Until then the request itself holds the blocks.
    """

    def __init__(self) -> None:
        self._lock: list[int] = []
        self._unlock: list[int] = []

    def hold(self, block_ids: Sequence[int]) -> None:
        """Lock at the end of this step."""
        self._lock += block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Unlock at the end of this step; locks are applied first."""
        self._unlock += block_ids

    def take_report(self) -> KVConnectorSchedulerOutput | None:
        """Locks and unlocks since the last call."""
        if not (self._lock or self._unlock):
            return None
        report = KVConnectorSchedulerOutput(tuple(self._lock), tuple(self._unlock))
        self._lock, self._unlock = [], []
        return report


class RequestHolder(BlockHolder):
    """Holds nothing: the request's own references must last until its copies have ended."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """The request holds them."""

    def release(self, block_ids: Sequence[int]) -> None:
        """The request holds them."""

    @property
    def outlives_requests(self) -> bool:
        """The request must outlive the hold instead."""
        return False
