"""What the server remembers of the last requests: where their prompts came from, and why."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from cargohold.connector.metrics import cache_label
from cargohold.engine.outputs import RequestMetrics, RequestOutput
from cargohold.serve.access import Client

MAX_RECORDS: Final = 200
"""Requests that can still be explained."""
COMPUTED: Final = "computed"
DEVICE: Final = "device"


@dataclass(slots=True)
class Sequence:
    """One answer of a request: how it went so far.

    Attributes:
        metrics: where its tokens came from; ``None`` before the first output.
        finish_reason: why it ended, once it has.
        error: what went wrong, if something did.
        notes: why its prompt hit or missed the cache, once it has ended.
    """

    metrics: RequestMetrics | None = None
    finish_reason: str | None = None
    error: str | None = None
    notes: tuple[str, ...] = ()

    def update(self, output: RequestOutput) -> None:
        """Learn from an output. The output itself is not kept: it has the prompt and the text."""
        self.metrics = output.metrics
        if output.finished:
            self.finish_reason, self.error, self.notes = output.finish_reason, output.error, output.cache_notes

    def sources(self) -> dict[str, int]:
        """Where the prompt's tokens came from, in the order of the prompt."""
        if self.metrics is None:
            return {}
        left = self.metrics.prompt_tokens
        found = {}
        for source, tokens in ((DEVICE, self.metrics.device_tokens), *self.metrics.restored_tokens.items()):
            # After a preemption, tokens were restored twice, or were of the answer.
            found[source] = min(tokens, left)
            left -= found[source]
        return {**found, COMPUTED: left}


@dataclass(slots=True)
class Record:
    """One request over HTTP.

    Attributes:
        request_id: as the client knows it.
        endpoint: which interface it came by.
        client: the sender.
        sequences: one per answer.
        arrived: when, in seconds since 1970.
        state: ``running``, ``finished``, ``gone`` (its client is) or ``failed``.
    """

    request_id: str
    endpoint: str
    client: Client
    sequences: list[Sequence]
    arrived: float = field(default_factory=time.time)
    state: str = "running"

    def sources(self) -> Counter[str]:
        """Where the prompt tokens of all answers came from."""
        return sum((Counter(sequence.sources()) for sequence in self.sequences), Counter())

    @property
    def ttft_s(self) -> float | None:
        """From its arrival in the engine to the first token."""
        times = [sequence.metrics.ttft_s for sequence in self.sequences if sequence.metrics is not None]
        return min((time_s for time_s in times if time_s is not None), default=None)

    @property
    def cache_label(self) -> str:
        """What it counts as in times to the first token."""
        sources = self.sources()
        all_tokens, device = sources.total(), sources[DEVICE]
        return cache_label(all_tokens - device - sources[COMPUTED], device, all_tokens)

    def as_json(self) -> dict[str, Any]:
        """What people are shown."""
        metrics = [sequence.metrics for sequence in self.sequences if sequence.metrics is not None]
        return {
            "id": self.request_id,
            "endpoint": self.endpoint,
            "arrived": self.arrived,
            "state": self.state,
            # Unknown before the first token: it may be waiting in the queue.
            "prompt_tokens": sum(one.prompt_tokens for one in metrics) if metrics else None,
            "output_tokens": sum(one.output_tokens for one in metrics) if metrics else None,
            "sources": dict(self.sources()),
            "ttft_s": self.ttft_s,
            "total_s": max((one.total_s for one in metrics if one.total_s is not None), default=None),
            "load_wait_s": max((one.load_wait_s for one in metrics), default=0.0),
            "preemptions": sum(one.preemptions for one in metrics),
            "finish_reasons": [sequence.finish_reason for sequence in self.sequences],
            "notes": list(dict.fromkeys(note for sequence in self.sequences for note in sequence.notes)),
            "errors": [sequence.error for sequence in self.sequences if sequence.error is not None],
        }


class Records:
    """The last requests.

    Args:
        ended: called with each request that has ended.
    """

    def __init__(self, ended: Callable[[Record], object]) -> None:
        self._ended = ended
        self._records: dict[str, Record] = {}
        self._ids = count(1)
        self._start = f"{time.time_ns():x}"

    def new_id(self) -> str:
        """The end of a request's id, unlike all others of this server and of earlier ones."""
        return f"{self._start}-{next(self._ids)}"

    def begin(self, request_id: str, endpoint: str, client: Client, num_answers: int) -> Record:
        """Remember a request that begins, in place of the oldest."""
        if len(self._records) >= MAX_RECORDS:
            del self._records[next(iter(self._records))]
        record = Record(request_id, endpoint, client, [Sequence() for _ in range(num_answers)])
        self._records[request_id] = record
        return record

    def end(self, record: Record, state: str) -> None:
        """Note how a request has ended."""
        record.state = state
        self._ended(record)

    def find(self, request_id: str, client: Client) -> Record | None:
        """The request, if it is remembered and this client may see it."""
        record = self._records.get(request_id)
        return record if record is not None and client.sees(record.client.tenant) else None

    def latest(self, client: Client) -> Iterator[Record]:
        """The requests that this client may see, the latest first."""
        return (record for record in reversed(self._records.values()) if client.sees(record.client.tenant))
