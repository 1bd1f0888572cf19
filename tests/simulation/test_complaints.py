"""What a run that never comes to rest says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cargohold.connector.multi import MultiConnectorFactory
from cargohold.protocol import BlockIds, ClassFactory, RequestView, SchedulerContext
from cargohold.simulation.connectors import ConnectorPlan
from cargohold.simulation.run import Run
from cargohold.simulation.scenario import draw_scenario
from cargohold.simulation.timeline import RecentTimeline
from tests.conformance.shelf import FACTORY, ShelfScheduler, ShelfWorker


class Clinging(ShelfScheduler):
    name = "clinging"

    def bind_scheduler_context(self, context: SchedulerContext) -> None:
        self.context = context

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, None]:
        if block_ids and block_ids[0]:
            self.context.touch([self.context.get_block(block_ids[0][0])])
        return False, None


class Restless(ShelfScheduler):
    name = "restless"

    def has_pending_work(self) -> bool:
        return True


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
    factory = ClassFactory(broken, ShelfWorker)
    custom = MultiConnectorFactory((FACTORY, factory)) if is_composed else factory
    scenario = draw_scenario(0, "small", "none", ())
    scenario = replace(scenario, connector=ConnectorPlan("mine", (), custom=(custom,)), actions=scenario.actions[:1])
    timeline = RecentTimeline()
    result = Run(scenario, timeline=timeline).play()
    assert complaint in str(result.error)
    lines = timeline.lines()
    assert "step(s) more like that" in lines[-1]
    assert len(lines) < 20, "steps in which nothing happens have a line each"
    assert any("computes" in line for line in lines)
