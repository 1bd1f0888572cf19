"""The ``kv_transfer_params`` that a client can give for one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shown  # a client may send values of any size, and what is refused is logged
from typing import Any

from cargohold.errors import RequestError


@dataclass(frozen=True, slots=True)
class TransferParams:
    """The parameters of one request.

    Attributes:
        do_remote_decode: whether another engine will decode: all of the prompt's KV is then kept in the tier, hits included.
        max_load_tokens: maximum number of tokens to load; ``None`` for no limit.
        max_store_tokens: maximum number of leading tokens to store; ``None`` for no limit.
    """

    do_remote_decode: bool = False
    max_load_tokens: int | None = None
    max_store_tokens: int | None = None

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None, request_id: str) -> TransferParams:
        """Read the parameters of this connector; other keys belong to other connectors.

        Raises:
            RequestError: a parameter of this connector has an invalid value.
        """
        params = params or {}
        remote = params.get("do_remote_decode", False)
        if not isinstance(remote, bool):
            raise RequestError(
                f"kv_transfer_params: do_remote_decode={shown(remote)} must be true or false", request_id
            )
        limits = {}
        for key in ("max_load_tokens", "max_store_tokens"):
            limit = params.get(key)
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
                raise RequestError(f"kv_transfer_params: {key}={shown(limit)} must be an integer from 0", request_id)
            limits[key] = limit
        return cls(remote, limits["max_load_tokens"], limits["max_store_tokens"])
