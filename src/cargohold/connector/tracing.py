"""A connector around another whose work becomes OpenTelemetry spans, made under the request's own trace.

::

    (the client's span)
      cargohold.request          from its arrival until it ends; where its prompt came from, and why
        cargohold.look_up        from the engine's first question until the answer
          cargohold.wait         while the answer was "not yet"
          cargohold.prefetch     chunks on their way from lower tiers to host memory
        cargohold.load           host memory to device
        cargohold.store          device to host memory: its copies that have ended, added up, and each that ends later

The connector only notes what took how long (``Episode``), and only with an observer. Spans are made here, afterwards, in
one place; whatever goes wrong with them ends the traces and nothing else. Stores are added up, because while many requests
generate, one ends in almost every step.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from cargohold.errors import ConfigError, one_line
from cargohold.protocol import (
    CacheReport,
    Clock,
    Episode,
    ForwardingScheduler,
    KVConnectorFactory,
    KVConnectorScheduler,
    KVConnectorWorker,
    RequestView,
    SchedulerEnvironment,
    TransferOutcome,
    WorkerEnvironment,
)

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger(__name__)

_PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_MAX_ENDED: Final = 1024
"""Maximum number of ended requests whose spans are remembered: their stores may still be in flight."""
_MAX_LINKS: Final = 15
_DONE: Final = TransferOutcome.DONE.name.lower()
_EXPORT_TIMEOUT_S: Final = 2.0
"""How long an export may take. The last one delays the end of the engine if no collector runs."""


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
        except Exception as error:  # noqa: BLE001  # an observer must not turn off what it observes, whatever it raises
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

    def on_new_request(self, request: RequestView) -> None:
        super().on_new_request(request)
        self._spans.begin(request)

    def explain(self, request_id: str) -> CacheReport:
        report = super().explain(request_id)
        self._spans.end(request_id, report)
        return report

    def shutdown(self) -> None:
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
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415  # the same
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  # the same
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415  # the same
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415  # the same

    provider: Any = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        return provider.get_tracer("cargohold"), lambda: None
    name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "cargohold"}
    own = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
    own.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=_EXPORT_TIMEOUT_S)))
    return own.get_tracer("cargohold"), own.shutdown
