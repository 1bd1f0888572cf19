"""Options of the kernel: host memory, chunks, and the copies between it and the device."""

from __future__ import annotations

from dataclasses import dataclass

from cargohold.cache.policies import DEFAULT_POLICY, find_policy
from cargohold.errors import ConfigError
from cargohold.option_values import find_factory, is_int, is_number, is_positive_int, is_positive_number, parse_bytes
from cargohold.protocol import AttentionKind, KVCacheLayout

MAX_SHUTDOWN_S = 20.0
"""Maximum of ``shutdown_timeout_s``. Engines kill workers that have not stopped by themselves: the embedded one after 30 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """Options of host memory and of the copies between it and the device.

    Attributes:
        host_bytes: host memory for KV, over all workers: a number, or a size such as ``2GiB``. A hard limit.
        policy: name of the eviction policy for host memory; see ``cargohold.cache.policies.find_policy``.
        blocks_per_chunk: number of blocks offloaded as one unit. Larger chunks cost less bookkeeping and hit less often.
        store_generated: whether KV of generated tokens is kept too; otherwise only that of prompts.
        store_within_steps: while many requests generate, chunks that they complete are stored together, at most so many steps
            later; 0 for at once.
        max_inflight_fraction: fraction of the device pool that stores in flight may hold; above it, new chunks wait.
        transfer_timeout_s: a transfer that has not started after this time is given up: a load becomes a miss.
        job_timeout_s: nobody waits longer for a transfer to end on all workers, nor than half of the engine's
            ``load_timeout_s``; its blocks and slots stay out of service until it ends.
        restore_timeout_s: maximum time that a request waits for chunks that are not in host memory; those that have not come
            by then are computed.
        shutdown_timeout_s: maximum time to finish writes when the engine stops; chunks whose writes have not ended by then are
            not there after a restart.
        read_only: whether nothing is stored: for engines that only use what others have stored.
        manager: what decides which chunks host memory holds, if it is your own: ``MODULE:FACTORY``, called with the number of
            chunks and ``record_events``; it makes a ``cargohold.cache.OffloadManager``. Then there is no ``policy``.
        transfer: what copies between device and host memory on a worker, if it is your own: ``MODULE:FACTORY``, called with the
            arguments of ``cargohold.transfer.cpu.make_transfer_worker``; it makes a ``cargohold.transfer.TransferWorker``.
    """

    host_bytes: int | str
    policy: str = DEFAULT_POLICY
    blocks_per_chunk: int = 1
    store_generated: bool = True
    store_within_steps: int = 8
    max_inflight_fraction: float = 0.5
    transfer_timeout_s: float = 30.0
    job_timeout_s: float = 120.0
    restore_timeout_s: float = 5.0
    shutdown_timeout_s: float = 3.0
    read_only: bool = False
    manager: str | None = None
    transfer: str | None = None

    def __post_init__(self) -> None:
        """Refuse invalid options. Overrides call ``KernelConfig.__post_init__(self)`` first: ``super()`` fails with slots."""
        parse_bytes("host_bytes", self.host_bytes)
        find_policy(self.policy)
        self._require("blocks_per_chunk", is_positive_int(self.blocks_per_chunk), "an integer from 1")
        self._require("store_generated", isinstance(self.store_generated, bool), "True or False")
        within = self.store_within_steps
        self._require("store_within_steps", is_int(within) and within >= 0, "an integer from 0")
        fraction = self.max_inflight_fraction
        self._require(
            "max_inflight_fraction", is_positive_number(fraction) and fraction <= 1, "a number above 0 and at most 1"
        )
        self._require("transfer_timeout_s", is_positive_number(self.transfer_timeout_s), "a number of seconds above 0")
        self._require(
            "job_timeout_s",
            is_positive_number(self.job_timeout_s) and self.job_timeout_s > self.transfer_timeout_s,
            f"a number of seconds above transfer_timeout_s, which is {self.transfer_timeout_s:g}",
        )
        self._require("restore_timeout_s", is_positive_number(self.restore_timeout_s), "a number of seconds above 0")
        self._require(
            "shutdown_timeout_s",
            is_number(self.shutdown_timeout_s) and 0 <= self.shutdown_timeout_s <= MAX_SHUTDOWN_S,
            f"a number of seconds from 0 to {MAX_SHUTDOWN_S:g}",
        )
        self._require("read_only", isinstance(self.read_only, bool), "True or False")
        for key in ("manager", "transfer"):
            if getattr(self, key) is not None:
                find_factory(key, getattr(self, key))

    @property
    def num_host_bytes(self) -> int:
        """``host_bytes`` as a number."""
        return parse_bytes("host_bytes", self.host_bytes)

    def _require(self, key: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(key, getattr(self, key), f"it must be {expected}")

    def check_chunks_can_be_filled(self, layout: KVCacheLayout, max_model_len: int) -> None:
        """Check that there can be a request long enough for one chunk.

        Args:
            layout: the paged KV.
            max_model_len: tokens of the longest sequence.

        Raises:
            ConfigError: no request can ever fill a chunk, so nothing would be kept.
        """
        limits = [layout.num_blocks - 1 for group in layout.groups if group.kind is AttentionKind.FULL]
        # The KV of the last token is not computed: there is none behind it that would look at it.
        num_tokens = max_model_len - 1
        groups = [group for group in layout.groups if group.kind is not AttentionKind.RECURRENT]
        limits += [num_tokens // group.block_tokens for group in groups]
        most = max(1, min(limits, default=self.blocks_per_chunk))
        if self.blocks_per_chunk > most:
            expected = f"no request can have so many full blocks, so nothing would ever be kept; use at most {most}"
            raise ConfigError("blocks_per_chunk", self.blocks_per_chunk, expected)
