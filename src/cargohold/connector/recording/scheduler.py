"""Scheduler side of the recording connector: passes every call on, and notes what each request asked for and reused."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from cargohold.connector.recording.trace_file import TraceFile
from cargohold.protocol import (
    BlockIds,
    ForwardingScheduler,
    KVConnectorOutput,
    KVConnectorScheduler,
    RequestView,
    SchedulerEnvironment,
)


@dataclass(slots=True)
class _Seen:
    """The state of one request.

    Attributes:
        device_tokens: number of tokens found on the device when the connector was last asked.
        admitted_ms: time of its first admission, in milliseconds since the start; ``None`` before that.
        reused_tokens: number of tokens found at its first admission, on the device and in tiers; reduced when a load fails.
        loading: its block tables while a load fills them; empty otherwise.
    """

    device_tokens: int = 0
    admitted_ms: float | None = None
    reused_tokens: int = 0
    loading: BlockIds = ()


class RecordingScheduler(ForwardingScheduler):
    """Wraps a connector and writes one line for each request that was admitted, when the request ends.

    The reuse in a line is what the engine decided when it first admitted the request, without tokens that a load then failed to
    bring. Requests that were never admitted leave no line.

    Args:
        inner: the connector that does the work.
        file: the trace; closed by ``shutdown``.
        environment: facts about the engine.
    """

    def __init__(self, inner: KVConnectorScheduler, file: TraceFile, environment: SchedulerEnvironment) -> None:
        super().__init__(inner)
        self._file = file
        self._clock = environment.clock
        self._block_tokens = environment.layout.hash_block_tokens
        self._step_tokens = environment.max_step_tokens
        self._groups = environment.layout.groups
        self._finds_partial = environment.finds_partial_loads
        self._started = environment.clock()
        self._last_ms = 0.0
        self._seen: dict[str, _Seen] = {}

    def on_new_request(self, request: RequestView) -> None:  # noqa: D102
        self.inner.on_new_request(request)
        self._seen[request.request_id] = _Seen()

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: D102
        seen = self._seen.get(request.request_id)
        if seen is not None:
            seen.device_tokens = num_computed_tokens
        return self.inner.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: RequestView, blocks: BlockIds, num_external_tokens: int) -> None:  # noqa: D102
        seen = self._seen.get(request.request_id)
        if seen is not None and seen.admitted_ms is None:
            seen.admitted_ms = self._next_ms()
            seen.reused_tokens = seen.device_tokens + num_external_tokens
            if num_external_tokens:
                seen.loading = tuple(tuple(table) for table in blocks)
        self.inner.update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, output: KVConnectorOutput) -> None:  # noqa: D102
        self._take_back(output)
        self.inner.update_connector_output(output)

    def request_finished(self, request: RequestView, block_ids: BlockIds) -> tuple[bool, Mapping[str, Any] | None]:  # noqa: D102
        seen = self._seen.pop(request.request_id, None)
        if seen is not None and seen.admitted_ms is not None:
            self._file.write(self._line(request, seen, seen.admitted_ms))
        return self.inner.request_finished(request, block_ids)

    def shutdown(self) -> None:  # noqa: D102
        self._file.close()
        self.inner.shutdown()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _next_ms(self) -> float:
        """Return the time in milliseconds since the start, but always more than the last call did.

        Requests are replayed in the order of these times, which must be the order in which they were admitted.
        """
        now = round(1000 * (self._clock() - self._started), 3)
        self._last_ms = max(now, round(self._last_ms + 0.001, 3))
        return self._last_ms

    def _take_back(self, output: KVConnectorOutput) -> None:
        """Reduce the reused tokens of requests by those that a load failed to bring."""
        if output.invalid_block_ids:
            for seen in self._seen.values():
                if seen.loading:
                    seen.reused_tokens = min(seen.reused_tokens, self._num_good_tokens(seen, output.invalid_block_ids))
        for request_id in output.finished.finished_recving & self._seen.keys():
            seen = self._seen[request_id]
            if seen.loading and request_id in output.finished.failed_recving:
                seen.reused_tokens = seen.device_tokens
            seen.loading = ()

    def _num_good_tokens(self, seen: _Seen, bad_blocks: AbstractSet[int]) -> int:
        """Return how many leading tokens are reused if these blocks are bad, of those that a load fills for the request."""
        num_good = seen.reused_tokens
        for group, table in zip(self._groups, seen.loading, strict=True):
            first_bad = next((at for at, block_id in enumerate(table) if block_id in bad_blocks), None)
            if first_bad is not None:
                num_good = min(num_good, first_bad * group.block_tokens if self._finds_partial else 0)
        return max(num_good, seen.device_tokens)

    def _line(self, request: RequestView, seen: _Seen, admitted_ms: float) -> dict[str, Any]:
        num_prompt_blocks = request.num_prompt_tokens // self._block_tokens
        # The last token was generated, but its KV was not computed.
        num_blocks = max(num_prompt_blocks, (request.num_tokens - 1) // self._block_tokens)
        ids = self._file.ids(request.block_hashes[:num_blocks])
        return {
            "timestamp_ms": admitted_ms,
            "input_length": request.num_prompt_tokens,
            "output_length": request.num_tokens - request.num_prompt_tokens,
            "block_tokens": self._block_tokens,
            "step_tokens": self._step_tokens,
            "reused_blocks": seen.reused_tokens // self._block_tokens,
            "hash_ids": ids[:num_prompt_blocks],
            "output_hash_ids": ids[num_prompt_blocks:],
        }
