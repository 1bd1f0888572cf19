"""Chunks being brought up from lower tiers for one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cargohold.offload.manager.base import LoadHandle, OffloadKey


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive chunks of one prefix, absent in host memory and all in the same tier.

    Attributes:
        tier: index of the tier, from 0.
        keys: the chunks, in prefix order.
        parent: the chunk before the first; ``None`` at the start of a prompt.
    """

    tier: int
    keys: Sequence[OffloadKey]
    parent: OffloadKey | None


@dataclass(slots=True, eq=False)
class Promotion:
    """Brings chunks into host memory for a request, and pins them there until it is released.

    Attributes:
        started_at: time at which it began.
        expires_at: time at which it is released at the latest.
        on_release: called when it is released.
        num_running: number of its jobs that have not ended.
        num_wanted: number of chunks for which slots were found.
        sources: index of the tier that each arrived chunk came from.
        pins: pins on its chunks in host memory.
        is_released: whether it was released.
        is_given_up: whether it was released because its jobs took too long.
    """

    started_at: float
    expires_at: float
    on_release: Callable[[Promotion], None]
    num_running: int = 0
    num_wanted: int = 0
    sources: dict[OffloadKey, int] = field(default_factory=dict)
    pins: list[LoadHandle] = field(default_factory=list)
    is_released: bool = False
    is_given_up: bool = False
    _tiers: set[int] = field(default_factory=set)

    @property
    def only_tier(self) -> int | None:
        """Index of the tier that all of its chunks come from; ``None`` if they come from several."""
        return next(iter(self._tiers)) if len(self._tiers) == 1 else None

    def begin_job(self, tier: int, num_chunks: int) -> None:
        """Note that a job begins that brings up ``num_chunks`` chunks."""
        self.num_running += 1
        self.num_wanted += num_chunks
        self._tiers.add(tier)

    def end_job(self, tier: int, arrived: Sequence[OffloadKey]) -> None:
        """Note that a job has ended, and which chunks arrived."""
        self.num_running -= 1
        self.sources.update(dict.fromkeys(arrived, tier))

    def release(self) -> None:
        """Give back the pins and cancel the jobs: the request has its chunks, or needs none. May be called repeatedly."""
        if not self.is_released:
            self.is_released = True
            pins, self.pins = self.pins, []
            for handle in pins:
                handle.release()
            self.on_release(self)

    def give_up(self) -> None:
        """Give back the pins: the request has waited long enough. The jobs end by themselves, or at their deadlines.

        A tier is judged by how its jobs end. If they were cancelled, one that hangs would never be blamed.
        """
        self.is_given_up = True
        self.release()
