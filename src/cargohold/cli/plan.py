"""``cargohold plan``: how large a cache should be, and what it would do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer
from rich.table import Table

from cargohold.cache.policies import DEFAULT_POLICY, POLICY_NAMES, find_policy
from cargohold.cli.app import app
from cargohold.cli.common import Answers, remark
from cargohold.cli.options import takes_groups
from cargohold.cli.traces import (
    CostOptions,
    DiskOptions,
    LoadedTrace,
    OutputOptions,
    TraceOptions,
    load_trace,
    look_here_for,
    parse_bandwidth,
    replay_all,
)
from cargohold.errors import ConfigError
from cargohold.option_values import is_positive_number, parse_bytes
from cargohold.process import memory_limit_bytes
from cargohold.replay.advice import Machine, advise, as_facts, fits, plan_table, recommend, unit_of_gain
from cargohold.replay.html import plan_page, write_text
from cargohold.replay.planning import BASELINE, Budget, Plan, Planner
from cargohold.replay.replaying import BOUNDS, ReplayResult
from cargohold.replay.report import Report

_LEAST_WIDTH = 20


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Trace, model and budget that are planned for."""

    trace: Annotated[
        list[str], typer.Option("--trace", "-t", help="A file of the trace; - for standard input. May be repeated.")
    ]
    model: Annotated[str | None, typer.Option(help="Model that tells KV bytes per token.", metavar="MODEL")] = None
    host_bytes: Annotated[str | None, typer.Option(help="Host memory that could be had, such as 256GiB.")] = None
    disk_bytes: Annotated[str | None, typer.Option(help="Disk that could be had below it, such as 4TB.")] = None
    disk_dir: Annotated[Path | None, typer.Option(help="Where on this machine, to see whether it fits.")] = None
    host_price: Annotated[
        float, typer.Option(help="What a GiB of host memory costs per hour, in seconds of an accelerator.")
    ] = 2.0
    disk_price: Annotated[
        float, typer.Option(help="What a GiB of disk costs per hour, in seconds of an accelerator.")
    ] = 0.1
    disk_write_bandwidth: Annotated[str, typer.Option(help="Bytes per second that the disk can always take.")] = "2GB"
    disk_writes_per_day: Annotated[
        float, typer.Option(help="How often a day the disk may be written from end to end (DWPD).")
    ] = 1.0
    policy: Annotated[str, typer.Option(help=f"One of {POLICY_NAMES}.")] = DEFAULT_POLICY
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; by default as many as cores.")] = None

    def budget(self) -> Budget:
        """The budget. Raises ``ConfigError`` for an impossible policy or size."""
        look_here_for([self.policy])
        find_policy(self.policy)
        if self.disk_bytes is not None and self.host_bytes is None:
            raise ConfigError("disk_bytes", self.disk_bytes, "a disk needs host memory above it: give --host-bytes too")
        return Budget(
            host_bytes=None if self.host_bytes is None else parse_bytes("host_bytes", self.host_bytes),
            disk_bytes=None if self.disk_bytes is None else parse_bytes("disk_bytes", self.disk_bytes),
            host_price_s=_checked("host_price", self.host_price),
            disk_price_s=_checked("disk_price", self.disk_price),
            disk_write_bytes_per_s=parse_bandwidth("disk_write_bandwidth", self.disk_write_bandwidth),
            disk_writes_per_day=_checked("disk_writes_per_day", self.disk_writes_per_day),
        )

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Within the ``with`` block, errors about a size show it as the user wrote it, not as a number."""
        try:
            yield
        except ConfigError as error:
            written = {"host_bytes": self.host_bytes, "disk_bytes": self.disk_bytes}.get(error.key)
            if written is None:
                raise
            raise ConfigError(error.key, written, error.expected) from error

    def machine(self) -> Machine:
        """The limits of this machine. Raises ``ConfigError`` if ``disk_dir`` does not exist."""
        if self.disk_dir is None:
            return Machine(memory_bytes=memory_limit_bytes())
        try:
            free = shutil.disk_usage(self.disk_dir).free
        except OSError as error:
            raise ConfigError("disk_dir", str(self.disk_dir), "there is no such directory") from error
        return Machine(memory_bytes=memory_limit_bytes(), disk_free_bytes=free)


@app.command()
@takes_groups
def plan(
    what: PlanOptions = PlanOptions(trace=[]),  # frozen
    disk_options: DiskOptions = DiskOptions(),  # noqa: B008  # frozen
    trace_options: TraceOptions = TraceOptions(),  # noqa: B008  # frozen
    cost_options: CostOptions = CostOptions(),  # noqa: B008  # frozen
    output: OutputOptions = OutputOptions(),  # noqa: B008  # frozen
) -> None:
    """Say how large a cache should be for a trace: up to which size the next GiB is worth its price, and if a disk pays.

    Nothing is loaded of the model but its configuration.
    """
    if not what.trace:
        raise ConfigError("trace", None, "--trace FILE is required")
    budget = what.budget()
    disk_policy = disk_options.checked_policy("--disk-bytes", what.disk_bytes)
    machine = what.machine()
    costs = cost_options.costs(what.model)
    if costs.bytes_per_token is None:
        raise ConfigError("model", None, "a plan needs --model or --bytes-per-token")
    trace = load_trace(what.trace, trace_options)
    with what.as_written():
        planner = Planner(trace.workload, costs, what.policy, budget)
    results = _replay(planner, trace, what, disk_policy)
    found = planner.plan(results)
    answer = list(recommend(planner, found))
    words = [*advise(planner, found), *fits(planner, found, machine)]
    report = Report(tuple(what.trace), trace.workload, costs, tuple(results), (*words, *trace.remarks))
    if output.html is not None:
        write_text(output.html, plan_page(planner, found, report, answer))
        remark(f"wrote {output.html}")
    if output.as_json:
        facts = as_facts(planner, found) | {"memory_limit_bytes": machine.memory_bytes, "advice": [*answer, *words]}
        typer.echo(json.dumps(facts | replace(report, remarks=trace.remarks).as_facts(), indent=1))
    else:
        _show(planner, found, [*answer, *words])


def _checked(key: str, number: float) -> float:
    if not is_positive_number(number):
        raise ConfigError(key, number, "it must be a number above 0")
    return number


def _replay(planner: Planner, trace: LoadedTrace, what: PlanOptions, disk_policy: str) -> list[ReplayResult]:
    policies = trace.replayable([what.policy, BASELINE, *BOUNDS])
    results = replay_all(trace.workload, policies, planner.curve(), disk_policy, what.jobs)
    further = planner.further(results)
    if further:
        results += replay_all(trace.workload, [what.policy], further, disk_policy, what.jobs)
    return results


def _show(planner: Planner, found: Plan, words: list[str]) -> None:
    console = Answers()
    for sentence in words:
        # Programs that read a pipe can wrap lines themselves.
        lines = wrap(sentence, max(_LEAST_WIDTH, console.width - 2)) if console.is_terminal else [sentence]
        console.print("* " + "\n  ".join(lines), highlight=False, markup=False, soft_wrap=True)
    console.print(f"\n{found.policy}, by size of host memory, once it is full", style="bold", highlight=False)
    heads, rows = plan_table(planner, found)
    table = Table(box=None, pad_edge=False)
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print_table(table)
    console.print(f"next GiB: what each GiB up to the next size brings, in {unit_of_gain(planner)}", highlight=False)
