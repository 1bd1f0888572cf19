"""Configuration of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cargohold.engine.core.roster import QueuePolicy


class LoadFailurePolicy(Enum):
    """What becomes of a request whose load failed."""

    RECOMPUTE = "recompute"
    """The request's tokens are computed instead, which only takes time."""
    FAIL = "fail"
    """The request ends with an error."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policies of the scheduler.

    Attributes:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens computed in one step; longer prompts are computed in chunks.
        max_model_len: longest sequence, prompt and generated tokens together.
        policy: which request is served first.
        prefix_caching: whether blocks on the device are reused across requests.
        load_failure_policy: what becomes of a request whose load failed.
        load_timeout_s: a connector that has not ended a load after this time is turned off. A connector has deadlines of
            its own; this one is for connectors that miss them.
        emit_events: whether KV events are collected.
        emit_salted_events: whether that includes events of salted requests' blocks.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: QueuePolicy = QueuePolicy.FCFS
    prefix_caching: bool = True
    load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE
    load_timeout_s: float = 120.0
    emit_events: bool = False
    emit_salted_events: bool = False

    @property
    def give_up_loads_after_s(self) -> float:
        """See ``SchedulerEnvironment``: early enough that a connector that gives a load up is not turned off for it."""
        return self.load_timeout_s / 2
