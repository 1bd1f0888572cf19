"""The plan of one step, while the scheduler makes it."""

from __future__ import annotations

from collections.abc import Iterator

from cargohold.engine.core.request import Request
from cargohold.engine.core.step import GREEDY, SampleSpec, ScheduledTokens
from cargohold.protocol import BlockIds


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
