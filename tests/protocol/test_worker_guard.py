"""A worker side that raises is stopped: what it had said by then counts, and nothing else of it is called."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest

from cargohold.protocol import (
    NOTHING_TO_REPORT,
    EmptyMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorTransferResults,
    KVConnectorWorker,
    Stats,
    TransferOutcome,
    WorkerConnectorGuard,
    metrics,
)


class Scripted(KVConnectorWorker):
    """Notes what is called, and raises where it is told to."""

    def __init__(self, raises_in: str | None = None) -> None:
        self.raises_in = raises_in
        self.calls: list[str] = []
        self.finished = KVConnectorTransferResults()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._note("bind_connector_metadata")

    def handle_preemptions(self) -> None:
        self._note("handle_preemptions")

    def start_load_kv(self) -> None:
        self._note("start_load_kv")

    def wait_for_save(self) -> None:
        self._note("wait_for_save")

    def get_transfer_results(self, finished_req_ids: AbstractSet[str]) -> KVConnectorTransferResults:
        self._note("get_transfer_results")
        return self.finished

    def get_block_ids_with_load_errors(self) -> AbstractSet[int]:
        self._note("get_block_ids_with_load_errors")
        return {7}

    def get_kv_connector_stats(self) -> Stats:
        self._note("get_kv_connector_stats")
        return {metrics.STORED.of("host"): 1}

    def clear_connector_metadata(self) -> None:
        self._note("clear_connector_metadata")

    def shutdown(self) -> None:
        self._note("shutdown")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.raises_in:
            raise ZeroDivisionError


@dataclass(frozen=True)
class Orders:
    loads: tuple[int, ...] = ()

    def aggregate(self, other: Orders) -> Orders:
        return self


BEFORE_THE_MODEL = ["bind_connector_metadata", "handle_preemptions", "start_load_kv"]


@pytest.mark.parametrize("at", range(3))
def test_it_is_stopped_at_the_first_call_that_raises(at: int) -> None:
    inner = Scripted(BEFORE_THE_MODEL[at])
    guard = WorkerConnectorGuard(inner)
    guard.begin(EmptyMetadata())
    guard.wait_for_save()
    output = guard.collect(frozenset())
    assert inner.calls == [*BEFORE_THE_MODEL[: at + 1], "shutdown"]
    assert output.step_failed
    assert BEFORE_THE_MODEL[at] in (guard.take_error() or "")
    # From the next step on it is as if there were none.
    guard.begin(EmptyMetadata())
    assert guard.collect(frozenset()).is_empty()
    assert guard.take_error() is None


def test_a_message_to_a_worker_side_that_declares_none_is_refused() -> None:
    """In another process it would be an empty one: what was to be loaded would be missing, and nobody would know."""
    inner = Scripted()
    guard = WorkerConnectorGuard(inner)
    guard.begin(Orders(loads=(1,)))
    assert inner.calls == ["shutdown"]
    assert "it received a Orders, and declares no metadata_type" in (guard.take_error() or "")
    assert guard.collect(frozenset()).step_failed
    guard.begin(Orders(loads=(2,)))  # it takes a step until the scheduler knows
    assert guard.take_error() is None
    inner = Scripted()
    inner.metadata_type = Orders
    WorkerConnectorGuard(inner).begin(Orders())
    assert inner.calls == BEFORE_THE_MODEL


def test_what_it_said_before_it_raised_counts() -> None:
    inner = Scripted("get_kv_connector_stats")
    inner.finished = KVConnectorTransferResults(finished_recving=frozenset({"r1"}), failed_recving=frozenset({"r1"}))
    guard = WorkerConnectorGuard(inner)
    output = guard.collect(frozenset())
    assert output.finished_recving == output.failed_recving == {"r1"}
    assert output.step_failed
    assert output.invalid_block_ids == {7}
    assert output.kv_connector_stats == {}
    assert "get_kv_connector_stats" in (guard.take_error() or "")


def test_loads_whose_bad_blocks_it_could_not_name_have_failed() -> None:
    inner = Scripted("get_block_ids_with_load_errors")
    inner.finished = KVConnectorTransferResults(
        finished_recving=frozenset({"r1", "r2"}), failed_recving=frozenset({"r1"})
    )
    output = WorkerConnectorGuard(inner).collect(frozenset())
    assert output.failed_recving == {"r1", "r2"}
    assert output.invalid_block_ids == frozenset()


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("get_transfer_results", None, "is not a KVConnectorTransferResults"),
        ("get_transfer_results", KVConnectorTransferResults(finished_recving=["a"]), "finished_recving="),  # type: ignore[arg-type]  # wrong on purpose
        ("get_transfer_results", KVConnectorTransferResults(finished_sending=frozenset({1})), "finished_sending="),  # type: ignore[arg-type]  # wrong on purpose
        ("get_transfer_results", KVConnectorTransferResults(jobs={"s1": TransferOutcome.DONE}), "jobs="),  # type: ignore[dict-item]  # wrong on purpose
        ("get_transfer_results", KVConnectorTransferResults(jobs={1: True}), "jobs="),  # type: ignore[dict-item]  # wrong on purpose
        ("get_block_ids_with_load_errors", {"7"}, "not block ids"),
        ("get_kv_connector_stats", None, "not time series and numbers"),
        ("get_kv_connector_stats", {metrics.STORED.of("host"): "many"}, "not time series and numbers"),
        ("get_kv_connector_stats", {"copies": 1}, "not time series and numbers"),
        ("get_kv_connector_stats", {metrics.STORED.of("host"): -1}, "counters from 0 on"),
    ],
)
def test_an_answer_that_no_executor_could_carry_stops_it(
    method: str, answer: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by writing a connector with names for its jobs: an engine with workers in other processes died of them."""
    inner = Scripted()
    monkeypatch.setattr(inner, method, Mock(__name__=method, return_value=answer))
    guard = WorkerConnectorGuard(inner)
    guard.begin(EmptyMetadata())
    output = guard.collect(frozenset())
    assert inner.calls[-1] == "shutdown"
    error = guard.take_error() or ""
    assert said in error and error.endswith(method)
    bad = frozenset({7}) if method == "get_kv_connector_stats" else frozenset[int]()
    assert output == KVConnectorOutput(step_failed=True, invalid_block_ids=bad)


def test_saying_nothing_stays_saying_nothing() -> None:
    """What is shared by all who have nothing to say is never changed."""
    guard = WorkerConnectorGuard(Scripted("get_transfer_results"))
    assert guard.collect(frozenset()) != NOTHING_TO_REPORT
    assert not NOTHING_TO_REPORT.step_failed
    assert NOTHING_TO_REPORT.is_empty()
