"""What the scheduler side knows of one of vLLM's requests, in one record: forgetting a request is one ``pop``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cargohold.deadlines import Patience
from cargohold.integrations.vllm.request_view import SeenRequest
from cargohold.protocol import EXPLAIN, CacheReport, HintOutcome


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request, from its arrival to its end.

    Attributes:
        seen: the connector's view of it.
        is_bypass: whether the connector does not know it, because of what it is or asks: no cache could serve it.
        notes: for its client, besides the connector's own report.
        outcomes: answers to the hints of its client.
        num_computed: number of its tokens on the device when vLLM last asked; ``None`` before that.
        is_admitted: whether its prompt was counted: after a failed load or a preemption it is admitted again.
        has_failed: whether a load of it failed: asking again might fail again, for ever.
        ends_in_step: whether the connector has just promised a synchronous load.
        is_parked: whether it was given blocks for a load and has not run since.
        patience: decides when it has been deferred for too long; ``None`` unless it is deferred.
        deferred_s: for how long it has been, between steps at whose ends vLLM asked again; ``None`` before the first.
        first_token: the label under which its time to the first token is counted; empty if it is not, or was.
        blocks: its block tables as vLLM reported them last, for versions in which they are to be noted.
    """

    seen: SeenRequest
    is_bypass: bool = False
    notes: list[str] = field(default_factory=list)
    outcomes: list[HintOutcome] = field(default_factory=list)
    num_computed: int | None = None
    is_admitted: bool = False
    has_failed: bool = False
    ends_in_step: bool = False
    is_parked: bool = False
    patience: Patience | None = None
    deferred_s: float | None = None
    first_token: str = ""
    blocks: Sequence[Sequence[Any]] = ()

    @property
    def own(self) -> Any:
        """VLLM's request."""
        return self.seen.own

    @property
    def request_id(self) -> str:
        return self.seen.request_id

    def note(self, sentence: str) -> None:
        """Note a sentence once: vLLM asks again in every step in which the request waits."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def bypass(self, why: str) -> None:
        """Note that the request does not use the cache."""
        self.is_bypass = True
        self.note(f"nothing was looked up: {why}")

    def explanation(self, report: CacheReport) -> Mapping[str, Any]:
        """Return the explanation under its key, if the client has asked for one."""
        wishes = getattr(self.own, "kv_transfer_params", None)
        if not (isinstance(wishes, Mapping) and wishes.get(EXPLAIN)):
            return {}
        notes = [*map(str, self.outcomes), *report.notes, *self.notes]
        return {EXPLAIN: {"restored_tokens": dict(report.restored_tokens), "notes": notes}}


def why_all_computed(request: Any) -> str | None:
    """Why a request needs every token of its prompt in a forward pass; ``None`` if it does not."""
    # vLLM sets the option below for these requests, unless the client has set it to False: then vLLM would answer with memory
    # that nothing has written.
    if getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None:
        return "log probabilities of a prompt need all of it computed"
    if getattr(request, "skip_reading_prefix_cache", False):
        return "the request skips the prefix cache (skip_reading_prefix_cache)"  # vLLM would ignore tokens that are offered
    return None
