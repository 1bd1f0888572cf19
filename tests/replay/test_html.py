"""The page stands alone, says what the report says, and survives names that look like markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cargohold.errors import ConfigError
from cargohold.lab.replay.costs import CostModel
from cargohold.lab.replay.html import Axes, line_chart, page, plan_page, write_text
from cargohold.lab.replay.planning import Planner, SizingBudget
from cargohold.lab.replay.replaying import Capacities, replay
from cargohold.lab.replay.report import Report
from cargohold.lab.replay.traces import TraceRequest
from cargohold.lab.replay.workload import load_workload

OUTSIDE = re.compile(r"url\((?!#)|@import|<script|<link")
PATHS = [[1, 2, 3], [1, 2, 4], [7, 8], [1, 2, 3]]


def report(*policies: str, sizes: tuple[Capacities, ...] = ((1,), (3,)), costs: CostModel | None = None) -> Report:
    workload = load_workload(TraceRequest(hash_ids=path, block_tokens=16) for path in PATHS)
    results = [result for policy in policies for result in replay(workload, policy, sizes)]
    return Report(("<b>&trace",), workload, costs or CostModel(), tuple(results), ("Mind the <gap>.",))


class Reader(HTMLParser):
    """Text and structure; fails on elements that are not closed in order."""

    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert name not in ("src", "href"), f"{tag} refers to {value}"
            assert not name.endswith(":href") or (value or "").startswith("#"), f"{tag} refers to {value}"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_needs_nothing_from_outside() -> None:
    text = page(report("lru", "optimum", "infinite"))
    reader = read(text)
    assert not OUTSIDE.search(text)
    assert "prefers-color-scheme: dark" in text
    assert reader.tags.count("svg") == 1
    assert {"lru", "optimum", "infinite", "Mind the <gap>.", "Replay of <b>&trace"} <= set(reader.text)


def test_the_page_of_a_plan_begins_with_the_recommendation() -> None:
    """Each chart has a mark at what is recommended."""
    paths = [[at % 7, 100 + at % 7] for at in range(60)]
    workload = load_workload(
        TraceRequest(hash_ids=path, block_tokens=16, timestamp_ms=1000 * at) for at, path in enumerate(paths)
    )
    costs = CostModel(bytes_per_token=1 << 16, prefill_tokens_per_s=100.0)
    planner = Planner(
        workload,
        costs,
        "arc",
        SizingBudget(host_bytes=1 << 20, disk_bytes=16 << 20, disk_price_s=1e-6),
    )
    results = [one for name in ("arc", "lru", "optimum", "infinite") for one in replay(workload, name, planner.curve())]
    results += replay(workload, "arc", planner.further(results))
    plan = planner.plan(results)
    text = plan_page(planner, plan, Report(("t",), workload, costs, tuple(results), ("A <remark>.",)), ["Buy <this>."])
    reader = read(text)
    assert reader.tags.count("svg") == text.count('id="mark"') == 2
    assert not OUTSIDE.search(text)
    assert reader.text.index("Buy <this>.") < reader.text.index("What the next GiB is worth")
    assert {"arc", "lru", "optimum", "price", "A <remark>.", "max_daily_bytes"} <= set(reader.text)


def test_the_table_has_the_numbers() -> None:
    costs = CostModel(bytes_per_token=1 << 16, prefill_tokens_per_s=1.0)
    cells = "|".join(read(page(report("lru", sizes=((2, 4), (3, 4)), costs=costs))).text)
    assert "prefill saved" in cells and "loaded" in cells
    assert "2.0 MiB (33.3%) + 4.0 MiB (66.7%)" in cells
    assert re.search(r"lru\|3\.0 MiB \(50%\) \+ 4\.0 MiB \(66\.7%\)\|36\.36\|36\.36\|3\.0 MiB \+ 1\.0 MiB\|", cells)


def test_a_page_of_the_infinite_cache_alone() -> None:
    assert "Nothing to draw" in page(report("infinite"))


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="html"):
        write_text(tmp_path / "no" / "page.html", page(report("lru")))


@pytest.mark.parametrize("points", [[(5.0, 0.0)], [(1.0, 0.0), (2.0, 0.0)], [(1.0, 3.0), (1000.0, 1e9)]])
@pytest.mark.parametrize("is_log_y", [False, True])
def test_charts_of_little(points: list[tuple[float, float]], is_log_y: bool) -> None:
    axes = Axes("a <title>", "x", str, "{:g}".format, is_log_y=is_log_y)
    chart = line_chart({"one": points, "two": [(1.0, 1.0)]}, axes)
    assert "nan" not in chart and "inf" not in chart
    assert {"a <title>", "one", "two"} <= {text.strip() for text in read(chart).text}
    assert chart == line_chart({"one": points, "two": [(1.0, 1.0)]}, axes), "the same each time"
