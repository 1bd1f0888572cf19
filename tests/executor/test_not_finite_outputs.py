"""Requests whose numbers are not finite on one rank: every way of an output to the scheduler says so."""

from __future__ import annotations

from cargohold.engine.core.request import ScheduledTokens, SchedulerStep, StepOutput
from cargohold.engine.executor import merge_outputs
from cargohold.engine.ranks.step_codec import StepCodec
from cargohold.protocol import KVConnectorOutput, OutputAggregator


def test_any_rank_can_say_so() -> None:
    outputs = [StepOutput(sampled={"a": 1, "b": 2}), StepOutput(sampled={"b": None, "c": None}), StepOutput()]
    merged = merge_outputs(OutputAggregator(3), outputs)
    assert merged.sampled == {"a": 1, "b": None, "c": None}


def test_it_is_not_lost_if_a_connector_breaks_a_rule_in_the_same_step() -> None:
    twice = KVConnectorOutput(finished_recving=frozenset({"r"}))
    aggregator = OutputAggregator(2)
    merge_outputs(aggregator, [StepOutput(connector=twice), StepOutput()])
    merged = merge_outputs(aggregator, [StepOutput({"a": 1}, twice), StepOutput({"a": None})])
    assert merged.connector_error is not None
    assert merged.sampled == {"a": None}


def test_it_survives_the_way_between_processes() -> None:
    codec = StepCodec()
    assert codec.decode_output(codec.encode_output(StepOutput({"a": None, "b": 3}))).sampled == {"a": None, "b": 3}


def test_workers_in_other_processes_learn_which_shares_are_the_first() -> None:
    shares = tuple(ScheduledTokens(str(first), (1,), 4, 4, ([1],), None, is_first=first) for first in (True, False))
    codec = StepCodec()
    decoded = codec.decode_step(codec.encode_step(SchedulerStep(scheduled=shares))).scheduled
    assert [share.is_first for share in decoded] == [True, False]
