"""What servers count besides connectors; only ``/metrics`` shows it."""

from __future__ import annotations

from itertools import product
from typing import Final

from cargohold.protocol import Family, Kind

_PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
_ENDS: Final = tuple(product(_PATHS, ("finished", "gone", "failed")))

UP: Final = Family("up", Kind.GAUGE, "0 or 1", "Whether requests are accepted.")
REQUESTS: Final = Family(
    "requests", Kind.COUNTER, "requests", "Ended; gone: the client disconnected.", ("endpoint", "state"), _ENDS
)
REFUSED: Final = Family("refused_requests", Kind.COUNTER, "requests", "Found the queue full.", start=((),))
ANSWERS: Final = Family("answers_in_progress", Kind.GAUGE, "answers", "That clients wait for.")
IN_ENGINE: Final = Family(
    "engine_requests", Kind.GAUGE, "requests", "In the engine: running, waiting, loading.", ("state",)
)
GENERATED: Final = Family("generated_tokens", Kind.COUNTER, "tokens", "Generated.", start=((),))

OWN_FAMILIES: Final = (UP, REQUESTS, REFUSED, ANSWERS, IN_ENGINE, GENERATED)
