"""Draw the plots of the documentation from ``benchmarks/results``: ``python tools/plots.py`` writes them to ``docs/figures``.

No figure is written down twice: a new result and ``make figures`` change the plots. ``--check`` writes nothing, and exits with
1 if a plot is not what would be drawn.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from diagrams import FIGURES, picture, text, write

RESULTS = FIGURES.parent.parent / "benchmarks" / "results"
OURS, OTHERS, BOUND = "teal", "line", "amber"


def result(name: str) -> Any:
    """What a benchmark has measured."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["result"]


def measured_on(name: str) -> str:
    """The machine of a benchmark, in words."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["environment"]
    maker = re.sub(r"\(\w+\)|Processor|CPU|@.*", "", found["processor"])
    return f"{found['cores']} cores, {' '.join(maker.split())}"


TRACES = {
    "made": "made",
    "mooncake_toolagent_head1000": "Mooncake, tool agent",
    "lmcache_agent_64": "LMCache, agent",
    "mooncake_conversation_h1": "Mooncake, conversation",
    "claude_code_512_odd": "coding agent",
}
CONTEXT_TOKENS = 2000
"""The context whose restore is shown: longer ones gain more, and are rarer."""


def restored() -> Any:
    """The row of the benchmark for such a context."""
    return next(row for row in result("restore")["rows"] if row["context_tokens"] == CONTEXT_TOKENS)


def sooner(row: Mapping[str, Any]) -> str:
    """How many times sooner the first token comes than it would if it were computed: of the very figures that are shown."""
    return f"{row['recomputed_s'] / row['restored_s']:.0f}"


def number(value: float) -> str:
    """A number as people read it: three digits, and no more zeros than needed."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def bars(title: str, note: str, rows: Sequence[tuple[str, float, str]], unit: str) -> str:
    """Horizontal bars: label, length and colour of each."""
    longest = max(value for _, value, _ in rows)
    parts = [text(24, 34, title, "bold", "start"), text(24, 56, note, "small", "start")]
    for at, (label, value, colour) in enumerate(rows):
        top, width = 76 + 34 * at, max(3.0, 400 * value / longest)
        parts += [
            text(208, top + 17, label, "", "end"),
            f'<rect x="220" y="{top}" width="{width:.1f}" height="24" rx="4" style="fill: var(--{colour})"/>',
            text(228 + width, top + 17, f"{number(value)} {unit}", "small", "start"),
        ]
    return picture(760, 92 + 34 * len(rows), f"{title}: {note}", parts)


def headline(figure: str, words: Sequence[str], rows: Sequence[tuple[str, float, str]], unit: str) -> str:
    """One figure in large type, what it is, and the bars behind it."""
    longest = max(value for _, value, _ in rows)
    parts = [f'<text x="24" y="66" style="font-size: 48px; font-weight: 700; fill: var(--teal)">{figure}</text>']
    parts += [text(24, 98 + 20 * at, line, "", "start") for at, line in enumerate(words)]
    for at, (label, value, colour) in enumerate(rows):
        top, width = 146 + 40 * at, max(3.0, 220 * value / longest)
        parts += [
            text(24, top + 8, label, "small", "start"),
            f'<rect x="24" y="{top + 14}" width="{width:.1f}" height="12" rx="3" style="fill: var(--{colour})"/>',
            text(32 + width, top + 25, f"{number(value)} {unit}", "small", "start"),
        ]
    return picture(340, 156 + 40 * len(rows), f"{figure} {' '.join(words)}", parts)


def curves(title: str, note: str, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]) -> str:
    """Panels of curves over sizes in per cent, in equal steps: per panel, name and points of each curve."""
    colours = {"reuse-index": "teal", "lru": "line", "arc": "green", "optimum": "amber"}
    parts = [text(24, 34, title, "bold", "start"), text(24, 56, note, "small", "start")]
    for at, name in enumerate(colours):
        parts += [
            f'<rect x="{24 + 130 * at}" y="70" width="18" height="5" rx="2" style="fill: var(--{colours[name]})"/>',
            text(48 + 130 * at, 77, name, "small", "start"),
        ]
    for at, (panel, lines) in enumerate(panels.items()):
        left, top = 60 + 240 * (at % 3), 122 + 220 * (at // 3)
        parts.append(text(left + 90, top - 12, panel, ""))
        for percent in (0, 25, 50, 75, 100):
            y = top + 150 - 1.5 * percent
            parts.append(f'<path d="M{left} {y} h180" style="stroke: var(--edge); stroke-width: 1"/>')
            parts.append(text(left - 8, y + 4, str(percent), "small", "end"))
        sizes = [size for size, _ in next(iter(lines.values()))]
        for step, size in enumerate(sizes):
            parts.append(text(left + 180 * step / (len(sizes) - 1), top + 170, f"{size:g}", "small"))
        for name, points in lines.items():
            route = " ".join(
                f"{left + 180 * step / (len(points) - 1):.1f},{top + 150 - 1.5 * hits:.1f}"
                for step, (_, hits) in enumerate(points)
            )
            width = 3 if name == "reuse-index" else 1.8
            parts.append(
                f'<polyline points="{route}" style="fill: none; stroke: var(--{colours[name]}); stroke-width: {width}"/>'
            )
    return picture(760, 90 + 220 * -(-len(panels) // 3), f"{title}: {note}", parts)


def first_token() -> str:
    """Time to the first token of a context that comes back, by where its KV is."""
    row = restored()
    kept = [
        ("computed again", "recomputed_s", OTHERS),
        ("from disk", "from_disk_s", OURS),
        ("from host memory", "restored_s", OURS),
        ("still on the device", "on_device_s", BOUND),
    ]
    note = f"SmolLM2-135M on two cores, a question about a context of {row['context_tokens']:,} tokens that comes back"
    return bars("Time to the first token", note, [(label, row[key], colour) for label, key, colour in kept], "s")


def in_vllm() -> list[tuple[str, float, str]]:
    """How much longer than a device hit a returning context takes inside vLLM, by connector."""
    names = {"cargohold": "Cargohold", "vllm": "vLLM's own", "lmcache": "LMCache", "no connector": "no connector"}
    rows = result("vllm")["revisits"]["rows"]
    found = {row["contender"]: row["over_device_hit"]["median"] for row in rows}
    # Of LMCache's two settings, the better one.
    found["lmcache"] = min(value for name, value in found.items() if name.startswith("lmcache"))
    return [(label, found[name], OURS if name == "cargohold" else OTHERS) for name, label in names.items()]


def vllm() -> str:
    """The same as bars."""
    note = "as a multiple of the time when the device itself still has the context; 1 is the best possible"
    return bars("Inside vLLM: time to the first token of a returning context", note, in_vllm(), "times")


def policies() -> str:
    """Prefix hits of policies on traces, by size."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in result("policies")["rows"]:
        for name in ("lru", "arc", "optimum", "reuse-index"):
            points = panels.setdefault(TRACES.get(row["trace"], row["trace"]), {}).setdefault(name, [])
            points.append((row["size_percent"], row["hits"][name]))
    note = "prefix hits in per cent of the chunks looked up, by the tier's size in per cent of the trace's different chunks"
    return curves("Which policy finds more", note, panels)


def step_cost() -> str:
    """What connectors cost vLLM's scheduler per step, while requests generate."""
    found = result("generating")["rows"][0]
    beyond = found["generating_us_per_step_beyond_no_connector"]
    rows = [
        ("Cargohold", "cargohold", OURS),
        ("with a disk", "cargohold, a disk below", OURS),
        ("vLLM's own", "vllm", OTHERS),
    ]
    note = f"{found['requests']} requests that generate; microseconds beyond what vLLM's scheduler takes alone"
    shown = [(label, beyond[name], colour) for label, name, colour in rows]
    return bars("What a connector costs the scheduler, per step", note, shown, "µs")


def disk() -> str:
    """The disk tier beside fio."""
    found = result("tiers")["bandwidth"][1]
    rows = [
        (label, found[way][key], OURS if key.startswith("tier") else OTHERS)
        for way, verb in (("randread", "reads"), ("randwrite", "writes"))
        for key, label in (("tier_mb_per_s", f"the tier {verb}"), ("yardstick_mb_per_s", f"fio {verb}"))
    ]
    note = f"chunks of {found['chunk_bytes'] >> 20} MiB in random order, eight threads, beside fio with eight jobs, turn about"
    return bars("The disk tier", note, rows, "MB/s")


def landing() -> dict[str, dict[str, float]]:
    """The three figures of the landing page and README, and what they are made of: ``benchmarks/results/landing.json``."""
    row, over, beyond = restored(), {name: times for name, times, _ in in_vllm()}, step_cost_beyond()
    keys = ("context_tokens", "recomputed_s", "restored_s")
    return {
        "restore": {"times_sooner": float(sooner(row)), **{key: row[key] for key in keys}},
        "vllm": {"over_device_hit": over["Cargohold"], "theirs_over_device_hit": over["vLLM's own"]},
        "step": {
            "percent_of_theirs": round(100 * beyond["cargohold"] / beyond["vllm"]),
            "us": beyond["cargohold"],
            "theirs_us": beyond["vllm"],
        },
    }


def headline_restore() -> str:
    """How much sooner the first token comes."""
    row = landing()["restore"]
    rows = [("computed again", row["recomputed_s"], OTHERS), ("from host memory", row["restored_s"], OURS)]
    words = ("sooner: the first token of a context", f"of {row['context_tokens']:,} tokens that comes back")
    return headline(f"{row['times_sooner']:.0f}×", words, rows, "s")


def headline_vllm() -> str:
    """How near to a device hit a restore is."""
    over = landing()["vllm"]
    rows = [("Cargohold", over["over_device_hit"], OURS), ("vLLM's own", over["theirs_over_device_hit"], OTHERS)]
    words = ("the time of a hit on the device,", "for a restore inside vLLM")
    return headline(f"{over['over_device_hit']:.2f}×", words, rows, "times")


def step_cost_beyond() -> dict[str, float]:
    """Microseconds that a step takes longer with a connector, while all requests generate."""
    beyond: dict[str, float] = result("generating")["rows"][0]["generating_us_per_step_beyond_no_connector"]
    return beyond


def headline_step() -> str:
    """What it costs the scheduler."""
    step = landing()["step"]
    rows = [("Cargohold", step["us"], OURS), ("vLLM's own offloading", step["theirs_us"], OTHERS)]
    words = ("of the scheduler's time per step that", "vLLM's own offloading takes")
    return headline(f"{step['percent_of_theirs']:.0f}%", words, rows, "µs")


PLOTS = {
    "first-token": first_token,
    "vllm": vllm,
    "policies": policies,
    "step-cost": step_cost,
    "disk": disk,
    "headline-restore": headline_restore,
    "headline-vllm": headline_vllm,
    "headline-step": headline_step,
}

if __name__ == "__main__":
    sys.exit(write(PLOTS, "tools/plots.py"))
