"""The interface of an engine replica for a run, its oracles and its timeline: with our scheduler in it, or with vLLM's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from cargohold.engine.core.config import SchedulerConfig
from cargohold.engine.core.request import Request
from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.protocol import ConnectorGuard, KVCacheBlockView, KVCacheLayout, KVEvent
from cargohold.simulation.copies import CopiesInFlight


class ReplicaPool(Protocol):
    """The device pool. ``CopyOracle`` replaces ``allocate`` by a function of its own."""

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block included."""
        ...

    @property
    def num_usable_blocks(self) -> int:
        """Without the null block."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks."""
        ...

    @property
    def num_cached_prefixes(self) -> int:
        """Prefixes that can be found."""
        ...

    def get_block(self, block_id: int) -> KVCacheBlockView:
        """One block."""
        ...

    def allocate(self, num_blocks: int) -> Sequence[KVCacheBlockView]:
        """Allocate blocks. There is no other way in which blocks are given out."""
        ...


class ReplicaCache(Protocol):
    """The manager of the requests' blocks."""

    @property
    def pool(self) -> ReplicaPool:
        """The device pool."""
        ...

    def reference_counts(self) -> Counter[int]:
        """References that requests hold, per block."""
        ...

    def check(self) -> None:
        """Verify that no block is lost. Raises ``AssertionError``."""
        ...


class WaitingRequest(Protocol):
    """A request that waits."""

    @property
    def request_id(self) -> str:
        """Its id."""
        ...


class ReplicaScheduler(Protocol):
    """The scheduler."""

    @property
    def kv(self) -> ReplicaCache:
        """The requests' blocks."""
        ...

    @property
    def connector(self) -> ConnectorGuard:
        """The connector, contained."""
        ...

    def has_work(self) -> bool:
        """Whether another step is needed."""
        ...

    def waiting_requests(self) -> Iterable[WaitingRequest]:
        """Requests that are not running, for the timeline."""
        ...

    def reset_cache(self) -> bool:
        """Forget everything cached; ``False`` if something is in the way."""
        ...

    def take_events(self) -> Iterable[KVEvent]:
        """KV events of device pool and tiers since the last call, in order per medium."""
        ...

    def check_settled(self) -> None:
        """Verify that nothing is left behind once all work is done. Raises ``AssertionError`` naming what is."""
        ...


class Replica(Protocol):
    """An engine replica in virtual time, checked for wrong tokens in every step.

    Attributes:
        on_update: called with each update of a request.
    """

    on_update: Callable[[RequestUpdate], None]

    @property
    def layout(self) -> KVCacheLayout:
        """The paged KV cache."""
        ...

    @property
    def config(self) -> SchedulerConfig:
        """Its limits and policies."""
        ...

    @property
    def scheduler(self) -> ReplicaScheduler:
        """Its scheduler."""
        ...

    @property
    def copies(self) -> Sequence[CopiesInFlight]:
        """Per rank, the copies in flight."""
        ...

    @property
    def requests(self) -> Mapping[str, Request]:
        """All requests so far, by id."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps made."""
        ...

    @property
    def last_step(self) -> tuple[SchedulerStep, StepOutput]:
        """The step made last, or being made, and its output."""
        ...

    @property
    def dedupes_blocks(self) -> bool:
        """Whether the device pool keeps each prefix at most once."""
        ...

    @property
    def shares_loads(self) -> bool:
        """Whether blocks loaded for one request are found by others on the device."""
        ...

    @property
    def shares_load_ends(self) -> bool:
        """Whether at least those are found with which others can continue where the load ends."""
        ...

    @property
    def num_half_reported(self) -> int:
        """Transfers that some workers have reported and others have not."""
        ...

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_tokens: int = 1,
        *,
        priority: int = 0,
        salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> object:
        """Queue a request. Raises ``RequestError`` if it is refused."""
        ...

    def load_weights(self, version: int) -> None:
        """Compute KV with another version of the weights from now on."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request."""
        ...

    def step(self) -> tuple[SchedulerStep, StepOutput]:
        """Make one step. Raises ``WrongTokenError`` if a request reads wrong KV in it."""
        ...

    def cached_prefixes(self) -> set[tuple[bytes, int | None]]:
        """Hash and group of every prefix that the device pool can find."""
        ...

    def shutdown(self) -> None:
        """Stop the replica."""
        ...
