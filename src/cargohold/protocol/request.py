"""What a connector sees of a request and of a step. All of it is read-only, and structural: an engine's own classes fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from cargohold.protocol.kv_cache import BlockIds

ExtraKey: TypeAlias = str | bytes | tuple[str, int]
"""One thing besides tokens that a block hash covers: an adapter's name, a salt, a digest, or a medium and where it begins."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What is added to a model's weights for some requests, such as LoRA.

    Attributes:
        name: what clients call it.
        number: the engine's number of it, for followers of events that know no names.
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
        """Tokens the user sent."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known: the prompt and what was generated so far."""
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
        """What the KV was computed with besides the model's own weights."""
        ...

    def extra_keys(self, start: int, end: int) -> tuple[ExtraKey, ...]:
        """What hashes cover of the tokens in ``[start, end)`` besides the tokens, so that who follows events can make them.

        In vLLM's order: the adapter's name; of each medium that reaches into the range its identifier, and where it begins,
        counted from ``start``; the salt, where ``start`` is 0; the digest of embeddings that stand in for tokens.
        """
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What the client asked of the connectors for this request, unvalidated."""
        ...


@runtime_checkable
class ScheduledRequest(Protocol):
    """One request's share of a step."""

    @property
    def request_id(self) -> str:
        """The request."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the device pool before this step."""
        ...

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens this step computes. Under asynchronous scheduling the sum may run ahead of the ids that are known."""
        ...

    @property
    def block_ids(self) -> BlockIds:
        """The request's block tables, this step's new blocks included."""
        ...


@runtime_checkable
class StepView(Protocol):
    """What the scheduler decided for one step."""

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
