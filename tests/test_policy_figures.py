"""What pages say of policies and hints is what benchmarks have measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import hints, parts

REPOSITORY = Path(__file__).parents[1]
NAMES = {
    "made": "made",
    "Mooncake tool agent": "mooncake_toolagent_head1000",
    "LMCache agent": "lmcache_agent_64",
    "Mooncake conversation": "mooncake_conversation_h1",
    "coding agent": "claude_code_512_odd",
}
LMCACHE, CODING = NAMES["LMCache agent"], NAMES["coding agent"]


def rows_of(benchmark: str) -> list[dict[str, Any]]:
    file = REPOSITORY / "benchmarks" / "results" / f"{benchmark}.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["result"]["rows"]
    return rows


def text_of(page: str) -> str:
    """A page with one space between words."""
    return " ".join((REPOSITORY / "docs" / page).read_text(encoding="utf-8").split())


def table(page: str, heading: str) -> Iterator[list[str]]:
    """The cells of each row of a table."""
    lines = iter((REPOSITORY / "docs" / page).read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line.startswith(heading))
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def per_cent(part: float) -> str:
    return f"{100 * part:.0f}"


def of_gap(hits: float, floor: float, best: float) -> float:
    return (hits - floor) / (best - floor)


def test_hits_on_traces() -> None:
    measured = {(row["trace"], f"{row['size_percent']:g}"): row for row in rows_of("policies")}
    shown, name = 0, ""
    for first, size, slots, *hits in table("policies.md", "| trace | size % | slots |"):
        name = first or name
        row = measured[NAMES[name], size]
        policies = ("fifo", "arc", "lru", "reuse-index", "optimum")
        expected = [*(row["hits"][policy] for policy in policies), row["without_eviction"]]
        assert [slots, *hits] == [f"{row['slots']:,}", *(f"{value:.1f}" for value in expected)], (name, size)
        shown += 1
    assert shown == 2 * len(NAMES)


def test_what_the_default_gains_on_traces() -> None:
    hits = [row["hits"] for row in rows_of("policies")]
    gains = [each["reuse-index"] - each["lru"] for each in hits]
    gaps = [of_gap(h["reuse-index"], h["lru"], h["optimum"]) for h in hits if h["optimum"] - h["lru"] >= 0.5]
    text = text_of("policies.md")
    assert f"lost at most {-min(gains):.1f} points on these traces and won up to {max(gains):.0f}" in text
    assert f"it closed {per_cent(mean(gaps))} % of the gap" in text
    (chat,) = (r for r in rows_of("policies") if r["trace"].endswith("conversation_h1") and r["size_percent"] == 1)
    written = chat["written"]
    expected = f"wrote {written['reuse-index']:.0f} on the conversation trace at 1 %, and LRU {written['lru']:.0f}"
    assert expected in text


def summary_of(*uses: str) -> tuple[str, str]:
    """The part of the gap that is closed, in per cent, and the points that are lost in the worst cell."""
    cells = [cell for row in rows_of("parts") if row["use"] in uses for cell in row["cells"]]
    counted = [cell for cell in cells if cell["optimum_beyond_lru"] >= parts.COUNTED_FROM]
    closed = mean(cell["beyond_lru"] / cell["optimum_beyond_lru"] for cell in counted)
    return per_cent(closed), f"{-min(cell['beyond_lru'] for cell in cells):.1f}"


def test_what_the_default_gains_on_parts_of_traces() -> None:
    text, more = text_of("policies.md"), text_of("api/policies.md")
    closed, lost = summary_of(parts.HELD_OUT, parts.FITTED)
    assert f"it closed {closed} %, and lost up to {lost} points" in text
    closed, lost = summary_of(parts.HELD_OUT)
    assert f"on the seven of them that were held out, {closed} %, and up to {lost}" in text
    closed, lost = summary_of(parts.TRIED)
    assert f"the default closed {closed} % of the gap, and lost up to {lost} points" in more


def test_the_table_of_parts() -> None:
    measured = [row for row in rows_of("parts") if row["use"] != parts.TRIED]
    expected = [
        [row["requests"], *(f"{c['beyond_lru']:+.1f} of {c['optimum_beyond_lru']:.1f}" for c in row["cells"])]
        for row in measured
    ]
    assert list(table("api/policies.md", "| requests | 0.5 % |")) == expected


def closed_by(policy: str, trace: str) -> str:
    """The least and the most part of the gap that a policy closes, in per cent."""
    parts_closed = [100 * row["part_of_gap"][policy] for row in rows_of("hints") if row["trace"] == trace]
    return f"{min(parts_closed):.0f} to {max(parts_closed):.0f} %"


def test_what_hints_gain() -> None:
    text = text_of("replay.md")
    for trace, of_default in ((LMCACHE, "the default alone "), (CODING, "")):
        hinted, default = (closed_by(policy, trace) for policy in ("reuse-index+hints", "reuse-index"))
        assert f"{hinted} of the distance" in text or f"and {hinted} on coding agents" in text
        assert f"({of_default}{default})" in text


def test_the_table_of_hints() -> None:
    shown = re.findall(r"^(LMCache's|coding) agents +([\d.]+) % +(.*)$", hints.__doc__ or "", re.MULTILINE)
    traces = {"LMCache's": LMCACHE, "coding": CODING}
    measured = {(row["trace"], f"{row['size_percent']:g}"): row for row in rows_of("hints")}
    for agents, size, cells in shown:
        row = measured.pop((traces[agents], size))
        hits = [f"{row['hits'][policy]:.1f}" for policy in hints.COLUMNS]
        assert re.findall(r"-?[\d.]+", cells) == [*hits, *map(per_cent, row["part_of_gap"].values())], (agents, size)
    assert not measured
