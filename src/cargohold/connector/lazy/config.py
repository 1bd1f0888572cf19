"""Options of the lazy offloading connector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cargohold.cache.policies.recency import LRUPolicy
from cargohold.connector.offloading.config import RESTORE_IF_FASTER, OffloadConfig
from cargohold.errors import ConfigError
from cargohold.offload.tier import TierConfig
from cargohold.protocol import SchedulerEnvironment
from cargohold.units import is_positive_int


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyOffloadConfig:
    """Options for keeping blocks in host memory that the device is about to evict.

    Checked when created; raises ``ConfigError``, which names the option. Moves far fewer bytes than eager offloading if most
    blocks are used again before they are evicted; blocks that are evicted faster than they can be copied are lost.

    Attributes:
        host_bytes: host memory for KV, over all workers: a number, or a size such as ``2GiB``. A hard limit.
        lookahead_blocks: number of blocks ahead of eviction that are kept safe. By default twice what one step can allocate.
        policy: what host memory evicts; see ``OffloadConfig``. Blocks come without the blocks before them, so a policy that
            learns from prefixes has little to learn.
        max_inflight_fraction: fraction of the device pool that stores in flight may hold.
        transfer_timeout_s: a transfer that has not started after this time is given up: a load becomes a miss.
        job_timeout_s: nobody waits longer for a transfer to end on all workers, nor than half of the engine's
            ``load_timeout_s``; its blocks and slots stay out of service until it ends.
        tiers: the tiers below host memory, the fastest first; see ``OffloadConfig``.
        restore: see ``OffloadConfig``.
        restore_timeout_s: see ``OffloadConfig``.
        shutdown_timeout_s: see ``OffloadConfig``.
    """

    host_bytes: int | str
    lookahead_blocks: int | None = None
    policy: str = LRUPolicy.name
    max_inflight_fraction: float = 0.5
    transfer_timeout_s: float = 30.0
    job_timeout_s: float = 120.0
    tiers: Sequence[TierConfig] = ()
    restore: str = RESTORE_IF_FASTER
    restore_timeout_s: float = 5.0
    shutdown_timeout_s: float = 3.0

    def __post_init__(self) -> None:
        self.common()
        if self.lookahead_blocks is not None and not is_positive_int(self.lookahead_blocks):
            raise ConfigError("lookahead_blocks", self.lookahead_blocks, "it must be an integer from 1, or None")

    def common(self) -> OffloadConfig:
        """Return the options that eager offloading has too, checked."""
        return OffloadConfig(
            host_bytes=self.host_bytes,
            policy=self.policy,
            max_inflight_fraction=self.max_inflight_fraction,
            transfer_timeout_s=self.transfer_timeout_s,
            job_timeout_s=self.job_timeout_s,
            tiers=self.tiers,
            restore=self.restore,
            restore_timeout_s=self.restore_timeout_s,
            shutdown_timeout_s=self.shutdown_timeout_s,
        )

    def lookahead(self, environment: SchedulerEnvironment) -> int:
        """Return ``lookahead_blocks``, or its default for the engine's step size."""
        if self.lookahead_blocks is not None:
            return self.lookahead_blocks
        return 2 * sum(-(-environment.max_step_tokens // group.block_tokens) for group in environment.layout.groups)
