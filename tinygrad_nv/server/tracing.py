"""Traces of requests, for an OpenTelemetry collector (`--otlp-traces-endpoint`).

Protocol: `Tracer.to(endpoint)` sends a span `llm_request` for each request that has reached the engine, in
the background; its attributes have vLLM's names. A span goes on with the trace of the client, which the
headers `traceparent` and `tracestate` name. Spans that a collector does not take are dropped, with a line in
the log. `close` sends what is left.

The protocol is OTLP over HTTP, or what OTEL_EXPORTER_OTLP_TRACES_PROTOCOL says; OpenTelemetry's other
variables hold, too: OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_TRACES_HEADERS, …
"""
from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from tinygrad_nv.errors import RequestError
from tinygrad_nv.server.record import Record

PROTOCOL, HTTP, GRPC = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf", "grpc"
EXPORTERS = {HTTP: "opentelemetry.exporter.otlp.proto.http.trace_exporter",
             GRPC: "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"}
PACKAGES = {HTTP: "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
            GRPC: "opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc"}
SCHEMES = {HTTP: ("http://", "https://"), GRPC: ("grpc://", "http://", "https://")}
OPTION, SPAN, NAME, SERVICE = "--otlp-traces-endpoint", "llm_request", "tinygrad_nv.server", "tinygrad-nv"
HEADERS = (b"traceparent", b"tracestate")
FLUSH_MS = 5000


class Tracer:
    """Spans of requests, over an OpenTelemetry provider."""

    def __init__(self, provider: Any) -> None:
        self.provider, self.tracer = provider, provider.get_tracer(NAME)
        self.trace = importlib.import_module("opentelemetry.trace")
        context = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        self.propagator = context.TraceContextTextMapPropagator()

    @staticmethod
    def to(endpoint: str) -> Tracer:
        """One that sends to a collector. Raises `RequestError`."""
        protocol = os.environ.get(PROTOCOL) or HTTP
        if protocol not in EXPORTERS:
            raise RequestError(f"{PROTOCOL} is {protocol!r}", " or ".join(EXPORTERS), f"change {PROTOCOL}")
        if not endpoint.startswith(SCHEMES[protocol]):
            raise RequestError(f"{OPTION} is {endpoint!r}", f"an address that begins with "
                               f"{' or '.join(SCHEMES[protocol])}, such as http://localhost:4318/v1/traces",
                               f"change {OPTION}")
        try:
            sdk = importlib.import_module("opentelemetry.sdk.trace")
            export = importlib.import_module("opentelemetry.sdk.trace.export")
            resources = importlib.import_module("opentelemetry.sdk.resources")
            exporter = importlib.import_module(EXPORTERS[protocol])
        except ModuleNotFoundError as error:
            raise RequestError(f"{OPTION} is {endpoint!r}, and the Python package of {error.name} is not "
                               "installed", "OpenTelemetry's SDK, and its exporter of OTLP",
                               f"pip install {PACKAGES[protocol]}") from error
        options = {"insecure": not endpoint.startswith("https://")} if protocol == GRPC else {}
        service = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or SERVICE}
        provider = sdk.TracerProvider(resource=resources.Resource.create(service), shutdown_on_exit=False)
        sender = exporter.OTLPSpanExporter(endpoint=endpoint, **options)
        provider.add_span_processor(export.BatchSpanProcessor(sender))
        return Tracer(provider)

    def record_end(self, record: Record, headers: Iterable[tuple[bytes, bytes]], status: int) -> None:
        """Sends the span of a request that has ended with an HTTP status."""
        if record.params is None: return
        end_ns, seconds = time.time_ns(), time.perf_counter() - record.started
        given = {name.decode(): value.decode("latin-1") for name, value in headers if name in HEADERS}
        span = self.tracer.start_span(
            SPAN, self.propagator.extract(given), self.trace.SpanKind.SERVER, attributes(record, seconds),
            start_time=end_ns - int(seconds * 1e9))
        if record.error is not None or status >= 400:
            span.set_status(self.trace.Status(self.trace.StatusCode.ERROR, record.error or str(status)))
        span.end(end_ns)

    def close(self) -> None:
        """Sends what is left, for a bounded time."""
        self.provider.force_flush(FLUSH_MS)
        self.provider.shutdown()


def attributes(record: Record, seconds: float) -> Mapping[str, Any]:
    """Returns the attributes of the span of a request, which took so many seconds. Times are in seconds; of
    the time to the first token, waiting is a part."""
    params = record.params
    assert params is not None
    last = max((answer.last for answer in record.answers.values()), default=None)
    found = {
        "gen_ai.request.id": record.id, "gen_ai.response.model": record.model,
        "gen_ai.request.n": params.n, "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature, "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.num_sequences": record.choices, "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.output_tokens,
        "gen_ai.usage.cached_tokens": record.cached_tokens,
        "gen_ai.response.finish_reasons": record.reasons or None, "gen_ai.latency.e2e": seconds,
        "gen_ai.latency.time_to_first_token": None if record.first is None else
        record.first - record.started,
        "gen_ai.latency.time_in_model_decode": None if record.first is None or last is None else
        last - record.first}
    return {name: value for name, value in found.items() if value is not None}
