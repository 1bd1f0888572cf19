"""Benchmarks of bookkeeping and policies run, at tiny sizes, and say what they are for."""

from __future__ import annotations

from benchmarks import bookkeeping, policies


def test_bookkeeping() -> None:
    result = bookkeeping.run(quick=True)
    measured = {(row["manager"], row["operation"]) for row in result["rows"]}
    assert {("cargohold lru", operation) for operation in bookkeeping.OPERATIONS} <= measured
    assert all(row["ns_per_key"] > 0 and row["longest_call_ms"] > 0 for row in result["rows"])
    (admission,) = result["admission"]
    assert 0 < admission["first_look_up_ms"] <= admission["whole_ms"]
    assert admission["asked_again_ms"] > 0


def test_policies() -> None:
    result = policies.run(quick=True)
    (row,) = result["rows"]
    assert row["hits"]["fifo"] < row["hits"]["lru"] <= row["hits"]["optimum"] <= row["without_eviction"]
    assert result["worst_against_lru_in_points"] > -1
