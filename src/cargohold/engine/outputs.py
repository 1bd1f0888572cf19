"""Outputs of requests, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where a request's tokens came from, and how long it waited. Times are in seconds.

    Attributes:
        prompt_tokens: tokens of the prompt.
        output_tokens: tokens generated.
        device_tokens: leading tokens found in the device pool when the request was first admitted.
        restored_tokens: tokens loaded from each tier, by the tier's name, over the request's whole life: tokens that were
            loaded again after a preemption count twice.
        ttft_s: from arrival to the first generated token; ``None`` if there was none.
        load_wait_s: time spent waiting for loads, and before them for lower tiers to look chunks up or to bring them up.
        total_s: from arrival to the end.
        preemptions: how often it lost its blocks and started over.
    """

    prompt_tokens: int
    output_tokens: int = 0
    device_tokens: int = 0
    restored_tokens: Mapping[str, int] = field(default_factory=dict)
    ttft_s: float | None = None
    load_wait_s: float = 0.0
    total_s: float | None = None
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's generated text and tokens so far, or all of them once ``finished``.

    Attributes:
        request_id: the request.
        prompt: the prompt as text; ``None`` if it was given as token ids.
        prompt_token_ids: the prompt's tokens.
        text: generated text, without the stop string or token that ended it; while unfinished, also without a tail that may
            turn out to be the beginning of a stop string.
        new_text: the part of ``text`` that is new since the last output of this request.
        token_ids: generated tokens, including one that ended the request.
        finished: whether this is the last output.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error``, once finished.
        error: what went wrong, if the reason is ``error``.
        metrics: where tokens came from and what took how long; complete once finished.
        cache_notes: why the request hit or missed the cache, as sentences, once finished.
        kv_transfer_params: what a connector returns with the response, once finished.
        stop_string: the stop string that ended it, if one did.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    text: str
    new_text: str
    token_ids: tuple[int, ...]
    finished: bool
    finish_reason: str | None
    error: str | None
    metrics: RequestMetrics
    cache_notes: tuple[str, ...] = ()
    kv_transfer_params: Mapping[str, Any] | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How busy an engine is.

    Attributes:
        num_running: requests that compute.
        num_waiting: requests in the queue.
        num_loading: requests whose KV is being loaded, ended ones among them.
        num_blocks: blocks of the device pool, without the null block.
        num_free_blocks: blocks that nobody uses, though they may hold KV that can be found again.
        num_cached_blocks: blocks' worth of KV in it that can be found again.
        connector_error: why the connector was turned off; ``None`` while it works, or if there is none.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_loading: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    connector_error: str | None = None
