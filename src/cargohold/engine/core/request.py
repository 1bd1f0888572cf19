"""One request's life in the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from cargohold.blocks import extend_hashes, root_hash
from cargohold.engine.sampling_params import SamplingParams
from cargohold.protocol import Adapter, ExtraKey, HintOutcome


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
        num_external_tokens: tokens behind ``num_device_tokens`` that a connector loaded, or is loading, since then.
        num_starved_tokens: most tokens that it had when it found no more blocks although no other request ran, or lost what it
            had loaded before it ran. To have as many again is no progress.
        ask_connector: whether the connector may be asked for this request; ``False`` after a load for it has failed.
        was_deferred: whether a connector has told it to ask again.
        tenant: whose request it is, for quotas and hints; by default the salt.
        trace_headers: the trace that the request belongs to, as HTTP headers say it; ``None`` if it belongs to none.
        hint_outcomes: the answers to its hints.
        finish_reason, error: why the request ended.
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
        """The generated tokens."""
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
        """Whether it has ended."""
        return self.status is RequestStatus.FINISHED

    def note_starved(self) -> None:
        """Note that it found no more blocks although no other request ran, or that it loses blocks that were loaded in vain."""
        self.num_starved_tokens = max(self.num_starved_tokens, self.num_computed_tokens)

    def append_token(self, token_id: int) -> None:
        """Add a generated token, and the hash of the block it completes."""
        self.all_token_ids.append(token_id)
        if len(self.all_token_ids) % self.hash_block_tokens == 0:
            self._extend_hashes()

    def _extend_hashes(self) -> None:
        extend_hashes(self.block_hashes, self.all_token_ids, self.hash_block_tokens, self._root_hash)
