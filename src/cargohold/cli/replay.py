"""``cargohold replay`` and ``plan``: what a cache would have done for recorded traffic, and how large it should be."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Annotated

import typer
from rich.table import Table

from cargohold.cache.policies import DEFAULT_POLICY, POLICY_NAMES, find_policy
from cargohold.cli.app import Answers, AsJson, app, remark, takes_groups
from cargohold.cli.traces import (
    CostOptions,
    DiskOptions,
    LoadedTrace,
    TraceOptions,
    TracesArgument,
    load_trace,
    look_here_for,
    parse_bandwidth,
    replay_all,
)
from cargohold.errors import ConfigError
from cargohold.lab.replay.advice import advise, as_facts, disk_table, fits, plan_table, recommend, unit_of_gain
from cargohold.lab.replay.costs import CostModel, Size, parse_size, parse_sizes
from cargohold.lab.replay.planning import BASELINE, Plan, Planner, SizingBudget
from cargohold.lab.replay.replaying import BOUNDS, HINTED, Capacities, ReplayResult, check_policies
from cargohold.lab.replay.report import Report, all_numbers, describe_size, describe_trace, format_seconds
from cargohold.lab.replay.workload import Workload
from cargohold.option_values import format_bytes, parse_room
from cargohold.process import memory_limit_bytes

_DEFAULT_POLICIES = ("lru", DEFAULT_POLICY, *BOUNDS)
_KNOWN = "known"
_DEFAULT_SIZES = "1%,2%,5%,10%,20%,50%"


@dataclass(frozen=True, slots=True)
class GridOptions:
    """Policies and sizes to replay."""

    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help=f"Several, with commas: {', '.join(BOUNDS)}, {POLICY_NAMES}."),
    ] = None
    size: Annotated[
        str, typer.Option("--size", "-s", help="Sizes of host memory: blocks, bytes (64GiB) or % of all blocks.")
    ] = _DEFAULT_SIZES
    disk: Annotated[str | None, typer.Option(help="Size of a disk tier below host memory; by default none.")] = None
    device: Annotated[
        str | None, typer.Option(help="Size of the device pool in front, which is one cache with host memory.")
    ] = None
    hints: Annotated[
        str | None,
        typer.Option(
            help="known: also replay each policy with hints of an orchestrator that knows which sessions are closed."
        ),
    ] = None
    model: Annotated[
        str | None, typer.Option(help="Model whose configuration gives KV bytes per token.", metavar="MODEL")
    ] = None
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; by default one per core.")] = None

    def policies(self) -> list[str]:
        """Names of the policies. Raises ``ConfigError`` for one that does not exist."""
        names = [name.strip() for text in self.policy or _DEFAULT_POLICIES for name in text.split(",")]
        look_here_for(names)
        check_policies(names)
        if self.hints is None:
            return names
        if self.hints != _KNOWN:
            raise ConfigError("hints", self.hints, f"it must be {_KNOWN}")
        return [each for name in names for each in ((name,) if name in BOUNDS else (name, name + HINTED))]

    def sizes(self) -> tuple[list[Size], list[Size]]:
        """Sizes of host memory, and the size of the disk if there is one. Raises ``ConfigError`` for what is not a size."""
        return parse_sizes("size", self.size), [] if self.disk is None else [parse_size("disk", self.disk)]


@app.command()
@takes_groups
def replay(
    traces: TracesArgument,
    grid: GridOptions = GridOptions(),  # frozen
    disk_options: DiskOptions = DiskOptions(),  # noqa: B008  # frozen
    trace_options: TraceOptions = TraceOptions(),  # noqa: B008  # frozen
    cost_options: CostOptions = CostOptions(),  # noqa: B008  # frozen
    as_json: AsJson = False,
) -> None:
    """Replay a trace of KV blocks through the policies that production runs, at several sizes.

    A hit is a block found with all blocks before it. The optimum knows the future; infinite never evicts.
    """
    policies = grid.policies()
    disk_policy = disk_options.checked_policy("--disk", grid.disk)
    sizes, disk = grid.sizes()
    costs = cost_options.costs(grid.model)
    if costs.bytes_per_token is None:
        _refuse_bytes("size", sizes)
        _refuse_bytes("disk", disk)
    trace = load_trace(traces, trace_options).behind(grid.device, costs)
    workload = trace.workload
    capacities = _capacities(workload, sizes, disk, costs)
    results = replay_all(workload, trace.replayable(policies), capacities, disk_policy, grid.jobs)
    report = Report(tuple(traces), workload, costs, tuple(results), trace.remarks)
    why = report.why_no_times()
    if why is not None:
        remark(f"note: {why}", style="yellow")
        report = replace(report, remarks=(*report.remarks, why))
    if as_json:
        typer.echo(json.dumps(report.as_facts(), indent=1))
    else:
        show_report(report)


def _refuse_bytes(key: str, sizes: Sequence[Size]) -> None:
    for size in sizes:
        if size.is_bytes:
            raise ConfigError(key, size.text, "a size in bytes needs --bytes-per-token or --model")


def _capacities(workload: Workload, sizes: Sequence[Size], disk: Sequence[Size], costs: CostModel) -> list[Capacities]:
    chunk_bytes = costs.chunk_bytes(workload.chunk_tokens)
    lower = tuple(size.chunks_for(workload, chunk_bytes) for size in disk)
    return sorted({(size.chunks_for(workload, chunk_bytes), *lower) for size in sizes})


def show_report(report: Report) -> None:
    """Print the report as tables to standard output."""
    console = Answers()
    console.print(describe_trace(report), highlight=False, soft_wrap=True)
    tables = {
        "prefix-hit ratio, per cent": _by_size(report, lambda result: f"{100 * result.prefix_hit_ratio:.2f}"),
        "what moved": _details(report),
    }
    if report.has_time:
        waits = _by_size(report, lambda result: format_seconds(report.costs.waiting_s(result, report.workload)))
        tables["how long all prompts together wait to be loaded and computed"] = waits
    for title, table in tables.items():
        console.print(f"\n{title}", style="bold", highlight=False)
        console.print_table(table)


def _by_size(report: Report, cell: Callable[[ReplayResult], str]) -> Table:
    """A row per size, a column per policy."""
    table = Table(box=None, pad_edge=False)
    has_disk = any(len(size) > 1 for size in report.sizes)
    table.add_column("host\n+ disk" if has_disk else "host", justify="right")
    for policy in report.policies:
        table.add_column(policy, justify="right")
    for size in report.sizes or ((),):  # an infinite cache alone has none
        found = [report.find(policy, size) for policy in report.policies]
        cells = ["" if result is None else cell(result) for result in found]
        table.add_row(_stacked(describe_size(report, size)) if size else "everything", *cells)
    return table


def _details(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    heads, rows = all_numbers(report)
    hidden = heads.index("prefix hits, %")  # in the table above
    for name in (name for name in heads if name != heads[hidden]):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=name in ("policy", "size"))
    for row in rows:
        table.add_row(*(_stacked(cell) for at, cell in enumerate(row) if at != hidden))
    return table


def _stacked(sum_of_tiers: str) -> str:
    """Put each tier on a line of its own: side by side, tiers would not fit into a terminal."""
    return sum_of_tiers.replace(" + ", "\n+ ")


_LEAST_WIDTH = 20


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Trace, model and budget that are planned for."""

    trace: Annotated[
        list[str], typer.Option("--trace", "-t", help="Trace file; - for standard input. Can be repeated.")
    ]
    model: Annotated[
        str | None, typer.Option(help="Model whose configuration gives KV bytes per token.", metavar="MODEL")
    ] = None
    host_bytes: Annotated[str | None, typer.Option(help="Largest host memory to consider, such as 256GiB.")] = None
    disk_bytes: Annotated[str | None, typer.Option(help="Largest disk to consider below it, such as 4TB.")] = None
    device: Annotated[
        str | None, typer.Option(help="Size of the device pool in front, which is one cache with host memory.")
    ] = None
    host_price: Annotated[
        float, typer.Option(help="What a GiB of host memory costs per hour, in seconds of an accelerator.")
    ] = 2.0
    disk_price: Annotated[
        float, typer.Option(help="What a GiB of disk costs per hour, in seconds of an accelerator.")
    ] = 0.1
    disk_write_bandwidth: Annotated[
        str, typer.Option(help="Sustained write bandwidth of the disk, in bytes per second.")
    ] = "2GB"
    disk_writes_per_day: Annotated[float, typer.Option(help="Drive writes per day that the disk endures (DWPD).")] = 1.0
    disk_part: Annotated[
        float, typer.Option(help="Size of a packed chunk on disk, relative to its bytes: 0.7 for bfloat16.")
    ] = 1.0
    policy: Annotated[str, typer.Option(help=f"One of {POLICY_NAMES}.")] = DEFAULT_POLICY
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; by default one per core.")] = None

    def budget(self) -> SizingBudget:
        """The budget. Raises ``ConfigError`` for an impossible policy or size."""
        look_here_for([self.policy])
        find_policy(self.policy)
        return SizingBudget(
            host_bytes=None if self.host_bytes is None else parse_room("host_bytes", self.host_bytes),
            disk_bytes=None if self.disk_bytes is None else parse_room("disk_bytes", self.disk_bytes),
            host_price_s=self.host_price,
            disk_price_s=self.disk_price,
            disk_write_bytes_per_s=parse_bandwidth("disk_write_bandwidth", self.disk_write_bandwidth),
            disk_writes_per_day=self.disk_writes_per_day,
            disk_part=self.disk_part,
        )


@app.command()
@takes_groups
def plan(
    what: PlanOptions = PlanOptions(trace=[]),  # frozen
    disk_options: DiskOptions = DiskOptions(),  # noqa: B008  # frozen
    trace_options: TraceOptions = TraceOptions(),  # noqa: B008  # frozen
    cost_options: CostOptions = CostOptions(),  # noqa: B008  # frozen
    as_json: AsJson = False,
) -> None:
    """Say how large a cache should be for a trace: up to which size the next GiB is worth its price, and if a disk pays.

    Nothing is loaded of the model but its configuration.
    """
    if not what.trace:
        raise ConfigError("trace", None, "--trace FILE is required")
    budget = what.budget()
    disk_policy = disk_options.checked_policy("--disk-bytes", what.disk_bytes)
    costs = cost_options.costs(what.model)
    if costs.bytes_per_token is None:  # said before the trace is read, which takes minutes
        raise ConfigError("model", None, "a plan needs --model or --bytes-per-token")
    trace = load_trace(what.trace, trace_options).behind(what.device, costs)
    planner = Planner(trace.workload, costs, what.policy, budget)
    results = _replay(planner, trace, what, disk_policy)
    found, memory = planner.plan(results), memory_limit_bytes()
    answer = list(recommend(planner, found))
    words = [*advise(planner, found), fits(planner, found, memory)]
    if as_json:
        report = Report(tuple(what.trace), trace.workload, costs, tuple(results), trace.remarks)
        facts = as_facts(planner, found) | {"memory_limit_bytes": memory, "advice": [*answer, *words]}
        typer.echo(json.dumps(facts | report.as_facts(), indent=1))
    else:
        _show(planner, found, [*answer, *words])


def _replay(planner: Planner, trace: LoadedTrace, what: PlanOptions, disk_policy: str) -> list[ReplayResult]:
    policies = trace.replayable([what.policy, BASELINE, *BOUNDS])
    results = replay_all(trace.workload, policies, planner.curve(), disk_policy, what.jobs, learns_first=True)
    further = planner.further(results)
    if further:
        results += replay_all(trace.workload, [what.policy], further, disk_policy, what.jobs, learns_first=True)
    return results


def _show(planner: Planner, found: Plan, words: list[str]) -> None:
    console = Answers()
    for sentence in words:
        # Programs that read a pipe can wrap lines themselves.
        lines = wrap(sentence, max(_LEAST_WIDTH, console.width - 2)) if console.is_terminal else [sentence]
        console.print("* " + "\n  ".join(lines), highlight=False, markup=False, soft_wrap=True)
    console.print(f"\n{found.policy}, by size of host memory, once it is full", style="bold", highlight=False)
    _print_rows(console, *plan_table(planner, found))
    console.print(f"next GiB: what each GiB up to the next size brings, in {unit_of_gain(planner)}", highlight=False)
    heads, rows = disk_table(planner, found)
    if rows:
        what = f"{format_bytes(planner.budget.disk_bytes or 0)} of disk below, by size of host memory"
        console.print(f"\n{what}", style="bold", highlight=False)
        _print_rows(console, heads, rows)


def _print_rows(console: Answers, heads: list[str], rows: list[list[str]]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in heads:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print_table(table)
