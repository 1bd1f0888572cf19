"""Workers' reports, converted from the form in which vLLM carries them to the simulation's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cargohold.engine.core.step import StepOutput
from cargohold.protocol import FinishedTransfers, KVConnectorOutput, TransferOutcome, add_stats


class InOrder(set[str]):
    """A set of strings that is iterated in sorted order: the order of a plain one differs from process to process."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__()))


def in_order(report: Any) -> None:
    """Make vLLM go through the requests of a report in the same order every time. Mutates the report."""
    for name in ("finished_sending", "finished_recving", "failed_recving"):
        setattr(report, name, InOrder(getattr(report, name) or ()))


def united(answer: Any) -> StepOutput:
    """Convert vLLM's model runner output. Ranks are not counted: a job is in the result if one of them has reported it."""
    report = answer.kv_connector_output
    message = None if report is None else report.kv_connector_worker_meta
    reports = [] if message is None else [message.reports[rank] for rank in sorted(message.reports)]
    united = KVConnectorOutput()
    for rank in reports:
        united = _both(united, rank.output)
    return StepOutput(
        sampled={name: answer.sampled_token_ids[at][-1] for name, at in _with_tokens(answer)},
        connector=united,
        connector_error=next((rank.error for rank in reports if rank.error is not None), None),
    )


def _with_tokens(answer: Any) -> Iterator[tuple[str, int]]:
    return ((name, at) for name, at in answer.req_id_to_index.items() if answer.sampled_token_ids[at])


def _both(left: KVConnectorOutput, right: KVConnectorOutput) -> KVConnectorOutput:
    one, two = left.finished, right.finished
    ids = {*one.jobs, *two.jobs}
    done = TransferOutcome.DONE
    return KVConnectorOutput(
        finished=FinishedTransfers(
            finished_sending=one.finished_sending | two.finished_sending,
            finished_recving=one.finished_recving | two.finished_recving,
            failed_recving=one.failed_recving | two.failed_recving,
            jobs={ident: max(one.jobs.get(ident, done), two.jobs.get(ident, done)) for ident in sorted(ids)},
            step_failed=one.step_failed or two.step_failed,
        ),
        invalid_block_ids=left.invalid_block_ids | right.invalid_block_ids,
        stats=add_stats(left.stats, right.stats),
    )
