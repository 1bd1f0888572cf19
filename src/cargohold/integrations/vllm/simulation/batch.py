"""The requests as a worker keeps them, because vLLM sends it only what has changed since the last step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cargohold.engine.core.step import GREEDY, ScheduledTokens, SchedulerStep


@dataclass(slots=True)
class _Row:
    """One request.

    Attributes:
        num_prompt_tokens: tokens of its prompt.
        tables: its block ids per group, as far as this worker was told.
    """

    num_prompt_tokens: int
    tables: tuple[list[int], ...]


class InputBatch:
    """Follows vLLM's scheduler outputs, and converts each of them to a step of the model.

    Args:
        tokens_of: gives the prompt and answer of a request; the simulated model's answers are known beforehand.
    """

    def __init__(self, tokens_of: Callable[[str], Sequence[int]]) -> None:
        self._tokens_of = tokens_of
        self._rows: dict[str, _Row] = {}

    def follow(self, output: Any) -> SchedulerStep:
        """The step that a scheduler output describes."""
        for request_id in output.finished_req_ids:
            self._rows.pop(request_id, None)
        shares = [self._start(new, output) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            self._take_blocks(request_id, cached.new_block_ids[at], request_id in cached.resumed_req_ids)
            num_known = self._rows[request_id].num_prompt_tokens + cached.num_output_tokens[at]
            shares.append(self._share(request_id, cached.num_computed_tokens[at], num_known, output))
        return SchedulerStep(
            scheduled=tuple(shares),
            preempted_req_ids=frozenset(output.preempted_req_ids or ()),
            finished_req_ids=frozenset(output.finished_req_ids),
        )

    def _start(self, new: Any, output: Any) -> ScheduledTokens:
        self._rows[new.req_id] = _Row(len(new.prompt_token_ids), new.block_ids)
        num_known = len(new.prefill_token_ids or new.prompt_token_ids)
        return self._share(new.req_id, new.num_computed_tokens, num_known, output)

    def _take_blocks(self, request_id: str, block_ids: Any, is_resumed: bool) -> None:
        row = self._rows[request_id]
        if is_resumed:
            row.tables = block_ids
        elif block_ids is not None:
            for table, new in zip(row.tables, block_ids, strict=True):
                table.extend(new)

    def _share(self, request_id: str, num_computed_tokens: int, num_known: int, output: Any) -> ScheduledTokens:
        end = num_computed_tokens + output.num_scheduled_tokens[request_id]
        return ScheduledTokens(
            request_id=request_id,
            token_ids=tuple(self._tokens_of(request_id)[num_computed_tokens:end]),
            num_computed_tokens=num_computed_tokens,
            write_from=num_computed_tokens,
            block_ids=self._rows[request_id].tables,
            # The last known token is computed to learn the next one.
            sample=GREEDY if end >= num_known else None,
        )
