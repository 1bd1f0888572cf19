"""Oracles of requests: the right tokens, legitimate ends, counters that add up, and connectors turned off for a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cargohold.engine.core.request import FinishReason, Request
from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.engine.core.step import SchedulerStep, StepOutput
from cargohold.protocol import Stats, add_stats, is_level, last_name
from cargohold.testing.simulation.oracles.base import Oracle
from cargohold.testing.simulation.replica import Replica, guards_of, live_sides


@dataclass(slots=True)
class Expectation:
    """What a request must get.

    Attributes:
        tokens: the tokens that it generates when it has the engine to itself.
        ends_with: the reason for which it ends then.
        is_aborted: whether its client has asked to abort it.
        has_ended: whether it has ended.
    """

    tokens: list[int]
    ends_with: FinishReason
    is_aborted: bool = False
    has_ended: bool = False


class RequestOracle(Oracle):
    """Compares tokens and finish reasons of requests with those expected.

    Args:
        expected: expectations by request id.
        may_fail: whether a request may end with an error, because that is the policy for failed loads.
    """

    name = "requests"

    def __init__(self, expected: Mapping[str, Expectation], *, may_fail: bool) -> None:
        self._expected = expected
        self._may_fail = may_fail

    def on_update(self, update: RequestUpdate) -> None:
        """Compare new tokens with those expected, and at the end the finish reason with those possible."""
        request = update.request
        expected = self._expected[request.request_id]
        if update.new_token_ids:
            first = request.num_output_tokens - len(update.new_token_ids)
            wanted = expected.tokens[first : request.num_output_tokens]
            if list(update.new_token_ids) != wanted:
                self.fail(f"request {request.request_id} got {list(update.new_token_ids)} where it gets {wanted} alone")
        elif request.is_finished:
            self._check_end(request, expected)

    def at_end(self) -> None:
        """Every request has ended."""
        left = [request_id for request_id, expected in self._expected.items() if not expected.has_ended]
        self.require(not left, f"these requests never ended: {left}")

    def _check_end(self, request: Request, expected: Expectation) -> None:
        name = f"request {request.request_id}"
        self.require(not expected.has_ended, f"{name} ended twice")
        expected.has_ended = True
        match request.finish_reason:
            case FinishReason.ABORT:
                self.require(expected.is_aborted, f"{name} was aborted, and nobody asked for it")
            case FinishReason.ERROR:
                self.require(self._may_fail, f"{name} failed: {request.error}")
                self.require(bool(request.error), f"{name} failed without a reason")
            case reason:
                self.require(reason is expected.ends_with, f"{name} ended with {reason}, not {expected.ends_with}")
                tokens = list(request.output_token_ids)
                self.require(tokens == expected.tokens, f"{name} got {tokens}, alone {expected.tokens}")


# --- oracle -----------------------------------------------------------------------------------------------------------


class StatsOracle(Oracle):
    """Takes the counters now and then, and checks them, also after connectors were turned off.

    Counters never fall, no more tokens are found than were asked for, and levels equal what there is.

    Args:
        engine: the replica. Its connectors are offloading connectors, and nobody else takes their counters.
    """

    name = "stats"

    def __init__(self, engine: Replica) -> None:
        self._engine = engine
        self._total: Stats = {}

    def inspect(self) -> None:
        """Take the counters, and check them."""
        connector = self._engine.scheduler.connector
        stats = connector.get_stats()
        fallen = [counter for counter, value in stats.items() if value < 0 and not is_level(counter)]
        self.require(not fallen, f"counters fell: {fallen}")
        self._total = add_stats(self._total, stats)
        num_ready = sum(side.manager.num_ready for side in live_sides(connector))
        told = self._sum("num_ready_chunks")
        self.require(told == num_ready, f"counters tell of {told} chunks, {num_ready} can be found")
        for connector_name, num_found in self._num_found().items():
            num_asked = self._total.get(f"{connector_name}asked_tokens", 0)
            self.require(num_found <= num_asked, f"{num_found} tokens were found, {num_asked} were asked for")
        is_any_off = any(guard.broken is not None for guard in guards_of(connector))
        self.require(bool(self._sum("connectors_off")) is is_any_off, "connectors that are turned off are not counted")

    def at_end(self) -> None:
        """Check once more."""
        self.inspect()

    def _num_found(self) -> Counter[str]:
        """Tokens found on the device and in tiers, by the prefix of each connector's counters."""
        found: Counter[str] = Counter()
        for counter, value in self._total.items():
            if counter.endswith("_hit_tokens"):
                found[counter.removesuffix(last_name(counter))] += int(value)
        return found

    def _sum(self, name: str) -> float:
        return sum(value for counter, value in self._total.items() if last_name(counter) == name)


# --- oracle -----------------------------------------------------------------------------------------------------------


class ContainmentOracle(Oracle):
    """Checks that no connector was turned off for breaking a rule, unless a fault may have made it do so.

    Args:
        engine: the replica.
        is_excused: whether a fault has struck that breaks a rule.
    """

    name = "containment"

    def __init__(self, engine: Replica, is_excused: Callable[[], bool]) -> None:
        self._guards = guards_of(engine.scheduler.connector)
        self._is_excused = is_excused

    def after_step(self, step: SchedulerStep, output: StepOutput) -> None:
        """No connector was turned off."""
        for guard in self._guards:
            if guard.broken is not None and not self._is_excused():
                self.require(False, f"connector {guard.name} was turned off: {guard.broken.rule}")
