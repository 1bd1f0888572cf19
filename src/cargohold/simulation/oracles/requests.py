"""Oracle: every request gets the tokens that it would get alone, and ends for a legitimate reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cargohold.engine.core.request import FinishReason, Request
from cargohold.engine.core.scheduler import RequestUpdate
from cargohold.simulation.oracles.base import Oracle


@dataclass(slots=True)
class Expectation:
    """What a request must get.

    Attributes:
        tokens: the tokens that it generates when it has the engine to itself.
        ends_with: the reason for which it ends then.
        is_aborted: whether its client has asked to abort it.
        has_ended: whether it has ended.
    """

    tokens: list[int]
    ends_with: FinishReason
    is_aborted: bool = False
    has_ended: bool = False


class RequestOracle(Oracle):
    """Compares tokens and finish reasons of requests with those expected.

    Args:
        expected: expectations by request id.
        may_fail: whether a request may end with an error, because that is the policy for failed loads.
    """

    name = "requests"

    def __init__(self, expected: Mapping[str, Expectation], *, may_fail: bool) -> None:
        self._expected = expected
        self._may_fail = may_fail

    def on_update(self, update: RequestUpdate) -> None:
        """Compare new tokens with those expected, and at the end the finish reason with those possible."""
        request = update.request
        expected = self._expected[request.request_id]
        if update.new_token_ids:
            first = request.num_output_tokens - len(update.new_token_ids)
            wanted = expected.tokens[first : request.num_output_tokens]
            if list(update.new_token_ids) != wanted:
                self.fail(f"request {request.request_id} got {list(update.new_token_ids)} where it gets {wanted} alone")
        elif request.is_finished:
            self._check_end(request, expected)

    def at_end(self) -> None:
        """Every request has ended."""
        left = [request_id for request_id, expected in self._expected.items() if not expected.has_ended]
        self.require(not left, f"these requests never ended: {left}")

    def _check_end(self, request: Request, expected: Expectation) -> None:
        name = f"request {request.request_id}"
        self.require(not expected.has_ended, f"{name} ended twice")
        expected.has_ended = True
        match request.finish_reason:
            case FinishReason.ABORT:
                self.require(expected.is_aborted, f"{name} was aborted, and nobody asked for it")
            case FinishReason.ERROR:
                self.require(self._may_fail, f"{name} failed: {request.error}")
                self.require(bool(request.error), f"{name} failed without a reason")
            case reason:
                self.require(reason is expected.ends_with, f"{name} ended with {reason}, not {expected.ends_with}")
                tokens = list(request.output_token_ids)
                self.require(tokens == expected.tokens, f"{name} got {tokens}, alone {expected.tokens}")
