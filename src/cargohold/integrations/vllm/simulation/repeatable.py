"""vLLM's schedulers, the same in every process."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class _Repeatable:
    """Mix-in for vLLM's schedulers, which go through some requests in the order of a set of strings.

    That order differs from process to process.
    """

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """Finish requests in the order of their ids."""
        one_by_one = [request_ids] if isinstance(request_ids, str) else sorted(request_ids)
        finish = super().finish_requests  # type: ignore[misc]  # of vLLM's scheduler, which is mixed in
        return [request for request_id in one_by_one for request in finish(request_id, finished_status)]


class RepeatableScheduler(_Repeatable, Scheduler):  # type: ignore[misc]  # vLLM ships no types
    """Schedules a step when it has the output of the one before."""


class RepeatableAsyncScheduler(_Repeatable, AsyncScheduler):  # type: ignore[misc]  # vLLM ships no types
    """Schedules a step before it has the output of the one before."""
