"""Scenarios for others' connectors, and the runs that play them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from importlib.metadata import version
from random import Random
from tempfile import TemporaryDirectory
from textwrap import fill
from time import sleep
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, supports_hma

from cargohold.errors import ConfigError
from cargohold.integrations.vllm import compat
from cargohold.lab.simulation.connectors import ConnectorPlan
from cargohold.lab.simulation.faults import Fault
from cargohold.lab.simulation.fingerprints import GroupPlan, WrongTokenError
from cargohold.lab.simulation.oracles import OracleError
from cargohold.lab.simulation.replica import Replica
from cargohold.lab.simulation.run import RunResult, ScenarioRun
from cargohold.lab.simulation.timeline import NO_TIMELINE, RecentTimeline, Timeline
from cargohold.lab.simulation.traffic import Abort, Action, Ask, Reset
from cargohold.lab.simulation.transfers import CopyConflictError
from cargohold.lab.simulation.world import ANY, Scenario, Shape, check_names, draw_scenario
from cargohold.lab.vllm.adapter import AdapterEngine
from cargohold.lab.vllm.configuration import ASYNC, DRAFTED
from cargohold.lab.vllm.others.copies import simulated_copies
from cargohold.lab.vllm.others.files import simulated_files
from cargohold.lab.vllm.others.plan import MULTI, PREFIX, StrangerPlan, check_tiers, connector_class, drawn_config
from cargohold.lab.vllm.others.world import StrangerWorld, described
from cargohold.lab.vllm.recipe import VllmRecipe, VllmRun, VllmWorld, fitted
from cargohold.protocol import AttentionKind

FAULTS: Final = frozenset({Fault.LATE, Fault.LATE_WORKER, Fault.SLOW, Fault.FULL, Fault.GONE})
"""Faults that every connector must bear. For a failed copy, vLLM's own have no word but an assertion."""


class StrangerError(Exception):
    """A connector, or vLLM because of it, has raised; the message says what and where."""


class StrangerRun(VllmRun):
    """A run in which time passes by steps alone, as simulated copies count these."""

    _world: StrangerWorld

    def play(self) -> RunResult:
        """Play to the end, or to the first failure; what others' code raises is reported with its place."""
        with (
            simulated_copies(),
            simulated_files(),
            TemporaryDirectory(prefix="cargohold-simulation-") as self._world.scratch,
        ):
            result = super().play()
        if result.error is not None and not isinstance(result.error, (ConfigError, *EXPECTED)):
            raised, result.error = result.error, StrangerError(described(result.error))
            result.error.__cause__ = raised
        return result

    def _sleep(self, next_action: float) -> None:
        """Give real threads of a connector some real time; simulated copies take steps."""
        if not self._world.num_streams:
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


def kind_of(error: Exception | None) -> str | None:
    """What kind of failure it is: two with the same are taken for the same. ``None`` if nothing failed."""
    if error is None:
        return None
    if isinstance(error, OracleError):
        return error.oracle
    return str(error).partition("(")[2] if isinstance(error, StrangerError) else type(error).__name__


def show(scenario: Scenario, num_lines: int = 40) -> int:
    """Play a scenario, and print the end of its table of steps. Returns 1 if it fails."""
    table = RecentTimeline(num_lines)
    result = StrangerRun(scenario, timeline=table, world=StrangerWorld(scenario)).play()
    end = "it ended well" if result.error is None else f"{type(result.error).__name__}: {result.error}"
    sys.stdout.write("\n".join([scenario.describe(), "", *table.lines(), "", end, ""]))
    return int(result.error is not None)


# --- scenarios --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StrangerRecipe(VllmRecipe):
    """Scenarios for connectors of vLLM's interface.

    Attributes:
        config: the connector's own options; those that are left out are drawn at random.
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
        return self._drawn(seed, self.workload)

    def _drawn(self, seed: int, workload: str) -> Scenario:
        asked_for = {Fault.FAILED} if self.faults != frozenset(Fault) else set[Fault]()  # played only if it is named
        scenario = draw_scenario(seed, workload, "eager", self.faults & (FAULTS | asked_for))
        classes = [connector_class(name) for name in self._names()]
        shape = replace(scenario.shape, scheduler={**scenario.shape.scheduler, "prefix_caching": True})
        if not all(supports_hma(kind) for kind in classes):
            shape = replace(shape, groups=(GroupPlan(block_tokens=shape.groups[0].block_tokens),))
        scenario = fitted(replace(scenario, shape=shape), Random(f"{seed}/vllm scenario"))  # noqa: S311  # repeatable, on purpose
        shape = _with_drafts(scenario.shape, Random(f"{seed}/speculative tokens"))  # noqa: S311  # so, too
        random = Random(f"{seed}/native")  # noqa: S311  # repeatable, on purpose
        parts = tuple(
            (name, {**drawn_config(name, random, shape, self.config), **self.config}) for name in self._names()
        )
        polls = random.choice(((1,), (1, 2), (1, 3, 8), (2, 20)))
        plan = StrangerPlan(self.connector, parts=parts, polls=polls)
        may_reset = all(kind.reset_cache is not KVConnectorBase_V1.reset_cache for kind in classes)
        kept = (Ask, Abort, Reset) if may_reset else (Ask, Abort)
        actions = tuple(
            replace(action, params=None, hints=()) if isinstance(action, Ask) else action
            for action in scenario.actions
            if isinstance(action, kept)
        )
        return replace(scenario, shape=shape, connector=plan, actions=actions)

    def run(self, scenario: Scenario, timeline: Timeline = NO_TIMELINE) -> ScenarioRun:
        return StrangerRun(scenario, timeline=timeline, world=StrangerWorld(scenario))

    def fails_like(self, scenario: Scenario, error: Exception) -> bool:
        """Whether a run of ``scenario`` fails in the same way."""
        return kind_of(self.run(scenario).play().error) == kind_of(error)

    def remark(self, scenario: Scenario, error: Exception) -> str | None:
        """Whether the same goes wrong without any connector."""
        alone = replace(scenario, connector=ConnectorPlan("none", ()))
        if kind_of(VllmRun(alone, world=_UnaidedWorld(alone)).play().error) != kind_of(error):
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
        return script(scenario, f"{type(error).__name__}: {error}", command)

    def _names(self) -> Sequence[str]:
        return self.connector.removeprefix(PREFIX).split("+")


class _UnaidedWorld(VllmWorld):
    """Makes engines around vLLM's scheduler as it is alone: the adapter does not put off what vLLM does too early."""

    def new_engine(self) -> Replica:
        engine = super().new_engine()
        assert isinstance(engine, AdapterEngine)
        engine.side._copies_inside = False
        return engine


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


# --- a failing run as a script, for those who know vLLM and not us ----------------------------------------------------


def script(scenario: Scenario, failure: str, command: str) -> str:
    """Python text that plays a scenario and ends with status 1 if it fails. It needs vLLM and Cargohold alone."""
    modules: dict[str, set[str]] = {}
    text = _text(scenario, modules)
    imports = "\n".join(f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(modules.items()))
    vllm, own = compat.VLLM_VERSION, version("cargohold")
    return f'''"""Found by Cargohold {own} in vLLM {vllm}: {failure}

Found with: {command}
Play it with: python THIS_FILE
It needs vllm {vllm} and cargohold[lab]; no GPU and no model. Ends with status 1 if it fails, after a table of the last steps.
"""

from vllm import __version__

{imports}
from cargohold.lab.vllm.others.recipe import show

SCENARIO = {text}

if __name__ == "__main__":
    print(f"vLLM {{__version__}}; this was found in {vllm}")
    raise SystemExit(show(SCENARIO))
'''


def _text(value: Any, modules: dict[str, set[str]], indent: str = "") -> str:
    """Python text that makes ``value``. Notes in ``modules`` what it needs to import.

    Fields of dataclasses that are at their defaults are left out.
    """
    kind, deeper = type(value), indent + "    "
    match value:
        case Enum():
            modules.setdefault(kind.__module__, set()).add(kind.__name__)
            return f"{kind.__name__}.{value.name}"
        case Mapping():
            parts = [f"{_text(key, modules)}: {_text(item, modules, deeper)}" for key, item in value.items()]
            return _joined("{", parts, "}", indent)
        case tuple() | list():
            parts = [_text(item, modules, deeper) for item in value]
            opening, closing = "[]" if isinstance(value, list) else "()"
            return _joined(opening, parts, closing, indent)
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    modules.setdefault(kind.__module__, set()).add(kind.__name__)
    given = [
        (part.name, getattr(value, part.name)) for part in fields(value) if getattr(value, part.name) != part.default
    ]
    return _joined(f"{kind.__name__}(", [f"{name}={_text(item, modules, deeper)}" for name, item in given], ")", indent)


def _joined(opening: str, parts: Sequence[str], closing: str, indent: str) -> str:
    """In one line if that is short, or one part to a line."""
    line = f"{opening}{', '.join(parts)}{',' if opening == '(' and len(parts) == 1 else ''}{closing}"
    if len(line) + len(indent) <= 100 and "\n" not in line:
        return line
    if all(part.isdecimal() for part in parts):
        return fill(line, 116, subsequent_indent=indent + " ", break_long_words=False)
    return "\n".join([opening, *(f"{indent}    {part}," for part in parts), indent + closing])
