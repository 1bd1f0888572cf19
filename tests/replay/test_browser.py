"""The page in a real browser: in light and dark, wide and narrow, nothing is cut off, covered, or too faint to read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from cargohold.lab.replay.advice import recommend
from cargohold.lab.replay.costs import CostModel
from cargohold.lab.replay.html import page, plan_page
from cargohold.lab.replay.planning import Planner, SizingBudget
from cargohold.lab.replay.replaying import replay
from cargohold.lab.replay.report import Report
from cargohold.lab.replay.traces import read_trace
from cargohold.lab.replay.workload import load_workload
from tests.data.make_trace import TRACE

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
POLICIES = ("fifo", "lru", "arc", "optimum", "infinite")
COSTS = CostModel(bytes_per_token=1 << 17, prefill_tokens_per_s=5000.0)
SCHEMES = {"dark": 0, "light": 1}
PAPER = {"dark": "rgb(20, 24, 29)", "light": "rgb(255, 255, 255)"}

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome to look at the page with"),
]

LOOK = """
<script>
const box = element => { const b = element.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
const all = (root, query) => [...root.querySelectorAll(query)];
const seen = {
  paper: getComputedStyle(document.body).backgroundColor,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  charts: all(document, "svg").map(svg => ({
    box: box(svg), texts: all(svg, "text").map(box), lines: all(svg, "[id^='line ']").length,
    colours: all(svg, "text").map(text => getComputedStyle(text).fill),
    strokes: all(svg, "[id^='line '] > path").map(line => getComputedStyle(line).stroke),
  })),
  text: getComputedStyle(document.querySelector("td")).color,
};
const pre = document.createElement("pre"); pre.id = "seen"; pre.textContent = JSON.stringify(seen); document.body.append(pre);
</script>
"""


def replay_page() -> str:
    workload = load_workload(read_trace([TRACE]))
    results = [result for policy in POLICIES for result in replay(workload, policy, [(16,), (128,), (1024,)])]
    return page(Report(("trace.jsonl",), workload, COSTS, tuple(results), ("A remark.",)))


def a_plan_page(disk_writes_per_day: float = 1.0) -> str:
    workload = load_workload(read_trace([TRACE]))
    budget = SizingBudget(host_bytes=1 << 30, disk_bytes=4 << 30, disk_writes_per_day=disk_writes_per_day)
    planner = Planner(workload, COSTS, "arc", budget)
    results = [one for name in ("arc", "lru", "optimum", "infinite") for one in replay(workload, name, planner.curve())]
    results += replay(workload, "arc", planner.further(results))
    plan = planner.plan(results)
    report = Report(("a_long_name_of_a_trace_of_last_week.jsonl.zst",), workload, COSTS, tuple(results), ("A remark.",))
    return plan_page(planner, plan, report, list(recommend(planner, plan)))


PAGES: dict[str, tuple[Callable[[], str], list[int]]] = {
    "replay": (replay_page, [5]),
    "plan": (a_plan_page, [2, 3]),
    "plan_with_disk": (partial(a_plan_page, 1000.0), [2, 3]),
}
"""Per kind of page, what makes it, and how many lines its charts have."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with pages that measure themselves."""
    directory = tmp_path_factory.mktemp("page")
    for kind, (make, _) in PAGES.items():
        text = make().replace("</body>", f"{LOOK}</body>")
        (directory / f"{kind}.html").write_text(text, encoding="utf-8")
    return directory


def look(file: Path, scheme: str, width: int, *more: str) -> str:
    """What the browser prints of a page."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={file.parent / 'profile'}",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--window-size={width},900", *more, file.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(colour: str, paper: str) -> float:
    light, dark = sorted((luminance(colour), luminance(paper)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def overlap(one: list[float], other: list[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] + 2 < other[3] and other[1] + 2 < one[3]


@pytest.mark.parametrize("kind", PAGES)
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 600), ("light", 390)])
def test_it_can_be_read(written: Path, kind: str, scheme: str, width: int) -> None:
    told = look(written / f"{kind}.html", scheme, width, "--dump-dom")
    found = re.search(r'<pre id="seen">(.*?)</pre>', told, re.DOTALL)
    assert found is not None
    seen: dict[str, Any] = json.loads(unescape(found[1]))
    assert seen["paper"] == PAPER[scheme]
    assert seen["overflow"] <= 0, "the page must be scrolled sideways"
    assert contrast(seen["text"], seen["paper"]) >= 7
    assert [chart["lines"] for chart in seen["charts"]] == PAGES[kind][1]
    for chart in seen["charts"]:
        left, top, right, bottom = chart["box"]
        texts = chart["texts"]
        for text in texts:
            assert left - 1 <= text[0] and text[2] <= right + 1 and top - 1 <= text[1] and text[3] <= bottom + 1, (
                "cut off"
            )
        assert not any(overlap(one, other) for at, one in enumerate(texts) for other in texts[:at]), "covered"
        assert min(contrast(colour, seen["paper"]) for colour in chart["colours"]) >= 4.5
        assert min(contrast(colour, seen["paper"]) for colour in chart["strokes"]) >= 3


def test_a_screenshot_can_be_taken_without_network(written: Path) -> None:
    image = written / "page.png"
    look(written / "replay.html", "dark", 1000, f"--screenshot={image}", "--host-resolver-rules=MAP * ~NOTFOUND")
    data = image.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") == 1000
    assert len(data) > 20_000, "an empty page compresses to less"
