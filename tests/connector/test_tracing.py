"""Spans of what a connector does, in the trace of the request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="traces need the extra otel")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Tracer

from cargohold.connector import tracing
from cargohold.connector.tracing import Spans, TracingFactory
from cargohold.lab.simulation import SimulatedEngine, simulated_layout
from cargohold.protocol import CacheReport, Episode, KVConnectorFactory
from tests.connector.common import alone, prompt
from tests.held_tiers import SimulatedTiering

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-1bf7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01"
UNSAMPLED = "00-2cf7651916cd43dd8448eb211c80319c-d7ad6b7169203331-00"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(autouse=True)
def tracer(exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracer]:
    """The tracer that connectors get, too."""
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(1.0)), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    monkeypatch.setattr(tracing, "_open_tracer", lambda: (tracer, provider.shutdown))
    yield tracer
    provider.shutdown()


class Traced:
    """Requests that say which trace they belong to."""

    def __init__(self, factory: KVConnectorFactory, **options: Any) -> None:
        self.engine = SimulatedEngine(simulated_layout(60), TracingFactory(factory), **options)

    def serve(self, name: str, tokens: list[int], trace: str | None = PARENT) -> None:
        self.engine.add(name, tokens, 3)
        self.engine.run()
        assert self.engine.tokens(name) == alone(tokens, 3)


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time


def by_name(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    spans: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name.removeprefix("cargohold."), []).append(span)
    return spans


def test_a_request_is_one_tree_of_spans(exporter: InMemorySpanExporter) -> None:
    tiering = SimulatedTiering(60)
    Traced(tiering).serve("first", prompt(0, 45))
    exporter.clear()
    restarted = Traced(tiering)
    restarted.serve("second", prompt(0, 45))
    spans = by_name(exporter)
    assert {"request", "look_up", "wait", "prefetch", "load"} <= spans.keys()
    (request,) = spans["request"]
    for name in ("look_up", "wait", "prefetch", "load"):
        (span,) = spans[name]
        assert span.parent is not None and span.parent.span_id == request.context.span_id, name
        inner, outer = times(span), times(request)
        assert outer[0] <= inner[0] <= inner[1] <= outer[1], name
    (look_up,), (wait,), (load,) = spans["look_up"], spans["wait"], spans["load"]
    asked, waited = times(look_up), times(wait)
    assert asked[0] <= waited[0] <= waited[1] <= asked[1] <= times(load)[0]
    found: dict[str, Any] = dict(look_up.attributes or {})
    restored: dict[str, Any] = dict(request.attributes or {})
    assert found["cargohold.found_tokens.device"] == 0
    assert found["cargohold.found_tokens.disk"] == restored["cargohold.restored_tokens.disk"] > 0
    assert dict(load.attributes or {})["cargohold.outcome"] == "done"
    assert any("tokens" in event.name for event in request.events), "it says why"


def test_a_store_that_outlives_its_request_is_still_in_its_trace(exporter: InMemorySpanExporter) -> None:
    traced = Traced(SimulatedTiering(60))
    traced.serve("first", prompt(0, 45))
    spans = by_name(exporter)
    (request,) = spans["request"]
    assert spans["store"]
    assert {span.parent.span_id for span in spans["store"] if span.parent} == {request.context.span_id}
    assert sum(dict(span.attributes or {})["cargohold.chunks"] for span in spans["store"]) > 5  # type: ignore[misc]  # numbers


class Request:
    """As much of a request as spans are made of."""

    num_prompt_tokens = 7

    def __init__(self, request_id: str, traceparent: str | None = None) -> None:
        self.request_id = request_id
        self.trace_headers = None if traceparent is None else {"traceparent": traceparent}


@pytest.fixture
def spans(tracer: Tracer) -> Spans:
    return Spans(tracer, lambda: 5.0)


def test_spans_are_in_the_trace_that_the_client_sent(spans: Spans, exporter: InMemorySpanExporter) -> None:
    spans.begin(Request("one", PARENT))  # type: ignore[arg-type]  # what is looked at
    spans.begin(Request("two", OTHER))  # type: ignore[arg-type]  # what is looked at
    spans.note(Episode("load", ("two", "one"), 1.0, 2.0))
    spans.end("one", CacheReport())
    store, request = exporter.get_finished_spans()
    start, end = times(store)
    assert format(request.context.trace_id, "032x") == PARENT.split("-")[1]
    assert request.parent is not None and format(request.parent.span_id, "016x") == PARENT.split("-")[2]
    assert format(store.context.trace_id, "032x") == OTHER.split("-")[1]
    assert [link.context.span_id for link in store.links] == [request.context.span_id]
    assert end - start == 1e9


def test_stores_of_a_request_are_one_span_and_each_that_ends_later_is_its_own(
    spans: Spans, exporter: InMemorySpanExporter
) -> None:
    """While many requests generate, a store ends in almost every step: a span each was most of what traces cost."""
    for request_id, trace in (("one", PARENT), ("two", OTHER)):
        spans.begin(Request(request_id, trace))  # type: ignore[arg-type]  # what is looked at
    for at, outcome in enumerate(("done", "failed", "done")):
        facts: dict[str, int | str] = {"chunks": at + 1, "outcome": outcome}
        spans.note(Episode("store", ("one", "two"), 1.0 + at, 2.0 + at, facts))
    assert exporter.get_finished_spans() == ()
    spans.end("one", CacheReport())
    spans.note(Episode("store", ("one",), 5.0, 6.0, {"chunks": 1, "outcome": "done"}))
    stores, request, later = exporter.get_finished_spans()
    added = {"cargohold.chunks": 6, "cargohold.copies": 3, "cargohold.outcome": "failed"}
    assert dict(stores.attributes or {}) == added
    assert times(stores)[1] - times(stores)[0] == 3e9
    assert [format(link.context.trace_id, "032x") for link in stores.links] == [OTHER.split("-")[1]]
    assert dict(later.attributes or {}) == {"cargohold.chunks": 1, "cargohold.outcome": "done"}
    assert {span.parent.span_id for span in (stores, later) if span.parent} == {request.context.span_id}


def test_what_the_client_does_not_sample_makes_no_spans(spans: Spans, exporter: InMemorySpanExporter) -> None:
    spans.begin(Request("one", UNSAMPLED))  # type: ignore[arg-type]  # what is looked at
    spans.note(Episode("load", ("one",), 1.0, 2.0))
    spans.note(Episode("load", ("nobody",), 1.0, 2.0))
    spans.end("one", CacheReport())
    spans.note(Episode("store", ("one",), 2.0, 3.0))
    assert exporter.get_finished_spans() == ()


def test_memory_for_ended_requests_is_bounded(spans: Spans, exporter: InMemorySpanExporter) -> None:
    """The store of a request that ended long ago is in no trace: nothing is known of it any more."""
    for at in range(3000):
        spans.begin(Request(str(at)))  # type: ignore[arg-type]  # what is looked at
        spans.end(str(at), CacheReport())
    exporter.clear()
    for request_id in ("0", "2999"):
        spans.note(Episode("store", (request_id,), 5.0, 6.0))
    (store,) = exporter.get_finished_spans()
    assert store.name == "cargohold.store"


def test_headers_that_are_none_and_a_tracer_that_fails_do_no_harm(
    spans: Spans,
    tracer: Tracer,
    exporter: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spans.begin(Request("one", "no trace"))  # type: ignore[arg-type]  # what is looked at
    spans.end("one", CacheReport())
    (span,) = exporter.get_finished_spans()
    assert span.parent is None, "a trace of its own"

    def fail(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(tracer, "start_span", fail)
    spans.begin(Request("two"))  # type: ignore[arg-type]  # what is looked at
    spans.begin(Request("three"))  # type: ignore[arg-type]  # what is looked at
    assert [record.message for record in caplog.records] == ["traces have ended: no route to host"]
