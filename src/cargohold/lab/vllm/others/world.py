"""What surrounds a third-party connector: its engine, and what is simulated in the place of devices and threads."""

from __future__ import annotations

import traceback
from pathlib import Path
from random import Random
from typing import Any

from cargohold.errors import ConfigError
from cargohold.lab.simulation.oracles import Oracle
from cargohold.lab.simulation.replica import Replica
from cargohold.lab.simulation.transfers import ByteRows
from cargohold.lab.simulation.world import Scenario
from cargohold.lab.vllm.configuration import WORLD
from cargohold.lab.vllm.engine import VllmEngine
from cargohold.lab.vllm.others.oracles import HostEventOracle, StandstillOracle
from cargohold.lab.vllm.others.plan import PREFIX, StrangerPlan
from cargohold.lab.vllm.recipe import VllmWorld


class StrangerWorld(VllmWorld):
    """Makes engines around a third-party connector, and surrounds what is simulated of it.

    Attributes:
        scratch: a folder for the connector's files.
        polls: how many polls a copy may take.
        num_streams: streams of copies made so far, on all workers.
        regions: host memory that several parts of a connector share, by the id of its engine.
    """

    engine_class = VllmEngine

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        assert isinstance(scenario.connector, StrangerPlan)
        self._plan = scenario.connector
        self.scratch = ""
        self.polls = self._plan.polls
        self.num_streams = 0
        self.regions: dict[str, ByteRows] = {}

    def new_random(self, what: str, rank: int = 0) -> Random:
        """Random numbers for a part of a worker's connector, or of the scheduler's."""
        return Random(f"{self._scenario.seed}/{what} {rank}")  # noqa: S311  # repeatable, on purpose

    def new_engine(self) -> Replica:
        try:
            return super().new_engine()
        except Exception as error:
            names = "+".join(name for name, _ in self._plan.parts)
            raise ConfigError(
                "connector", PREFIX + names, f"vLLM could not start with it: {described(error)}"
            ) from error

    def transfer_config(self) -> Any:
        return self._plan.transfer_config(self.scratch)

    def oracles(self, engine: Replica) -> list[Oracle]:
        assert isinstance(engine, VllmEngine)
        events = [HostEventOracle(engine)] if engine.config.emit_events else []
        return [StandstillOracle(engine), *super().oracles(engine), *events]


def surroundings() -> StrangerWorld:
    """The world of the connectors that vLLM is making."""
    world = WORLD.get()
    assert isinstance(world, StrangerWorld)
    return world


def described(error: BaseException) -> str:
    """What was raised, and where: the innermost line outside of Cargohold."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "cargohold" not in Path(frame.filename).parts
    ]
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'without a message'}"
    if not frames:
        return text
    parts = Path(frames[-1].filename).parts
    place = parts[-parts[::-1].index("vllm") - 1 :] if "vllm" in parts else parts[-1:]
    return f"{text} ({'/'.join(place)}, line {frames[-1].lineno}, in {frames[-1].name}: {frames[-1].line})"
