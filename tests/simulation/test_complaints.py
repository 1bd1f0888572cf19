"""What a run says of connectors of others that never come to rest, or break a rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cargohold.connector.multi import MultiConnectorFactory
from cargohold.lab.simulation.connectors import ConnectorPlan
from cargohold.lab.simulation.run import RunResult, ScenarioRun
from cargohold.lab.simulation.timeline import RecentTimeline
from cargohold.lab.simulation.world import draw_scenario
from cargohold.protocol import BlockIds, ClassFactory, RequestView, SchedulerContext
from examples.own_connector.shelf import FACTORY, ShelfScheduler, ShelfWorker


class Clinging(ShelfScheduler):
    name = "clinging"

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        self.context = context

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, None]:
        if block_ids and block_ids[0]:
            self.context.touch_ids([block_ids[0][0]])
        return False, None


class Restless(ShelfScheduler):
    name = "restless"

    def has_pending_work(self) -> bool:
        return True


class Breaking(ShelfScheduler):
    name = "breaking"

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, None]:
        raise LookupError("it has lost its books")


@pytest.mark.parametrize("is_composed", [False, True])
@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (Clinging, "connector clinging holds references on blocks"),
        (Restless, "connector restless says that it has work pending"),
    ],
)
def test_a_run_that_never_rests_names_who_keeps_it(
    broken: type[ShelfScheduler], complaint: str, is_composed: bool
) -> None:
    timeline = RecentTimeline()
    result = play_with(broken, is_composed=is_composed, timeline=timeline)
    assert complaint in str(result.error)
    lines = timeline.lines()
    assert "step(s) more like that" in lines[-1]
    assert len(lines) < 20, "steps in which nothing happens have a line each"
    assert any("r1 0-" in line for line in lines)


@pytest.mark.parametrize("is_composed", [False, True])
def test_a_run_names_who_was_turned_off(is_composed: bool) -> None:
    result = play_with(Breaking, is_composed=is_composed, timeline=RecentTimeline())
    assert "connector breaking was turned off: request_finished raised LookupError" in str(result.error)


def play_with(broken: type[ShelfScheduler], *, is_composed: bool, timeline: RecentTimeline) -> RunResult:
    """One request beside this connector, or beside one that is composed of it and another."""
    factory = ClassFactory(broken, ShelfWorker)
    custom = MultiConnectorFactory((FACTORY, factory)) if is_composed else factory
    scenario = draw_scenario(0, "small", "none", ())
    scenario = replace(scenario, connector=ConnectorPlan("mine", (), custom=(custom,)), actions=scenario.actions[:1])
    return ScenarioRun(scenario, timeline=timeline).play()
