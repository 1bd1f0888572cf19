"""Two engines over one shared tier: one computes prompts, the other one decodes, and either may die at any moment.

What stands between them is a proxy as simple as possible: it asks the prefill engine, passes what that announces to the decode
engine, and asks the decode engine without an announcement if the prefill engine has died meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from cargohold.cache.manager import offload_key
from cargohold.connector.guests.handoff import HANDOFF
from cargohold.engine.core.request import FinishReason
from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.lab.simulation.connectors import forget_engine, live_sides, num_stuck_jobs
from cargohold.lab.simulation.faults import BREAKING, Fault
from cargohold.lab.simulation.oracles import (
    ContainmentOracle,
    CopyOracle,
    Expectation,
    LookUpOracle,
    Oracle,
    OracleError,
    PoolOracle,
    RequestOracle,
    TierOracle,
)
from cargohold.lab.simulation.replica import STEP_S, Replica, SimulatedEngine
from cargohold.lab.simulation.run import RunResult, quiet_logging
from cargohold.lab.simulation.tiers import TieredOffloading
from cargohold.lab.simulation.traffic import Ask
from cargohold.lab.simulation.world import Scenario, World

MAX_SECONDS = 600.0
"""Virtual seconds after which a run that has not ended is taken for one that hangs."""
NAP_S = 0.05
_PART_LOST = frozenset({Fault.CORRUPT, Fault.TORN})
"""Faults after which a chunk that was written may be gone."""


@dataclass(slots=True)
class _Side:
    """One of the two engines, and who watches it.

    Attributes:
        world: what surrounds it.
        engine: the replica of now.
        oracles: its oracles.
        expected: what its requests must get.
        asked: its requests that have not ended, with their parameters.
    """

    world: World
    engine: Replica = field(init=False)
    oracles: list[Oracle] = field(init=False)
    expected: dict[str, Expectation] = field(default_factory=dict)
    asked: dict[str, tuple[Ask, Mapping[str, Any]]] = field(default_factory=dict)


class PairRun:
    """Plays the requests of a scenario as hand-offs.

    Oracles: tokens are those of one engine; what is announced as readable can be read; what is announced is there once the
    prefill engine has settled; no request waits longer than its deadline. The last three where no fault excuses the engines.

    Args:
        scenario: engines, tiers, faults and traffic; its connector must have tiers below host memory.
        restarts: virtual times at which an engine dies and is started again, and whether it is the decode engine.
    """

    def __init__(self, scenario: Scenario, restarts: tuple[tuple[float, bool], ...] = ()) -> None:
        self._scenario = scenario
        world = World(scenario)
        self._prefill, self._decode = _Side(world), _Side(World(scenario, beside=world))
        num_shards = scenario.shape.world_size // scenario.shape.num_replicas
        for tiered, beside in zip(world.tiered, self._decode.world.tiered, strict=True):
            for at in _shared_tiers(tiered):
                beside.shards |= {(at, shard): tiered.shard(at, shard) for shard in range(num_shards)}
        self._clock = world.clock
        self._restarts = sorted(restarts)
        self._asks = [action for action in scenario.actions if isinstance(action, Ask)]
        # Prompts that were announced, with the keys of the chunks.
        self._announced: list[list[bytes]] = []
        self._result = RunResult()

    def play(self) -> RunResult:
        """Play to the end, or to the first failure, which is in the result."""
        with quiet_logging():
            try:
                for side in (self._prefill, self._decode):
                    self._start(side)
                self._play()
                self._finish()
            except Exception as error:  # noqa: BLE001  # whatever the code under test raises is what we are looking for
                self._result.error = error
        self._result.seconds = self._clock.now
        self._result.struck = self._prefill.world.source.struck
        return self._result

    # --- the course of events -----------------------------------------------------------------------------------------

    def _play(self) -> None:
        asks, sides = list(self._asks), (self._prefill, self._decode)
        while asks or any(map(self._is_busy, sides)):
            while asks and asks[0].at <= self._clock.now:
                ask = asks.pop(0)
                self._ask(self._prefill, ask, {"do_remote_decode": True})
            while self._restarts and self._restarts[0][0] <= self._clock.now:
                self._restart(self._decode if self._restarts.pop(0)[1] else self._prefill)
            is_idle = True
            for side in sides:
                if self._is_busy(side):
                    step, output = side.engine.step()
                    self._result.num_steps += 1
                    for oracle in side.oracles:
                        oracle.after_step(step, output)
                    is_idle = is_idle and not step.scheduled and output.connector.is_empty()
            if is_idle:
                events = [side.world.next_event() for side in sides] + [ask.at for ask in asks[:1]]
                self._clock.advance_to(max(self._clock.now + STEP_S, min(*events, self._clock.now + NAP_S)))
            if self._clock.now > MAX_SECONDS:
                raise OracleError(
                    "liveness", f"requests {list(self._prefill.asked) + list(self._decode.asked)} do not end"
                )

    def _is_busy(self, side: _Side) -> bool:
        """Whether an engine has work, or something is on its way that an idle engine may leave for later."""
        connector = side.engine.scheduler.connector
        lower = [of.lower for of in live_sides(connector) if of.lower is not None]
        is_half_reported = side.engine.num_half_reported > num_stuck_jobs(connector) and not self._is_excused()
        return side.engine.scheduler.has_work() or is_half_reported or not all(tiers.is_idle for tiers in lower)

    def _ask(self, side: _Side, ask: Ask, params: Mapping[str, Any]) -> None:
        answer = ask.answer()
        is_prefill = side is self._prefill
        tokens = answer[:1] if is_prefill else answer
        side.expected[ask.request_id] = Expectation(tokens, FinishReason.LENGTH)
        side.asked[ask.request_id] = ask, params
        self._result.tallies["requests"] += 1
        side.engine.add(
            ask.request_id,
            ask.prompt,
            1 if is_prefill else ask.max_tokens,
            salt=ask.salt,
            kv_transfer_params={**(ask.params or {}), **params},
        )

    def _note(self, side: _Side, update: RequestUpdate) -> None:
        for oracle in side.oracles:
            oracle.on_update(update)
        request = update.request
        if not request.is_finished or update.new_token_ids:
            return
        ask, _ = side.asked.pop(request.request_id)
        if side is self._decode:
            self._result.tallies["restored tokens"] += sum(update.cache_report.restored_tokens.values())
            self._check_wait(update)
            return
        params = update.kv_transfer_params or {}
        if HANDOFF in params and not self._is_excused():
            self._check_announced(update, params[HANDOFF])
        self._ask(self._decode, ask, params)

    def _restart(self, side: _Side) -> None:
        """Let an engine die. The proxy asks the decode engine for what it had asked this one for."""
        self._result.tallies["restarts"] += 1
        forget_engine(side.engine.scheduler.connector)
        self._announced.clear()  # nobody writes any more what was on its way
        unended, side.asked = side.asked, {}
        self._start(side)
        for request_id, (ask, params) in unended.items():
            del side.expected[request_id]
            self._ask(self._decode, ask, params if side is self._decode else {})

    def _start(self, side: _Side) -> None:
        engine = side.engine = side.world.new_engine()
        assert isinstance(engine, SimulatedEngine)
        may_fail = self._scenario.shape.scheduler["load_failure_policy"].value == "fail"
        side.oracles = [
            RequestOracle(side.expected, may_fail=may_fail),
            CopyOracle(engine, holds=self._scenario.connector.holds_copies),
            TierOracle(engine, self._is_excused),
            LookUpOracle(engine),
            ContainmentOracle(engine, self._is_excused),
            PoolOracle(engine),
        ]
        engine.on_update = lambda update: self._note(side, update)

    def _finish(self) -> None:
        self._prefill.world.source.until = self._clock.now
        for side in (self._prefill, self._decode):
            for oracle in side.oracles:
                oracle.at_end()
        if not self._prefill.world.source.struck and self._keeps_all:
            for keys in self._announced:
                absent = [key for key in keys if not self._is_readable(key)]
                _require(not absent, f"{len(absent)} of {len(keys)} announced chunks never came")

    # --- what is checked ----------------------------------------------------------------------------------------------

    def _check_announced(self, update: RequestUpdate, told: Mapping[str, Any]) -> None:
        num_tokens, num_readable = told["num_tokens"], told["num_readable_tokens"]
        request = update.request
        _require(0 <= num_readable <= num_tokens <= request.num_tokens, f"{request.request_id} announces {told}")
        self._result.tallies["announced tokens"] += num_tokens
        self._result.tallies["announced when readable"] += num_readable
        keys = self._keys(update, num_tokens)
        if keys and self._keeps_all:
            readable = self._keys(update, num_readable)
            absent = [key for key in readable if not self._is_readable(key)]
            _require(
                not absent, f"{len(absent)} chunks of {request.request_id} are said to be readable, and are not there"
            )
            self._announced.append(keys)

    def _check_wait(self, update: RequestUpdate) -> None:
        """A faultless request waits no longer than its deadline, and for its load from host memory."""
        request, link = update.request, self._scenario.shape.link
        if self._prefill.world.source.struck or self._result.tallies["restarts"]:
            return
        limit_s = max(tier.options.get("restore_timeout_s", 0.0) for tier in self._scenario.connector.tiers)
        num_blocks = sum(-(-request.num_tokens // group.block_tokens) for group in self._scenario.shape.groups)
        seats = self._scenario.shape.scheduler["max_num_seqs"]
        load_s = 4 * seats * (2 * link.latency_s + num_blocks * link.block_s) + 10 * seats * STEP_S
        allowed_s = (1 + request.num_preemptions) * (2 * limit_s + load_s)
        waited_s = request.times.load_wait_s
        _require(
            waited_s <= allowed_s, f"{request.request_id} waited for {waited_s:.2f} s; {allowed_s:.2f} s are allowed"
        )

    @property
    def _keeps_all(self) -> bool:
        """Whether the tiers have room for everything, and the prefill engine has time to write what it has promised."""
        tiers = self._scenario.connector.tiers
        has_room = all(plan.max_chunks >= 1000 for tier in tiers for plan in tier.lower)
        return has_room and all(tier.options.get("restore_timeout_s", 0.0) >= 5.0 for tier in tiers)

    def _keys(self, update: RequestUpdate, num_tokens: int) -> list[bytes]:
        """The chunks of the first group's leading tokens, if it has full attention: of others, only the last are needed."""
        layout = self._prefill.engine.layout
        group = layout.groups[0]
        per_chunk = max(tier.options.get("blocks_per_chunk", 1) for tier in self._scenario.connector.tiers)
        if group.window_tokens is not None or group.kind.value != "full":
            return []
        size = group.block_tokens * per_chunk
        ends = range(size, num_tokens + 1, size)
        hashes = update.request.block_hashes
        return [offload_key(hashes[end // layout.hash_block_tokens - 1], group.index) for end in ends]

    def _is_readable(self, key: bytes) -> bool:
        """Whether all workers' shards of a shared tier have a chunk."""
        return any(
            all(key in shard.chunks for (tier, _), shard in tiered.shards.items() if tier == at)
            for tiered in self._prefill.world.tiered
            for at in _shared_tiers(tiered)
        )

    def _is_excused(self) -> bool:
        struck = self._prefill.world.source.struck
        return any(struck[fault] for fault in (*BREAKING, *_PART_LOST, Fault.LOST))


def _shared_tiers(tiered: TieredOffloading) -> list[int]:
    """Numbers of the tiers that both machines share."""
    return [at for at, plan in enumerate(tiered.plans) if plan.options.locality == "REMOTE"]


def draw_restarts(seed: int, scenario: Scenario) -> tuple[tuple[float, bool], ...]:
    """Draw when engines die: in half of all scenarios, once or twice."""
    random = Random(f"{seed}/restarts")  # repeatable, on purpose
    end = scenario.actions[-1].at + 0.5
    return tuple((random.random() * end, random.random() < 0.5) for _ in range(random.choice((0, 0, 1, 2))))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise OracleError("hand-offs", message)
