"""What sentences say of policies and hints is what benchmarks have measured; ``tools/texts.py`` checks the tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import hints, parts

REPOSITORY = Path(__file__).parents[1]


def rows_of(benchmark: str) -> list[dict[str, Any]]:
    file = REPOSITORY / "benchmarks" / "results" / f"{benchmark}.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["result"]["rows"]
    return rows


def text_of(page: str) -> str:
    """A page with one space between words."""
    return " ".join((REPOSITORY / "docs" / page).read_text(encoding="utf-8").split())


def per_cent(part: float) -> str:
    return f"{100 * part:.0f}"


def of_gap(hits: float, floor: float, best: float) -> float:
    return (hits - floor) / (best - floor)


def test_what_the_default_gains_on_traces() -> None:
    hits = [row["hits"] for row in rows_of("policies")]
    gains = [each["reuse-index"] - each["lru"] for each in hits]
    gaps = [of_gap(h["reuse-index"], h["lru"], h["optimum"]) for h in hits if h["optimum"] - h["lru"] >= 0.5]
    text = text_of("policies.md")
    assert f"| these | {per_cent(mean(gaps))} %, on average" in text
    assert f"of at least half a point | {-min(gains):.1f} points |" in text
    (chat,) = (r for r in rows_of("policies") if r["trace"].endswith("conversation_h1") and r["size_percent"] == 1)
    written = chat["written"]
    expected = (
        f"at 1 %, the default wrote {written['reuse-index']:.0f} chunks per 100 looked up, LRU {written['lru']:.0f}"
    )
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
    assert f"sessions with other beginnings | {closed} % | **{lost} points**" in text
    closed, lost = summary_of(parts.HELD_OUT)
    assert f"the seven of them that were held out | {closed} % | {lost} points |" in text
    closed, lost = summary_of(parts.TRIED)
    assert f"the default closed {closed} % of the gap, and lost up to {lost} points" in more


def test_what_hints_gain() -> None:
    shown = []
    for policy in ("reuse-index+hints", "reuse-index"):
        hits = [row["hits"] for row in rows_of("hints") if row["size_percent"] <= 2]
        closed = [of_gap(each[policy], each["lru"], each["optimum"]) for each in hits]
        shown += [per_cent(mean(closed)), per_cent(min(closed))]
    expected = (
        "hints closed {} % of the distance from `lru` to `optimum` on average, {} % at worst; "
        "the default alone {} %, {} % at worst"
    )
    assert expected.format(*shown) in text_of("replay.md")


def test_the_table_of_hints() -> None:
    shown = re.findall(r"^(LMCache's|coding) agents +([\d.]+) % +(.*)$", hints.__doc__ or "", re.MULTILINE)
    traces = {"LMCache's": "lmcache_agent_64", "coding": "claude_code_512_odd"}
    measured = {(row["trace"], f"{row['size_percent']:g}"): row for row in rows_of("hints")}
    for agents, size, cells in shown:
        row = measured.pop((traces[agents], size))
        hits = [f"{row['hits'][policy]:.1f}" for policy in hints.COLUMNS]
        assert re.findall(r"-?[\d.]+", cells) == [*hits, *map(per_cent, row["part_of_gap"].values())], (agents, size)
    assert not measured
