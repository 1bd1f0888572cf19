"""Connectors around another that write down what it does: a block trace of what was asked for and reused, or spans.

OpenTelemetry spans are made under the request's own trace::

    (the client's span)
      cargohold.request          from its arrival until it ends; where its prompt came from, and why
        cargohold.look_up        from the engine's first question until the answer
          cargohold.wait         while the answer was "not yet"
          cargohold.prefetch     chunks on their way from lower tiers to host memory
        cargohold.load           host memory to device
        cargohold.store          device to host memory: its copies that have ended, added up, and each that ends later

The connector only notes what took how long (``Episode``), and only if somebody observes it. Spans are made here, afterwards, in
one place; whatever goes wrong with them ends the traces and nothing else. Stores are added up, because while many requests
generate, one ends in almost every step.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cargohold.errors import ConfigError, one_line
from cargohold.protocol import (
    BlockIds,
    CacheReport,
    Clock,
    Episode,
    ForwardingScheduler,
    KVConnectorFactory,
    KVConnectorOutput,
    KVConnectorScheduler,
    KVConnectorWorker,
    RequestView,
    SchedulerEnvironment,
    TransferOutcome,
    TurnEnd,
    WorkerEnvironment,
)

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer


logger = logging.getLogger(__name__)

_ID_BITS: Final = 53
"""Number of bits of an id: every JSON reader represents such integers exactly."""
_KEY_BYTES: Final = 16


class TraceFile:
    """A file with one JSON line per request, readable only by its owner. A failure ends the trace, but not the engine.

    Block hashes are digests of tokens, so whoever guesses a prompt could verify the guess with them. So the file has digests of
    the hashes under a random key that is not kept: within the file equal blocks have equal ids, and outside it the ids mean
    nothing.

    Args:
        path: path of the file, which must not exist.

    Raises:
        ConfigError: the file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._encoder = msgspec.json.Encoder()
        try:
            self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError("record", str(path), error.strerror or one_line(error)) from error

    def ids(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the ids of blocks in this file."""
        key, shift = self._key, 64 - _ID_BITS
        # Python's own keyed hash (SipHash): a tenth of the time of a cryptographic one, in the scheduler's thread.
        return [(hash(key + block_hash) & 0xFFFF_FFFF_FFFF_FFFF) >> shift for block_hash in block_hashes]

    def write(self, line: dict[str, Any]) -> None:
        """Add a line, whole or not at all as far as the system allows. The first failure is logged and ends the trace."""
        if self._descriptor is None:
            return
        try:
            self._write_all(self._descriptor, self._encoder.encode(line) + b"\n")
        except OSError as error:
            logger.warning("recording to %s has ended: %s", self._path, one_line(error))
            self.close()

    @staticmethod
    def _write_all(descriptor: int, data: bytes) -> None:
        num_written = os.write(descriptor, data)
        if num_written < len(data):
            raise OSError(f"only {num_written} of {len(data)} bytes were written")

    def close(self) -> None:
        """Close the file; ``write`` does nothing from now on."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


# --- scheduler side of the recording connector ------------------------------------------------------------------------


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

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:  # noqa: D102
        self._take_back(connector_output)
        self.inner.update_connector_output(connector_output)

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
        for request_id in output.finished_recving & self._seen.keys():
            seen = self._seen[request_id]
            if seen.loading and request_id in output.failed_recving:
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
        end = request.turn_end
        return {
            "timestamp_ms": admitted_ms,
            "input_length": request.num_prompt_tokens,
            "output_length": request.num_tokens - request.num_prompt_tokens,
            "block_tokens": self._block_tokens,
            "step_tokens": self._step_tokens,
            "reused_blocks": seen.reused_tokens // self._block_tokens,
            "hash_ids": ids[:num_prompt_blocks],
            "output_hash_ids": ids[num_prompt_blocks:],
            **({} if end is TurnEnd.UNKNOWN else {"stop": end.value}),
        }


# --- makes a connector that records -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordingFactory:
    """Makes a connector that records. Satisfies ``cargohold.protocol.KVConnectorFactory``.

    Raises ``ConfigError`` if the path is empty, the file exists already, or its directory does not.

    Attributes:
        inner: makes the connector that does the work; ``NULL_CONNECTOR`` for none.
        file: path of the trace; ``{pid}`` in it stands for the process's id, for engines with several replicas. The file must
            not exist yet.
    """

    inner: KVConnectorFactory
    file: str

    def __post_init__(self) -> None:
        if not self.file:
            raise ConfigError("record", self.file, "it must be the path of a file to write")
        path = self._path()
        if path.is_dir():
            raise ConfigError("record", self.file, "it is a directory; give the path of a file to write")
        if path.exists():
            raise ConfigError("record", self.file, "there is such a file already; traces are not overwritten")
        if not path.parent.is_dir():
            raise ConfigError("record", self.file, "there is no such directory")

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> KVConnectorScheduler:
        """Make the inner scheduler side and a wrapper that records it. Raises ``ConfigError`` if the file cannot be created."""
        inner = self.inner.make_scheduler_side(environment)
        try:
            file = TraceFile(self._path())
        except BaseException:
            inner.shutdown()
            raise
        return RecordingScheduler(inner, file, environment)

    def make_worker_side(self, environment: WorkerEnvironment) -> KVConnectorWorker:
        """Make the inner worker side, where there is nothing to record."""
        return self.inner.make_worker_side(environment)

    def _path(self) -> Path:
        return Path(self.file.replace("{pid}", str(os.getpid())))


_PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_MAX_ENDED: Final = 1024
"""Maximum number of ended requests whose spans are remembered: their stores may still be in flight."""
_MAX_LINKS: Final = 15
_DONE: Final = TransferOutcome.DONE.name.lower()
_EXPORT_TIMEOUT_S: Final = 2.0
"""How long an export may take. The last one delays the end of the engine where nobody collects traces."""


@dataclass(slots=True)
class _Traced:
    """A request that is traced.

    Attributes:
        span: its span.
        stores: its copies to host memory that have ended, added up; ``None`` if there are none, or it has ended itself.
        others: spans of other requests that have chunks in these.
        has_ended: whether its span has ended.
    """

    span: Span
    stores: Episode | None = None
    others: list[Span] = field(default_factory=list)
    has_ended: bool = False

    def add(self, store: Episode, others: Sequence[Span]) -> None:
        """Add a copy that has ended."""
        self.stores = store if self.stores is None else _sum(self.stores, store)
        for span in others:
            if len(self.others) < _MAX_LINKS and span not in self.others:
                self.others.append(span)


def _sum(stores: Episode, store: Episode) -> Episode:
    """Several stores as one; with the outcome of the last that was not done, if there is one."""
    facts = dict(stores.facts)
    facts["copies"] = int(facts.get("copies", 1)) + 1
    facts["chunks"] = int(facts["chunks"]) + int(store.facts["chunks"])
    if store.facts["outcome"] != _DONE:
        facts["outcome"] = store.facts["outcome"]
    times = min(stores.began_at, store.began_at), max(stores.ended_at, store.ended_at)
    return Episode(stores.what, stores.request_ids, *times, facts)


class Spans:
    """Makes spans of requests and of what was done for them.

    Args:
        tracer: makes single spans.
        clock: the engine's clock.
    """

    def __init__(self, tracer: Tracer, clock: Clock) -> None:
        self._tracer = tracer
        self._clock = clock
        self._epoch = time.time() - clock()
        self._open: dict[str, _Traced] = {}
        self._ended: OrderedDict[str, _Traced] = OrderedDict()
        self._is_off = False

    def begin(self, request: RequestView) -> None:
        """Begin the span of a request, in its client's trace if the engine says which that is."""
        self._do(self._begin, request)

    def note(self, episode: Episode) -> None:
        """Make the span of something that was done for requests, under the first of them that is traced."""
        self._do(self._note, episode)

    def end(self, request_id: str, report: CacheReport) -> None:
        """End the span of a request, and say in it where its prompt came from, and why."""
        self._do(self._end, request_id, report)

    def _begin(self, request: RequestView) -> None:
        from opentelemetry.propagate import extract  # noqa: PLC0415  # may be absent

        # Engines that pass no trace on have no such attribute.
        headers: Mapping[str, str] = getattr(request, "trace_headers", None) or {}
        facts: dict[str, str | int] = {
            "cargohold.request_id": request.request_id,
            "cargohold.prompt_tokens": request.num_prompt_tokens,
        }
        span = self._tracer.start_span(
            "cargohold.request", context=extract(headers), attributes=facts, start_time=self._at(self._clock())
        )
        if span.get_span_context().trace_flags.sampled:
            self._open[request.request_id] = _Traced(span)

    def _note(self, episode: Episode) -> None:
        traced = [
            one
            for request_id in episode.request_ids
            if (one := self._open.get(request_id) or self._ended.get(request_id)) is not None
        ]
        if traced:
            first, others = traced[0], [one.span for one in traced[1 : _MAX_LINKS + 1]]
            if episode.what == "store" and not first.has_ended:
                first.add(episode, others)
            else:
                self._make(first.span, episode, others)

    def _make(self, parent: Span, episode: Episode, others: Sequence[Span]) -> None:
        from opentelemetry.trace import Link, set_span_in_context  # noqa: PLC0415  # may be absent

        self._tracer.start_span(
            f"cargohold.{episode.what}",
            context=set_span_in_context(parent),
            links=[Link(span.get_span_context()) for span in others],
            attributes={f"cargohold.{name}": value for name, value in episode.facts.items()},
            start_time=self._at(episode.began_at),
        ).end(self._at(episode.ended_at))

    def _end(self, request_id: str, report: CacheReport) -> None:
        traced = self._open.pop(request_id, None)
        if traced is None:
            return
        span = traced.span
        if traced.stores is not None:
            self._make(span, traced.stores, traced.others)
        self._ended[request_id] = _Traced(span, has_ended=True)
        for tier, num_tokens in report.restored_tokens.items():
            span.set_attribute(f"cargohold.restored_tokens.{tier}", num_tokens)
        for note in report.notes:
            span.add_event(note)
        span.end(self._at(self._clock()))
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def _at(self, moment: float) -> int:
        """A moment of the engine's clock in nanoseconds since 1970."""
        return int((self._epoch + moment) * 1e9)

    def _do(self, work: Callable[..., None], *args: object) -> None:
        if self._is_off:
            return
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001  # who only watches must not turn off what is watched, whatever it raises
            self._is_off = True
            logger.warning("traces have ended: %s", one_line(error))


class TracingScheduler(ForwardingScheduler):
    """Wraps a connector and traces its requests.

    Args:
        inner: the connector, which notes its episodes in ``spans``.
        spans: where they go.
        close: exports the last ones.
    """

    def __init__(self, inner: KVConnectorScheduler, spans: Spans, close: Callable[[], None]) -> None:
        super().__init__(inner)
        self._spans = spans
        self._close = close

    def on_new_request(self, request: RequestView) -> None:  # noqa: D102
        super().on_new_request(request)
        self._spans.begin(request)

    def explain(self, request_id: str) -> CacheReport:  # noqa: D102
        report = super().explain(request_id)
        self._spans.end(request_id, report)
        return report

    def shutdown(self) -> None:  # noqa: D102
        super().shutdown()
        self._close()


@dataclass(frozen=True, slots=True)
class TracingFactory:
    """Makes a connector whose requests are traced. Satisfies ``cargohold.protocol.KVConnectorFactory``.

    Attributes:
        inner: makes the connector.
    """

    inner: KVConnectorFactory

    def __post_init__(self) -> None:
        require_packages()

    def make_scheduler_side(self, environment: SchedulerEnvironment) -> KVConnectorScheduler:
        """Make the inner scheduler side and a wrapper that traces it."""
        tracer, close = _open_tracer()
        spans = Spans(tracer, environment.clock)
        inner = self.inner.make_scheduler_side(replace(environment, observe=spans.note))
        return TracingScheduler(inner, spans, close)

    def make_worker_side(self, environment: WorkerEnvironment) -> KVConnectorWorker:
        """Make the inner worker side, where nothing is traced."""
        return self.inner.make_worker_side(environment)


def require_packages() -> None:
    """Raise ``ConfigError`` if OpenTelemetry is not installed."""
    try:
        is_there = all(find_spec(package) is not None for package in _PACKAGES)
    except ModuleNotFoundError:  # of a parent package
        is_there = False
    if not is_there:
        raise ConfigError("traces", value=True, expected="it needs OpenTelemetry: pip install 'cargohold[otel]'")


def _open_tracer() -> tuple[Tracer, Callable[[], None]]:
    """Return a tracer, and what ends it: of the program, if it has set up OpenTelemetry itself, or one of our own.

    Our own exports to the endpoint in OpenTelemetry's usual environment variables, by default to this machine's port 4318.
    """
    from opentelemetry import trace  # noqa: PLC0415  # may be absent
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  # likewise
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  # likewise
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415  # likewise
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415  # likewise

    provider: Any = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        return provider.get_tracer("cargohold"), lambda: None
    name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "cargohold"}
    own = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
    own.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=_EXPORT_TIMEOUT_S)))
    return own.get_tracer("cargohold"), own.shutdown
