"""Virtual time, and layouts of paged KV for the simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

from cargohold.engine.core.kv_cache_manager import max_held_blocks
from cargohold.protocol import AttentionKind, KVCacheGroup, KVCacheLayout
from cargohold.testing.simulation.fingerprints import FINGERPRINT_BYTES


class VirtualClock:
    """A clock of virtual time. Satisfies ``cargohold.protocol.Clock``.

    Attributes:
        now: seconds since the start. Reading it lets no time pass, unlike a call.
        before_reading: gives the seconds that pass before each call returns; ``None`` if none do.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.before_reading: Callable[[], float] | None = None

    def __call__(self) -> float:
        """The current time."""
        if self.before_reading is not None:
            self.advance(self.before_reading())
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0
        self.now += seconds

    def advance_to(self, time: float) -> None:
        """Let time pass until ``time``, unless it is past already."""
        self.now = max(self.now, time)


# --- layouts of paged KV caches that hold fingerprints ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A KV-cache group to be made.

    Attributes:
        kind: how its layers look back.
        block_tokens: tokens per block.
        window_tokens: reach of a window; ``None`` where there is none.
    """

    kind: AttentionKind = AttentionKind.FULL
    block_tokens: int = 4
    window_tokens: int | None = None


def layout_of(plans: Sequence[GroupPlan], num_blocks: int, world_size: int = 1) -> KVCacheLayout:
    """A paged KV cache with these groups."""
    groups = tuple(
        KVCacheGroup(index, plan.kind, plan.block_tokens, (f"layers.{index}",), plan.window_tokens)
        for index, plan in enumerate(plans)
    )
    widest = max(plan.block_tokens for plan in plans)
    return KVCacheLayout(
        groups, num_blocks, widest * FINGERPRINT_BYTES, gcd(*(plan.block_tokens for plan in plans)), world_size
    )


def simulated_layout(
    num_blocks: int, block_tokens: int = 4, windows: Sequence[int | None] = (None,), world_size: int = 1
) -> KVCacheLayout:
    """A paged KV cache of full attention and sliding windows.

    Args:
        windows: one per KV-cache group: ``None`` for full attention, or the window in tokens.
    """
    plans = [
        GroupPlan(AttentionKind.FULL if window is None else AttentionKind.SLIDING_WINDOW, block_tokens, window)
        for window in windows
    ]
    return layout_of(plans, num_blocks, world_size)


def num_blocks_needed(plans: Sequence[GroupPlan], num_tokens: int, max_step_tokens: int) -> int:
    """Blocks, the null block included, with which a request of ``num_tokens`` tokens can be served alone."""
    groups = layout_of(plans, 2).groups
    return 1 + sum(max_held_blocks(group, num_tokens, max_step_tokens) for group in groups)
