"""How long requests wait for their first token, with a hit and without: what the cache is for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from cargohold.connector.metrics import TTFT_MS, is_hit
from cargohold.protocol import Times

_HIT: Final = Times("hit_ttft", TTFT_MS)
_MISS: Final = Times("miss_ttft", TTFT_MS)


class FirstTokens:
    """Measures from when vLLM's front end has received a request until the step after the one that makes its first token.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._epoch = time.time() - clock()  # vLLM notes arrivals in seconds since 1970
        # Requests without a token, and whether they are hits.
        self._awaited: dict[str, tuple[Any, bool]] = {}

    def note_admitted(self, request: Any, num_found_tokens: int) -> None:
        """Note that a request is admitted for the first time, and how many tokens of its prompt were found."""
        if getattr(request, "arrival_time", None) is not None:
            self._awaited[request.request_id] = request, is_hit(num_found_tokens, request.num_prompt_tokens)

    def look(self, stats: Counter[str]) -> None:
        """Count in ``stats`` the requests that have their first token by now. Called once a step."""
        if self._awaited:
            for request, _ in list(self._awaited.values()):
                if request.num_tokens > request.num_prompt_tokens:
                    self.note_ended(request, stats)

    def note_ended(self, request: Any, stats: Counter[str]) -> None:
        """Forget a request. Counts it in ``stats`` if it has a token that was not counted."""
        awaited = self._awaited.pop(request.request_id, None)
        if awaited is not None and request.num_tokens > request.num_prompt_tokens:
            waited_s = self._epoch + self._clock() - request.arrival_time
            (_HIT if awaited[1] else _MISS).note(max(0.0, waited_s), stats)
