"""The benchmark of tiers runs, so that it cannot rot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import tiers


@pytest.mark.parametrize("yardstick", ["fio", "dd"])
def test_the_benchmark_of_tiers_has_all_of_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, yardstick: str
) -> None:
    if shutil.which(yardstick) is None:
        pytest.skip(f"{yardstick} is not installed")
    if yardstick == "dd":
        which = shutil.which
        monkeypatch.setattr(shutil, "which", lambda name: None if name == "fio" else which(name))
    monkeypatch.setenv("CARGOHOLD_BENCH_DIR", str(tmp_path))
    result = tiers.run(quick=True)
    assert yardstick in result["workload"]["yardstick"]
    for row in result["bandwidth"]:
        assert all(row[pattern]["tier_mb_per_s"] > 0 for pattern in tiers.PATTERNS)
    assert all(row["open_s"] > 0 for row in result["start"])
    assert not list(tmp_path.iterdir()), "it leaves nothing behind"
