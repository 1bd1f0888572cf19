"""A connector's view of requests and steps: read-only protocols that an engine's own classes satisfy as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from cargohold.protocol.kv_cache import BlockIds

ExtraKey: TypeAlias = str | bytes | tuple[str, int]
"""One thing besides tokens that a block hash covers.

An adapter's name, a salt, a digest, or the identifier of a multimedia item and the position where it begins.
"""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Weights that are added to the model's own for some requests, such as LoRA.

    Attributes:
        name: the name that clients use.
        number: the engine's number for the adapter, for followers of KV events that do not know names.
    """

    name: str
    number: int


@runtime_checkable
class RequestView(Protocol):
    """One request, as the scheduler knows it at the time of the call."""

    @property
    def request_id(self) -> str:
        """Unique among the requests alive."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens that the user sent."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose ids are known: the prompt and the tokens generated so far."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The ``num_tokens`` ids, prompt first."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One digest per full run of ``hash_block_tokens`` tokens.

        Each covers its tokens *and all before them*, and whatever else changes the KV: salt, adapter, media. It grows as
        tokens are generated; an entry never changes.
        """
        ...

    @property
    def adapter(self) -> Adapter | None:
        """The adapter with which the KV is computed; ``None`` for the model's own weights alone."""
        ...

    def extra_keys(self, start: int, end: int) -> tuple[ExtraKey, ...]:
        """Return what the hash of ``[start, end)`` covers besides the tokens, so that followers of events can compute it.

        In vLLM's order: the adapter's name; for each multimedia item that reaches into the range, its identifier and its
        first position, counted from ``start``; the salt, if ``start`` is 0; the digest of embeddings that stand in for tokens.
        """
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """The client's parameters to the connectors for this request, unvalidated."""
        ...


@runtime_checkable
class ScheduledRequest(Protocol):
    """One request's share of a step."""

    @property
    def request_id(self) -> str:
        """Id of the request."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV is in the device pool before this step."""
        ...

    @property
    def num_scheduled_tokens(self) -> int:
        """Number of tokens that this step computes.

        Under asynchronous scheduling, ``num_computed_tokens`` plus this may exceed the number of token ids that are known.
        """
        ...

    @property
    def block_ids(self) -> BlockIds:
        """The request's block tables, this step's new blocks included."""
        ...


@runtime_checkable
class StepView(Protocol):
    """The scheduler's plan for one step."""

    @property
    def scheduled(self) -> Sequence[ScheduledRequest]:
        """The requests that compute tokens in this step; empty in a step that only carries transfers."""
        ...

    @property
    def preempted_req_ids(self) -> AbstractSet[str]:
        """Requests that lost their blocks in this step and will start over."""
        ...

    @property
    def finished_req_ids(self) -> AbstractSet[str]:
        """Requests that ended since the last step."""
        ...
