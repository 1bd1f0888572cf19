"""Oracles of requests: each ends, with the right tokens, and none waits longer than it may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from cargohold.engine.core.request import FinishReason, Request, SchedulerStep, StepOutput
from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.lab.simulation.connectors import guards_of, live_sides
from cargohold.lab.simulation.faults import Fault
from cargohold.lab.simulation.replica import STEP_S, Oracle, Replica
from cargohold.lab.simulation.transfers import LinkProfile
from cargohold.pace import REACH
from cargohold.protocol import Kind, Tally, metrics
from cargohold.protocol.metrics import over_connectors
from cargohold.tiers import BreakerConfig


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
        left = [request_id for request_id, expected in self._expected.items() if not expected.has_ended]
        self.require(not left, f"these requests never ended: {left}")

    def _check_end(self, request: Request, expected: Expectation) -> None:
        name = f"request {request.request_id}"
        self.require(not expected.has_ended, f"{name} ended twice")
        expected.has_ended = True
        match request.finish_reason:
            case FinishReason.ABORT:
                self.require(expected.is_aborted, f"{name} was aborted without being asked")
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
        engine: the replica. Its connectors are offloading connectors, and nothing else takes their counters.
    """

    name = "stats"

    def __init__(self, engine: Replica) -> None:
        self._engine = engine
        self._total = Tally()

    def inspect(self) -> None:
        connector = self._engine.scheduler.connector
        stats = connector.get_kv_connector_stats()
        fallen = [series for series, value in stats.items() if value < 0 and series.family.kind is not Kind.GAUGE]
        self.require(not fallen, f"counters fell: {fallen}")
        self._total.add(stats)
        total = over_connectors(self._total)
        num_ready = sum(side.shared.manager.num_ready for side in live_sides(connector))
        counted = total[metrics.READY_CHUNKS]
        self.require(counted == num_ready, f"counters say {counted} chunks, {num_ready} can be found")
        for connector_name, num_found in self._num_found().items():
            num_asked = self._total[metrics.ASKED.of()._replace(connector=connector_name)]
            self.require(num_found <= num_asked, f"{num_found} tokens were found, {num_asked} were asked for")
        different = [of for of in total if of.family is metrics.VERIFIED and "different" in of.labels]
        self.require(not different, "chunks that are true were found to be different")
        is_any_off = any(guard.broken is not None for guard in guards_of(connector))
        self.require(
            bool(total[metrics.FAILURES.of("connector_off")]) is is_any_off,
            "connectors that are turned off are not counted",
        )

    def at_end(self) -> None:
        """Check once more."""
        self.inspect()

    def _num_found(self) -> Counter[str]:
        """Tokens found on the device and in tiers, by connector."""
        found: Counter[str] = Counter()
        for series, value in self._total.items():
            if series.family in {metrics.FOUND_ON_DEVICE, metrics.PROMPT}:
                found[series.connector] += int(value)
        return found


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


NUM_SURPRISES = 4
"""So many requests may wait for nothing in any run, to find out that a tier is slow."""
NUM_FAILURES = BreakerConfig().failures_to_open
"""So many more may do so whenever a tier begins to hang: so many failures in a row open its breaker."""
NUM_STEPS = 4
"""Steps that each wait may cost: look-ups and loads are handed out and reported with steps."""
ALLOWED_PART = 0.2
"""All other requests together may wait for nothing for this part of the time that computing takes them."""
LONGEST_WAIT = 3
"""A request may wait for so many times the time that computing takes: twice, and a deadline is only noticed in a step."""
_HARMLESS: Final = frozenset({Fault.HANGS, Fault.RESTART})
"""Faults that delay no copy between host memory and device."""


@dataclass(frozen=True, slots=True)
class _RequestWait:
    """What a request waited for.

    Attributes:
        request_id: the request.
        waited_s: virtual seconds in which it waited for loads and look-ups.
        vain_s: those of them that it would have saved without tiers.
        excess_s: those that a request must not wait at all, even if that pays.
        compute_s: virtual seconds that computing takes of what was not on the device.
    """

    request_id: str
    waited_s: float
    vain_s: float
    excess_s: float
    compute_s: float

    def __str__(self) -> str:
        return f"{self.request_id} waited for {self.waited_s:.2f} s, and computing takes {self.compute_s:.2f} s"


class PatienceOracle(Oracle):
    """Checks that requests do not wait for nothing again and again: a tier that does not pay must be left alone.

    Each request must not wait much longer than computing takes. That is not enough: if each waits for a tier that hangs no
    longer than it may, all of them are slower than without the tier. So these useless waits are added up, too. Waits are not
    in vain if the time saved is at least half as long.

    Some requests are forgiven: those that arrived before one of a quarter of their length had ended, as it was unknown then how
    long computing takes; some for every time that a fault struck; and a few surprises.

    Args:
        engine: the replica. Its connector restores chunks from tiers only if that is expected to be faster.
        link: how fast host memory is, for which requests wait, too.
        struck: how often each fault has struck.
        is_excused: whether a fault has struck that breaks a rule.
    """

    name = "patience"

    def __init__(
        self, engine: Replica, link: LinkProfile, struck: Counter[Fault], is_excused: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._link = link
        self._struck = struck
        self._is_excused = is_excused
        # When requests ended, and how many tokens of their prompts were computed.
        self._ends: list[tuple[float, int]] = []
        self._waits: list[_RequestWait] = []

    def on_update(self, update: RequestUpdate) -> None:
        """Note how long a request that has ended has waited, and what for."""
        request = update.request
        if not request.is_finished or update.new_token_ids or request.finish_reason is FinishReason.ABORT:
            return
        times = request.times
        num_restored = sum(update.cache_report.restored_tokens.values())
        if times.finished is not None:
            num_computed = request.num_prompt_tokens - request.num_first_device_tokens - num_restored
            self._ends.append((times.finished, num_computed))
        if not self._is_known(request):
            return
        saved_s = self._compute_s(num_restored)
        forgiven_s = (1 + request.num_preemptions) * (NUM_STEPS * STEP_S + self._link_s(request))
        waited_s = times.load_wait_s - forgiven_s
        vain_s = max(0.0, waited_s - 2 * saved_s)
        excess_s = waited_s - LONGEST_WAIT * (1 + request.num_preemptions) * self._compute_s(request.num_tokens)
        compute_s = self._compute_s(request.num_prompt_tokens - request.num_first_device_tokens)
        self._waits.append(_RequestWait(request.request_id, times.load_wait_s, vain_s, excess_s, compute_s))

    def at_end(self) -> None:
        """Add up the useless waits of requests, except those that are forgiven."""
        if self._is_excused():
            return
        if _HARMLESS.issuperset(self._struck):
            too_long = [wait for wait in self._waits if wait.excess_s > 0]
            self.require(not too_long, f"requests waited too long: {'; '.join(map(str, too_long))}")
        num_forgiven = NUM_SURPRISES + self._struck.total() + (NUM_FAILURES - 1) * self._struck[Fault.HANGS]
        longest = nlargest(len(self._waits), self._waits, key=lambda wait: wait.vain_s)
        vain_s = sum(wait.vain_s for wait in longest[num_forgiven:])
        allowed_s = ALLOWED_PART * sum(wait.compute_s for wait in self._waits)
        self.require(
            vain_s <= allowed_s,
            f"requests waited for nothing for {vain_s:.2f} s, and {num_forgiven} more are forgiven; {allowed_s:.2f} s are "
            f"allowed. Those that waited longest: {'; '.join(map(str, longest[: num_forgiven + 3]))}",
        )

    def _is_known(self, request: Request) -> bool:
        """Whether enough tokens had been computed when a request arrived to tell how long computing it takes."""
        num_computed = max((tokens for ended, tokens in self._ends if ended < request.times.arrived), default=0)
        return num_computed * REACH >= min(request.num_tokens, self._engine.config.max_num_batched_tokens)

    def _compute_s(self, num_tokens: int) -> float:
        return STEP_S * -(-num_tokens // self._engine.config.max_num_batched_tokens)

    def _link_s(self, request: Request) -> float:
        """The seconds that a load from host memory may take, if as many others as possible are in its way."""
        num_blocks = sum(-(-request.num_tokens // group.block_tokens) for group in self._engine.layout.groups)
        return self._engine.config.max_num_seqs * (2 * self._link.latency_s + num_blocks * self._link.block_s)
