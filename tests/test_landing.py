"""README and the landing page show the same three figures: those of one file of results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
LANDING = json.loads((REPOSITORY / "benchmarks" / "results" / "landing.json").read_text(encoding="utf-8"))
RESTORE, VLLM, STEP = LANDING["restore"], LANDING["vllm"], LANDING["step"]
SHOWN = {
    "restore": f"{RESTORE['times_sooner']:.0f}",
    "vllm": f"{VLLM['over_device_hit']:.2f}",
    "step": f"{STEP['percent_of_theirs']:.0f}",
}


def results(name: str) -> Any:
    return json.loads((REPOSITORY / "benchmarks" / "results" / f"{name}.json").read_text())["result"]


def test_readme_shows_them() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    seconds = (
        f"{RESTORE['restored_s']:.2f} s instead of {RESTORE['recomputed_s']:.2f} s, {SHOWN['restore']} times sooner"
    )
    assert seconds in readme
    assert f"a restore takes {SHOWN['vllm']} times as long as a hit on the device" in readme
    assert f"tokens generate, Cargohold adds {SHOWN['step']} %" in readme.replace("\n", " ")


def test_the_landing_page_and_its_pictures_show_them() -> None:
    page = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
    told = re.findall(r"!\[.*?: ([\d.]+) .*?\]\(figures/headline-(\w+)\.svg\)", page)
    assert {name: figure for figure, name in told} == SHOWN
    for name, figure in SHOWN.items():
        picture = (REPOSITORY / "docs" / "figures" / f"headline-{name}.svg").read_text(encoding="utf-8")
        (large,) = re.findall(r"font-size: 48px[^>]*>([\d.]+)\D<", picture)
        assert large == figure


def test_the_file_follows_from_what_benchmarks_have_measured() -> None:
    restores = {row["context_tokens"]: row for row in results("restore")["rows"]}
    row = restores[RESTORE["context_tokens"]]
    assert (row["restored_s"], row["recomputed_s"]) == (RESTORE["restored_s"], RESTORE["recomputed_s"])
    step = results("generating")["rows"][0]["generating_us_per_step_beyond_no_connector"]
    assert (step["cargohold"], step["vllm"]) == (STEP["us"], STEP["theirs_us"])
