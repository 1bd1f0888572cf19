"""The output aggregator: every id passed on exactly once, in the step of the last report, whatever the interleaving."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cargohold.errors import ContractError
from cargohold.protocol import (
    KVConnectorOutput,
    OutputAggregator,
    TransferOutcome,
    messages,
    metrics,
)


@dataclass(frozen=True)
class Trail:
    """Worker metadata that remembers in which order it was merged."""

    ranks: tuple[int, ...]

    def aggregate(self, other: Trail) -> Trail:
        return Trail(self.ranks + other.ranks)


def output(rank: int = 0, **finished: object) -> KVConnectorOutput:
    return KVConnectorOutput(**finished, kv_connector_worker_meta=Trail((rank,)))  # type: ignore[arg-type]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, int, dict[tuple[int, int], tuple[int, TransferOutcome]]]:
    """World size, number of steps, and for every (rank, job) the step it reports in and the outcome."""
    world_size, num_jobs, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    reports = {
        (rank, job): (draw(st.integers(0, num_steps - 1)), draw(st.sampled_from(TransferOutcome)))
        for rank in range(world_size)
        for job in range(num_jobs)
    }
    return world_size, num_steps, reports


@given(schedules())
def test_jobs_complete_with_the_last_report_and_the_worst_outcome(
    schedule: tuple[int, int, dict[tuple[int, int], tuple[int, TransferOutcome]]],
) -> None:
    world_size, num_steps, reports = schedule
    expected: dict[int, dict[int, TransferOutcome]] = defaultdict(dict)
    for job in {job for _, job in reports}:
        of_job = [reports[rank, job] for rank in range(world_size)]
        expected[max(step for step, _ in of_job)][job] = max(outcome for _, outcome in of_job)
    aggregator = OutputAggregator(world_size)
    for step in range(num_steps):
        outputs: list[KVConnectorOutput | None] = []
        for rank in range(world_size):
            jobs = {job: outcome for (of, job), (at, outcome) in reports.items() if (of, at) == (rank, step)}
            outputs.append(KVConnectorOutput(jobs=jobs) if jobs else None)
        assert aggregator.aggregate(outputs).jobs == expected[step]
    assert aggregator.num_incomplete == 0


@given(schedules())
def test_requests_complete_like_jobs_and_fail_if_any_rank_failed_them(
    schedule: tuple[int, int, dict[tuple[int, int], tuple[int, TransferOutcome]]],
) -> None:
    world_size, num_steps, reports = schedule
    ended: dict[str, tuple[int, bool]] = {}
    for job in {job for _, job in reports}:
        of_job = [reports[rank, job] for rank in range(world_size)]
        failed = any(outcome is not TransferOutcome.DONE for _, outcome in of_job)
        ended[f"r{job}"] = (max(step for step, _ in of_job), failed)
    aggregator = OutputAggregator(world_size)
    for step in range(num_steps):
        outputs = []
        for rank in range(world_size):
            mine = {f"r{job}": outcome for (of, job), (at, outcome) in reports.items() if (of, at) == (rank, step)}
            failed_ids = frozenset(ident for ident, outcome in mine.items() if outcome is not TransferOutcome.DONE)
            outputs.append(
                output(
                    rank, finished_sending=frozenset(mine), finished_recving=frozenset(mine), failed_recving=failed_ids
                )
            )
        merged = aggregator.aggregate(outputs)
        now = {ident for ident, (at, _) in ended.items() if at == step}
        assert merged.finished_sending == merged.finished_recving == now
        assert merged.failed_recving == {ident for ident in now if ended[ident][1]}


A = metrics.STORED.of("a")


def test_metadata_and_stats_are_merged_in_rank_order_and_blocks_united() -> None:
    outputs = [
        KVConnectorOutput(
            invalid_block_ids=frozenset({rank, 7}),
            kv_connector_worker_meta=Trail((rank,)),
            kv_connector_stats={A: rank, metrics.STORED.of(f"b{rank}"): 1},
        )
        for rank in range(3)
    ]
    merged = OutputAggregator(3).aggregate(outputs)
    assert merged.kv_connector_worker_meta == Trail((0, 1, 2))
    assert merged.kv_connector_stats == {A: 3, **{metrics.STORED.of(f"b{rank}"): 1 for rank in range(3)}}
    assert merged.invalid_block_ids == {0, 1, 2, 7}
    assert outputs[0].kv_connector_stats == {A: 0, metrics.STORED.of("b0"): 1}, "inputs are left alone"


def test_a_worker_that_reports_without_metadata_takes_no_part_in_merging_it() -> None:
    silent = KVConnectorOutput(kv_connector_stats={A: 1})
    merged = OutputAggregator(4).aggregate([silent, output(1), silent, output(3)])
    assert merged.kv_connector_worker_meta == Trail((1, 3))


@pytest.mark.parametrize("failed", [(True, False), (False, True), (True, True), (False, False)])
def test_a_step_failed_if_it_failed_on_any_rank(failed: tuple[bool, ...]) -> None:
    """Others may have computed rightly: tokens come from all of them together."""
    outputs = [output(rank, step_failed=has_failed) for rank, has_failed in enumerate(failed)]
    assert OutputAggregator(2).aggregate(outputs).step_failed is any(failed)


def test_a_second_report_of_the_same_rank_is_refused() -> None:
    aggregator = OutputAggregator(2)
    aggregator.aggregate([output(jobs={1: TransferOutcome.DONE}), None])
    with pytest.raises(ContractError, match=r"worker 0 reported end of job 1 twice"):
        aggregator.aggregate([output(jobs={1: TransferOutcome.DONE}), None])


def test_a_failure_that_is_not_an_end_is_refused() -> None:
    with pytest.raises(ContractError, match="failed but not as finished"):
        OutputAggregator(1).aggregate([output(failed_recving=frozenset({"r"}))])


def test_fewer_reports_suffice_if_the_connector_says_so() -> None:
    aggregator = OutputAggregator(4, expected_finished_count=2)
    assert not aggregator.aggregate([output(finished_sending=frozenset({"r"})), None, None, None]).finished_sending
    merged = aggregator.aggregate([None, None, None, output(finished_sending=frozenset({"r"}))])
    assert merged.finished_sending == {"r"}


def test_a_worker_may_raise_the_expectation() -> None:
    aggregator = OutputAggregator(3, expected_finished_count=1)
    raised = output(finished_sending=frozenset({"r"}), expected_finished_count=3)
    assert not aggregator.aggregate([raised, None, None]).finished_sending
    assert not aggregator.aggregate([None, output(finished_sending=frozenset({"r"})), None]).finished_sending
    assert aggregator.aggregate([None, None, output(finished_sending=frozenset({"r"}))]).finished_sending == {"r"}


@pytest.mark.parametrize("count", [0, 3, -1])
def test_an_expectation_that_can_never_be_met_is_refused(count: int) -> None:
    with pytest.raises(ContractError, match=r"there are 2 worker"):
        OutputAggregator(2, expected_finished_count=count)


def test_a_late_report_does_not_count_for_the_next_transfer_under_the_same_id() -> None:
    aggregator = OutputAggregator(3, expected_finished_count=2)
    ended = output(finished_recving=frozenset({"r"}))
    assert aggregator.aggregate([ended, ended, None]).finished_recving == {"r"}
    assert not aggregator.aggregate([ended, None, ended]).finished_recving, "the last report is of the first"
    assert aggregator.aggregate([None, ended, None]).finished_recving == {"r"}


def test_a_worker_cannot_lower_the_expectation() -> None:
    aggregator = OutputAggregator(3)
    lowered = output(jobs={1: TransferOutcome.DONE}, expected_finished_count=1)
    assert not aggregator.aggregate([lowered, None, None]).jobs


def test_of_transfers_that_some_workers_never_report_only_so_many_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "MAX_REMEMBERED", 2)
    aggregator = OutputAggregator(2, expected_finished_count=1)
    reports = [output(jobs={job: TransferOutcome.DONE}) for job in range(4)]
    assert [set(aggregator.aggregate([report, None]).jobs) for report in reports] == [{0}, {1}, {2}, {3}]
    late = [set(aggregator.aggregate([None, report]).jobs) for report in reversed(reports)]
    assert late == [set(), set(), {1}, {0}], "the first two were forgotten"


@given(st.data())
def test_each_transfer_is_passed_on_once_whatever_count_is_expected(data: st.DataObject) -> None:
    """Against a naive model: the n-th transfer of an id ends when enough workers have reported the id n times."""
    world_size = data.draw(st.integers(1, 4), "world size")
    expected = data.draw(st.integers(1, world_size), "expected")
    aggregator = OutputAggregator(world_size, expected)
    started, ended = Counter("ab"), Counter[str]()
    reported: list[Counter[str]] = [Counter() for _ in range(world_size)]
    worst: dict[tuple[str, int], bool] = defaultdict(bool)

    def report(rank: int) -> KVConnectorOutput:
        ids = [ident for ident in "ab" if reported[rank][ident] < started[ident] and data.draw(st.booleans())]
        failed = [ident for ident in ids if data.draw(st.booleans())]
        reported[rank].update(ids)
        for ident in ids:
            worst[ident, reported[rank][ident]] |= ident in failed
        return output(finished_recving=frozenset(ids), failed_recving=frozenset(failed))

    for _ in range(data.draw(st.integers(1, 12), "steps")):
        outputs: list[KVConnectorOutput | None] = [report(rank) for rank in range(world_size)]
        if data.draw(st.integers(0, 5)) == 0:
            expected = data.draw(st.integers(expected, world_size), "raised")
            assert outputs[0] is not None
            outputs[0] = replace(outputs[0], expected_finished_count=expected)
        now = {
            ident
            for ident in "ab"
            if ended[ident] < started[ident] and sum(counts[ident] >= started[ident] for counts in reported) >= expected
        }
        merged = aggregator.aggregate(outputs)
        assert merged.finished_recving == now
        assert merged.failed_recving == {ident for ident in now if worst[ident, started[ident]]}
        ended.update(now)
        started.update(ident for ident in "ab" if ended[ident] == started[ident] and data.draw(st.booleans(), "again"))


def test_nothing_from_nobody_is_nothing() -> None:
    merged = OutputAggregator(2).aggregate([None, KVConnectorOutput()])
    assert merged.is_empty()


@dataclass(frozen=True)
class Unmergeable:
    """Worker metadata whose author forgot that there may be several workers."""

    def aggregate(self, other: Unmergeable) -> Unmergeable:
        raise NotImplementedError("one worker only")


def test_metadata_that_cannot_be_merged_is_its_connectors_fault() -> None:
    outputs = [KVConnectorOutput(kv_connector_worker_meta=Unmergeable()) for _ in range(2)]
    assert OutputAggregator(1).aggregate(outputs[:1]).kv_connector_worker_meta == Unmergeable()
    with pytest.raises(ContractError, match="aggregate raised NotImplementedError"):
        OutputAggregator(2).aggregate(outputs)
