"""Messages between scheduler and executor: a step, and its output.

They are structs, not dataclasses: several are made in every step, and a frozen dataclass takes ten times as long to make.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct, field

from cargohold.engine.core.request import Request
from cargohold.protocol import NOTHING_TO_REPORT, BlockIds, ConnectorMetadata, EmptyMetadata, KVConnectorOutput

_NO_METADATA: ConnectorMetadata = EmptyMetadata()


class SampleSpec(Struct, frozen=True):
    """How to choose a request's next token; see ``SamplingParams``.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: sample among so many likeliest tokens; 0 for all.
        top_p: sample among the likeliest tokens of this total probability.
        seed: the request's seed.
        index: number of the token to choose, counted from the first generated one. Seed and index decide the random draw,
            so a request that starts over draws the same.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    index: int = 0


GREEDY = SampleSpec()
"""The likeliest token: nothing is drawn, so seed and index do not matter."""


class ScheduledTokens(Struct, frozen=True):
    """One request's share of a step. Satisfies ``cargohold.protocol.ScheduledRequest``.

    Attributes:
        request_id: the request.
        token_ids: the tokens to compute.
        num_computed_tokens: position of the first of them.
        write_from: first position whose KV is to be written. The KV of earlier positions is in place, in blocks that other
            requests may be reading; such tokens are computed only for their logits.
        block_ids: block tables per group, valid during this step.
        sample: how to choose the next token; ``None`` if the prompt goes on after this step.
        is_first: whether it may be the request's first share since it was given its blocks. Rows of its last block may hold
            anything then, also in a block that a connector has filled in part.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    write_from: int
    block_ids: BlockIds
    sample: SampleSpec | None
    is_first: bool = True

    @property
    def num_scheduled_tokens(self) -> int:
        """How many tokens are computed."""
        return len(self.token_ids)


class SchedulerStep(Struct, frozen=True):
    """What workers do in one step. Satisfies ``cargohold.protocol.StepView``.

    Attributes:
        scheduled: the batch; empty in a step that only carries transfers.
        preempted_req_ids: requests that lost their blocks since the last step.
        finished_req_ids: requests that ended since the last step.
        connector_metadata: the connector's message to its workers.
        drop_connector: whether workers must stop their connectors, and wait for the transfers that these have in flight.
    """

    scheduled: tuple[ScheduledTokens, ...] = ()
    preempted_req_ids: frozenset[str] = frozenset()
    finished_req_ids: frozenset[str] = frozenset()
    connector_metadata: ConnectorMetadata = _NO_METADATA
    drop_connector: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum([share.num_scheduled_tokens for share in self.scheduled])


class StepOutput(Struct, frozen=True):
    """The output of a step, merged over all workers.

    Attributes:
        sampled: the next token of every request that was to get one, by request id. ``None`` for each request for which the
            model computed numbers that are not finite, whether or not it was to get a token.
        connector: what the workers' connectors report.
        connector_error: the rule that a worker's connector broke, if one did; it has been stopped on that worker.
    """

    sampled: Mapping[str, int | None] = field(default_factory=dict)
    connector: KVConnectorOutput = NOTHING_TO_REPORT
    connector_error: str | None = None


# --- the plan of one step ---------------------------------------------------------------------------------------------


class StepPlan:
    """The requests of a step and their shares, within a budget of tokens.

    Args:
        max_tokens: tokens that the step may compute.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens_left = max_tokens
        self._entries: list[tuple[Request, ScheduledTokens]] = []
        self._loading: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed."""
        return not self._entries

    def __iter__(self) -> Iterator[tuple[Request, ScheduledTokens]]:
        return iter(self._entries)

    def shares(self) -> tuple[ScheduledTokens, ...]:
        """The requests' shares, as workers are sent them."""
        return tuple([share for _, share in self._entries])

    def add(self, request: Request, num_new_tokens: int, block_ids: BlockIds, *, loads_in_step: bool = False) -> None:
        """Add the request's next ``num_new_tokens`` tokens to the step.

        Args:
            loads_in_step: whether the step itself loads KV that these tokens read.
        """
        start = request.num_computed_tokens
        end = start + num_new_tokens
        reaches_end = end == request.num_tokens
        share = ScheduledTokens(
            request_id=request.request_id,
            token_ids=tuple(request.all_token_ids[start:end]),
            num_computed_tokens=start,
            write_from=max(start, request.num_reused_tokens),
            block_ids=block_ids,
            sample=_sample_spec(request) if reaches_end else None,
            is_first=start <= request.num_reused_tokens,
        )
        self._entries.append((request, share))
        self.num_tokens_left -= num_new_tokens
        if loads_in_step:
            self._loading.add(request.request_id)

    def take_out_loading(self) -> list[Request]:
        """Remove and return the requests for which this step itself was to load KV."""
        taken = [request for request, _ in self._entries if request.request_id in self._loading]
        self._entries = [entry for entry in self._entries if entry[0].request_id not in self._loading]
        self._loading.clear()
        return taken


def _sample_spec(request: Request) -> SampleSpec:
    sampling = request.sampling
    if sampling.temperature == 0:
        return GREEDY
    return SampleSpec(sampling.temperature, sampling.top_k, sampling.top_p, request.seed, request.num_output_tokens)
