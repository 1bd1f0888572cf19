"""``cargohold replay``: what a cache would have done for recorded traffic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cargohold.cli.app import app
from cargohold.cli.common import remark
from cargohold.cli.options import takes_groups
from cargohold.cli.traces import CostOptions, TraceOptions, load_trace, replay_all
from cargohold.errors import ConfigError
from cargohold.offload.policy import DEFAULT_POLICY, POLICIES
from cargohold.replay.costs import CostModel
from cargohold.replay.grid import check_policies
from cargohold.replay.html import write_page
from cargohold.replay.replaying import Capacities
from cargohold.replay.report import Report, policies_with_bounds
from cargohold.replay.results import BOUNDS, INFINITE, ReplayResult
from cargohold.replay.sizes import Size, parse_size, parse_sizes
from cargohold.replay.tiers import HOST
from cargohold.replay.workload import Workload
from cargohold.units import format_bytes

_DEFAULT_POLICIES = ("lru", DEFAULT_POLICY, *BOUNDS)
_DEFAULT_SIZES = "1%,2%,5%,10%,20%,50%"

TracesArgument = Annotated[
    list[str], typer.Argument(help="Files of one trace: JSON lines, plain, gz or zst; - for standard input.")
]


@app.command()
@takes_groups
def replay(
    traces: TracesArgument,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help=f"Several, with commas: {', '.join([*sorted(POLICIES), *BOUNDS])}."),
    ] = None,
    size: Annotated[
        str, typer.Option("--size", "-s", help="Sizes of host memory: blocks, bytes (64GiB) or % of all blocks.")
    ] = _DEFAULT_SIZES,
    disk: Annotated[str | None, typer.Option(help="Size of a disk tier below host memory; by default none.")] = None,
    model: Annotated[str | None, typer.Option(help="Model that tells KV bytes per token.", metavar="MODEL")] = None,
    trace_options: TraceOptions = TraceOptions(),  # frozen
    cost_options: CostOptions = CostOptions(),  # frozen
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; by default as many as cores.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with curves and tables to this file.")] = None,
) -> None:
    """Replay a trace of KV blocks through the policies that production runs, at several sizes.

    A hit is a block found with all blocks before it. The optimum knows the future; infinite never evicts.
    """
    policies = [name.strip() for text in policy or _DEFAULT_POLICIES for name in text.split(",")]
    check_policies(policies)
    sizes = parse_sizes("size", size)
    disk_size = None if disk is None else parse_size("disk", disk)
    costs = cost_options.costs(model)
    _check_bytes([*sizes, *([disk_size] if disk_size else [])], costs)
    trace = load_trace(traces, trace_options)
    workload = trace.workload
    capacities = _capacities(workload, sizes, disk_size, costs)
    results = replay_all(workload, policies_with_bounds(policies, workload), capacities, jobs)
    report = Report(tuple(traces), workload, costs, tuple(results), trace.remarks)
    if html is not None:
        write_page(html, report)
        remark(f"wrote {html}")
    if as_json:
        typer.echo(json.dumps(report.as_facts(), indent=1))
    else:
        show_report(report)


def _check_bytes(sizes: Sequence[Size], costs: CostModel) -> None:
    for size in sizes:
        if size.is_bytes and costs.bytes_per_token is None:
            raise ConfigError("size", size.text, "a size in bytes needs --bytes-per-token or --model")


def _capacities(
    workload: Workload, sizes: Sequence[Size], disk: Size | None, costs: CostModel
) -> list[Capacities]:
    chunk_bytes = costs.chunk_bytes(workload.chunk_tokens)
    lower = () if disk is None else (disk.chunks_for(workload, chunk_bytes),)
    return sorted({(size.chunks_for(workload, chunk_bytes), *lower) for size in sizes})


def show_report(report: Report) -> None:
    """Tables on standard output."""
    console = Console()
    workload = report.workload
    console.print(
        f"{workload.num_requests:,} requests, {workload.num_lookups:,} look-ups, {workload.num_unique:,} different "
        f"{'chunks' if workload.blocks_per_chunk > 1 else 'blocks'}"
        + ("" if workload.chunk_tokens is None else f" of {workload.chunk_tokens} tokens"),
        highlight=False,
    )
    console.print(_ratios(report))
    console.print(_details(report))


def _ratios(report: Report) -> Table:
    table = Table(title="prefix-hit ratio, per cent", title_justify="left", box=None, pad_edge=False)
    table.add_column(HOST if len(report.sizes[:1] and report.sizes[0]) < 2 else "host + disk", justify="right")
    for policy in report.policies:
        table.add_column(policy, justify="right")
    for size in report.sizes or ((0,),):
        found = [report.find(policy, size) for policy in report.policies]
        cells = ["" if result is None else f"{100 * result.prefix_hit_ratio:.2f}" for result in found]
        table.add_row(describe_size(report, size), *cells)
    return table


def _details(report: Report) -> Table:
    table = Table(title="what moved", title_justify="left", box=None, pad_edge=False)
    for name in ("policy", "size"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    has_time = report.costs.prefill_tokens_per_s is not None
    for name in ("block hits, %", "loaded", "written", "evicted", *(["prefill saved"] if has_time else [])):
        table.add_column(name, justify="right")
    for policy in report.policies:
        for result in sorted((r for r in report.results if r.policy == policy), key=lambda r: r.capacities):
            saved = report.costs.saved_s(result, report.workload.chunk_tokens)
            size = "everything" if policy == INFINITE else describe_size(report, result.capacities)
            cells = [policy, size, f"{100 * result.block_hit_ratio:.2f}", *_traffic(report, result)]
            table.add_row(*cells, *([format_seconds(saved)] if has_time else []))
    return table


def _traffic(report: Report, result: ReplayResult) -> list[str]:
    if not result.tiers:
        return ["", "", ""]
    columns = zip(*((tier.loaded, tier.stored, tier.evicted) for tier in result.tiers), strict=True)
    loaded, stored, evicted = (
        " + ".join(describe_amount(report, amount) for amount in column) for column in columns
    )
    return [loaded, stored, evicted]


def describe_amount(report: Report, num_chunks: int) -> str:
    """Chunks as bytes, or as a number where it is not known how large they are."""
    return f"{num_chunks:,}" if report.chunk_bytes is None else format_bytes(num_chunks * report.chunk_bytes)


def describe_size(report: Report, capacities: Capacities) -> str:
    """The tiers' sizes: ``1,000 (5%)`` or ``64 GiB (5%)``."""
    shares = (100 * capacity / report.workload.num_unique for capacity in capacities)
    return " + ".join(
        f"{describe_amount(report, capacity)} ({share:.3g}%)"
        for capacity, share in zip(capacities, shares, strict=True)
    )


def format_seconds(seconds: float | None) -> str:
    """A time for people: ``3.2 h``, ``45 s``."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if abs(seconds) >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
