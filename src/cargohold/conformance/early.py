"""Views of requests as an engine shows them that plans each step before it knows the tokens of the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cargohold.engine.core.request import Request, RequestStatus
from cargohold.protocol import Adapter, ExtraKey, RequestView


class EarlyView:
    """A request whose last generated token is not known yet while it runs. Satisfies ``RequestView``.

    Args:
        request: the request, with all of its tokens.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_known = 0

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """The number of the prompt's tokens, all of which are known."""
        return self._request.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """While the request runs, one less than it has, but never less than was shown before."""
        request = self._request
        is_early = request.status is RequestStatus.RUNNING and request.num_output_tokens > 0
        self._num_known = max(self._num_known, request.num_tokens - is_early)
        return self._num_known

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The tokens that are known."""
        return self._request.all_token_ids[: self.num_tokens]

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The hashes of the blocks that known tokens fill."""
        return self._request.block_hashes[: self.num_tokens // self._request.hash_block_tokens]

    @property
    def adapter(self) -> Adapter | None:
        """The request's adapter."""
        return self._request.adapter

    def extra_keys(self, start: int, end: int) -> tuple[ExtraKey, ...]:
        """What block hashes cover of these tokens besides their ids."""
        return self._request.extra_keys(start, end)

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """What the client asks of the connectors."""
        return self._request.kv_transfer_params


class EarlyViews:
    """One ``EarlyView`` per request, the same one for as long as the request is alive."""

    def __init__(self) -> None:
        self._views: dict[str, EarlyView] = {}

    def of(self, request: RequestView) -> RequestView:
        """The view of a request, made on the first call."""
        assert isinstance(request, Request)
        return self._views.setdefault(request.request_id, EarlyView(request))

    def forget(self, request_id: str) -> None:
        """Drop the view of a request that has ended."""
        self._views.pop(request_id, None)
