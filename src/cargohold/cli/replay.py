"""``cargohold replay``: what a cache would have done for recorded traffic."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from rich.table import Table

from cargohold.cache.policies import DEFAULT_POLICY, POLICY_NAMES
from cargohold.cli.app import app
from cargohold.cli.common import Answers, remark
from cargohold.cli.options import takes_groups
from cargohold.cli.traces import (
    CostOptions,
    DiskOptions,
    OutputOptions,
    TraceOptions,
    TracesArgument,
    load_trace,
    look_here_for,
    replay_all,
)
from cargohold.errors import ConfigError
from cargohold.replay.costs import CostModel, Size, parse_size, parse_sizes
from cargohold.replay.derived import HINTED
from cargohold.replay.html import page, write_text
from cargohold.replay.replaying import BOUNDS, INFINITE, Capacities, ReplayResult, check_policies
from cargohold.replay.report import Report, describe_amount, describe_size, describe_trace, format_seconds
from cargohold.replay.workload import Workload

_DEFAULT_POLICIES = ("lru", DEFAULT_POLICY, *BOUNDS)
_DERIVED = "derived"
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
    hints: Annotated[
        str | None, typer.Option(help="derived: also replay each policy with hints that an orchestrator could give.")
    ] = None
    model: Annotated[str | None, typer.Option(help="Model that tells KV bytes per token.", metavar="MODEL")] = None
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; by default as many as cores.")] = None

    def policies(self) -> list[str]:
        """Names of the policies. Raises ``ConfigError`` for one that does not exist."""
        names = [name.strip() for text in self.policy or _DEFAULT_POLICIES for name in text.split(",")]
        look_here_for(names)
        check_policies(names)
        if self.hints is None:
            return names
        if self.hints != _DERIVED:
            raise ConfigError("hints", self.hints, f"it must be {_DERIVED}")
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
    output: OutputOptions = OutputOptions(),  # noqa: B008  # frozen
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
    trace = load_trace(traces, trace_options)
    workload = trace.workload
    capacities = _capacities(workload, sizes, disk, costs)
    results = replay_all(workload, trace.replayable(policies), capacities, disk_policy, grid.jobs)
    report = Report(tuple(traces), workload, costs, tuple(results), trace.remarks)
    why = report.why_no_times()
    if why is not None:
        remark(f"note: {why}", style="yellow")
        report = replace(report, remarks=(*report.remarks, why))
    if output.html is not None:
        write_text(output.html, page(report))
        remark(f"wrote {output.html}")
    if output.as_json:
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
    if _has_time(report):
        waits = _by_size(report, lambda result: format_seconds(report.costs.waiting_s(result, report.workload)))
        tables["how long all prompts together wait to be loaded and computed"] = waits
    for title, table in tables.items():
        console.print(f"\n{title}", style="bold", highlight=False)
        console.print_table(table)


def _has_time(report: Report) -> bool:
    return report.costs.prefill_tokens_per_s is not None and report.chunk_bytes is not None


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
    for name in ("policy", "size"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    has_time = _has_time(report)
    for name in ("block hits, %", "loaded", "written", "evicted", *(["prefill saved"] if has_time else [])):
        table.add_column(name, justify="right")
    for policy in report.policies:
        for result in sorted((r for r in report.results if r.policy == policy), key=lambda r: r.capacities):
            saved = report.costs.saved_s(result, report.workload.chunk_tokens)
            size = "everything" if policy == INFINITE else _stacked(describe_size(report, result.capacities))
            cells = [policy, size, f"{100 * result.block_hit_ratio:.2f}", *_traffic(report, result)]
            table.add_row(*cells, *([format_seconds(saved)] if has_time else []))
    return table


def _traffic(report: Report, result: ReplayResult) -> list[str]:
    if not result.tiers:
        return ["", "", ""]
    columns = zip(*((tier.loaded, tier.stored, tier.evicted) for tier in result.tiers), strict=True)
    return [_stacked(" + ".join(describe_amount(report, amount) for amount in column)) for column in columns]


def _stacked(sum_of_tiers: str) -> str:
    """Put each tier on a line of its own: side by side, tiers would not fit into a terminal."""
    return sum_of_tiers.replace(" + ", "\n+ ")
