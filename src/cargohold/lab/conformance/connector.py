"""The conformance suite for connectors: tests of what every connector must do, to be inherited."""

from __future__ import annotations

import gc
import logging
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from random import Random
from types import FunctionType, ModuleType
from typing import Any, ClassVar

import pytest

from cargohold.connector.multi import MultiConnectorFactory, MultiConnectorScheduler
from cargohold.errors import ConfigError
from cargohold.lab.conformance.strict import (
    CodedExecutor,
    Failure,
    SpoilingScheduler,
    spoiler,
    strict,
)
from cargohold.lab.simulation.connectors import ConnectorPlan, TierPlan
from cargohold.lab.simulation.faults import Fault
from cargohold.lab.simulation.fingerprints import simulated_layout, tokens_alone
from cargohold.lab.simulation.replica import VOCAB_SIZE, SimulatedEngine
from cargohold.lab.simulation.run import ScenarioRun, quiet_logging
from cargohold.lab.simulation.workloads import WORKLOADS
from cargohold.lab.simulation.world import Scenario, World, draw_scenario
from cargohold.protocol import Hint, HintKind, HintStatus, Kind, KVConnectorFactory, Stats, add_stats

_EVERYBODYS = (type, ModuleType, logging.Logger)
"""Types of objects that are not followed: they are shared by everyone, and everything can be reached from them."""


def num_reachable(roots: Iterable[object]) -> int:
    """The number of objects that can be reached from ``roots``, themselves included; shared ones such as modules are not."""
    gc.collect()
    seen: dict[int, object] = {}
    pending = list(roots)
    while pending:
        found = pending.pop()
        if id(found) in seen or isinstance(found, _EVERYBODYS):
            continue
        seen[id(found)] = found
        pending += _held_by_function(found) if isinstance(found, FunctionType) else gc.get_referents(found)
    return len(seen)


def _held_by_function(function: FunctionType) -> list[object]:
    """The objects that a function refers to, except the globals of its module."""
    return [*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__, function.__dict__]


# --- the conformance suite for connectors -----------------------------------------------------------------------------

BLOCK_TOKENS = 4
PROMPT_TOKENS = 40
OUTPUT_TOKENS = 3
NUM_BLOCKS = 24
NUM_REPEATS = 96
MAX_GROWTH = 8
"""If a batch of ``NUM_REPEATS`` requests leaves fewer objects behind than this, the number of held objects no longer grows."""
MAX_REFUSALS = 5
"""Scenarios tried for each one that is to be played, because a connector may refuse some."""


class ConnectorConformance(ABC):
    """Tests a connector in a simulated engine: under random traffic that every oracle checks, and in single situations.

    Scenarios that the connector refuses, by raising ``ConfigError`` from ``make_scheduler_side``, are left out; a test whose
    scenarios are all refused is skipped.

    Attributes:
        num_seeds: scenarios that each test plays per workload.
        needs_context: whether the connector needs a scheduler context: a view of the block pool.
        needs_prefix_caching: whether the connector needs an engine that runs with ``prefix_caching``.
        takes_real_time: whether the connector copies in real time, in threads or processes of its own, so that a simulation
            must wait for it when nothing happens.
        may_forget: whether the connector may fail to find what it has just stored, although nothing was stored in between.
        max_remembered: number of ended requests about which the connector may keep something.
    """

    num_seeds: ClassVar[int] = 3
    needs_context: ClassVar[bool] = False
    needs_prefix_caching: ClassVar[bool] = False
    takes_real_time: ClassVar[bool] = False
    may_forget: ClassVar[bool] = False
    max_remembered: ClassVar[int] = 2000

    @abstractmethod
    def factory(self) -> KVConnectorFactory:
        """A new factory, whose connectors share nothing with those of earlier ones and have room for 100 blocks of 64 bytes."""

    # --- under traffic ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("workload", WORKLOADS)
    def test_tokens_blocks_and_endings_are_right(self, workload: str) -> None:
        """Every request gets the tokens it would get alone; no block leaks, or is reused during a copy; everything ends."""
        self._play_all(workload, ())

    @pytest.mark.parametrize("workload", ["shared-prefix", "aborts", "ranks"])
    def test_workers_may_report_at_different_times(self, workload: str) -> None:
        """One worker reports ended transfers some steps after the others: tokens, blocks and endings are right all the same."""
        self._play_all(workload, [Fault.LATE_WORKER])

    @pytest.mark.parametrize("workload", ["shared-prefix", "preemption"])
    def test_it_can_be_turned_off_at_any_moment(self, workload: str) -> None:
        """When either side raises in any hook, the connector is turned off, and requests go on without it."""
        self._play_all(workload, [Fault.RAISES])

    @pytest.mark.parametrize("workload", ["shared-prefix", "multi-turn"])
    def test_a_new_process_may_find_what_an_old_one_left(self, workload: str) -> None:
        """The engine dies and starts again, with new connectors of the same factory: tokens are still right."""
        self._play_all(workload, [Fault.RESTART])

    @pytest.mark.parametrize("workload", ["shared-prefix", "aborts"])
    def test_it_can_be_composed(self, workload: str) -> None:
        """In one engine with another connector, whose copies fail, all goes well, even if either connector raises."""
        other = TierPlan(num_slots=40, lookahead=None, options={})
        self._play_all(workload, [Fault.FAILED, Fault.RAISES], lambda plan: replace(plan, tiers=(other,), nesting=(2,)))

    @pytest.mark.parametrize("workload", ["shared-prefix", "full-hit"])
    def test_it_serves_beside_its_like(self, workload: str) -> None:
        """Two connectors of this kind serve in one engine, and all goes well even if either raises.

        One may raise while it loads KV for the very step from which the other one stores.
        """
        self._play_all(
            workload,
            [Fault.RAISES],
            lambda plan: replace(plan, custom=(*plan.custom, strict(self.factory())), nesting=(2,)),
        )

    @pytest.mark.parametrize("failure", [Failure.STEP, Failure.BLOCKS])
    @pytest.mark.parametrize("workload", ["small", "aborts", "returning"])
    def test_what_failed_steps_computed_is_never_found_under_traffic(self, workload: str, failure: Failure) -> None:
        """What steps with garbage in their blocks have computed is never restored, under any traffic.

        Another connector in the engine fills blocks with garbage instead of loading them, and reports that its loads failed.
        The connector under test may have begun to store from such a step before it hears of that.
        """

        def spoiled(plan: ConnectorPlan) -> ConnectorPlan:
            return replace(plan, custom=(spoiler(failure), *plan.custom), nesting=(2,))

        engines: list[SimulatedEngine] = []
        self._play_all(workload, (), spoiled, prepare=engines.append)
        for engine in engines:
            _require_sound(engine)

    def test_messages_survive_the_way_to_another_process(self) -> None:
        """Metadata of both sides can be encoded and decoded by the types that they declare for it."""

        def through_bytes(engine: SimulatedEngine) -> None:
            engine.executor = CodedExecutor(engine)

        self._play_all("ranks", (), prepare=through_bytes)

    # --- one thing at a time ------------------------------------------------------------------------------------------

    def test_the_factory_survives_spawn(self) -> None:
        """The factory can be pickled: workers may live in other processes."""
        copy = pickle.loads(pickle.dumps(self.factory()))  # noqa: S301  # our own bytes
        assert callable(copy.make_worker_side)

    def test_it_gives_back_what_it_has_stored(self) -> None:
        """A prompt that was evicted from the device pool is restored, at least in part, when it comes again."""
        engine, prompt = self._engine_with_a_prompt()
        again = self._ask(engine, "again", prompt)
        if self.may_forget and not again.num_external_tokens:
            pytest.skip("nothing was restored, which this connector may do")
        assert again.num_external_tokens > 0, "nothing was restored"

    def test_it_explains_what_it_has_restored(self) -> None:
        """A request's cache report claims no more restored tokens than were loaded, and none of its notes is empty."""
        engine, prompt = self._engine_with_a_prompt()
        again = self._ask(engine, "again", prompt)
        report = engine.outputs["again"].cache_report
        assert sum(report.restored_tokens.values()) <= again.num_external_tokens
        assert all(report.notes), "an empty note explains nothing"

    def test_each_hint_has_one_outcome_and_changes_no_token(self) -> None:
        """Hints of every kind, with a request and without one, are answered once each; nothing else changes.

        The guard turns a connector off that answers otherwise.
        """
        engine = self._engine(self.factory())
        for number in (0, 1, 0, 2, 0):
            hints = [Hint(kind=kind, ttl_s=1.0, lease="lease" if kind is HintKind.PIN else None) for kind in HintKind]
            request = engine.add(f"request {len(engine.requests)}", self._prompt(number), OUTPUT_TOKENS, hints=hints)
            assert [outcome.action_id for outcome in request.hint_outcomes] == [hint.action_id for hint in hints]
            self._settle(engine)
            expected = tokens_alone(self._prompt(number), OUTPUT_TOKENS, VOCAB_SIZE)
            assert engine.tokens(request.request_id) == expected, "a hint changed a token"
            engine.hint(self._prompt(number), None, hints)
            self._settle(engine)

    def test_it_tells_what_it_keeps(self) -> None:
        """``get_contents`` reports each lease that was accepted until it is released, and nothing after a reset.

        No lease covers more than there may be, and no prefix is longer than one that was served. A connector may tell nothing.
        """
        engine = self._engine(self.factory())
        connector = engine.scheduler.connector
        for number in (0, 1, 0):
            hints = [Hint.pin(1e6, f"lease {number}")]
            request = engine.add(f"request {len(engine.requests)}", self._prompt(number), OUTPUT_TOKENS, hints=hints)
            self._settle(engine)
            contents = connector.get_contents()
            is_pinned = request.hint_outcomes[0].status in (HintStatus.ACCEPTED, HintStatus.CLIPPED)
            leases = {pin.lease for of_tier in contents for pin in of_tier.pins}
            assert not contents or is_pinned == (f"lease {number}" in leases)
            longest = PROMPT_TOKENS + OUTPUT_TOKENS
            for of_tier in contents:
                assert len({pin.lease for pin in of_tier.pins}) == len(of_tier.pins), "a lease is reported twice"
                assert sum(pin.num_chunks for pin in of_tier.pins) <= of_tier.max_pinned_chunks
                assert all(0 <= pin.num_tokens <= longest and pin.left_s > 0 for pin in of_tier.pins)
                assert all(0 < prefix.num_tokens <= longest for prefix in of_tier.prefixes)
        engine.hint(self._prompt(0), None, [Hint.release("lease 0")])
        assert "lease 0" not in {pin.lease for of_tier in connector.get_contents() for pin in of_tier.pins}
        assert engine.scheduler.reset_cache()
        assert not any(of_tier.pins or of_tier.prefixes for of_tier in connector.get_contents())
        assert connector.broken is None

    def test_its_counters_add_up(self) -> None:
        """Values are changes since the last call: only those of gauges may be negative, and no sum falls below 0."""
        engine = self._engine(self.factory())
        total: Stats = {}
        for number in (0, 1, 2, 0):
            self._ask(engine, f"request {len(engine.requests)}", self._prompt(number))
            stats = engine.scheduler.connector.get_kv_connector_stats()
            assert engine.scheduler.connector.broken is None
            fallen = {
                series: value for series, value in stats.items() if value < 0 and series.family.kind is not Kind.GAUGE
            }
            assert not fallen, f"counters fell: {fallen}"
            total = add_stats(total, stats)
            assert all(value >= 0 for value in total.values()), f"less than nothing: {total}"

    def test_a_reset_forgets_everything(self) -> None:
        """After ``reset_cache``, which a connector at rest must not refuse, nothing that was stored before is found."""
        engine = self._engine(self.factory())
        prompt = self._prompt(0)
        self._ask(engine, "first", prompt)
        assert engine.scheduler.reset_cache(), "a connector at rest refuses to forget"
        assert self._ask(engine, "again", prompt).num_external_tokens == 0
        assert engine.scheduler.connector.broken is None

    @pytest.mark.parametrize("failure", Failure)
    def test_what_a_failed_step_computed_is_never_found(self, failure: Failure) -> None:
        """What a step computed after blocks that another connector failed to load must never be restored.

        The step fails, the prompt is computed again, evicted from the device pool, and asked for once more.
        """
        spoils_one = spoiler(failure, lambda request_id: request_id == "failed")
        engine = self._engine(MultiConnectorFactory((spoils_one, strict(self.factory()))))
        prompt = self._prompt(0)
        with quiet_logging():
            request = self._ask(engine, "failed", prompt)
            assert request.num_preemptions, "what was computed behind garbage was not computed again"
            self._overwrite_device(engine)
            self._ask(engine, "again", prompt)
        _require_sound(engine)

    def test_it_forgets_requests_that_have_ended(self) -> None:
        """The number of objects that the connector holds does not grow with the number of requests that have ended.

        The same few prompts are served or aborted again and again. Up to ``max_remembered`` requests may be remembered.
        """
        engine = self._engine(self.factory())
        held: list[int] = []
        # A record that is kept up to a limit stops growing some time; one that is tidied up now and then shrinks again.
        while len(held) < 2 or held[-1] - held[-2] >= MAX_GROWTH:
            num_ended = len(engine.requests)
            assert num_ended <= self.max_remembered, (
                f"{num_ended} requests have come and gone, and it holds {held[-1] - held[0]} objects more than at first"
            )
            for number in range(NUM_REPEATS):
                self._repeat(engine, number)
            held.append(self._num_held(engine))

    @pytest.mark.parametrize("num_steps", range(8))
    def test_an_abort_at_any_step_leaves_nothing_behind(self, num_steps: int) -> None:
        """A request is aborted while its prompt is restored or computed: nothing is left in flight, and others are served."""
        engine, prompt = self._engine_with_a_prompt()
        engine.add("aborted", prompt, OUTPUT_TOKENS)
        for _ in range(num_steps):
            engine.step()
        engine.abort("aborted")
        self._settle(engine)
        self._ask(engine, "again", prompt)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _play_all(
        self,
        workload: str,
        faults: Collection[Fault],
        change: Callable[[ConnectorPlan], ConnectorPlan] = lambda plan: plan,
        prepare: Callable[[SimulatedEngine], None] = lambda _: None,
    ) -> None:
        num_played, refusal = 0, ""
        for seed in range(MAX_REFUSALS * self.num_seeds):
            scenario = self._scenario(seed, workload, faults)
            scenario = replace(scenario, connector=change(scenario.connector))
            idle = self._wait if self.takes_real_time else None
            result = ScenarioRun(scenario, on_idle=idle, world=World(scenario, prepare=prepare)).play()
            if isinstance(result.error, ConfigError) and result.num_steps == 0:
                refusal = str(result.error)
                continue
            if result.error is not None:
                raise AssertionError(f"{result.error}\nin: {scenario.describe()}") from result.error
            num_played += 1
            if num_played == self.num_seeds:
                return
        if not num_played:
            pytest.skip(f"the connector refuses such engines: {refusal}")

    def _scenario(self, seed: int, workload: str, faults: Collection[Fault]) -> Scenario:
        scenario = draw_scenario(seed, workload, "none", faults)
        if faults:
            # Every fault is there, with a fixed rate: a few seeds cannot leave that to chance as a long simulation does.
            rates = {Fault.RAISES: 0.01, Fault.RESTART: 1.0}
            scenario = replace(scenario, rates={fault: rates.get(fault, 0.2) for fault in faults})
        shape = replace(scenario.shape, num_replicas=1)  # with more, workers would share memory between processes
        if self.needs_prefix_caching:
            shape = replace(shape, scheduler={**shape.scheduler, "prefix_caching": True})
        with_context = self.needs_context or Random(seed).random() < 0.6  # noqa: S311  # repeatable, on purpose
        factory = strict(self.factory(), plans_early=seed % 2 == 1)
        plan = ConnectorPlan(type(self).__name__, (), with_context=with_context, custom=(factory,))
        return replace(scenario, shape=shape, connector=plan)

    def _engine(self, factory: KVConnectorFactory, **options: Any) -> SimulatedEngine:
        try:
            return SimulatedEngine(simulated_layout(NUM_BLOCKS, BLOCK_TOKENS), factory, as_tensors=True, **options)
        except ConfigError as error:
            pytest.skip(f"the connector refuses a plain engine: {error}")

    def _ask(self, engine: SimulatedEngine, name: str, prompt: list[int]) -> Any:
        """Serve a request until nothing is in flight, check its tokens, and return it."""
        request = engine.add(name, prompt, OUTPUT_TOKENS)
        self._settle(engine)
        assert engine.tokens(name) == tokens_alone(prompt, OUTPUT_TOKENS, VOCAB_SIZE), f"{name} got wrong tokens"
        return request

    def _settle(self, engine: SimulatedEngine) -> None:
        """Step until nothing is in flight; verify that nothing is left and that the connector was not turned off."""
        for _ in range(10_000):
            if not engine.scheduler.has_work():
                break
            step, _ = engine.step()
            if self.takes_real_time and not step.scheduled:
                self._wait()
        engine.scheduler.check_settled()
        broken = engine.scheduler.connector.broken
        assert broken is None, f"the connector was turned off: {broken}"

    def _repeat(self, engine: SimulatedEngine, number: int) -> None:
        """Serve one of a few prompts under a new name; half of them are aborted on the way."""
        name = f"request {len(engine.requests)}"
        if number % 2:
            self._ask(engine, name, self._prompt(number % 3))
            return
        engine.add(name, self._prompt(number % 3), OUTPUT_TOKENS)
        for _ in range(number // 2 % 4):
            engine.step()
        engine.abort(name)
        self._settle(engine)

    def _num_held(self, engine: SimulatedEngine) -> int:
        """Objects that the connector's two sides hold, after their counters and events have been taken."""
        engine.scheduler.connector.get_kv_connector_stats()
        engine.scheduler.take_events()
        return num_reachable([engine.connector, *engine.worker_sides])

    def _engine_with_a_prompt(self) -> tuple[SimulatedEngine, list[int]]:
        """Return an engine whose tier has a prompt that its device has lost, and the prompt."""
        engine, prompt = self._engine(self.factory()), self._prompt(0)
        self._ask(engine, "first", prompt)
        self._overwrite_device(engine)
        return engine, prompt

    def _overwrite_device(self, engine: SimulatedEngine) -> None:
        """Serve other prompts until the first one is evicted from the device pool."""
        for number in range(1, 4):
            self._ask(engine, f"other {number}", self._prompt(number))

    def _prompt(self, number: int) -> list[int]:
        random = Random(f"prompt {number}")  # noqa: S311  # repeatable, on purpose
        return [random.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]

    def _wait(self) -> None:
        time.sleep(0.0005)


def _require_sound(engine: SimulatedEngine) -> None:
    """Assert that no connector composed in this engine was turned off, except the one that spoils steps."""
    composed = engine.connector
    assert isinstance(composed, MultiConnectorScheduler)
    for child in composed.children:
        assert child.broken is None or child.name == SpoilingScheduler.name, (
            f"the connector was turned off: {child.broken}"
        )
