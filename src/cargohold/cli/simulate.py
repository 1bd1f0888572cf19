"""``cargohold simulate``: the real scheduler and connectors under faults, seed after seed."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import traceback
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Annotated, Final

import typer
from rich.progress import BarColumn

from cargohold.cli.app import app, check_writable, parse_json, progress, takes_groups
from cargohold.cli.signals import EXIT_FAILED
from cargohold.errors import ConfigError
from cargohold.lab.simulation.campaign import Recipe, SeedReport, Shrinker, Totals, play_seeds
from cargohold.lab.simulation.connectors import CONNECTORS
from cargohold.lab.simulation.faults import Fault, parse_faults
from cargohold.lab.simulation.timeline import RecentTimeline
from cargohold.lab.simulation.workloads import WORKLOADS
from cargohold.lab.simulation.world import ANY, Scenario
from cargohold.option_values import format_count

DEFAULT_SEEDS = 500
OWN = "cargohold"
VLLM = "vllm"
OTHERS = "vllm:"
"""What the names of connectors of vLLM's interface begin with."""
_SINGULAR: Final = {
    "requests": "request",
    "resets": "reset",
    "restarts": "restart",
    "preemptions": "preemption",
    "restored tokens": "restored token",
    "device tokens": "device token",
    "engines refused by the connector": "engine refused by the connector",
}
"""Names of things that are counted, for one of them. Faults have names that are not of many."""


@dataclass(frozen=True, slots=True)
class RecipeOptions:
    """Which scenarios to play; see ``Recipe``."""

    workload: Annotated[str, typer.Option(help=f"{ANY}, or one of: {', '.join(WORKLOADS)}.")] = ANY
    connector: Annotated[
        str,
        typer.Option(
            help=f"{ANY}, one of: {', '.join(CONNECTORS)}; MODULE:FACTORY for your own. With --engine {VLLM}, also "
            f"{OTHERS}NAME for one of vLLM's, {OTHERS}MODULE:CLASS for a class of its interface, or several with + between."
        ),
    ] = ANY
    connector_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help=f"Options of a connector {OTHERS}NAME; those that are left out are drawn at random."
        ),
    ] = None
    faults: Annotated[
        str, typer.Option(help=f"all, none, or some of: {', '.join(fault.value for fault in Fault)}.")
    ] = "all"
    engine: Annotated[str, typer.Option(help=f"Whose scheduler to drive: {OWN}, or {VLLM} with our adapter.")] = OWN

    def recipe(self) -> Recipe:
        """The options as a recipe. Raises ``ConfigError`` for impossible ones."""
        faults = parse_faults(self.faults)
        if self.connector.startswith(OTHERS):
            if self.engine == OWN:
                expected = f"vLLM's connectors run in vLLM's scheduler only: add --engine {VLLM}"
                raise ConfigError("connector", self.connector, expected)
            _recipe_class(self.engine)
            from cargohold.lab.vllm.others.recipe import StrangerRecipe  # noqa: PLC0415  # takes seconds

            options = parse_json("connector-config", self.connector_config or "{}")
            return StrangerRecipe(self.workload, self.connector, faults, options)
        if self.connector_config is not None:
            expected = f"it is for connectors {OTHERS}NAME, and this is {self.connector}"
            raise ConfigError("connector-config", self.connector_config, expected)
        return _recipe_class(self.engine)(self.workload, self.connector, faults)

    def __str__(self) -> str:
        """The options as on a command line, without those at their defaults."""
        fields = dataclasses.fields(self)
        return "".join(
            f" --{field.name.replace('_', '-')} {shlex.quote(getattr(self, field.name))}"
            for field in fields
            if getattr(self, field.name) != field.default
        )


@dataclass(frozen=True, slots=True)
class AmountOptions:
    """How many seeds to play."""

    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Number of seeds to play; by default {DEFAULT_SEEDS}, or as many as --minutes allows."
        ),
    ] = None
    first_seed: Annotated[int, typer.Option(min=0, help="First seed.")] = 0
    minutes: Annotated[float | None, typer.Option(min=0.0, help="Start no more seeds after this many minutes.")] = None
    jobs: Annotated[int | None, typer.Option(min=1, help="Seeds to play in parallel; by default one per core.")] = None
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Play all seeds, and list all failures at the end.")
    ] = False

    @property
    def num_seeds(self) -> int | None:
        """Number of seeds to play; ``None`` if only time limits them."""
        return DEFAULT_SEEDS if self.seeds is None and self.minutes is None else self.seeds

    def reports(self, recipe: Recipe) -> Generator[SeedReport]:
        """Play the seeds; yields a report for each. Raises ``ConfigError`` if there is no time for any."""
        if self.minutes == 0:
            raise ConfigError("minutes", self.minutes, "it must be above 0")
        max_seconds = None if self.minutes is None else 60 * self.minutes
        return play_seeds(recipe, self.first_seed, self.num_seeds, self.jobs or os.cpu_count() or 1, max_seconds)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to show one seed."""

    replay: Annotated[int | None, typer.Option(metavar="SEED", min=0, help="Play one seed and show its timeline.")] = (
        None
    )
    lines: Annotated[int, typer.Option(min=1, help="Lines of the timeline to show.")] = 40
    shrink: Annotated[bool, typer.Option(help="Look for the shortest run that still fails.")] = True
    write_script: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"Write a failure of a connector {OTHERS}NAME as a stand-alone script."),
    ] = None

    def check(self, what: RecipeOptions) -> None:
        """Raise ``ConfigError`` if no failure could be written as a script."""
        if self.write_script is None:
            return
        if not what.connector.startswith(OTHERS):
            expected = f"only failures of connectors {OTHERS}NAME are written as scripts"
            raise ConfigError("write-script", str(self.write_script), expected)
        check_writable("write-script", self.write_script)


@app.command()
@takes_groups
def simulate(
    what: RecipeOptions = RecipeOptions(),  # frozen
    amount: AmountOptions = AmountOptions(),  # frozen
    show: ReplayOptions = ReplayOptions(),  # frozen
) -> None:
    """Drive the real scheduler and connectors in virtual time, with simulated models, tiers, links and faults.

    Every seed is one run, always the same; oracles watch every step. Ends with status 1 at the first seed that fails, after
    showing the shortest run found that still fails.
    """
    recipe = what.recipe()
    show.check(what)
    seed = show.replay
    if seed is not None and amount != AmountOptions():
        expected = "it plays this seed alone; leave out --seeds, --first-seed, --minutes and --jobs"
        raise ConfigError("replay", seed, expected)
    if seed is None:
        started = monotonic()
        totals = Totals()
        with closing(amount.reports(recipe)) as reports:
            failures = _failures(reports, totals, amount)
        _show_totals(totals, monotonic() - started)
        if not failures:
            return
        if amount.keep_going:
            _show_kinds(failures)
        failed = min(failures, key=lambda report: report.seed)
        typer.echo(f"\nseed {failed.seed} failed: {failed.failure}")
        seed = failed.seed
    command = f"cargohold simulate --replay {seed}{what}"
    if not _replay(recipe, recipe.scenario(seed), show, command):
        typer.echo(f"\nto see it again: {command}")
        raise typer.Exit(EXIT_FAILED)


def _failures(reports: Iterable[SeedReport], totals: Totals, amount: AmountOptions) -> list[SeedReport]:
    """Add up the reports, until the first failure or the end. Returns the reports of failures."""
    failures = []
    with progress(BarColumn()) as bar:
        task = bar.add_task("simulating", total=amount.num_seeds)
        for report in reports:
            totals.add(report)
            failures += [report] if report.failure is not None else []
            fine = f"{len(failures)} failed" if failures else "without a failure"
            steps = format_count(totals.num_steps, "step")
            bar.update(task, advance=1, description=f"seed {report.seed}, {steps} {fine}")
            if failures and not amount.keep_going:
                break
    return failures


def _show_kinds(failures: Iterable[SeedReport]) -> None:
    """How many seeds failed in each way; ways that differ in numbers and names of requests alone are one."""
    kinds: dict[str, list[SeedReport]] = {}
    for report in failures:
        assert report.failure is not None
        kinds.setdefault(re.sub(r"\br?\d[\d., r]*", "N", report.failure), []).append(report)
    typer.echo("")
    for alike in sorted(kinds.values(), key=len, reverse=True):
        first = min(alike, key=lambda report: report.seed)
        typer.echo(f"{len(alike):4d} failed, the first is seed {first.seed}: {first.failure}")


def _recipe_class(engine: str) -> type[Recipe]:
    """The class of recipes for an engine. Raises ``ConfigError`` if there is no such engine here."""
    if engine == OWN:
        return Recipe
    if engine != VLLM:
        raise ConfigError("engine", engine, f"it must be {OWN} or {VLLM}")
    if find_spec("vllm") is None:
        raise ConfigError(
            "engine", engine, "vLLM is not installed in this environment; make test-vllm makes one that has it"
        )
    try:
        from cargohold.lab.vllm.recipe import VllmRecipe  # noqa: PLC0415  # takes seconds
    except ImportError as error:
        raise ConfigError(
            "engine", engine, f"this depends on internals of vLLM 0.32, and the installed version differs: {error}"
        ) from error
    return VllmRecipe


def _replay(recipe: Recipe, scenario: Scenario, show: ReplayOptions, command: str) -> bool:
    """Play a scenario and show its timeline, of a failure shortened. Returns whether the run ended well."""
    timeline = recipe.timeline(show.lines)
    result = recipe.run(scenario, timeline).play()
    if result.error is None:
        _show_run(scenario, timeline)
        typer.echo(
            f"\nended well after {format_count(result.num_steps, 'step')}, {result.seconds:.2f} simulated seconds"
        )
        typer.echo(_counts(result.tallies + Counter({fault.value: times for fault, times in result.struck.items()})))
        return True
    if show.shrink:
        scenario = _shrunk(recipe, scenario, result.error)
        timeline = recipe.timeline(show.lines)
        result = recipe.run(scenario, timeline).play()
        typer.echo("\nthe shortest run found that fails:")
    _show_run(scenario, timeline)
    assert result.error is not None, "runs of the same scenario differ"
    frames = traceback.format_tb(result.error.__traceback__)
    typer.echo(f"\n{''.join(frames[-2:])}{type(result.error).__name__}: {result.error}")
    if remark := recipe.remark(scenario, result.error):
        typer.echo(remark)
    if show.write_script is not None:
        _write_script(show.write_script, recipe.script(scenario, result.error, command))
    return False


def _write_script(path: Path, text: str | None) -> None:
    assert text is not None, "the options were checked"
    path.write_text(text)
    typer.echo(f"\nwritten to {path}: python {shlex.quote(str(path))} shows it")


def _shrunk(recipe: Recipe, scenario: Scenario, error: Exception) -> Scenario:
    with progress() as bar:
        task = bar.add_task("looking for a shorter run that fails", total=None)

        def show() -> None:
            bar.advance(task)
            done = int(bar.tasks[task].completed)
            bar.update(task, description=f"looking for a shorter run that fails: {done} tried")

        def is_failing(less: Scenario) -> bool:
            return recipe.fails_like(less, error)

        return Shrinker(is_failing, recipe.simpler, on_run=show).shrink(scenario)


def _show_run(scenario: Scenario, timeline: RecentTimeline) -> None:
    typer.echo(scenario.describe())
    typer.echo("")
    for line in timeline.lines():
        typer.echo(line)


def _show_totals(totals: Totals, seconds: float) -> None:
    rate = totals.num_steps / seconds if seconds else 0.0
    seeds, steps = format_count(totals.num_seeds, "seed"), format_count(totals.num_steps, "step")
    typer.echo(f"{seeds}, {steps} in {seconds:.1f} s: {rate:,.0f} steps/s")
    typer.echo(f"  {_counts(totals.tallies) or 'nothing was played'}")
    typer.echo(f"  faults: {_counts(totals.struck) or 'none'}")


def _counts(counts: Counter[str]) -> str:
    return ", ".join(
        f"{count:,} {_SINGULAR.get(name, name) if count == 1 else name}"
        for name, count in counts.most_common()
        if count
    )
