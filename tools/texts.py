"""Put into README and docs what benchmarks have measured, from ``benchmarks/results``, and what is declared in the source.

``python tools/texts.py``.

A figure stands in a line of its own or in a table, which is known by how it begins. ``--check`` writes nothing, and exits with
1 if a text is not what would be written.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import plots
from plots import TRACES, measured_on, result

from cargohold.protocol import Kind, metrics
from cargohold.serve.scrape import OWN_FAMILIES

ROOT = Path(__file__).resolve().parent.parent
SHOWN_SIZES = (1, 5)
CELLS = r"\n\|[-:| ]+\|\n(?:\|.*\n)+"


class Text(NamedTuple):
    """A part of a file: what it looks like, whatever was measured, and what it must be."""

    file: str
    pattern: str
    made: str


def line(file: str, start: str, rest: str) -> Text:
    """A line that begins with ``start``."""
    return Text(file, rf"(?m)^{re.escape(start)}.*$", start + rest)


def table(file: str, titles: str, rows: Sequence[Sequence[object]]) -> Text:
    """A table with these titles."""
    separator = re.sub(r"[^|]+", "---", titles)
    lines = [titles, separator, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]
    return Text(file, re.escape(titles) + CELLS, "\n".join(lines) + "\n")


def headlines() -> Iterator[Text]:
    """The three figures of README and the landing page, of one file: a context that comes back, here and in vLLM; a step."""
    found = plots.landing()
    row, over, percent = found["restore"], found["vllm"]["over_device_hit"], found["step"]["percent_of_theirs"]
    yield Text("benchmarks/results/landing.json", r"(?s)\A.*\Z", json.dumps(found, indent=2) + "\n")
    seconds = (
        f"{row['restored_s']:.2f} s instead of {row['recomputed_s']:.2f} s, {row['times_sooner']:.0f} times sooner"
    )
    text = f" {row['context_tokens']:,} tokens returns, the first token takes {seconds} ({measured_on('restore')})."
    yield line("README.md", "When a prompt of about", text)
    yield line("README.md", "Inside vLLM, a restore takes", f" {over:.2f} times as long as a hit on the device.")
    case, (least, most) = result("generating")["rows"][0], extremes()
    load = f" {case['requests']} requests with prompts of {case['prompt_tokens']:,} tokens generate"
    cases = f" {least:.0f} to {most:.0f} % [in other cases](docs/api/policies.md#per-step-inside-vllm)."
    yield line("README.md", "In a step in which", f"{load}, Cargohold adds {percent:.0f} %")
    yield line("README.md", "of what vLLM's own offloading adds;", cases)
    for name, words in (
        ("restore", f"The first token of a context that comes back: {row['times_sooner']:.0f} times sooner"),
        ("vllm", f"A restore inside vLLM: {over:.2f} times the time of a hit on the device"),
        ("step", f"A step that generates: {percent:.0f} % of what vLLM's own offloading adds"),
    ):
        shown = f"](figures/headline-{name}.svg)"
        yield Text("docs/index.md", rf"(?m)^!\[.*{re.escape(shown)}$", f"![{words}{shown}")


def extremes() -> tuple[float, float]:
    """What a step costs over what vLLM's own connector costs, in per cent: the least and the most of all cases."""
    each = [
        row[f"{key}_us_per_step_beyond_no_connector"]
        for row in result("generating")["rows"]
        for key in ("prompts", "generating")
    ]
    over = [100 * beyond["cargohold"] / beyond["vllm"] for beyond in each]
    return min(over), max(over)


def span(of: dict[str, float]) -> str:
    """Median and quartiles."""
    return f"{of['median']:.2f} ({of['from']:.2f} to {of['to']:.2f})"


def in_vllm() -> Iterator[Text]:
    """The same inside vLLM, beside others."""
    found = result("vllm")
    over = {row["contender"]: row["over_device_hit"]["median"] for row in found["revisits"]["rows"]}
    ours, theirs, lmcache = over["cargohold"], over["vllm"], (over["lmcache"], over["lmcache, 128-token chunks"])
    values = (
        f" {ours:.2f} (Cargohold), {theirs:.2f} (vLLM's own), {lmcache[0]:.2f} and {lmcache[1]:.2f} times (LMCache)"
    )
    yield line(
        "docs/figures.md", "* The first token took", f"{values} as long as a device hit ({measured_on('vllm')})."
    )
    names = {
        "no connector": "no connector",
        "device hit": "everything in the device pool",
        "cargohold": "Cargohold",
        "vllm": "vLLM's own",
        "lmcache": "LMCache, default chunks",
        "lmcache, 128-token chunks": "LMCache, chunks of 128 tokens",
    }
    alone = {row["contender"]: row["over_no_connector"] for row in found["without_reuse"]}
    requests, rows = found["revisits"]["requests"], []
    for row in found["revisits"]["rows"]:
        name, same = row["contender"], row["identical"]
        hit = "1" if name == "device hit" else span(row["over_device_hit"])
        reuse = "1" if name == "no connector" else span(alone[name])
        rows.append((names[name], f"{row['ttft_ms']:,.0f} ms", hit, f"{same} of {requests}", reuse))
    titles = "| | first token of a revisit | over a device hit | identical to it | request without reuse, over no connector |"
    yield table("docs/vllm.md", titles, rows)


def under_load() -> Iterator[Text]:
    """The same without pauses."""
    own, shared = (result("vllm_load")["revisits"][name]["rows"] for name in ("own process", "in process"))
    hits = [next(row for row in rows if row["contender"] == "cargohold")["over_device_hit"] for rows in (own, shared)]
    values = f" {span(hits[0])}, and {span(hits[1])} in the client's ({measured_on('vllm_load')})."
    yield line("docs/figures.md", "  its own the first token took, over a device hit,", values)


def hits() -> Iterator[Text]:
    """What policies find on traces, at two of the sizes; the plot has all."""
    rows, last = [], ""
    for row in result("policies")["rows"]:
        if row["size_percent"] not in SHOWN_SIZES:
            continue
        name = TRACES.get(row["trace"], row["trace"]).replace(", ", " ")
        found = [f"{row['hits'][policy]:.1f}" for policy in ("fifo", "arc", "lru", "reuse-index", "optimum")]
        size, slots = f"{row['size_percent']:g}", f"{row['slots']:,}"
        rows.append(("" if name == last else name, size, slots, *found, f"{row['without_eviction']:.1f}"))
        last = name
    titles = "| trace | size % | slots | fifo | arc | lru | reuse-index | optimum | nothing evicted |"
    yield table("docs/policies.md", titles, rows)


def parts() -> Iterator[Text]:
    """What the default policy wins on parts of traces."""
    rows = [
        (row["requests"], *(f"{cell['beyond_lru']:+.1f} of {cell['optimum_beyond_lru']:.1f}" for cell in row["cells"]))
        for row in result("parts")["rows"]
        if row["use"] != "tried"
    ]
    yield table("docs/api/policies.md", "| requests | 0.5 % | 1 % | 2 % | 5 % | 10 % | 20 % |", rows)


def steps() -> Iterator[Text]:
    """What connectors cost vLLM's scheduler per step."""
    order = ("cargohold", "cargohold, a disk below", "vllm", None, "cargohold, prompts alone", "vllm, prompts alone")
    rows = []
    for row in result("generating")["rows"]:
        for key, name in (("prompts", "prompts are computed"), ("generating", "all generate")):
            beyond: dict[str, Any] = row[f"{key}_us_per_step_beyond_no_connector"]
            over = f"{beyond['cargohold'] / beyond['vllm']:.2f}"
            values = [over if who is None else f"{beyond[who]:,}" for who in order]
            size = ("", "") if key == "generating" else (row["requests"], f"{row['prompt_tokens']:,}")
            rows.append((*size, name, *values))
    titles = (
        "| requests | tokens of their prompts | while | Cargohold | with a disk below | vLLM's own | ours over vLLM's | "
        "Cargohold, prompts alone | vLLM's own, prompts alone |"
    )
    yield table("docs/api/policies.md", titles, rows)


def all_metrics() -> Iterator[Text]:
    """What is counted, from the declarations."""
    rows = []
    for family in (*metrics.FAMILIES, *OWN_FAMILIES):
        where = "both" if family in metrics.FAMILIES else "server"
        labels = ", ".join(f"`{label}`" for label in family.labels)
        kind = "" if family.kind is Kind.COUNTER else f"{family.kind.value}: "
        rows.append(
            (f"`{family.sample}`", labels, family.unit, where if family.is_exported else "stats", kind + family.help)
        )
    yield table("docs/api/metrics.md", "| name | labels | unit | where | what |", rows)


PARTS: tuple[Callable[[], Iterator[Text]], ...] = (headlines, in_vllm, under_load, hits, parts, steps, all_metrics)


def main() -> int:
    """Write or check all texts; returns the exit status."""
    only_check, problems = "--check" in sys.argv[1:], []
    for file, pattern, made in (text for part in PARTS for text in part()):
        path = ROOT / file
        before = path.read_text(encoding="utf-8")
        after, count = re.subn(pattern, lambda _, made=made: made, before)
        if count != 1:
            problems.append(f"{file} has {count} texts, and not one, such as: {made.splitlines()[0]}")
        elif after != before and only_check:
            problems.append(f"{file} is not what was measured, run `make figures`: {made.splitlines()[0]}")
        elif after != before:
            path.write_text(after, encoding="utf-8")
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
