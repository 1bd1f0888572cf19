"""Scenarios for others' connectors, and the runs that play them."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, supports_hma

from cargohold.errors import ConfigError
from cargohold.lab.simulation.connectors import ConnectorPlan
from cargohold.lab.simulation.faults import Fault, Spells
from cargohold.lab.simulation.fingerprints import GroupPlan, WrongTokenError
from cargohold.lab.simulation.oracles import Oracle, OracleError
from cargohold.lab.simulation.replica import Replica
from cargohold.lab.simulation.run import NO_TIMELINE, Run, RunResult, Timeline
from cargohold.lab.simulation.transfers import CopiesInFlight, CopyConflictError
from cargohold.lab.simulation.workloads import Abort, Action, Ask, Reset, without_used_ids
from cargohold.lab.simulation.world import ANY, Scenario, Shape, World, check_names, draw_scenario
from cargohold.lab.vllm.configuration import ASYNC, DRAFTED
from cargohold.lab.vllm.engine import VllmEngine, VllmRecipe, VllmRun, VllmWorld, fitted
from cargohold.lab.vllm.others.copies import ROOM, CopyRoom, simulated_copies
from cargohold.lab.vllm.others.engine import StrangerEngine
from cargohold.lab.vllm.others.events import HostEventOracle
from cargohold.lab.vllm.others.files import simulated_files
from cargohold.lab.vllm.others.oracles import LeftoverOracle, StandstillOracle
from cargohold.lab.vllm.others.plan import MULTI, PREFIX, StrangerPlan, check_tiers, connector_class, drawn_config
from cargohold.lab.vllm.others.report import StepTable, script
from cargohold.protocol import AttentionKind

FAULTS: Final = frozenset({Fault.LATE, Fault.LATE_WORKER, Fault.SLOW, Fault.FULL, Fault.GONE})
"""Faults that every connector must bear. For a failed copy, vLLM's own have no word but an assertion."""


class StrangerError(Exception):
    """A connector, or vLLM because of it, has raised; the message says what and where."""


class StrangerWorld(World):
    """Makes engines around somebody else's connector.

    Attributes:
        scratch: a folder for the connector's files.
    """

    scratch = ""

    def new_engine(self) -> Replica:
        """An engine as after a start of its process."""
        scenario = self._scenario
        plan = scenario.connector
        assert isinstance(plan, StrangerPlan)
        self.copies = [CopiesInFlight(rank) for rank in range(scenario.shape.world_size)]
        is_slow = Spells(self.source, Fault.SLOW)
        room = CopyRoom(scenario.seed, plan.polls, self.copies, self.source, is_slow, self.scratch)
        random = Random(f"{scenario.seed}/vllm")  # noqa: S311  # repeatable, on purpose
        token = ROOM.set(room)
        try:
            return StrangerEngine(plan, room, scenario.shape, clock=self.clock, copies=self.copies, random=random)
        except Exception as error:
            names = "+".join(name for name, _ in plan.parts)
            raise ConfigError("connector", PREFIX + names, f"vLLM could not start with it: {_told(error)}") from error
        finally:
            ROOM.reset(token)

    def oracles(self, engine: Replica) -> list[Oracle]:
        """What must hold with any connector."""
        assert isinstance(engine, VllmEngine)
        oracles: list[Oracle] = [StandstillOracle(engine), LeftoverOracle(engine)]
        return [*oracles, HostEventOracle(engine)] if engine.config.emit_events else oracles


class StrangerRun(VllmRun):
    """A run in which time passes by steps alone, as simulated copies count these."""

    _world: StrangerWorld

    def play(self) -> RunResult:
        """Play to the end, or to the first failure; what others' code raises is told with the place where it did."""
        with (
            simulated_copies(),
            simulated_files(),
            TemporaryDirectory(prefix="cargohold-simulation-") as self._world.scratch,
        ):
            result = super().play()
        if result.error is not None and not isinstance(result.error, (ConfigError, *EXPECTED)):
            told = StrangerError(_told(result.error))
            told.__cause__ = result.error
            result.error = told
        return result

    def _sleep(self, next_action: float) -> None:
        """Give real threads of a connector some real time; simulated copies take steps."""
        assert isinstance(self._engine, StrangerEngine)
        if self._engine.copies_in_real_time:
            sleep(_REAL_NAP_S)

    def _let_lower_tiers_settle(self) -> None:
        """Step on until nothing is being copied: an idle vLLM would do that with the next request."""
        for at in range(_LAST_STEPS):
            is_copying = any(copies.num_jobs for copies in self._engine.copies)
            if at >= _LEAST_STEPS and not is_copying and not self._engine.scheduler.has_work():
                return
            self._step(float("inf"))

    def _apply(self, action: Action) -> None:
        expected = self._expected.get(action.request_id) if isinstance(action, Abort) else None
        if expected is None or not expected.has_ended:
            super()._apply(action)


EXPECTED: Final = (OracleError, WrongTokenError, CopyConflictError)
"""Errors that say themselves what is wrong."""
_LEAST_STEPS: Final = 4
_STEP_TOKENS: Final = "max_num_batched_tokens"
_REAL_NAP_S: Final = 0.001
_LAST_STEPS: Final = 2000


def _told(error: BaseException) -> str:
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


def kind_of(error: Exception | None) -> str | None:
    """What kind of failure it is: two with the same are taken for the same. ``None`` if nothing failed."""
    if error is None:
        return None
    if isinstance(error, OracleError):
        return error.oracle
    return str(error).partition("(")[2] if isinstance(error, StrangerError) else type(error).__name__


def show(scenario: Scenario, num_lines: int = 40) -> int:
    """Play a scenario, and print the end of its table of steps. Returns 1 if it fails."""
    table = StepTable(num_lines)
    result = StrangerRun(scenario, timeline=table, world=StrangerWorld(scenario)).play()
    end = "it ended well" if result.error is None else f"{type(result.error).__name__}: {result.error}"
    sys.stdout.write("\n".join([scenario.describe(), "", *table.lines(), "", end, ""]))
    return int(result.error is not None)


# --- scenarios --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StrangerRecipe(VllmRecipe):
    """Scenarios for connectors of vLLM's interface.

    Attributes:
        config: the connector's own options; those that are left out are drawn.
    """

    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_names(self.workload, ANY)
        check_tiers(self.config)
        for name in self._names():
            connector_class(name)
        if len(self._names()) > 1 and self.config:
            raise ConfigError(
                "connector-config", self.config, f"with several connectors, give {PREFIX}{MULTI} all of it"
            )
        self._try()

    def _try(self) -> None:
        """Start an engine of the plainest kind. Raises ``ConfigError`` if that cannot be."""
        result = self.run(replace(self._drawn(0, "small"), actions=())).play()
        if isinstance(result.error, ConfigError):
            raise result.error

    def scenario(self, seed: int) -> Scenario:
        """The scenario of a seed."""
        return self._drawn(seed, self.workload)

    def _drawn(self, seed: int, workload: str) -> Scenario:
        scenario = draw_scenario(seed, workload, "eager", self.faults & (FAULTS | self._asked_for()))
        classes = [connector_class(name) for name in self._names()]
        if not all(supports_hma(kind) for kind in classes):
            scenario = replace(scenario, shape=_of_one_group(scenario.shape))
        scheduler = {**scenario.shape.scheduler, "prefix_caching": True}
        scenario = replace(scenario, shape=replace(scenario.shape, scheduler=scheduler))
        scenario = fitted(scenario, Random(f"{seed}/vllm scenario"))  # noqa: S311  # repeatable, on purpose
        scenario = replace(scenario, shape=_with_drafts(scenario.shape, Random(f"{seed}/speculative tokens")))  # noqa: S311  # so, too
        random = Random(f"{seed}/native")  # noqa: S311  # repeatable, on purpose
        parts = tuple(
            (name, {**drawn_config(name, random, scenario.shape, self.config), **self.config}) for name in self._names()
        )
        polls = random.choice(((1,), (1, 2), (1, 3, 8), (2, 20)))
        plan = StrangerPlan(self.connector, parts=parts, polls=polls)
        may_reset = all(kind.reset_cache is not KVConnectorBase_V1.reset_cache for kind in classes)
        kept = (Ask, Abort, Reset) if may_reset else (Ask, Abort)
        actions = tuple(
            replace(action, params=None, hints=()) if isinstance(action, Ask) else action
            for action in without_used_ids(scenario.actions)
            if isinstance(action, kept)
        )
        return replace(scenario, connector=plan, actions=actions)

    def run(self, scenario: Scenario, timeline: Timeline = NO_TIMELINE) -> Run:
        """A run of ``scenario``."""
        return StrangerRun(scenario, timeline=timeline, world=StrangerWorld(scenario))

    def timeline(self, num_lines: int) -> StepTable:
        """A timeline that shows the last lines of a run."""
        return StepTable(num_lines)

    def fails_like(self, scenario: Scenario, error: Exception) -> bool:
        """Whether a run of ``scenario`` fails in the same way."""
        return kind_of(self.run(scenario).play().error) == kind_of(error)

    def remark(self, scenario: Scenario, error: Exception) -> str | None:
        """Whether the same goes wrong without any connector."""
        alone = replace(scenario, connector=ConnectorPlan("none", ()))
        if kind_of(VllmRun(alone, world=VllmWorld(alone)).play().error) != kind_of(error):
            return None
        return "Without a connector it ends in the same way: this is not the connector's fault, but vLLM's."

    def simpler(self, scenario: Scenario) -> Iterator[Scenario]:
        """Scenarios with simpler options, and with fewer tokens."""
        plan, options = scenario.connector, scenario.shape.scheduler
        assert isinstance(plan, StrangerPlan)
        if plan.polls != (1,):
            yield replace(scenario, connector=replace(plan, polls=(1,)))
        if options[ASYNC]:
            yield replace(scenario, shape=replace(scenario.shape, scheduler={**options, ASYNC: False}))
        for at, action in enumerate(scenario.actions):
            for less in _shorter(action) if isinstance(action, Ask) else ():
                yield replace(scenario, actions=(*scenario.actions[:at], less, *scenario.actions[at + 1 :]))

    def script(self, scenario: Scenario, error: Exception, command: str) -> str:
        """A file that shows the failure without us."""
        return script(scenario, f"{type(error).__name__}: {error}", command)

    def _names(self) -> Sequence[str]:
        return self.connector.removeprefix(PREFIX).split("+")

    def _asked_for(self) -> frozenset[Fault]:
        """Faults that are played only if somebody names them."""
        return frozenset() if self.faults == frozenset(Fault) else self.faults & {Fault.FAILED}


def _shorter(ask: Ask) -> Iterator[Ask]:
    if ask.max_tokens > 1:
        yield replace(ask, max_tokens=1)
        yield replace(ask, max_tokens=ask.max_tokens // 2)
    for num_less in (len(ask.prompt) // 2, len(ask.prompt) // 8, 1):
        if 0 < num_less < len(ask.prompt):
            yield replace(ask, prompt=ask.prompt[:-num_less])
    if ask.salt is not None or ask.priority or ask.stop is not None:
        yield replace(ask, salt=None, priority=0, stop=None)


def _with_drafts(shape: Shape, random: Random) -> Shape:
    """Let one engine in six propose tokens by multi-token prediction, and give it room for them.

    Not where there are recurrent states, of which vLLM's workers keep more then, and not while steps overlap. A step has room
    for all tokens of a request: vLLM pads decodes to that, and one that does not fit is never scheduled.
    """
    if random.random() >= 1 / 6 or any(plan.kind is AttentionKind.RECURRENT for plan in shape.groups):
        return shape
    num_tokens = random.choice((1, 1, 3))
    num_more_in_step = max(1 + num_tokens - shape.scheduler[_STEP_TOKENS], 0)
    options = {**shape.scheduler, ASYNC: False, DRAFTED: num_tokens}
    options[_STEP_TOKENS] += num_more_in_step
    num_held = 1 + 2 * num_tokens + num_more_in_step
    num_more = sum(-(-num_held // plan.block_tokens) for plan in shape.groups)
    return replace(shape, scheduler=options, num_blocks=shape.num_blocks + num_more)


def _of_one_group(shape: Shape) -> Shape:
    return replace(shape, groups=(GroupPlan(block_tokens=shape.groups[0].block_tokens),))
