"""What a replay found."""

from __future__ import annotations

from dataclasses import dataclass

from cargohold.replay.tiers import TierTraffic

INFINITE = "infinite"
"""Not a policy: nothing is ever evicted."""
OPTIMUM = "optimum"
"""Not a policy: the future is known."""
BOUNDS = (OPTIMUM, INFINITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """One policy at one size.

    Attributes:
        policy: its name, or one of ``BOUNDS``.
        capacities: slots of each tier, first tier first; of an infinite cache, as many as there are different chunks.
        num_requests: requests replayed.
        num_lookups: chunks of their prompts.
        num_prefix_hits: chunks found that had all chunks before them found too: what saves prefill.
        num_block_hits: chunks found, behind a hole or not.
        num_hit_tokens: tokens of the prefix hits; ``None`` if the trace does not tell how many a block has.
        tiers: what went in and out of each tier; empty for the optimum, which does not say how it does it.
        seconds: how long the replay took.
    """

    policy: str
    capacities: tuple[int, ...]
    num_requests: int
    num_lookups: int
    num_prefix_hits: int
    num_block_hits: int
    num_hit_tokens: int | None
    tiers: tuple[TierTraffic, ...]
    seconds: float

    @property
    def prefix_hit_ratio(self) -> float:
        """Prefix hits per look-up."""
        return self.num_prefix_hits / self.num_lookups

    @property
    def block_hit_ratio(self) -> float:
        """Block hits per look-up."""
        return self.num_block_hits / self.num_lookups
