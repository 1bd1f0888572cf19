"""Pages of a report and of a plan: curves, and the tables behind them. They need no network and no script."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from io import StringIO
from pathlib import Path
from typing import Final

from cargohold.errors import ConfigError, one_line
from cargohold.lab.replay.advice import disk_table, plan_table, unit_of_gain
from cargohold.lab.replay.planning import BASELINE, Plan, Planner
from cargohold.lab.replay.replaying import INFINITE, OPTIMUM, ReplayResult
from cargohold.lab.replay.report import (
    Report,
    all_numbers,
    describe_costs,
    describe_size,
    describe_trace,
    format_amount,
)
from cargohold.option_values import format_bytes

_COLOURS: Final = ("#2a7de1", "#d1590f", "#12876a", "#a34fc4", "#997000", "#cf3480")
"""One per policy, to be seen on light and on dark paper."""
_GREY: Final = "#858d96"
_DASHES: Final = {OPTIMUM: "--", INFINITE: ":", "price": ":"}
_LOGARITHMIC_FROM: Final = 20
_LEAST_GAIN: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Axes:
    """Titles and axes of a chart.

    Attributes:
        title: the chart's title, for people who cannot see it.
        x_title: text below the x axis.
        show_x, show_y: convert a number on the axis to text.
        is_log_y: whether the y axis is logarithmic; values of 0 and below are then not drawn.
        mark: a value of x at which there is a line from top to bottom, and what it is called.
    """

    title: str
    x_title: str
    show_x: Callable[[float], str]
    show_y: Callable[[float], str]
    is_log_y: bool = False
    mark: tuple[float, str] | None = None


def line_chart(lines: Mapping[str, Sequence[tuple[float, float]]], axes: Axes) -> str:
    """An ``svg`` element with a line per name, given as pairs of x and y in ascending order of x, which is above 0.

    Bounds are grey. Its text and its paper have the page's colours.
    """
    from matplotlib import rc_context  # noqa: PLC0415  # half a second, only for pages
    from matplotlib.figure import Figure  # noqa: PLC0415

    xs = sorted({x for points in lines.values() for x, _ in points})
    colours = iter(_COLOURS * len(lines))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": axes.title, "font.size": 9}):
        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        plot = figure.add_subplot()
        for name, points in lines.items():
            colour = _GREY if name in _DASHES else next(colours)
            plot.plot(
                *zip(*points, strict=True),
                _DASHES.get(name, "-"),
                marker=".",
                color=colour,
                label=name,
                gid=f"line {name}",
            )
        if axes.mark is not None:
            plot.axvline(min(max(axes.mark[0], xs[0]), xs[-1]), color=_COLOURS[2], gid="mark", label=axes.mark[1])
        if xs[-1] > _LOGARITHMIC_FROM * xs[0]:
            plot.set_xscale("log")
        plot.set_xticks(xs[:: -(-len(xs) // 5)], minor=False)
        plot.set_xticks([], minor=True)
        plot.xaxis.set_major_formatter(lambda x, _: axes.show_x(x))
        plot.set_xlabel(axes.x_title)
        if axes.is_log_y:
            plot.set_yscale("log", nonpositive="mask")
        else:
            plot.set_ylim(bottom=0)
        plot.yaxis.set_major_formatter(lambda y, _: axes.show_y(y))
        plot.grid(visible=True, axis="y", color=_GREY, alpha=0.4)
        plot.spines[:].set_color(_GREY)
        plot.legend(framealpha=0)
        text = StringIO()
        figure.savefig(
            text, format="svg", transparent=True, metadata={"Title": axes.title, "Date": None, "Creator": None}
        )
    return _SIZES.sub("<svg", text.getvalue()[text.getvalue().index("<svg") :], count=1)


_SIZES: Final = re.compile(r"<svg[^>]*?(?= viewBox)")
"""What says how large a picture is, which is the page's to say."""

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6470; --paper: #ffffff; --rule: #d9dee4; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa5b1; --paper: #14181d; --rule: #333b45;
  --card: #1c2229; } }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .25rem; }
p { margin: .25rem 0 .75rem; max-width: 46rem; } .soft { color: var(--soft); }
.remark { background: var(--card); border-left: 4px solid #d1590f; padding: .5rem .75rem; }
.answer { background: var(--card); border-left: 4px solid #12876a; padding: .75rem 1rem; font-size: 1.1rem; }
svg { width: 100%; max-width: 40rem; height: auto; display: block; } svg text { fill: var(--ink) !important; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 0 2.5rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
"""


def write_text(path: Path, text: str) -> None:
    """Write a page. Raises ``ConfigError`` if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("html", str(path), f"it cannot be written: {error.strerror or one_line(error)}") from error


def page(report: Report) -> str:
    """The page of a replay as HTML text."""
    remarks = "".join(f'<p class="remark">{escape(text)}</p>' for text in report.remarks)
    body = f"""{remarks}
<h2>Prefix-hit ratio</h2>
<p>Blocks found with all blocks before them, of all blocks asked for. No policy can be above the optimum, which knows the
future; {INFINITE} never evicts.</p>
{_chart(report)}
<h2>All numbers</h2>
<p class="soft">{escape(describe_costs(report))}</p>
<div class="scroll">{_table(*all_numbers(report))}</div>"""
    return _document("Replay", report, body)


def plan_page(planner: Planner, plan: Plan, report: Report, answer: Sequence[str]) -> str:
    """The page of a plan as HTML text: the answer first, then why, then the rest of the report's remarks."""
    heads, rows = plan_table(planner, plan)
    answers = "".join(f'<p class="answer">{escape(text)}</p>' for text in answer)
    remarks = "".join(f"<li>{escape(text)}</li>" for text in report.remarks)
    charts = "".join(f"<section>{chart}</section>" for chart in _plan_charts(planner, plan))
    body = f"""{answers}
<div class="charts">{charts}</div>
<h2>More about it</h2>
<ul>{remarks}</ul>
<h2>{escape(plan.policy)}, by size of host memory</h2>
<p class="soft">{escape(describe_costs(report))} Sizes are counted once they are full. Next GiB: what each GiB up to the next
size brings, in {escape(unit_of_gain(planner))}.</p>
<div class="scroll">{_table(heads, rows)}</div>"""
    return _document("Plan", report, body + _disk(planner, plan))


def _disk(planner: Planner, plan: Plan) -> str:
    heads, rows = disk_table(planner, plan)
    if not rows:
        return ""
    return f"""
<h2>{escape(format_bytes(planner.budget.disk_bytes or 0))} of disk below, by size of host memory</h2>
<div class="scroll">{_table(heads, rows)}</div>"""


def _document(kind: str, report: Report, body: str) -> str:
    title = f"{kind} of {', '.join(Path(name).name for name in report.names)}"
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head>
<body>
<h1>{escape(title)}</h1>
<p class="soft">{escape(describe_trace(report))}</p>
{body}
</body>
</html>
"""


def _plan_charts(planner: Planner, plan: Plan) -> Iterator[str]:
    gains = [(math.sqrt(max(lower, upper / 2) * upper), gain) for lower, upper, gain in planner.gains(plan.steps)]
    most = max((gain for _, gain in gains), default=0.0)
    plan_axes = partial(_plan_axes, plan)
    if most <= 0:
        return
    # So small a gain is none; on a logarithmic axis it would take most of the room.
    lines = {"next GiB": [(x, gain) for x, gain in gains if gain > most * _LEAST_GAIN]}
    if planner.has_rates and planner.has_seconds:
        lines["price"] = [(x, planner.budget.host_price_s) for x, _ in (gains[0], gains[-1])]
    yield (
        f"<h2>What the next GiB is worth</h2><p>What one more GiB of host memory brings, in {escape(unit_of_gain(planner))}. "
        f"It pays where the line is above the price.</p>"
        + line_chart(lines, plan_axes("What the next GiB brings against size", _three_digits, is_log_y=True))
    )
    judged = [step for step in plan.steps if step.is_judged]
    found = {plan.policy: [step.result for step in judged]}
    found.setdefault(BASELINE, [step.baseline for step in judged if step.baseline is not None])
    found[OPTIMUM] = [step.optimum for step in judged if step.optimum is not None]
    ratios = {
        name: _points(planner, results, lambda r: 100 * r.prefix_hit_ratio)
        for name, results in found.items()
        if results
    }
    yield (
        "<h2>Prefix hits</h2><p>Blocks found with all blocks before them, once the cache is full. Only the optimum knows the "
        "future.</p>" + line_chart(ratios, plan_axes("Prefix-hit ratio against size", lambda y: f"{y:g}%"))
    )


def _three_digits(number: float) -> str:
    return f"{float(f'{number:.3g}'):,g}"


def _plan_axes(plan: Plan, title: str, show_y: Callable[[float], str], *, is_log_y: bool = False) -> Axes:
    chosen = plan.recommendation
    mark = None if chosen is None or not chosen.num_bytes else (float(chosen.num_bytes), format_bytes(chosen.num_bytes))
    return Axes(title, "host memory", format_bytes, show_y, is_log_y=is_log_y, mark=mark)


def _points(
    planner: Planner, results: Sequence[ReplayResult], value: Callable[[ReplayResult], float]
) -> list[tuple[float, float]]:
    return [(float(result.capacities[0] * planner.chunk_bytes), max(0.0, value(result))) for result in results]


def _chart(report: Report) -> str:
    sizes = report.sizes
    if not sizes:
        return '<p class="soft">Nothing to draw: only an infinite cache was replayed.</p>'
    lines = {
        policy: [
            (float(size[0]), 100 * result.prefix_hit_ratio)
            for size in sizes
            if (result := report.find(policy, size)) is not None
        ]
        for policy in report.policies
    }
    below = f", with {describe_size(report, sizes[0][1:])} of disk below" if len(sizes[0]) > 1 else ""
    axes = Axes(
        title="Prefix-hit ratio against size",
        x_title=f"host memory{below}",
        show_x=lambda x: format_amount(report, x),
        show_y=lambda y: f"{y:,.4g}%",
    )
    return line_chart({policy: points for policy, points in lines.items() if points}, axes)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<table>{_row(heads, 'th')}{''.join(_row(row, 'td') for row in rows)}</table>"


def _row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>\n"
