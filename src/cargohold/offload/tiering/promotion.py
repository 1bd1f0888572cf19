"""Chunks on their way up, for one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cargohold.offload.manager.base import LoadHandle, OffloadKey


@dataclass(frozen=True, slots=True)
class Chain:
    """Consecutive chunks of one prefix, absent in host memory and all in the same tier.

    Attributes:
        tier: which tier, from 0.
        keys: the chunks.
        parent: the chunk before the first, if there is one.
    """

    tier: int
    keys: Sequence[OffloadKey]
    parent: OffloadKey | None


@dataclass(slots=True, eq=False)
class Promotion:
    """Brings chunks into host memory, and keeps them there until it is released.

    Attributes:
        started_at: when it began.
        expires_at: when it is released at the latest.
        on_release: told when it is released.
        num_running: jobs that have not ended.
        num_wanted: chunks for which slots were found.
        sources: tier of each chunk that has arrived.
        pins: holds on what is in host memory.
    """

    started_at: float
    expires_at: float
    on_release: Callable[[Promotion], None]
    num_running: int = 0
    num_wanted: int = 0
    sources: dict[OffloadKey, int] = field(default_factory=dict)
    pins: list[LoadHandle] = field(default_factory=list)
    is_released: bool = False
    _tiers: set[int] = field(default_factory=set)

    @property
    def was_undisturbed(self) -> bool:
        """Whether its duration says how fast a tier is: all chunks arrived, from one tier, and were waited for."""
        return not self.is_released and len(self._tiers) == 1 and len(self.sources) == self.num_wanted

    def begin_job(self, tier: int, num_chunks: int) -> None:
        """A job that brings up chunks begins."""
        self.num_running += 1
        self.num_wanted += num_chunks
        self._tiers.add(tier)

    def end_job(self, tier: int, arrived: Sequence[OffloadKey]) -> None:
        """A job has ended."""
        self.num_running -= 1
        self.sources.update(dict.fromkeys(arrived, tier))

    def release(self) -> None:
        """Its request has what it wants, or wants nothing any more: pins are given back, jobs cancelled. May be repeated."""
        if not self.is_released:
            self.is_released = True
            pins, self.pins = self.pins, []
            for handle in pins:
                handle.release()
            self.on_release(self)
