"""What a client can ask for one request, through ``kv_transfer_params``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cargohold.errors import RequestError


@dataclass(frozen=True, slots=True)
class TransferParams:
    """Wishes of one request.

    Attributes:
        do_remote_decode: another engine will decode: keep all of the prompt's KV in the tier, hits included.
        max_load_tokens: load at most so many tokens; ``None`` for no limit.
        max_store_tokens: store at most so many leading tokens; ``None`` for no limit.
    """

    do_remote_decode: bool = False
    max_load_tokens: int | None = None
    max_store_tokens: int | None = None

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None, request_id: str) -> TransferParams:
        """Read the wishes that are ours; other keys belong to other connectors.

        Raises:
            RequestError: one of ours has a value that it cannot have.
        """
        params = params or {}
        remote = params.get("do_remote_decode", False)
        if not isinstance(remote, bool):
            raise RequestError(f"kv_transfer_params: do_remote_decode={remote!r} must be true or false", request_id)
        limits = {}
        for key in ("max_load_tokens", "max_store_tokens"):
            limit = params.get(key)
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
                raise RequestError(f"kv_transfer_params: {key}={limit!r} must be an integer from 0", request_id)
            limits[key] = limit
        return cls(remote, limits["max_load_tokens"], limits["max_store_tokens"])
