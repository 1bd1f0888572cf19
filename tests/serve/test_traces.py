"""Traces of a server arrive where OpenTelemetry's own exporter sends them, in the trace of the client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="traces need the extra otel")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cargohold import LLM, ConfigError
from cargohold.connector import tracing
from tests.serve.running import call, running

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector(BaseHTTPRequestHandler):
    """A collector of traces, as far as an exporter sees it."""

    spans: list[Any]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    self.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the exporter has sent."""
    spans: list[Any] = []
    kind = type("Own", (Collector,), {"spans": spans})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield spans
        server.shutdown()


def test_spans_of_a_request_arrive_in_its_clients_trace(chat_model: str, collected: list[Any]) -> None:
    with running(chat_model, traces=True) as server:
        for path, body in (
            ("/v1/completions", {"model": "chat", "prompt": "The ship sails on. " * 40, "max_tokens": 2}),
            ("/v1/messages", {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}),
        ):
            headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            assert call(server, path, body, headers).status == 200
    spans = {span.name: span for span in collected}
    assert {"cargohold.request", "cargohold.look_up", "cargohold.store"} <= spans.keys()
    assert {span.trace_id.hex() for span in collected} == {TRACE}
    assert [span.name for span in collected].count("cargohold.request") == 2


def test_without_the_packages_the_option_is_refused(chat_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_PACKAGES", ("cargohold_has_no_such_package.sdk",))
    with pytest.raises(ConfigError, match=r"traces.*pip install 'cargohold\[otel\]'"):
        LLM(chat_model, traces=True)
