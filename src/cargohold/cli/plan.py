"""``cargohold plan``: how large a cache should be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

import typer
from rich.table import Table

from cargohold.cli.app import app
from cargohold.cli.common import remark
from cargohold.cli.console import Answers
from cargohold.cli.options import takes_groups
from cargohold.cli.traces import (
    CostOptions,
    DiskOptions,
    LoadedTrace,
    OutputOptions,
    TraceOptions,
    load_trace,
    look_here_for,
    replay_all,
)
from cargohold.errors import ConfigError
from cargohold.machine import memory_limit_bytes
from cargohold.offload.policy import DEFAULT_POLICY, POLICY_NAMES, find_policy
from cargohold.replay.advice import Machine, advise, fits
from cargohold.replay.html import write_page
from cargohold.replay.planning import Budget, Plan, Planner
from cargohold.replay.replaying import BOUNDS, OPTIMUM, ReplayResult
from cargohold.replay.report import Report
from cargohold.units import format_bytes, parse_bytes

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
    """Say how large a cache should be for a trace: hits against size, where the curve bends, and which tier pays.

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
    words = [*advise(planner, found, trace.workload, costs, budget), *fits(budget, found, machine)]
    if output.html is not None:
        alone = tuple(result for result in results if len(result.capacities) == 1)
        write_page(output.html, Report(tuple(what.trace), trace.workload, costs, alone, (*words, *trace.remarks)))
        remark(f"wrote {output.html}")
    if output.as_json:
        report = Report(tuple(what.trace), trace.workload, costs, tuple(results), trace.remarks)
        typer.echo(json.dumps(_facts(found, machine, words) | report.as_facts(), indent=1))
    else:
        _show(planner, found, words)


def _replay(planner: Planner, trace: LoadedTrace, what: PlanOptions, disk_policy: str) -> list[ReplayResult]:
    results = replay_all(
        trace.workload, trace.replayable([what.policy, *BOUNDS]), planner.curve(), disk_policy, what.jobs
    )
    if planner.tiers():
        results += replay_all(trace.workload, [what.policy], planner.tiers(), disk_policy, what.jobs)
    return results


def _show(planner: Planner, found: Plan, words: list[str]) -> None:
    console = Answers()
    for sentence in words:
        # Programs that read a pipe can wrap lines themselves.
        lines = wrap(sentence, max(_LEAST_WIDTH, console.width - 2)) if console.is_terminal else [sentence]
        console.print("* " + "\n  ".join(lines), highlight=False, markup=False, soft_wrap=True)
    has_time = found.steps[-1].saved_s is not None
    per = " per hour" if planner.per_hour(1) is not None else ""
    console.print(f"\n{found.policy}, by size of host memory", style="bold", highlight=False)
    table = Table(box=None, pad_edge=False)
    gains = (
        [f"prefill saved{per}, s", "each further GiB, s"] if has_time else [f"tokens saved{per}", "each further GiB"]
    )
    for name in ("host", "prefix hits", OPTIMUM, *gains):
        table.add_column(name, justify="right", no_wrap=True)
    for step in found.steps:
        total = step.saved_s if has_time else step.result.num_hit_tokens
        added = step.added_saved_s if has_time else step.added_hit_tokens
        optimum = "" if step.optimum is None else f"{step.optimum.prefix_hit_ratio:.1%}"
        mark = " <- bend" if step is found.knee else ""
        table.add_row(
            format_bytes(step.num_bytes),
            f"{step.result.prefix_hit_ratio:.1%}",
            optimum,
            _amount(planner, total or 0),
            f"{_amount(planner, (added or 0) / (step.added_bytes / 1024**3))}{mark}",
        )
    console.print_table(table)


def _amount(planner: Planner, total: float) -> str:
    hourly = planner.per_hour(total)
    amount = total if hourly is None else hourly
    return f"{amount:,.1f}" if abs(amount) < 100 else f"{amount:,.0f}"


def _facts(found: Plan, machine: Machine, words: list[str]) -> dict[str, Any]:
    """The plan as values for JSON, without the results that it is based on."""
    return {
        "policy": found.policy,
        "memory_limit_bytes": machine.memory_bytes,
        "knee_bytes": None if found.knee is None else found.knee.num_bytes,
        "advice": words,
        "curve": [
            {
                "host_bytes": step.num_bytes,
                "prefix_hit_ratio": step.result.prefix_hit_ratio,
                "optimum_prefix_hit_ratio": None if step.optimum is None else step.optimum.prefix_hit_ratio,
                "hit_tokens": step.result.num_hit_tokens,
                "added_bytes": step.added_bytes,
                "added_hit_tokens": step.added_hit_tokens,
                "saved_prefill_s": step.saved_s,
            }
            for step in found.steps
        ],
    }
