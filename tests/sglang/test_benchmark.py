"""The benchmark runs, at a tiny size, and shows what faults do to each storage."""

from __future__ import annotations

import pytest

from benchmarks import sglang


def test_the_comparison_with_the_file_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "WAIT_S", 0.1)
    result = sglang.run(quick=True)
    assert all(row["store_mb_per_s"] > 0 and row["load_mb_per_s"] > 0 for row in result["median"].values())
    ours, theirs = (result["faults"][name] for name in sglang.NAMES)
    for fault in ("bits_flip", "other_weights"):
        assert ours[fault] == {"found": 0, "wrong": 0} and theirs[fault]["wrong"] == 8
    assert ours["kill_9"] == {"found": 8, "wrong": 0, "files_left_behind": 0}
    assert ours["full_disk"].get("wrong", 0) == 0
    assert ours["hanging_disk"]["returned"] and not theirs["hanging_disk"]["returned"]
