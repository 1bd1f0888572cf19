"""What must hold with any connector, whatever it is asked: nothing stands still or goes on for ever, and events are true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import SimpleCPUOffloadConnector
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.kv_offload.base import get_offload_block_hash, get_offload_group_idx

from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.lab.simulation.oracles import Oracle, OracleError
from cargohold.lab.vllm.engine import VllmEngine
from cargohold.lab.vllm.requests import watch

Prefixes = Counter[tuple[bytes, int]]
"""How often each prefix of a group is there."""
_SHOWN: Final = 4
PATIENCE: Final = 200
"""Steps in a row in which nothing runs and no block is copied, although requests wait, after which nothing ever will."""
UNREST: Final = 1000
"""Steps in a row with no request in the engine, or none that runs, after which that never changes, whatever is copied."""


class StandstillOracle(Oracle):
    """While there are requests, they run or something is copied; and when there are none, the engine comes to rest.

    Args:
        engine: the replica.
    """

    name = "standstill"

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._num_idle = self._num_waiting = self._num_empty = 0

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Count steps in which nothing has happened."""
        requests, is_waiting = self._engine.vllm.requests, not step.scheduled and output.connector.is_empty()
        is_copying = any(copies.num_jobs for copies in self._engine.copies)
        self._num_waiting = self._num_waiting + 1 if is_waiting and requests else 0
        self._num_idle = self._num_idle + 1 if is_waiting and requests and not is_copying else 0
        self._num_empty = 0 if requests else self._num_empty + 1
        if self._num_idle > PATIENCE:
            self.fail(self._complaint(PATIENCE, "nothing runs, and nothing is copied from or to the device"))
        if self._num_waiting > UNREST:
            self.fail(self._complaint(UNREST, "nothing runs, whatever is stored"))
        if self._num_empty > UNREST and self._engine.scheduler.has_work():
            message = f"for {UNREST} steps the engine has had no request, and it still has work to do for the connector"
            raise OracleError("unrest", message)

    def _complaint(self, num_steps: int, what: str) -> str:
        vllm, pool = self._engine.vllm, self._engine.scheduler.kv.pool
        managers = vllm.kv_cache_manager.coordinator.single_type_managers
        held = Counter(
            {
                name: sum(not block.is_null for manager in managers for block in manager.req_to_blocks.get(name, ()))
                for name in vllm.requests
            }
        )
        holders = (
            ", ".join(f"{name} holds {count} blocks" for name, count in held.items() if count) or "nobody holds blocks"
        )
        return (
            f"for {num_steps} steps {what}, and {len(vllm.requests)} requests wait: {holders}, "
            f"{pool.num_free_blocks} of {pool.num_usable_blocks} are free"
        )


# --- events of host memory ---------------------------------------------------------------------------------------------


class HostEventOracle(Oracle):
    """Follows the events in the order in which vLLM publishes them, and compares them with what connectors hold.

    Events may be late by as long as they wait in a queue: this is emptied before anything is compared. That all blocks are
    cleared does not say where. If the device says so, host memory may be cleared or not; if a connector says so, followers must
    not have to forget blocks of the device that are still there.

    The first error is reported at the end: a missing event must not hide a wrong token.

    Args:
        engine: the replica; it must emit events.
    """

    name = "host events"

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        connector = engine.vllm.connector
        parts = getattr(connector, "_connectors", [connector])
        self._followers = [_Follower(part, self) for part in parts if type(part) in _CONTENTS]
        self._complaint = ""
        watch(engine.vllm.kv_cache_manager, self._follow_device)

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Take what is about to be published, and compare."""
        if self._followers and not self._complaint:
            self._engine.vllm.kv_cache_manager.take_events()
            list(self._engine.vllm.connector.take_events())
            for follower in self._followers:
                follower.compare()

    def at_end(self) -> None:
        """Tell what was wrong first."""
        self.require(not self._complaint, self._complaint)

    def complain(self, what: str) -> None:
        self._complaint = self._complaint or f"in step {self._engine.num_steps}, {what}"

    def num_on_device(self) -> int:
        """How many blocks can be found on the device."""
        return len(self._engine.cached_prefixes())

    def _follow_device(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            for follower in self._followers:
                follower.doubt()


class _Follower:
    """What a follower of all of one connector's events knows.

    Attributes:
        announced: what is there.
        doubted: what was there when the device was cleared.
        chunks: prefixes of the chunk that ends with one.
    """

    def __init__(self, connector: Any, oracle: HostEventOracle) -> None:
        self._connector = connector
        self._oracle = oracle
        self.announced: Prefixes = Counter()
        self.doubted: Prefixes = Counter()
        self.chunks: dict[tuple[bytes, int], list[tuple[bytes, int]]] = {}
        watch(connector, self._follow)

    def doubt(self) -> None:
        """The device was cleared, and maybe host memory with it."""
        self.doubted += self.announced
        self.announced.clear()

    def compare(self) -> None:
        """What is announced must be there, and what is there must be announced."""
        ends = _CONTENTS[type(self._connector)](self._connector)
        held = Counter(prefix for end in ends for prefix in self.chunks.get(end, (end,)))
        gone, missing = self.announced - held, held - self.announced - self.doubted
        if gone or missing:
            self._oracle.complain(
                f"{type(self._connector).__name__} holds {held.total()} blocks in host memory and announces "
                f"{self.announced.total()}: {_told(gone)} not there, {_told(missing)} not announced"
            )

    def _follow(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            if left := self._oracle.num_on_device():
                name = type(self._connector).__name__
                self._oracle.complain(f"{name} announces that all blocks are cleared, and {left} are on the device")
            self.announced.clear()
            self.doubted.clear()
        elif event.medium == MEDIUM_CPU:
            prefixes = [(bytes(block_hash), event.group_idx) for block_hash in event.block_hashes]
            if isinstance(event, BlockRemoved):
                self._remove(prefixes)
            else:
                self.chunks[prefixes[-1]] = prefixes
                self.announced.update(prefixes)

    def _remove(self, prefixes: Iterable[tuple[bytes, int]]) -> None:
        for prefix in prefixes:
            known = self.announced if self.announced[prefix] > 0 else self.doubted
            if known[prefix] <= 0:
                self._oracle.complain(f"{_told(Counter([prefix]))} was removed, and never stored")
            known[prefix] -= 1


def _told(prefixes: Prefixes) -> str:
    names = [f"{block_hash.hex()[:8]} of group {group}" for block_hash, group in sorted(prefixes)[:_SHOWN]]
    return f"{prefixes.total()} ({', '.join(names)})" if names else "none"


# --- contents ---------------------------------------------------------------------------------------------------------


def _in_chunks(connector: Any) -> Iterator[tuple[bytes, int]]:
    """Hash of the last block, and group, of every chunk that can be loaded."""
    manager = connector.connector_scheduler.manager
    policy = getattr(manager, "primary_tier", manager)._policy
    for chunks in (policy.chunks,) if hasattr(policy, "chunks") else (policy.t1, policy.t2):
        for key, chunk in chunks.items():
            if chunk.is_ready:
                yield get_offload_block_hash(key), get_offload_group_idx(key)


def _in_pool(connector: Any) -> Iterator[tuple[bytes, int]]:
    """Hash and group of every block that can be found, once for each block with it."""
    pool = connector.scheduler_manager.cpu_block_pool
    for block in pool.blocks:
        if block.block_hash is not None:
            for key in (block.block_hash, *pool.cached_block_hashes_by_block.get(block.block_id, ())):
                yield bytes(get_block_hash(key)), get_group_id(key)


_CONTENTS: Final[dict[type, Callable[[Any], Iterator[tuple[bytes, int]]]]] = {
    OffloadingConnector: _in_chunks,
    SimpleCPUOffloadConnector: _in_pool,
}
"""How to look into the host memory of a connector. What others hold, their events alone tell."""
