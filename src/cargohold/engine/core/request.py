"""Requests, their lives in the engine and how their tokens are chosen; and the steps that compute them.

A step and its output are the messages between scheduler and executor. They are structs, not dataclasses: several are made in
every step, and a frozen dataclass takes ten times as long to make.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import msgspec

from cargohold.blocks import extend_hashes, root_hash
from cargohold.option_values import is_int, is_number, is_positive_int
from cargohold.options import require
from cargohold.protocol import (
    NOTHING_TO_REPORT,
    Adapter,
    BlockIds,
    EmptyMetadata,
    ExtraKey,
    HintOutcome,
    KVConnectorMetadata,
    KVConnectorOutput,
    TurnEnd,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when to stop. Checked when made; raises ``ConfigError`` naming the field.

    Attributes:
        max_tokens: stop after so many generated tokens.
        temperature: 0 takes the likeliest token (greedy); higher is more random.
        top_k: sample among the ``top_k`` likeliest tokens; 0 for all.
        top_p: sample among the likeliest tokens that together have this probability; 1 for all. In ``(0, 1]``.
        seed: makes sampling repeatable: the same request with the same seed gives the same tokens, whatever it is batched
            with and whether or not it was preempted. ``None`` draws a seed.
        stop: stop when the text contains one of these strings; the text ends before it. One that is a special token of the
            model, such as ``<|im_end|>``, stops at that token.
        stop_token_ids: stop when one of these tokens is generated; it is not part of the text.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._freeze_stops()
        require(self, "max_tokens", is_positive_int(self.max_tokens), "an integer from 1")
        # At most the largest float, for temperatures reach workers as floats: an integer may be larger.
        is_temperature = is_number(self.temperature) and 0 <= self.temperature <= sys.float_info.max
        require(self, "temperature", is_temperature, "a number from 0 (greedy)")
        is_count = is_int(self.top_k) and 0 <= self.top_k < 2**63
        require(self, "top_k", is_count, "an integer from 1, or 0 for all tokens")
        require(self, "top_p", is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1")
        require(
            self,
            "seed",
            self.seed is None or (is_int(self.seed) and 0 <= self.seed < 2**63),
            "an integer from 0 to 2**63 - 1, or None",
        )
        require(self, "ignore_eos", isinstance(self.ignore_eos, bool), "True or False")
        if self.temperature == 0:
            # Greedy decoding ignores top_k and top_p: a user who sets them with temperature 0 has misunderstood something.
            require(self, "top_k", self.top_k in (0, 1), "left out of greedy decoding; or set temperature above 0")
            require(self, "top_p", self.top_p == 1, "left out of greedy decoding; or set temperature above 0")
        self._make_plain()

    def _freeze_stops(self) -> None:
        """Turn ``stop`` and ``stop_token_ids`` into tuples: users may give one string, lists or sets."""
        stop = (self.stop,) if isinstance(self.stop, str) else _items(self.stop)
        require(self, "stop", stop is not None and all(isinstance(text, str) and text for text in stop), _STRINGS)
        token_ids = _items(self.stop_token_ids)
        require(
            self,
            "stop_token_ids",
            token_ids is not None and all(is_int(token_id) and token_id >= 0 for token_id in token_ids),
            "a list of integers from 0",
        )
        assert stop is not None and token_ids is not None
        object.__setattr__(self, "stop", tuple(str.__str__(text) for text in stop))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, token_ids)))

    def _make_plain(self) -> None:
        """Make all numbers plain ones: subclasses, such as numpy's, cannot be sent to workers, nor temperatures of 2**64."""
        for name, kind in (("max_tokens", int), ("temperature", float), ("top_k", int), ("top_p", float)):
            object.__setattr__(self, name, kind(getattr(self, name)))
        object.__setattr__(self, "seed", None if self.seed is None else int(self.seed))


_STRINGS = "a string or a list of strings, none of them empty"


def _items(value: object) -> tuple[Any, ...] | None:
    """The items of a list, tuple or set; ``None`` for anything else, also for strings and ``bytes``."""
    return (
        tuple(value) if isinstance(value, Sequence | frozenset | set) and not isinstance(value, str | bytes) else None
    )


class RequestStatus(Enum):
    """Stages of a request's life.

    ======== ======== ==============================================================================================
    from     to       when
    ======== ======== ==============================================================================================
    WAITING  LOADING  blocks are allocated for it, and a connector begins to fill them; until then it cannot run
    LOADING  WAITING  its load has ended: it keeps the blocks, or gives them back and starts over if the load failed
    WAITING  RUNNING  it is admitted to a step
    RUNNING  WAITING  it is preempted, or read KV that was not there: it gives its blocks back and starts over
    any      FINISHED it has all of its tokens, is aborted, or fails
    ======== ======== ==============================================================================================
    """

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    FINISHED = auto()


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    """A stop string, a stop token or the end-of-sequence token."""
    LENGTH = "length"
    """``max_tokens``, or the longest sequence the engine allows."""
    ABORT = "abort"
    """The client asked for it."""
    ERROR = "error"
    """The request alone failed; the output says why."""


@dataclass(slots=True)
class RequestTimes:
    """Moments in a request's life, in seconds of the engine's clock; ``None`` until they come.

    Attributes:
        arrived: added to the engine.
        first_scheduled: first admitted, to load or to compute.
        first_token: first token generated.
        finished: ended.
        loading_since: start of the load in flight.
        load_wait_s: total seconds spent waiting for loads, or for a connector to say whether there is something to load.
    """

    arrived: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    loading_since: float | None = None
    load_wait_s: float = 0.0

    def end_loading(self, now: float) -> None:
        """Add the wait for the load in flight to ``load_wait_s``, if there is a load."""
        if self.loading_since is not None:
            self.load_wait_s += now - self.loading_since
            self.loading_since = None


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress. Satisfies ``cargohold.protocol.RequestView``.

    Mutated by the scheduler alone.

    Attributes:
        request_id: unique among the requests alive.
        all_token_ids: prompt, then generated tokens.
        num_prompt_tokens: how many of them are the prompt.
        sampling: how tokens are chosen.
        seed: what makes this request's random choices repeatable.
        priority: lower is served first, under the priority policy.
        arrival: sequence number; ties are served in this order.
        kv_transfer_params: what the client asks of the connectors.
        block_hashes: one per full ``hash_block_tokens`` tokens.
        status: where the request is.
        num_computed_tokens: leading tokens whose KV is in the device pool.
        num_device_tokens: tokens found in the device pool when the request was last admitted.
        num_first_device_tokens: the same, when it was admitted for the first time.
        num_external_tokens: tokens after ``num_device_tokens`` that a connector loaded, or is loading, since then.
        num_starved_tokens: most tokens that it had when it found no more blocks although no other request ran, or lost what it
            had loaded before it ran. To have as many again is no progress.
        ask_connector: whether the connector may be asked for this request; ``False`` after a load for it has failed.
        was_deferred: whether a connector has deferred it.
        tenant: whose request it is, for quotas and hints; by default the salt.
        trace_headers: the trace that the request belongs to, as HTTP headers say it; ``None`` if it belongs to none.
        hint_outcomes: the answers to its hints.
        finish_reason, turn_end, error: why the request ended, and how the turn did.
    """

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    times: RequestTimes
    hash_block_tokens: int
    priority: int = 0
    arrival: int = 0
    salt: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    stop_token_ids: frozenset[int] = frozenset()
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_device_tokens: int = 0
    num_first_device_tokens: int = 0
    num_external_tokens: int = 0
    num_starved_tokens: int = 0
    num_preemptions: int = 0
    ask_connector: bool = True
    was_deferred: bool = False
    tenant: str | None = None
    trace_headers: Mapping[str, str] | None = None
    hint_outcomes: tuple[HintOutcome, ...] = ()
    finish_reason: FinishReason | None = None
    turn_end: TurnEnd = TurnEnd.UNKNOWN
    error: str | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    _root_hash: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.tenant is None:
            self.tenant = self.salt
        self._root_hash = root_hash(salt=self.salt)
        self._extend_hashes()

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known."""
        return len(self.all_token_ids)

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def adapter(self) -> Adapter | None:
        """None: this engine runs models as they are."""
        return None

    def extra_keys(self, start: int, end: int) -> tuple[ExtraKey, ...]:
        """What block hashes of the tokens in ``[start, end)`` cover besides the tokens: the salt, at the prompt's start."""
        return () if start or self.salt is None else (self.salt,)

    @property
    def num_reused_tokens(self) -> int:
        """Leading tokens whose KV was found or loaded when the request was last admitted. It must never be written again."""
        return self.num_device_tokens + self.num_external_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def note_starved(self) -> None:
        """Note that it found no more blocks although no other request ran, or that it loses blocks whose loads were wasted."""
        self.num_starved_tokens = max(self.num_starved_tokens, self.num_computed_tokens)

    def append_token(self, token_id: int) -> None:
        """Add a generated token, and the hash of the block it completes."""
        self.all_token_ids.append(token_id)
        if len(self.all_token_ids) % self.hash_block_tokens == 0:
            self._extend_hashes()

    def _extend_hashes(self) -> None:
        extend_hashes(self.block_hashes, self.all_token_ids, self.hash_block_tokens, self._root_hash)


# --- steps ------------------------------------------------------------------------------------------------------------

_NO_METADATA: KVConnectorMetadata = EmptyMetadata()


class SampleSpec(msgspec.Struct, frozen=True, array_like=True):
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


class ScheduledTokens(msgspec.Struct, frozen=True, array_like=True):
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


class SchedulerStep(msgspec.Struct, frozen=True, array_like=True):
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
    connector_metadata: KVConnectorMetadata = _NO_METADATA
    drop_connector: bool = False

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """How many tokens each request computes, by id, in the order of the batch."""
        return {share.request_id: len(share.token_ids) for share in self.scheduled}

    @property
    def num_tokens(self) -> int:
        return sum([share.num_scheduled_tokens for share in self.scheduled])


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """The output of a step, merged over all workers.

    Attributes:
        sampled: the next token of every request that was to get one, by request id. ``None`` for each request for which the
            model computed numbers that are not finite, whether or not it was to get a token.
        connector: what the workers' connectors report.
        connector_error: the rule that a worker's connector broke, if one did; it has been stopped on that worker.
    """

    sampled: Mapping[str, int | None] = msgspec.field(default_factory=dict)
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
