"""Oracles of tiers and limits: pins and slots belong to jobs, limits are kept, nothing is loaded twice at a time."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType, GeneratorType, MappingProxyType, MethodType
from typing import Any, Final

from cargohold.cache import OffloadKey, OffloadManager
from cargohold.connector.guests.verification import Comparison
from cargohold.connector.kernel.jobs import JobTable, Load
from cargohold.connector.offloading import OffloadingScheduler
from cargohold.engine.core.request import SchedulerStep, StepOutput
from cargohold.lab.simulation.connectors import num_stuck_jobs, offloading_sides
from cargohold.lab.simulation.fault_wrappers import FaultyManager
from cargohold.lab.simulation.faults import VirtualClock
from cargohold.lab.simulation.replica import Oracle, Replica
from cargohold.protocol import ConnectorGuard, RequestView
from cargohold.tiers.scheduler_side.tasks import SteppedClock


@dataclass(frozen=True, slots=True)
class _SideCounts:
    """One offloading connector, with its parts that are checked after every step.

    Attributes:
        side: its scheduler side.
        guards: the guards around it.
        manager, jobs: its manager and its jobs.
        is_alone: whether there are no tiers below host memory. Chunks on their way from and to lower tiers are pinned and
            reserved, too; then the manager's own check counts them.
        counts_tokens: whether it counts the tokens that its requests compute.
        lengths: by load, number of tokens of its request when it was planned: a step that waits for a load adds some.
    """

    side: OffloadingScheduler
    guards: Sequence[ConnectorGuard]
    manager: OffloadManager
    jobs: JobTable
    is_alone: bool
    counts_tokens: bool
    lengths: dict[int, int] = field(default_factory=dict)

    def is_live(self) -> bool:
        """Whether it is not turned off."""
        for guard in self.guards:  # noqa: SIM110  # every step; all() is slower
            if guard.broken is not None:
                return False
        return True


class TierOracle(Oracle):
    """Watches the offloading connectors that are not turned off, and their managers.

    Args:
        engine: the replica.
        is_excused: whether a fault has struck that breaks a rule.
    """

    name = "tiers"

    def __init__(self, engine: Replica, is_excused: Callable[[], bool]) -> None:
        self._engine = engine
        self._is_excused = is_excused
        self._sides = [
            _SideCounts(
                side,
                guards,
                side.shared.manager,
                side.shared.jobs,
                side.lower is None,
                side.name == "offloading",
            )
            for side, guards in offloading_sides(engine.scheduler.connector)
        ]
        for watched in self._sides:
            vars(watched.jobs)["add_load"] = partial(self._add_load, watched, watched.jobs.add_load)

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Check pins, slots and limits."""
        for watched in self._sides:
            if watched.is_live():
                self._check_counts(watched)
                if watched.jobs.num_loads > 1 and not self._engine.takes_less:
                    self._check_loads(watched)
                if watched.counts_tokens:
                    self._check_tokens(watched.side, step)

    def inspect(self) -> None:
        """Check every invariant of the managers."""
        for side in self._live_sides():
            side.shared.manager.check()
            if side.lower is not None:
                side.lower.check()

    def at_end(self) -> None:
        """No job, no pin, no reserved slot, no request is left, except jobs that are stuck and what they hold."""
        self.inspect()
        for side in self._live_sides():
            manager, jobs = side.shared.manager, side.shared.jobs
            self.require(not jobs.num_awaited, f"connector {side.name} has {jobs.num_awaited} jobs left")
            self.require(not side.requests, f"connector {side.name} still knows requests {list(side.requests)}")
            num_pins = manager.num_pins - _num_pinned(jobs)
            num_writing = manager.num_writing - sum(len(store.handle.keys) for store in jobs.stores())
            num_leaving = 0 if jobs else manager.num_leaving
            counts = (num_pins, num_writing, num_leaving)
            self.require(counts == (0, 0, 0), f"pinned, writing, leaving: {counts}")
        if not self._is_excused():
            num_incomplete = self._engine.num_half_reported
            num_stuck = num_stuck_jobs(self._engine.scheduler.connector)
            self.require(num_incomplete <= num_stuck, f"{num_incomplete} transfers were not reported by all workers")

    def _check_tokens(self, side: OffloadingScheduler, step: SchedulerStep) -> None:
        """Requests have computed no more tokens than the connector believes: it would offer their chunks too late."""
        for share in step.scheduled:
            state = side.requests.get(share.request_id)
            num_computed = share.num_computed_tokens + share.num_scheduled_tokens
            if state is None or not self._engine.is_shown(share.request_id, num_computed):
                continue
            if state.max_computed_tokens < num_computed:
                self.fail(
                    f"{share.request_id} has computed {num_computed} tokens, more than {state.max_computed_tokens}"
                )

    def _live_sides(self) -> list[OffloadingScheduler]:
        return [watched.side for watched in self._sides if watched.is_live()]

    def _check_counts(self, watched: _SideCounts) -> None:
        manager, jobs, is_alone = watched.manager, watched.jobs, watched.is_alone
        num_pins, num_writing = manager.num_pins, manager.num_writing
        num_loading = _num_pinned(jobs) + watched.side.answers.num_pins
        num_storing = sum([len(store.handle.keys) for store in jobs.stores()])
        if num_pins < num_loading or (is_alone and num_pins > num_loading):
            self.fail(f"{num_pins} chunks pinned, {num_loading} being loaded")
        if is_alone and num_writing != num_storing:
            self.fail(f"{num_writing} slots reserved, {num_storing} being written")
        used, num_free = manager.num_ready + num_writing + manager.num_leaving, manager.num_free
        # Where chunks differ in size, what is free counts in those of the largest group, and more fit of others.
        num_more, has_one_size = used + num_free - manager.capacity, manager.fill[1] == manager.capacity
        if used < 0 or num_free < 0 or num_more < 0 or (has_one_size and num_more):
            self.fail(f"{used} slots used and {num_free} free of {manager.capacity}")
        if jobs.num_store_blocks > (
            allowed := watched.side.shared.jobs.max_store_blocks + self._num_exempt_blocks(jobs)
        ):
            self.fail(f"stores in flight hold {jobs.num_store_blocks} blocks; {allowed} are allowed")

    def _num_exempt_blocks(self, jobs: JobTable) -> int:
        """The blocks of stores for remote decode, for which there is no limit."""
        requests = self._engine.requests.items()
        remote = {name for name, of in requests if (of.kv_transfer_params or {}).get("do_remote_decode")}
        return sum([len(store.block_ids) for store in jobs.stores() if not remote.isdisjoint(store.request_ids)])

    def _add_load(self, watched: _SideCounts, add: Callable[[Load], None], load: Load) -> None:
        watched.lengths[load.job_id] = self._engine.requests[load.request_id].num_tokens
        add(load)

    def _check_loads(self, watched: _SideCounts) -> None:
        jobs, lengths = watched.jobs, watched.lengths
        loads = [load for load in jobs.loads() if jobs.is_loading(load.job_id)]
        if self._engine.shares_loads:
            loading = Counter(
                key for load in loads for key in set(load.handle.keys) - self._own_keys(load, lengths[load.job_id])
            )
        elif self._engine.shares_load_ends:
            # The prefix cache gives back a block less than all tokens of a request, and no end next to a later shared prefix.
            parts = [load for load in loads if load.is_end_shared and load.num_tokens < lengths[load.job_id]]
            loading = Counter(key for load in parts for key in _last_keys(load))
        else:
            return
        twice = [key.hex()[:8] for key, count in loading.items() if count > 1]
        self.require(not twice, f"chunks {twice} are being loaded more than once at a time")

    def _own_keys(self, load: Load, num_tokens: int) -> set[OffloadKey]:
        """The chunks with a request's last token: the prefix cache never gives back their blocks, so they are not shared."""
        last_starts = {num_tokens - group.block_tokens for group in self._engine.layout.groups}
        return {key for key, start in zip(load.block_keys, load.block_starts, strict=True) if start in last_starts}


def _last_keys(load: Load) -> set[OffloadKey]:
    """The chunks at the end of a load: two loads that have them in common load the same prefix. A load may have none."""
    last = max(load.block_starts, default=None)
    return {key for key, start in zip(load.block_keys, load.block_starts, strict=True) if start == last}


class LimitOracle(Oracle):
    """Checks that the engine keeps to its own limits.

    Args:
        engine: the replica.
    """

    name = "limits"

    def __init__(self, engine: Replica) -> None:
        self._engine = engine

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """Batches are no larger than allowed; no request is in one twice, and none has the id of one that has just ended."""
        scheduled, config = step.scheduled, self._engine.config
        if not scheduled:
            return
        if len(scheduled) > config.max_num_seqs:
            self.fail(f"{len(scheduled)} requests run at a time")
        if step.num_tokens > config.max_num_batched_tokens:
            self.fail(f"{step.num_tokens} tokens in one step")
        if len(scheduled) > 1 and len({share.request_id for share in scheduled}) < len(scheduled):
            self.fail("a request is in a step twice")
        if step.finished_req_ids and any(share.request_id in step.finished_req_ids for share in scheduled):
            self.fail("a step computes a request with the id of one that, as it says, has ended")


# --- oracle -----------------------------------------------------------------------------------------------------------

EVERY: Final = 5
EVERY_LATER: Final = 100
NUM_EARLY: Final = 50
"""One look-up in so many is checked, the first included: to write everything down before and after takes long. Where requests
wait for tiers in trouble, there are thousands of look-ups that find all as it was."""
_APART = (
    *(SteppedClock, VirtualClock, FunctionType, MethodType, BuiltinFunctionType, GeneratorType),
    *(MappingProxyType, memoryview),
)
"""Of these, only the identity is compared: of clocks, which move by themselves, of code, and of what cannot change."""


class LookUpOracle(Oracle):
    """Compares the whole state of managers, tiers and other requests before and after look-ups.

    Everything counts that can be reached from them, whatever it is called, except clocks and the engine's view of requests.

    Args:
        engine: the replica.
    """

    name = "look-ups"

    def __init__(self, engine: Replica) -> None:
        self._num_seen = 0
        self._changed = ""
        for side, _ in offloading_sides(engine.scheduler.connector):
            self._watch(side)

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """No look-up since the last step has changed anything. Not raised in the look-up: guards would catch that."""
        if self._changed:
            self.fail(self._changed)

    def _watch(self, side: OffloadingScheduler) -> None:
        look_up = side.get_num_new_matched_tokens

        def watched(request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
            self._num_seen += 1
            if self._num_seen % (EVERY if self._num_seen <= NUM_EARLY else EVERY_LATER) != 1:
                return look_up(request, num_computed_tokens)
            before = _written_down(side, request.request_id)
            answer = look_up(request, num_computed_tokens)
            after = _written_down(side, request.request_id)
            changed = [part for part, state in before.items() if after.get(part) != state]
            if changed or len(after) > len(before):
                self._changed = (
                    f"the look-up of {request.request_id} by {side.name} changed {changed or 'what there is'}"
                )
            return answer

        side.get_num_new_matched_tokens = watched  # type: ignore[method-assign]  # of this one object only


def _written_down(side: OffloadingScheduler, asked: str) -> Mapping[str, bytes]:
    """Return everything but the record of the request that is asked for, in bytes that are equal if the state is."""
    requests = side.requests
    parts: dict[str, Any] = {"the manager": side.shared.manager, "lower tiers": side.lower}
    for name, state in requests.items():
        if name != asked:
            parts[f"request {name}"] = state, None if side.below is None else side.below.waiting.get(name)
    apart = {id(state.request) for state in requests.values()} | {id(requests[asked])}
    return {name: _bytes_of(part, apart) for name, part in parts.items()}


def _bytes_of(part: object, apart: set[int]) -> bytes:
    stream = io.BytesIO()
    _Writer(stream, apart).dump(part)
    return stream.getvalue()


class _Writer(pickle.Pickler):
    """Writes objects down, and only the identity of those that are ``apart`` and of those that cannot be written down."""

    def __init__(self, stream: io.BytesIO, apart: set[int]) -> None:
        super().__init__(stream)
        self._apart = apart

    def reducer_override(self, obj: object) -> Any:
        """Write down an object's identity, if no more is to be said of it, and of a manager with faults only the one inside.

        Faults are drawn again whenever such a manager is asked. Most of a state is numbers, texts and containers, of which
        this is not asked.
        """
        if isinstance(obj, _APART) or id(obj) in self._apart:
            return int, (id(obj),)
        return (FaultyManager, (obj.inner,)) if isinstance(obj, FaultyManager) else NotImplemented


def _num_pinned(jobs: JobTable) -> int:
    """How many chunks loads and comparisons in flight pin."""
    compared = (store.pins for store in jobs.stores() if isinstance(store, Comparison))
    return sum([len(pins.keys) for pins in (*compared, *[load.handle for load in jobs.loads()])])
