"""Results of replays, and the names of bounds."""

from __future__ import annotations

from dataclasses import dataclass

from cargohold.replay.tiers import TierTraffic

INFINITE = "infinite"
"""Name of a bound, not of a policy: nothing is ever evicted."""
OPTIMUM = "optimum"
"""Name of a bound, not of a policy: the future is known."""
BOUNDS = (OPTIMUM, INFINITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The result of one policy at one size.

    Attributes:
        policy: the policy's name, or one of ``BOUNDS``.
        capacities: slots of each tier, first tier first; of an infinite cache, the number of different chunks.
        num_requests: requests replayed.
        num_lookups: chunks of their prompts.
        num_prefix_hits: chunks found with all chunks before them: the hits that save prefill.
        num_block_hits: chunks found, behind a hole or not.
        num_hit_tokens: tokens of the prefix hits; ``None`` if the trace does not tell how many a block has.
        tiers: traffic of each tier; empty for the optimum, for which it is not known.
        seconds: real time that the replay took.
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
