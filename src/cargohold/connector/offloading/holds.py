"""Holding a copy's blocks while it runs, so that they are not reused. What the engine offers decides which of three ways."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from cargohold.protocol import KVConnectorSchedulerOutput, SchedulerContext


class BlockHolder(ABC):
    """Holds and releases blocks on behalf of jobs."""

    @abstractmethod
    def hold(self, block_ids: Sequence[int]) -> None:
        """Keep these blocks from being reused until they are released. Holds add up."""

    @abstractmethod
    def release(self, block_ids: Sequence[int]) -> None:
        """Give back what ``hold`` took."""

    def take_report(self) -> KVConnectorSchedulerOutput | None:
        """Return the locks and unlocks for the scheduler since the last call; ``None`` if there are none."""
        return None

    @property
    def outlives_requests(self) -> bool:
        """Whether a hold survives the end of the request whose blocks are held."""
        return True


class TouchHolder(BlockHolder):
    """Holds by taking references on the engine's block pool."""

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context

    def hold(self, block_ids: Sequence[int]) -> None:
        """Touch the blocks."""
        self._context.touch_ids(block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Free the blocks."""
        self._context.free_ids(block_ids)


class LockHolder(BlockHolder):
    """Holds by asking the scheduler to lock and unlock blocks, for engines that have no context but apply locks.

    A lock is applied at the end of the step in which the copy is planned. Until then the request itself holds the blocks.
    """

    def __init__(self) -> None:
        self._lock: list[int] = []
        self._unlock: list[int] = []

    def hold(self, block_ids: Sequence[int]) -> None:
        """Lock the blocks at the end of this step."""
        self._lock += block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Unlock the blocks at the end of this step; locks are applied first."""
        self._unlock += block_ids

    def take_report(self) -> KVConnectorSchedulerOutput | None:
        """Return the locks and unlocks since the last call; ``None`` if there are none."""
        if not (self._lock or self._unlock):
            return None
        report = KVConnectorSchedulerOutput(tuple(self._lock), tuple(self._unlock))
        self._lock, self._unlock = [], []
        return report


class RequestHolder(BlockHolder):
    """Holds nothing: the request's own references must last until its copies have ended."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Do nothing: the request holds the blocks."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Do nothing: the request gives its blocks back itself."""

    @property
    def outlives_requests(self) -> bool:
        """``False``: the request's blocks must be kept until its copies have ended."""
        return False
