"""vLLM's requests as the contract shows requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cargohold.integrations.vllm import compat
from cargohold.protocol import Adapter, ExtraKey


class SeenRequest:
    """A view of one of vLLM's requests; see ``cargohold.protocol.RequestView``.

    Args:
        own: vLLM's request object.

    Attributes:
        own: vLLM's request object.
        request_id: its id.
    """

    __slots__ = ("own", "request_id")

    def __init__(self, own: Any) -> None:
        self.own = own
        self.request_id: str = own.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens the user sent."""
        return int(self.own.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known."""
        return int(self.own.num_tokens)

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Their ids, prompt first."""
        token_ids: Sequence[int] = self.own.all_token_ids
        return token_ids

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Digests that vLLM made."""
        hashes: Sequence[bytes] = self.own.block_hashes
        return hashes

    @property
    def adapter(self) -> Adapter | None:
        """The LoRA adapter."""
        lora = getattr(self.own, "lora_request", None)
        return None if lora is None else Adapter(lora.lora_name, lora.lora_int_id)

    def extra_keys(self, start: int, end: int) -> tuple[ExtraKey, ...]:
        """What block hashes cover of these tokens besides their ids, in the form of vLLM's own events."""
        keys: tuple[Any, ...] | None = compat.extra_keys(self.own, start, end, 0)[0]
        return () if keys is None else compat.event_keys([keys])[0]

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What the client asks of the connectors."""
        params: Mapping[str, Any] | None = self.own.kv_transfer_params
        return params
