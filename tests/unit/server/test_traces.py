"""Traces of requests, at a collector that speaks OTLP over HTTP."""
from __future__ import annotations

import http.server
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.server.serve_case import NAME, FakeEngine, FakeModel, Live, fake_service, live, until
from tinygrad_nv.errors import ModelError, RequestError
from tinygrad_nv.server.tracing import Tracer

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(http.server.ThreadingHTTPServer):
    """Keeps the spans that it gets."""

    def __init__(self) -> None:
        spans: list[Any] = []
        services: list[str] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                found = ExportTraceServiceRequest()
                found.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                for resource in found.resource_spans:
                    services.extend(each.value.string_value for each in resource.resource.attributes
                                    if each.key == "service.name")
                    for scope in resource.scope_spans: spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: """Nothing is logged."""
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans, self.services = spans, services


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def engine() -> FakeEngine: return FakeEngine(FakeModel(), cached=2, pause_s=0.01)


@pytest.fixture
def server(collector: Collector, engine: FakeEngine) -> Iterator[Live]:
    tracer = Tracer.to(f"http://127.0.0.1:{collector.server_port}/v1/traces")
    collector.spans.clear()
    with live(fake_service(engine, tracer=tracer)) as running: yield running
    tracer.close()


def spans(server: Live, collector: Collector) -> list[Any]:
    """Returns the spans of all requests so far."""
    until(lambda: server.service.active == 0)
    assert server.service.tracer is not None
    server.service.tracer.provider.force_flush()
    return collector.spans


def values(span: Any) -> dict[str, Any]:
    def value(found: Any) -> Any:
        kind = found.WhichOneof("value")
        if kind == "array_value": return [value(each) for each in found.array_value.values]
        return getattr(found, kind)
    return {each.key: value(each.value) for each in span.attributes}


def test_a_request_is_a_span_of_its_clients_trace(server: Live, collector: Collector):
    begun = time.time_ns()
    asked = {"prompt": "Once upon a time", "max_tokens": 5, "temperature": 0.5, "n": 2, "top_p": 0.9}
    made = server.post(asked,
                       headers={"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=x"}).json()
    [span] = spans(server, collector)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "vendor=x")
    assert (span.name, span.kind, span.status.code) == ("llm_request", 2, 0)      # of a server
    assert begun <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns()
    found = values(span)
    e2e, first, decode = (found.pop(f"gen_ai.latency.{name}") for name in (
        "e2e", "time_to_first_token", "time_in_model_decode"))
    assert 0 < first < e2e
    assert 0.04 <= decode <= e2e - first
    assert e2e == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, abs=1e-6)
    assert found == {
        "gen_ai.request.id": made["id"], "gen_ai.response.model": NAME, "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.num_sequences": 2, "gen_ai.usage.prompt_tokens": made["usage"]["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 10, "gen_ai.usage.cached_tokens": 2,
        "gen_ai.response.finish_reasons": ["length", "length"]}
    assert set(collector.services) == {"tinygrad-nv"}


def test_requests_without_a_trace_begin_their_own(server: Live, collector: Collector):
    for _ in range(2): server.post({"prompt": "a", "max_tokens": 2, "stream": True})
    server.post({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}, "/v1/chat/completions")
    found = spans(server, collector)
    assert len({span.trace_id for span in found}) == len(found) == 3
    assert not any(span.parent_span_id for span in found)
    # a client whose trace is not sampled
    server.post({"prompt": "a", "max_tokens": 2}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert len(spans(server, collector)) == 3
    # a request that is refused, and paths that compute nothing
    server.post({"prompt": "a", "temperature": -1})
    server.http.get("/health")
    assert len(spans(server, collector)) == 3


def test_failures_are_told(server: Live, collector: Collector, engine: FakeEngine):
    engine.fails_after, engine.failure = 1, ModelError("NaN", "numbers")
    assert server.post({"prompt": "a", "max_tokens": 4}).status_code == 500
    engine.fails_after = None
    with pytest.raises(httpx.ReadTimeout): server.post({"prompt": "a", "max_tokens": 400}, timeout=0.1)
    failed, left = spans(server, collector)
    assert (failed.status.code, failed.status.message) == (2, "engine_error")
    assert (left.status.code, left.status.message) == (2, "client_gone")
    assert values(left)["gen_ai.usage.completion_tokens"] > 0


@pytest.mark.parametrize(("endpoint", "protocol", "words"), [
    ("localhost:4318", "", "--otlp-traces-endpoint is 'localhost:4318'\n  expected: an address that begins"),
    ("http://a", "zipkin", "_OTLP_TRACES_PROTOCOL is 'zipkin'\n  expected: http/protobuf or grpc"),
    ("grpc://a", "http/protobuf", "begins with http:// or https://")])
def test_endpoints_that_cannot_be(monkeypatch: pytest.MonkeyPatch, endpoint: str, protocol: str, words: str):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with pytest.raises(RequestError) as error: Tracer.to(endpoint)
    assert words in str(error.value)


@pytest.mark.parametrize(("protocol", "kind"), [("", "http"), ("grpc", "grpc")])
def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch, protocol: str, kind: str):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter", None)
    with pytest.raises(RequestError, match=f"pip install opentelemetry-sdk .*proto-{kind}") as error:
        Tracer.to("http://localhost:4318/v1/traces")
    assert "is not installed" in str(error.value)


def test_the_command_refuses_them_before_it_loads_a_model(command):
    command("serve", "--port", "0", "--otlp-traces-endpoint", "collector:4317").refused(
        "--otlp-traces-endpoint is 'collector:4317'", "an address that begins with http://")
