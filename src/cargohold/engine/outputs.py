"""Outputs of requests: metrics, and text piece by piece, up to a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cargohold.engine.model.tokenizer import PieceDecoder
from cargohold.protocol import HintOutcome, Outage


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where a request's tokens came from, and how long it waited. Times are in seconds.

    Attributes:
        prompt_tokens: tokens of the prompt.
        output_tokens: tokens generated.
        device_tokens: leading tokens found in the device pool when the request was first admitted.
        restored_tokens: tokens loaded from each tier, by the tier's name, over the request's whole life. A token that was
            loaded again after a preemption counts once.
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
        hint_outcomes: the answers to its hints, one for each.
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
    hint_outcomes: tuple[HintOutcome, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How busy an engine is.

    Attributes:
        num_running: requests that compute.
        num_waiting: requests in the queue.
        num_loading: requests whose KV is being loaded, ended ones among them.
        num_blocks: blocks of the device pool, without the null block.
        num_free_blocks: unused blocks, though they may hold KV that can be found again.
        num_cached_blocks: blocks' worth of KV in it that can be found again.
        connector_error: why the connector was turned off; ``None`` while it works, or if there is none.
        outages: what the connector does not use now because it has failed, with times in seconds since 1970.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_loading: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    connector_error: str | None = None
    outages: tuple[Outage, ...] = ()


# --- generated tokens as text -----------------------------------------------------------------------------------------


class TextStream:
    """Turns one request's tokens into text.

    A stop string may span several tokens: text is released only when it cannot be the beginning of one.

    Args:
        decoder: turns tokens into pieces of text; ``None`` for a model without tokenizer, whose text stays empty.
        stop: strings that end the text, which goes up to the first of them.
    """

    def __init__(self, decoder: PieceDecoder | None, stop: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stop = stop
        self._num_released = 0
        self.text = ""
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        return self.stop_string is not None

    def push(self, token_id: int) -> bool:
        """Add a token. Returns whether the text has reached a stop string."""
        if self._decoder is not None and not self.stopped:
            piece = self._decoder.step(token_id)
            # A new occurrence must end in the new piece, so what lies further back has been searched.
            search_from = max(0, len(self.text) - max(map(len, self._stop), default=0) + 1)
            self.text += piece
            found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, search_from)) >= 0]
            if found:
                at, self.stop_string = min(found)
                self.text = self.text[:at]
        return self.stopped

    @property
    def released(self) -> str:
        return self.text[: self._num_released]

    def release(self, *, finished: bool) -> str:
        """Release text, all of it if ``finished``; returns the part that was not released before."""
        end = len(self.text) - (0 if finished or self.stopped else self._num_held_back())
        new = self.text[self._num_released : end]
        self._num_released = max(self._num_released, end)
        return new

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max(
            (
                length
                for stop in self._stop
                for length in range(1, min(len(stop), len(self.text) + 1))
                if self.text.endswith(stop[:length])
            ),
            default=0,
        )
