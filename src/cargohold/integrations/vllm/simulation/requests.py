"""Requests as vLLM has them, and beside each the request as its client knows it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, Final

from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus as VllmStatus

from cargohold.engine.core.request import FinishReason, Request, RequestStatus, RequestTimes
from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.engine.sampling_params import SamplingParams as OwnSamplingParams
from cargohold.integrations.vllm.scheduler import EXPLAIN
from cargohold.protocol import CacheReport, Clock
from cargohold.simulation.chains import tokens_alone
from cargohold.simulation.engine import VOCAB_SIZE, root_of_salt

_HASH: Final = "sha256"
_NO_HASHES: Final = 1 << 30
_NOTHING_RESTORED: Final = CacheReport()
_BEYOND: Final = 4
"""Tokens known beyond the end of an answer: vLLM may compute further steps before it notices the end."""


class RequestBook:
    """Makes vLLM's requests, and keeps for each one a request of our own, which has what its client knows.

    Args:
        clock: virtual time.
        hash_tokens: tokens per block hash of vLLM's.
        tell: called with every update that a client gets.

    Attributes:
        own: our requests so far by id, with what their clients have been told.
        failed_loads: ids of requests of which a load has failed.
    """

    def __init__(self, clock: Clock, hash_tokens: int, tell: Callable[[RequestUpdate], None]) -> None:
        self._clock = clock
        self._tell = tell
        self._hasher = get_request_block_hasher(hash_tokens, hash_function())
        self._live: dict[str, Any] = {}
        self._tokens: dict[str, list[int]] = {}
        self.own: dict[str, Request] = {}
        self.failed_loads: set[str] = set()

    def tokens(self, request_id: str) -> Sequence[int]:
        """Prompt and answer of a request: the model's answers are known beforehand."""
        return self._tokens[request_id]

    def root(self, request_id: str) -> int:
        """The number that the request's chain of fingerprints starts from."""
        return root_of_salt(self.own[request_id].salt)

    def make(
        self,
        request_id: str,
        token_ids: Sequence[int],
        max_tokens: int,
        *,
        priority: int,
        salt: str | None,
        kv_transfer_params: Mapping[str, Any] | None,
        stop_token_ids: Collection[int],
    ) -> Any:
        """A request for vLLM."""
        self.own[request_id] = _own_request(request_id, token_ids, max_tokens, salt, kv_transfer_params, self._clock())
        answer = tokens_alone(token_ids, max_tokens + _BEYOND, VOCAB_SIZE, root_of_salt(salt))
        self._tokens[request_id] = [*token_ids, *answer]
        request = VllmRequest(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                stop_token_ids=list(stop_token_ids),
                extra_args={"kv_transfer_params": {**(kv_transfer_params or {}), EXPLAIN: True}},
            ),
            pooling_params=None,
            arrival_time=self._clock(),
            cache_salt=salt,
            priority=priority,
            block_hasher=self._hasher,
        )
        self._live[request_id] = request
        return request

    def take(self, news: Any) -> None:
        """Take one of vLLM's outputs: new tokens of a request, or its end, or both."""
        request = self.own[news.request_id]
        if news.prefill_stats is not None:
            request.num_first_device_tokens = news.prefill_stats.num_local_cached_tokens
        if news.new_token_ids:
            request.all_token_ids += news.new_token_ids
            self._tell(RequestUpdate(request, tuple(news.new_token_ids)))
        if news.finish_reason is not None:
            explanation = (news.kv_transfer_params or {}).get(EXPLAIN, {})
            report = CacheReport(explanation.get("restored_tokens", {}))
            self.end(news.request_id, FinishReason(str(news.finish_reason)), report)

    def end(self, request_id: str, reason: FinishReason, report: CacheReport = _NOTHING_RESTORED) -> None:
        """Note that a request has ended, and tell its client."""
        request = self.own[request_id]
        if reason is FinishReason.ERROR and request_id in self.failed_loads:
            request.error = "its load failed"
        request.finish_reason = reason
        request.status = RequestStatus.FINISHED
        request.num_preemptions = self._live.pop(request_id).num_preemptions
        self._tell(RequestUpdate(request, cache_report=report))

    def follow_status(self) -> None:
        """Note which requests are loading, for timelines that people read."""
        for request_id, request in self._live.items():
            is_loading = request.status is VllmStatus.WAITING_FOR_REMOTE_KVS
            self.own[request_id].status = RequestStatus.LOADING if is_loading else RequestStatus.WAITING


def _own_request(
    request_id: str,
    token_ids: Sequence[int],
    max_tokens: int,
    salt: str | None,
    kv_transfer_params: Mapping[str, Any] | None,
    now: float,
) -> Request:
    return Request(
        request_id=request_id,
        all_token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        sampling=OwnSamplingParams(max_tokens=max_tokens),
        seed=0,
        times=RequestTimes(arrived=now),
        hash_block_tokens=_NO_HASHES,  # vLLM has its own
        salt=salt,
        kv_transfer_params=kv_transfer_params,
    )


@cache
def hash_function() -> Any:
    """The function that vLLM hashes blocks with in the simulation."""
    function = get_hash_fn_by_name(_HASH)
    init_none_hash(function)
    return function
