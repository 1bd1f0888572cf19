"""What a request is told of its way through the cache, whether or not the connector was asked about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from cargohold.protocol import CacheReport, HintOutcome

EXPLAIN: Final = "cargohold_explain"
"""Key in a request's ``kv_transfer_params`` that asks for an explanation, and in the response that gives it."""


class Explanations:
    """Collects what the adapter has to tell of each request, besides the connector's own report."""

    def __init__(self) -> None:
        self._notes: dict[str, list[str]] = {}
        self._bypasses: set[str] = set()

    def note(self, request_id: str, sentence: str) -> None:
        """Tell a request something, once: vLLM asks anew in every step in which the request waits."""
        notes = self._notes.setdefault(request_id, [])
        if sentence not in notes:
            notes.append(sentence)

    def bypass(self, request_id: str, why: str) -> None:
        """Note that a request does not use the cache, because of what it is or asks: no cache could serve it."""
        self._bypasses.add(request_id)
        self.note(request_id, f"nothing was looked up: {why}")

    def is_bypass(self, request_id: str) -> bool:
        """Whether a request does not use the cache."""
        return request_id in self._bypasses

    def take(self, request: Any, report: CacheReport, outcomes: Iterable[HintOutcome]) -> Mapping[str, Any]:
        """Return the explanation of a request that has ended, under its key, if it asked for one. Forgets the request."""
        notes = self._notes.pop(request.request_id, [])
        self._bypasses.discard(request.request_id)
        wishes = request.kv_transfer_params
        if not (isinstance(wishes, Mapping) and wishes.get(EXPLAIN)):
            return {}
        all_notes = [*map(str, outcomes), *report.notes, *notes]
        return {EXPLAIN: {"restored_tokens": dict(report.restored_tokens), "notes": all_notes}}


def why_all_computed(request: Any) -> str | None:
    """Why a request needs every token of its prompt in a forward pass; ``None`` if it does not."""
    # vLLM sets the option below for these requests, unless the client has set it to False: then vLLM would answer with memory
    # that nobody has written.
    if getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None:
        return "log probabilities of a prompt need all of it computed"
    if getattr(request, "skip_reading_prefix_cache", False):
        return "the request skips the prefix cache (skip_reading_prefix_cache)"  # vLLM would ignore tokens that are offered
    return None
