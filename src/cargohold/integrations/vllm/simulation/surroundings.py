"""The environment variables that vLLM reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_INT_HASHES: Final = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"


@contextmanager
def whole_hashes() -> Iterator[None]:
    """Within the ``with`` block, vLLM's events name blocks by whole hashes, which can be looked up, not by 64 bits of them."""
    before = os.environ.get(_INT_HASHES)
    os.environ[_INT_HASHES] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INT_HASHES]
        else:
            os.environ[_INT_HASHES] = before
