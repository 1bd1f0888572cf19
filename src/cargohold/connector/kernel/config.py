"""Options of the kernel: host memory, chunks, and the copies between it and the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from cargohold.cache.policies import DEFAULT_POLICY
from cargohold.cache.policies.registry import POLICY
from cargohold.cache.rows import RowPlan, even_rows, plan_rows
from cargohold.deadlines import DEFAULTS, MAX_SHUTDOWN_S, RESTORE, SHUTDOWN, TRANSFER
from cargohold.option_values import is_int, is_number, parse_bytes
from cargohold.options import FACTORY, INT_FROM_1, PART, SHORT_TIME, SIZE, Options, must
from cargohold.protocol import KVCacheLayout

_SHUTDOWN = must(
    lambda value: is_number(value) and 0 <= value <= MAX_SHUTDOWN_S, f"a number of seconds from 0 to {MAX_SHUTDOWN_S:g}"
)
_STEPS: Final = must(lambda value: is_int(value) and 0 <= value <= 1_000_000, "an integer from 0 to 1000000")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig(Options):
    """Options of host memory and of the copies between it and the device.

    Attributes:
        host_bytes: host memory for KV, over all workers: a number, or a size such as ``2GiB``. A hard limit.
        policy: which chunks are evicted: see ``cargohold.cache.policies.find_policy``.
        blocks_per_chunk: blocks offloaded as one unit. Only whole chunks are kept, so they must be shorter than the prompts.
        store_generated: whether KV of generated tokens is kept too; otherwise only that of prompts.
        store_within_steps: while many requests generate, chunks that they complete are stored together, at most so many steps
            later; 0 for at once.
        max_inflight_fraction: fraction of the device pool that stores in flight may hold; above it, new chunks wait.
        transfer_timeout_s: a copy that has not started after this time is given up: a load becomes a miss. Other deadlines of
            copies and of what is written follow from it.
        restore_timeout_s: maximum time that a request waits for chunks that are not in host memory; those that have not come
            by then are computed.
        shutdown_timeout_s: maximum time to finish writes when the workers stop, at most 20 s; 0 waits for nothing. Chunks whose
            writes have not ended by then are not there after a restart.
        read_only: whether nothing is stored: for engines that only use what others have stored.
        manager: what decides which chunks host memory holds, if it is your own: a ``MODULE:FACTORY`` that makes a
            ``cargohold.cache.OffloadManager``; called as ``cargohold.cache.make_manager`` is, without a policy.
        transfer: what copies between device and host memory on a worker, if it is your own: a ``MODULE:FACTORY`` that makes a
            ``cargohold.transfer.TransferWorker``; called as ours in ``cargohold.transfer.cpu`` is.
    """

    host_bytes: Annotated[int | str, SIZE]
    policy: Annotated[str, POLICY] = DEFAULT_POLICY
    blocks_per_chunk: Annotated[int, INT_FROM_1] = 1
    store_generated: bool = True
    store_within_steps: Annotated[int, _STEPS] = 8
    max_inflight_fraction: Annotated[float, PART] = 0.5
    transfer_timeout_s: Annotated[float, SHORT_TIME] = DEFAULTS[TRANSFER]
    restore_timeout_s: Annotated[float, SHORT_TIME] = DEFAULTS[RESTORE]
    shutdown_timeout_s: Annotated[float, _SHUTDOWN] = DEFAULTS[SHUTDOWN]
    read_only: bool = False
    manager: Annotated[str | None, FACTORY] = None
    transfer: Annotated[str | None, FACTORY] = None

    def __post_init__(self) -> None:
        """Refuse options that do not fit together. An override calls ``KernelConfig.__post_init__(self)`` first."""

    def plan_rows(self, layout: KVCacheLayout) -> RowPlan:
        """Return how blocks lie in host memory. Managers and transfers of the user's own know only rows as large as blocks."""
        return plan_rows(layout) if self.manager is self.transfer is None else even_rows(layout)

    @property
    def num_host_bytes(self) -> int:
        """``host_bytes`` as a number."""
        return parse_bytes("host_bytes", self.host_bytes)
