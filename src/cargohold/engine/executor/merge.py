"""Merges all workers' outputs of a step into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cargohold.engine.core.step import StepOutput
from cargohold.errors import ContractError
from cargohold.protocol import FinishedTransfers, KVConnectorOutput, OutputAggregator


def merge_outputs(aggregator: OutputAggregator, outputs: Sequence[StepOutput]) -> StepOutput:
    """Merge the outputs of one step, indexed by rank.

    Every rank samples the same tokens, so rank 0 speaks for all; but numbers that are not finite may be in one rank's part of
    the model.

    Mutates ``aggregator``. If a worker's connector broke a rule of reporting, the merged output carries that as the
    connector's error instead of its reports.
    """
    if len(outputs) == 1 and outputs[0].connector.is_empty() and not outputs[0].connector_error:
        return outputs[0]  # as in most steps of an engine with one worker
    sampled = _merge_sampled(outputs)
    errors = [f"worker {rank}: {out.connector_error}" for rank, out in enumerate(outputs) if out.connector_error]
    try:
        connector = aggregator.aggregate([output.connector for output in outputs])
    except ContractError as error:
        # The reports said which loads failed. Without them, nothing of the step can be trusted.
        failed = KVConnectorOutput(finished=FinishedTransfers(step_failed=True))
        return StepOutput(sampled=sampled, connector=failed, connector_error=error.rule)
    return StepOutput(sampled=sampled, connector=connector, connector_error="; ".join(errors) or None)


def _merge_sampled(outputs: Sequence[StepOutput]) -> Mapping[str, int | None]:
    not_finite = [name for output in outputs[1:] for name, token in output.sampled.items() if token is None]
    return {**outputs[0].sampled, **dict.fromkeys(not_finite)} if not_finite else outputs[0].sampled
