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


@dataclass(slots=True)
class _Part:
    """What a promotion brings up from one tier.

    Attributes:
        num_running: number of jobs that have not ended.
        num_arrived: number of chunks that have arrived.
        has_failed: whether a job was not carried out as a whole.
    """

    num_running: int = 0
    num_arrived: int = 0
    has_failed: bool = False


@dataclass(slots=True, eq=False)
class Promotion:
    """Brings chunks into host memory for a request, and pins them there until it is released.

    Attributes:
        started_at: time at which it began.
        expires_at: time at which it is released at the latest.
        on_release: called when it is released.
        sources: index of the tier that each arrived chunk came from.
        pins: pins on its chunks in host memory.
        is_released: whether it was released.
        is_given_up: whether it was released because its jobs took too long.
    """

    started_at: float
    expires_at: float
    on_release: Callable[[Promotion], None]
    sources: dict[OffloadKey, int] = field(default_factory=dict)
    pins: list[LoadHandle] = field(default_factory=list)
    is_released: bool = False
    is_given_up: bool = False
    _parts: dict[int, _Part] = field(default_factory=dict)

    @property
    def num_running(self) -> int:
        """Number of its jobs that have not ended."""
        return sum(part.num_running for part in self._parts.values())

    def num_measured(self, tier: int) -> int | None:
        """Return how many chunks came from a tier since the beginning, if that says how fast it is; else ``None``.

        It does so once all jobs of the tier have ended: whether they found all chunks or not, for a tier may be slow to say
        that it lacks a chunk; and even if the request has given up waiting meanwhile, or a tier whose loads always take too
        long would never be known to be slow. The jobs of a request that needs its chunks no more are cut short.
        """
        part = self._parts[tier]
        is_cut_short = self.is_released and not self.is_given_up
        if part.num_running or is_cut_short or (part.has_failed and not (self.is_given_up and part.num_arrived)):
            return None
        return part.num_arrived

    def begin_job(self, tier: int) -> None:
        """Note that a job begins that brings up chunks from a tier."""
        self._parts.setdefault(tier, _Part()).num_running += 1

    def end_job(self, tier: int, arrived: Sequence[OffloadKey], *, is_done: bool) -> None:
        """Note that a job has ended, which chunks arrived, and whether it was carried out as a whole."""
        part = self._parts[tier]
        part.num_running -= 1
        part.num_arrived += len(arrived)
        part.has_failed |= not is_done
        self.sources.update(dict.fromkeys(arrived, tier))

    def release(self) -> None:
        """Give back the pins and cancel the jobs: the request has its chunks, or needs none. May be called repeatedly."""
        if not self.is_released:
            self.is_released = True
            self.drop_pins()
            self.on_release(self)

    def drop_pins(self) -> None:
        """Give back the pins."""
        pins, self.pins = self.pins, []
        for handle in pins:
            handle.release()

    def give_up(self) -> None:
        """Give back the pins: the request has waited long enough. The jobs end by themselves, or at their deadlines.

        A tier is judged by how its jobs end. If they were cancelled, one that hangs would never be blamed.
        """
        self.is_given_up = True
        self.release()
