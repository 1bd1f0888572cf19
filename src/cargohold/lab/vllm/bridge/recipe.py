"""Scenarios of the embedded engine with a connector written for vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from cargohold.lab.simulation.campaign import Recipe
from cargohold.lab.simulation.connectors import ConnectorPlan
from cargohold.lab.simulation.world import ANY, Scenario, check_names, draw_scenario
from cargohold.lab.vllm.bridge.factory import Bridge
from cargohold.lab.vllm.others.plan import PREFIX


@dataclass(frozen=True, slots=True)
class BridgeRecipe(Recipe):
    """Scenarios for a class of vLLM's interface in the embedded engine.

    Attributes:
        config: the class's own options.
    """

    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_names(self.workload, ANY)
        self._bridge()

    def scenario(self, seed: int) -> Scenario:
        """The scenario of a seed."""
        scenario = draw_scenario(seed, self.workload, "none", self.faults)
        random = Random(f"{seed}/bridge")  # noqa: S311  # repeatable, on purpose
        plan = ConnectorPlan(self.connector, (), with_context=random.random() < 0.7, custom=(self._bridge(),))
        shape = replace(scenario.shape, num_replicas=1)  # with more, workers would share memory between processes
        return replace(scenario, shape=shape, connector=plan)

    def _bridge(self) -> Bridge:
        return Bridge(self.connector.removeprefix(PREFIX), dict(self.config))
