"""Plays many seeds, on all cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from time import monotonic

from cargohold.errors import ConfigError
from cargohold.lab.simulation.faults import Fault
from cargohold.lab.simulation.run import ScenarioRun
from cargohold.lab.simulation.timeline import NO_TIMELINE, RecentTimeline, Timeline
from cargohold.lab.simulation.world import ANY, Scenario, check_names, draw_scenario
from cargohold.process import WorkerPool, collected_in_one_go

HUNG_S = 300.0
"""Real seconds: if no seed ends for so long, one of them hangs. Runs limit virtual time, but not real time."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Options that scenarios of seeds are drawn with. Checked when made; raises ``ConfigError``.

    Attributes:
        workload: name of the traffic, or ``ANY``.
        connector: name of the connector, ``MODULE:FACTORY``, or ``ANY``.
        faults: faults that may strike.
    """

    workload: str = ANY
    connector: str = ANY
    faults: frozenset[Fault] = frozenset(Fault)

    def __post_init__(self) -> None:
        check_names(self.workload, self.connector)

    def scenario(self, seed: int) -> Scenario:
        return draw_scenario(seed, self.workload, self.connector, self.faults)

    def run(self, scenario: Scenario, timeline: Timeline = NO_TIMELINE) -> ScenarioRun:
        return ScenarioRun(scenario, timeline=timeline)

    def timeline(self, num_lines: int) -> RecentTimeline:
        """A timeline that shows the last lines of a run."""
        return RecentTimeline(num_lines)

    def fails_like(self, scenario: Scenario, error: Exception) -> bool:
        """Whether a run of ``scenario`` fails; any failure is one like ``error``."""
        return self.run(scenario).play().error is not None

    def simpler(self, scenario: Scenario) -> Iterator[Scenario]:
        """Yield scenarios with simpler options, to shorten a run that fails."""
        yield from ()

    def remark(self, scenario: Scenario, error: Exception) -> str | None:
        """What else there is to say of a failure; ``None`` for nothing."""
        return None

    def script(self, scenario: Scenario, error: Exception, command: str) -> str | None:
        """A file that shows a failure without us; ``None`` if it is our own."""
        return None


@dataclass(frozen=True, slots=True)
class SeedReport:
    """The result of one seed.

    Attributes:
        seed: the seed.
        num_steps: scheduler steps.
        failure: what went wrong; ``None`` if nothing did.
        struck: how often each fault has struck, by its name.
        tallies: see ``RunResult``.
    """

    seed: int
    num_steps: int = 0
    failure: str | None = None
    struck: Counter[str] = field(default_factory=Counter)
    tallies: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Totals:
    """Sums over all seeds so far.

    Attributes:
        num_seeds, num_steps: numbers of seeds and of scheduler steps.
        struck, tallies: see ``SeedReport``.
    """

    num_seeds: int = 0
    num_steps: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    tallies: Counter[str] = field(default_factory=Counter)

    def add(self, report: SeedReport) -> None:
        """Add the report of one more seed."""
        self.num_seeds += 1
        self.num_steps += report.num_steps
        self.struck.update(report.struck)
        self.tallies.update(report.tallies)


def play_seed(recipe: Recipe, seed: int) -> SeedReport:
    """Play one seed; never raises."""
    try:
        with collected_in_one_go():
            result = recipe.run(recipe.scenario(seed)).play()
    except Exception as error:  # noqa: BLE001  # a bug of the harness is a failure like any other
        return SeedReport(seed, failure=f"while the scenario was set up: {error!r}")
    if ":" in recipe.connector and isinstance(result.error, ConfigError) and not result.num_steps:
        return SeedReport(seed, tallies=Counter({"engines refused by the connector": 1}))  # as it may, by name
    failure = None if result.error is None else f"{type(result.error).__name__}: {result.error}"
    struck = Counter({fault.value: times for fault, times in result.struck.items()})
    return SeedReport(seed, result.num_steps, failure, struck, result.tallies)


def play_seeds(
    recipe: Recipe, first_seed: int, num_seeds: int | None, num_processes: int, max_seconds: float | None = None
) -> Generator[SeedReport]:
    """Play seeds in order, several at a time; yields reports in the order in which seeds end.

    Args:
        recipe: options of the scenarios.
        first_seed: the first seed.
        num_seeds: number of seeds; ``None`` for no end.
        num_processes: seeds to play at a time, each in a process; 1 plays them in this process.
        max_seconds: real seconds after which no more seeds are begun.
    """
    # A range may be longer than islice allows.
    seeds: Iterator[int] = count(first_seed) if num_seeds is None else iter(range(first_seed, first_seed + num_seeds))
    deadline = float("inf") if max_seconds is None else monotonic() + max_seconds
    if num_processes == 1:
        for seed in seeds:
            if monotonic() >= deadline:
                return
            yield play_seed(recipe, seed)
    else:
        with WorkerPool(num_processes) as pool:
            yield from _in_pool(pool, recipe, seeds, deadline, 4 * num_processes)


def _in_pool(
    pool: WorkerPool, recipe: Recipe, seeds: Iterator[int], deadline: float, num_ahead: int
) -> Iterator[SeedReport]:
    running: dict[Future[SeedReport], int] = {}
    while True:
        if monotonic() < deadline:
            for seed in islice(seeds, num_ahead - len(running)):
                running[pool.submit(play_seed, recipe, seed)] = seed
        if not running:
            return
        ended = wait(running, timeout=HUNG_S, return_when=FIRST_COMPLETED).done
        if not ended:
            yield SeedReport(min(running.values()), failure=f"no seed from here on has ended within {HUNG_S:g} s")
            return
        for future in ended:
            del running[future]
            yield future.result()


# --- shortens a run that fails to one that still fails ----------------------------------------------------------------

MAX_RUNS = 300
"""Most runs to spend: a run that does not settle takes seconds."""


class Shrinker:
    """Makes a failing scenario smaller: takes its shortest failing beginning, and leaves out whatever it fails without.

    The smaller scenario may fail for another reason than the whole: that is a failure as well.

    Args:
        is_failing: returns whether a scenario fails, by playing it.
        simpler: yields further scenarios that are simpler than a given one.
        on_run: called after each run, for progress.
    """

    def __init__(
        self,
        is_failing: Callable[[Scenario], bool],
        simpler: Callable[[Scenario], Iterable[Scenario]],
        on_run: Callable[[], None] = lambda: None,
    ) -> None:
        self._simpler = simpler
        self._is_failing = is_failing
        self._num_left = MAX_RUNS
        self._on_run = on_run

    def shrink(self, scenario: Scenario) -> Scenario:
        """The smallest failing scenario found; ``scenario`` itself, which must fail, if there is none."""
        for length in range(1, len(scenario.actions)):
            beginning = replace(scenario, actions=scenario.actions[:length])
            if self._fails(beginning):
                scenario = beginning
                break
        scenario = self._without_stretches(scenario)
        smaller: Scenario | None = scenario
        while smaller is not None:
            scenario = smaller
            candidates = chain(_one_thing_less(scenario), self._simpler(scenario))
            smaller = next((less for less in candidates if self._fails(less)), None)
        return scenario

    def _without_stretches(self, scenario: Scenario) -> Scenario:
        """Leave out whole stretches of actions, ever shorter ones: most of a long run has nothing to do with its end."""
        size = len(scenario.actions) // 2
        while size > 1:
            at = 0
            while at < len(scenario.actions) > size:
                actions = scenario.actions
                less = replace(scenario, actions=actions[:at] + actions[at + size :])
                if self._fails(less):
                    scenario = less
                else:
                    at += size
            size //= 2
        return scenario

    def _fails(self, scenario: Scenario) -> bool:
        if self._num_left <= 0:
            return False
        self._num_left -= 1
        self._on_run()
        return self._is_failing(scenario)


def _one_thing_less(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with one fault, one action or one worker less."""
    for fault in scenario.rates:
        yield replace(scenario, rates={other: rate for other, rate in scenario.rates.items() if other is not fault})
    if len(scenario.actions) > 1:
        for at in range(len(scenario.actions)):
            yield scenario.without(at)
    shape = scenario.shape
    if shape.world_size > 1:
        yield replace(scenario, shape=replace(shape, world_size=shape.world_size - 1, num_replicas=1))
    if shape.num_replicas > 1 and shape.world_size > shape.num_replicas:
        yield replace(scenario, shape=replace(shape, world_size=shape.world_size - shape.num_replicas))
