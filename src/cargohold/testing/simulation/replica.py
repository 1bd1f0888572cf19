"""An engine replica as a run, its oracles and its timeline see it: with our scheduler in it, or with vLLM's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Protocol

from cargohold.blocks import extend_hashes, root_hash
from cargohold.connector.multi import MultiConnectorScheduler
from cargohold.connector.offloading import OffloadingScheduler
from cargohold.engine.core.config import SchedulerConfig
from cargohold.engine.core.request import Request, RequestTimes
from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.engine.sampling_params import SamplingParams
from cargohold.protocol import (
    Clock,
    ConnectorGuard,
    ForwardingScheduler,
    Hint,
    KVCacheBlockView,
    KVCacheLayout,
    KVConnectorScheduler,
    KVEvent,
    Prefix,
)
from cargohold.testing.simulation.fingerprints import PrefixChains
from cargohold.testing.simulation.transfers import CopiesInFlight

NO_OUTPUT: Final = StepOutput()
"""The output of a step that has not been made yet."""


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


class Replica(ABC):
    """An engine replica in virtual time, checked for wrong tokens in every step.

    Args:
        layout: the paged KV cache.
        config: its limits and policies.
        clock: time in seconds.
        copies: per rank, the copies in flight.
        hash_block_tokens: tokens per block hash of its requests.

    Attributes:
        requests: all requests so far by id, in the state that their clients know of.
        num_steps: steps made.
        last_step: the step made last, or being made, and its output.
        on_update: called with each update of a request.
        dedupes_blocks: whether the device pool keeps each prefix at most once.
        has_own_hashes: whether block hashes are those of ``cargohold.blocks``, so that events can be checked.
    """

    dedupes_blocks: ClassVar[bool]
    has_own_hashes: ClassVar[bool]

    def __init__(
        self,
        layout: KVCacheLayout,
        config: SchedulerConfig,
        clock: Clock,
        copies: Sequence[CopiesInFlight],
        hash_block_tokens: int,
    ) -> None:
        self.layout = layout
        self.config = config
        self.clock = clock
        self.copies = copies
        self.requests: dict[str, Request] = {}
        self.num_steps = 0
        self.last_step = (SchedulerStep(), NO_OUTPUT)
        self.on_update: Callable[[RequestUpdate], None] = lambda _: None
        self._hash_block_tokens = hash_block_tokens

    @property
    @abstractmethod
    def scheduler(self) -> ReplicaScheduler:
        """Its scheduler."""

    @property
    @abstractmethod
    def chains(self) -> PrefixChains:
        """The fingerprints of its requests' prefixes."""

    @property
    @abstractmethod
    def shares_loads(self) -> bool:
        """Whether blocks loaded for one request are found by others on the device."""

    @property
    @abstractmethod
    def shares_load_ends(self) -> bool:
        """Whether at least those are found with which others can continue where the load ends."""

    @property
    @abstractmethod
    def num_half_reported(self) -> int:
        """Transfers that some workers have reported and others have not."""

    def add(  # noqa: PLR0913  # options that callers name
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_tokens: int = 1,
        *,
        priority: int = 0,
        salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        stop_token_ids: Sequence[int] = (),
        hints: Sequence[Hint] = (),
    ) -> Request:
        """Queue a request. Raises ``RequestError`` if it is refused."""
        request = Request(
            request_id=request_id,
            all_token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(max_tokens=max_tokens),
            seed=0,
            times=RequestTimes(arrived=self.clock()),
            hash_block_tokens=self._hash_block_tokens,
            priority=priority,
            salt=salt,
            kv_transfer_params=kv_transfer_params,
            stop_token_ids=frozenset(stop_token_ids),
        )
        self.requests[request_id] = request
        self.chains.forget(request_id)
        self._queue(request, hints)
        return request

    def hint(self, prompt: Sequence[int], salt: str | None, hints: Sequence[Hint]) -> None:
        """Give hints about a prefix to the connector."""
        hashes: list[bytes] = []
        extend_hashes(hashes, prompt, self._hash_block_tokens, root_hash(salt=salt))
        self.scheduler.connector.on_hints(Prefix(hashes, prompt, len(prompt), salt, salt), hints)

    @abstractmethod
    def _queue(self, request: Request, hints: Sequence[Hint]) -> None:
        """Hand a request and its hints to the scheduler. Raises ``RequestError`` if it is refused."""

    def load_weights(self, version: int) -> None:
        """Compute KV with another version of the weights from now on."""
        self.chains.use_weights(version)

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a request."""

    @abstractmethod
    def step(self) -> tuple[SchedulerStep, StepOutput]:
        """Make one step. Raises ``WrongTokenError`` if a request reads wrong KV in it and the step's result is used."""

    @abstractmethod
    def cached_prefixes(self) -> set[tuple[bytes, int | None]]:
        """Hash and group of every prefix that the device pool can find."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the replica."""


# --- finds the connectors that an engine's connector is made of -------------------------------------------------------


def walk(
    connector: KVConnectorScheduler, guards: Sequence[ConnectorGuard] = ()
) -> Iterator[tuple[KVConnectorScheduler, Sequence[ConnectorGuard]]]:
    """Yield ``connector`` and all connectors inside it, outer ones first, each with the guards around it, outermost first."""
    yield connector, guards
    for inner in _parts(connector):
        yield from walk(inner, [*guards, connector] if isinstance(connector, ConnectorGuard) else guards)


def offloading_sides(connector: KVConnectorScheduler) -> Iterator[tuple[OffloadingScheduler, Sequence[ConnectorGuard]]]:
    """Every offloading connector inside ``connector``, with the guards around it, outermost first."""
    return ((side, guards) for side, guards in walk(connector) if isinstance(side, OffloadingScheduler))


def live_sides(connector: KVConnectorScheduler) -> list[OffloadingScheduler]:
    """Every offloading connector inside ``connector`` that is not turned off, and no connector around it either."""
    return [side for side, guards in offloading_sides(connector) if all(guard.broken is None for guard in guards)]


def guards_of(connector: KVConnectorScheduler) -> list[ConnectorGuard]:
    """Every guard around or inside ``connector``."""
    return [guard for guard, _ in walk(connector) if isinstance(guard, ConnectorGuard)]


def innermost_guards(connector: KVConnectorScheduler) -> list[ConnectorGuard]:
    """For every connector that is made of no others, the guard closest around it."""
    return [guards[-1] for part, guards in walk(connector) if guards and not _parts(part)]


def num_stuck_jobs(connector: KVConnectorScheduler) -> int:
    """How many jobs of connectors that are not turned off have not ended in time, and may never end."""
    return sum(side.jobs.num_stuck for side in live_sides(connector))


def forget_engine(connector: KVConnectorScheduler) -> None:
    """End the jobs of a connector whose process has died, so that its tiers give up their pins and reservations."""
    for side, _ in offloading_sides(connector):
        for load in list(side.jobs.loads()):
            load.handle.release()
        for store in list(side.jobs.stores()):
            store.handle.forfeit()


def _parts(connector: KVConnectorScheduler) -> Sequence[KVConnectorScheduler]:
    match connector:
        case ConnectorGuard() | ForwardingScheduler():
            return [connector.inner]
        case MultiConnectorScheduler():
            return connector.children
        case _:
            return []
