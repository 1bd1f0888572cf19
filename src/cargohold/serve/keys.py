"""Keys as clients show them, and whose they are."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


def shown_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key as clients of OpenAI send it, or else as those of Anthropic do."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key")


class KeyRing(Generic[T]):
    """Knows whose a key is.

    Args:
        owners: keys, and whose they are.
    """

    def __init__(self, owners: Iterable[tuple[str, T]]) -> None:
        self._owners = [(key.encode(), owner) for key, owner in owners]

    def __bool__(self) -> bool:
        return bool(self._owners)

    def find(self, key: bytes | None) -> T | None:
        """Whose key it is; ``None`` if nobody's."""
        found = None
        for known, owner in self._owners:  # all of them, so that the time tells nothing
            if key is not None and secrets.compare_digest(known, key):
                found = owner
        return found
