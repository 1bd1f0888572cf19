"""One run: a scenario played to its end, with every oracle watching."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import lcm

from cargohold.engine.core.request import FinishReason
from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.errors import RequestError
from cargohold.lab.simulation.connectors import (
    NO_CONNECTOR,
    forget_engine,
    innermost_guards,
    live_sides,
    num_stuck_jobs,
)
from cargohold.lab.simulation.faults import BREAKING, Fault, VirtualClock
from cargohold.lab.simulation.oracles import (
    ContainmentOracle,
    CopyOracle,
    EventOracle,
    Expectation,
    FoundOracle,
    HintOracle,
    LimitOracle,
    LookUpOracle,
    LossOracle,
    Oracle,
    OracleError,
    PatienceOracle,
    PoolOracle,
    RequestOracle,
    ReuseOracle,
    TierOracle,
)
from cargohold.lab.simulation.replica import STEP_S, Replica
from cargohold.lab.simulation.timeline import NO_TIMELINE, Timeline
from cargohold.lab.simulation.traffic import Abort, Action, Ask, Reset, Restart, SendHints
from cargohold.lab.simulation.workloads import REUSING
from cargohold.lab.simulation.world import Scenario, World
from cargohold.protocol import ConnectorGuard

INSPECT_EVERY = 32
"""Steps between the oracles' thorough checks; the cheap ones are made after every step."""

LONGEST_NAP_S = 1.0
"""Most virtual time that passes at once while nothing happens."""
WAITING_NAP_S = 0.05
"""The same while requests wait, so that they are not kept waiting by the simulation: a connector has deadlines of its own."""


@dataclass(slots=True)
class RunResult:
    """The result of a run.

    Attributes:
        num_steps: scheduler steps.
        seconds: virtual time at the end.
        error: the exception that ended the run; ``None`` if nothing failed.
        struck: how often each fault has struck.
        tallies: further counters: requests, preemptions, restored tokens, ...
        found: tokens of each request that it found on the device or restored.
    """

    num_steps: int = 0
    seconds: float = 0.0
    error: Exception | None = None
    struck: Counter[Fault] = field(default_factory=Counter)
    tallies: Counter[str] = field(default_factory=Counter)
    found: dict[str, int] = field(default_factory=dict)


class ScenarioRun:
    """Plays one scenario.

    Args:
        scenario: what to play.
        timeline: records what happens, for people.
        on_idle: called when nothing happens, in place of letting virtual time pass: a user's connector may copy in real time.
        world: what surrounds the engines; by default, made from ``scenario``.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        timeline: Timeline = NO_TIMELINE,
        on_idle: Callable[[], None] | None = None,
        world: World | None = None,
    ) -> None:
        self._scenario = scenario
        self._on_idle = on_idle
        self._timeline = timeline
        self._world = world or World(scenario)
        self._clock: VirtualClock = self._world.clock
        self._expected: dict[str, Expectation] = {}
        self._asks: dict[str, Ask] = {}
        self._result = RunResult()
        # Versions of the weights: the one in use, and the one that the process started with.
        self._weights = self._first_weights = self._newest_weights = 0
        self._reset_due: Reset | None = None
        self._deadline = self._latest_end()
        self._engine: Replica
        self._oracles: list[Oracle]
        self._each_step: list[Oracle]
        self._each_update: list[Oracle]

    def play(self) -> RunResult:
        """Play to the end, or to the first failure, which is in the result: whatever the simulated code raises is caught."""
        result = self._result
        with quiet_logging():
            try:
                self._start_engine()
                self._play_actions()
                self._let_lower_tiers_settle()
                self._finish()
            except Exception as error:  # noqa: BLE001  # whatever the code under test raises is what we are looking for
                result.error = error
        result.seconds = self._clock.now
        result.struck = self._world.source.struck
        return result

    # --- the course of events -----------------------------------------------------------------------------------------

    def _play_actions(self) -> None:
        actions = self._scenario.actions
        at = 0
        while True:
            while at < len(actions) and actions[at].at <= self._clock.now:
                self._apply(actions[at])
                at += 1
            next_action = actions[at].at if at < len(actions) else float("inf")
            if self._reset_due is not None:
                self._try_to_reset(self._reset_due)
            if self._engine.scheduler.has_work():
                self._step(next_action)
            elif next_action < float("inf"):
                self._clock.advance_to(next_action)
            else:
                return

    def _apply(self, action: Action) -> None:
        self._timeline.note(self._clock.now, str(action))
        match action:
            case Ask():
                self._ask(action)
            case Abort():
                self._abort([action.request_id])
            case SendHints():
                self._engine.hint(action.prompt, action.salt, action.hints, action.tenant)
            case Reset():
                self._reset_due = action
                if self._engine.announce_reset(sleeps=action.sleeps):
                    self._abort([name for name, expected in self._expected.items() if not expected.has_ended])
            case Restart():
                self._restart()

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            expected = self._expected.get(request_id)
            if expected is not None:
                expected.is_aborted = True
                self._engine.abort(request_id)

    def _ask(self, ask: Ask) -> None:
        earlier = self._expected.get(ask.request_id)
        if earlier is not None and not earlier.has_ended:
            # Where a run was shortened, the abort may be missing.
            self._result.tallies["refused"] += 1
            return
        self._asks[ask.request_id] = ask
        answer = ask.answer()
        reason = FinishReason.STOP if ask.stop is not None and answer[-1] == ask.stop else FinishReason.LENGTH
        self._expected[ask.request_id] = Expectation(answer, reason)
        self._result.tallies["requests"] += self._add(ask)

    def _add(self, ask: Ask) -> bool:
        """Add a request to the engine. Returns whether it was accepted."""
        try:
            self._engine.add(
                ask.request_id,
                ask.prompt,
                ask.max_tokens,
                priority=ask.priority,
                salt=ask.salt,
                kv_transfer_params=ask.params,
                stop_token_ids=() if ask.stop is None else (ask.stop,),
                hints=ask.hints,
                tenant=ask.tenant,
            )
        except RequestError:
            # Refused for its ``kv_transfer_params``, or because an earlier request's blocks are still being copied under its
            # id: nothing is expected of it.
            self._result.tallies["refused"] += 1
            del self._expected[ask.request_id]
            return False
        return True

    def _try_to_reset(self, reset: Reset) -> None:
        """Reset all caches; then go on with new weights, with earlier ones, or with the same.

        If that is refused, try again later.
        """
        if not self._engine.scheduler.reset_cache():
            return
        self._reset_due = None
        self._result.tallies["resets"] += 1
        num_before, which = divmod(self._result.tallies["resets"], 3)
        if which == 1 and not reset.sleeps:
            self._weights = self._newest_weights = self._newest_weights + 1
        elif which == 2 and not reset.sleeps:
            self._weights = num_before % (self._newest_weights + 1)
        self._timeline.note(self._clock.now, f"caches were reset; the weights are number {self._weights} next")
        pool = self._engine.scheduler.kv.pool
        if pool.num_cached_prefixes:
            raise OracleError("reset", f"{pool.num_cached_prefixes} prefixes are cached after a reset")
        for _ in range(self._engine.num_steps_before_weights):
            self._step(float("inf"))
        self._engine.load_weights(self._weights)

    def _restart(self) -> None:
        self._count_engine()
        forget_engine(self._engine.scheduler.connector)
        if self._weights != self._first_weights and not self._engine.tells_weights_apart:
            self._world.open_namespace()
        self._start_engine()
        self._result.tallies["restarts"] += 1
        for request_id in [request_id for request_id, expected in self._expected.items() if not expected.has_ended]:
            self._add(self._asks[request_id])  # may be refused this time, if the connector was off the first time

    def _step(self, next_action: float) -> None:
        engine = self._engine
        self._result.num_steps += 1
        try:
            step, output = engine.step()
            for oracle in self._each_step:
                oracle.after_step(step, output)
        except Exception:
            self._timeline.note(self._clock.now, "here it failed:")
            self._timeline.step(self._clock.now, engine, *engine.last_step)
            raise
        self._timeline.step(self._clock.now, engine, step, output)
        if engine.num_steps % INSPECT_EVERY == 0:
            self._inspect()
        if not step.scheduled and output.connector.is_empty():
            self._sleep(next_action)
        if self._clock.now > self._deadline:
            raise OracleError("liveness", self._complaint())

    def _sleep(self, next_action: float) -> None:
        """Let time pass until something may happen. Faults strike by time, too, so time does not pass all at once."""
        if self._on_idle is not None:
            self._on_idle()
            return
        nap_s = WAITING_NAP_S if any(self._engine.scheduler.waiting_requests()) else LONGEST_NAP_S
        wake_at = min(next_action, self._world.next_event(), self._clock.now + nap_s)
        self._clock.advance_to(wake_at)

    def _let_lower_tiers_settle(self) -> None:
        """Step on while chunks are on their way to lower tiers, or look-ups have answers of only some workers.

        An idle engine stops before that, because both can wait for the next request.
        """
        lower = [side.lower for side in live_sides(self._engine.scheduler.connector) if side.lower is not None]
        while lower and (
            not all(tiers.is_idle for tiers in lower)
            or self._engine.scheduler.has_work()
            or (
                self._engine.num_half_reported > num_stuck_jobs(self._engine.scheduler.connector)
                and not self._is_excused()
            )
        ):
            self._step(float("inf"))

    def _finish(self) -> None:
        # Everything has settled, maybe before faults have stopped: none may strike while oracles make their last checks.
        self._world.source.until = self._clock.now
        for oracle in self._oracles:
            oracle.at_end()
        self._count_engine()
        self._engine.shutdown()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        scenario, world = self._scenario, self._world
        world.weights = self._first_weights = self._weights
        engine = self._engine = world.new_engine()
        engine.load_weights(self._weights)
        struck = world.source.struck
        may_fail = scenario.shape.scheduler["load_failure_policy"].value == "fail"
        known_tiers = () if scenario.connector.custom else scenario.connector.tiers
        self._oracles = [
            RequestOracle(self._expected, may_fail=may_fail),
            CopyOracle(engine, holds=scenario.connector.holds_copies),
            TierOracle(engine, self._is_excused),
            LimitOracle(engine),
            HintOracle(engine, known_tiers, world.listed_media, lambda: struck.total() > 0),
            ContainmentOracle(engine, self._is_excused),
            FoundOracle(engine, world.listed_media, lambda: engine.takes_less or struck.total() > 0),
            LossOracle(engine, lambda: struck.total() > 0 or any("quotas" in tier.options for tier in known_tiers)),
            *world.oracles(engine),
        ]
        if scenario.workload not in REUSING:
            self._oracles.append(LookUpOracle(engine))
        elif scenario.connector.keeps_all:  # the other writes everything down, and here thousands of chunks are kept
            self._oracles.append(self._reuse_oracle())
        if engine.config.emit_events:
            self._oracles.append(
                EventOracle(
                    engine,
                    knows_tiers=not scenario.connector.custom,
                    media=world.listed_media,
                    is_excused=lambda: struck.total() > 0,
                )
            )
        self._oracles.append(PoolOracle(engine))
        if scenario.connector.restores_if_faster:
            self._oracles.append(
                PatienceOracle(
                    engine, scenario.shape.link, struck, lambda: self._is_excused() or struck[Fault.LOST] > 0
                )
            )
        self._each_step = [oracle for oracle in self._oracles if type(oracle).after_step is not Oracle.after_step]
        self._each_update = [oracle for oracle in self._oracles if type(oracle).on_update is not Oracle.on_update]
        engine.on_update = self._on_update

    def _reuse_oracle(self) -> Oracle:
        scenario, result = self._scenario, self._result
        blocks_per_chunk = int(scenario.connector.tiers[0].options.get("blocks_per_chunk", 1))
        return ReuseOracle(
            [action for action in scenario.actions if isinstance(action, Ask)],
            lcm(*[plan.block_tokens for plan in scenario.shape.groups]) * blocks_per_chunk,
            result.found,
            self._found_alone,
            lambda: self._world.source.struck.total() + result.tallies["restarts"] > 0,
        )

    def _found_alone(self) -> Mapping[str, int]:
        """Tokens that each request finds on a device that forgets nothing, without a connector."""
        scenario = self._scenario
        num_tokens = sum(len(ask.prompt) + ask.max_tokens for ask in scenario.actions if isinstance(ask, Ask))
        num_blocks = scenario.shape.num_blocks + len(scenario.shape.groups) * num_tokens
        shape = replace(scenario.shape, num_blocks=num_blocks)
        alone = replace(scenario, shape=shape, connector=NO_CONNECTOR, rates={})
        result = type(self)(alone, world=type(self._world)(alone)).play()
        if result.error is not None:
            raise result.error
        return result.found

    def _is_excused(self) -> bool:
        """Whether a fault has struck that breaks a rule of the contract."""
        struck = self._world.source.struck
        return any(struck[fault] for fault in BREAKING) or (struck[Fault.LOST] > 0 and self._may_turn_off_for_stuck())

    def _may_turn_off_for_stuck(self) -> bool:
        """Whether stuck copies may turn a connector off: it cannot hold their blocks, or no request fits next to these."""
        broken = self._engine.scheduler.connector.broken
        return not self._scenario.connector.holds_copies or (broken is not None and broken.rule.startswith("kept "))

    def _on_update(self, update: RequestUpdate) -> None:
        for oracle in self._each_update:
            oracle.on_update(update)
        if update.request.is_finished and not update.new_token_ids:
            restored = sum(update.cache_report.restored_tokens.values())
            self._result.tallies["restored tokens"] += restored
            self._result.tallies["device tokens"] += update.request.num_first_device_tokens
            self._result.found[update.request.request_id] = restored + update.request.num_first_device_tokens
            self._result.tallies["preemptions"] += update.request.num_preemptions

    def _inspect(self) -> None:
        for oracle in self._oracles:
            oracle.inspect()

    def _count_engine(self) -> None:
        self._result.tallies["turned off"] += self._engine.scheduler.connector.broken is not None

    def _latest_end(self) -> float:
        """Virtual time by which the run must be over, even in the worst case."""
        asks = [action for action in self._scenario.actions if isinstance(action, Ask)]
        # Each token may be computed several times, one at a time, when requests preempt each other.
        compute_s = 20 * STEP_S * sum(len(ask.prompt) + ask.max_tokens for ask in asks)
        last = self._scenario.actions[-1].at if self._scenario.actions else 0.0
        patience_s = 4 * 60.0
        return max(last, self._scenario.quiet_from) + compute_s + patience_s

    def _complaint(self) -> str:
        unended = [request_id for request_id, expected in self._expected.items() if not expected.has_ended]
        what = f"requests {unended} have not ended" if unended else "nobody waits, and yet there is work to do"
        causes = "".join(f"; {cause}" for cause in _what_keeps(self._engine.scheduler.connector))
        return f"after {self._clock.now:.0f} s, long after the last fault, {what}{causes}"


def _what_keeps(engine_connector: ConnectorGuard) -> Iterator[str]:
    """Reasons why an engine with this connector does not settle, as sentences, from each connector inside it."""
    for connector in innermost_guards(engine_connector):
        held = connector.held_references()
        if held:
            blocks = ", ".join(
                str(block_id) + (f" ({count} times)" if count > 1 else "") for block_id, count in sorted(held.items())
            )
            yield f"connector {connector.name} holds references on blocks {blocks}, and never gave them back"
        elif connector.has_pending_work():
            yield f"connector {connector.name} says that it has work pending"


@contextmanager
def quiet_logging(package: str = "cargohold") -> Iterator[None]:
    """Turn off a package's log within the ``with`` block: it is about faults caused on purpose, and costs more than a step."""
    logger = logging.getLogger(package)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
