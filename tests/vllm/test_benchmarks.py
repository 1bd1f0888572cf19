"""Benchmarks that need vLLM, at tiny sizes."""

from __future__ import annotations

import pytest

from benchmarks import found, generating
from cargohold.connector.offloading import OffloadingScheduler

# Something that vLLM has since 0.32, whose scheduler the benchmark drives.
pytest.importorskip(
    "vllm.v1.metrics.cache_hit_source", reason="vLLM 0.32 has an environment of its own: make test-vllm"
)


def test_generating() -> None:
    (row,) = generating.run(quick=True)["rows"]
    assert set(row["generating_us_per_step"]) == set(generating.CONTENDERS)


def test_generating_fails_at_once_when_the_connector_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(OffloadingScheduler, "get_num_new_matched_tokens", fails)
    with pytest.raises(RuntimeError, match="cargohold was turned off"):
        generating.run(quick=True)


def test_found() -> None:
    (row,) = found.run(quick=True)["rows"]
    assert not row["lacking"]
    assert row["found_tokens"][found.ALONE][-1] > 0
