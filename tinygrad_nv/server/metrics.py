"""/metrics: Prometheus metrics.

Protocol: names, labels and bucket edges are vLLM's with the prefix `tinygrad_nv:` (or `vllm:`, by
--metrics-prefix, for existing dashboards). Engine statistics are read when /metrics is requested; request
metrics are observed when they happen. Each server has its own registry.
"""
from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tinygrad_nv.server.record import Record

PREFIXES = ("tinygrad_nv", "vllm")
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
        40.0, 80.0, 160.0, 640.0, 2560.0)
TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
         80.0)
REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
           480.0, 960.0, 1920.0, 7680.0)


def tokens_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, … up to `most`."""
    edges = (mantissa * 10 ** power for power in range(len(str(most))) for mantissa in (1, 2, 5))
    return tuple(edge for edge in edges if edge <= most)


class _Engine(Collector):
    """The engine's statistics at the time of a request: (kind, name, field of EngineStats, help)."""
    METRICS = (("gauge", "num_requests_running", "running", "Sequences in the running batch."),
               ("gauge", "num_requests_waiting", "waiting", "Waiting requests and preempted sequences."),
               ("gauge", "kv_cache_usage_perc", "kv_used", "Fraction of KV cache pages in use."),
               ("counter", "num_preemptions", "preempted", "Preemptions because of too few free pages."),
               ("counter", "prefix_cache_queries", "prefix_queries", "Tokens looked up in the prefix cache."),
               ("counter", "prefix_cache_hits", "prefix_hits", "Tokens found in the prefix cache."),
               ("counter", "prompt_tokens", "prompt_tokens", "Prompt tokens of started requests, with those "
                "found in the prefix cache."),
               ("counter", "generation_tokens", "generated_tokens", "Tokens generated."),
               ("counter", "engine_steps", "steps", "Steps of the engine."))

    def __init__(self, prefix: str, model: str, stats: Callable[[], Any],
                 compilations: Callable[[], int]) -> None:
        self.prefix, self.model, self.stats, self.compilations = prefix, model, stats, compilations

    def collect(self) -> Iterator[Metric]:
        """Metrics now."""
        stats = self.stats()
        for kind, name, attribute, words in self.METRICS:
            family = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}[kind]
            metric = family(f"{self.prefix}:{name}", words, labels=["model_name"])
            metric.add_metric([self.model], getattr(stats, attribute))
            yield metric
        if stats.adapters is not None:
            labels = stats.adapters.labels()
            metric = GaugeMetricFamily(f"{self.prefix}:lora_requests_info", "Adapters of running and of "
                                       "waiting sequences, and how many run at a time; the time.",
                                       labels=[*labels])
            metric.add_metric([*labels.values()], time.time())
            yield metric
        metric = CounterMetricFamily(f"{self.prefix}:compilations_after_ready",
                                     "Kernels that the server itself compiled, and steps that it captured, "
                                     "since it was ready.", labels=["model_name"])
        metric.add_metric([self.model], self.compilations())
        yield metric


class _Gaps(Collector):
    """The histogram of times between tokens. prometheus_client's takes 5 µs for each, this a fifth: the event
    loop alone writes to it."""

    def __init__(self, name: str, model: str) -> None:
        self.name, self.model = name, model
        self.counts, self.total_s = [0] * (len(TOKEN) + 1), 0.0

    def observe(self, seconds: float) -> None:
        """Counts a token."""
        self.counts[bisect_left(TOKEN, seconds)] += 1
        self.total_s += seconds

    def collect(self) -> Iterator[Metric]:
        """The histogram now."""
        edges = [*map(floatToGoString, TOKEN), "+Inf"]
        metric = HistogramMetricFamily(self.name, "Time between a sequence's tokens.", labels=["model_name"])
        metric.add_metric([self.model], [*zip(edges, accumulate(self.counts), strict=True)], self.total_s)
        yield metric


class Metrics:
    """Metrics of the model `model` with a context of `length` tokens."""

    def __init__(self, model: str, length: int, stats: Callable[[], Any], prefix: str = PREFIXES[0],
                 compilations: Callable[[], int] = lambda: 0) -> None:
        self.registry, self.prefix, self.model = CollectorRegistry(), prefix, model
        self.registry.register(_Engine(prefix, model, stats, compilations))
        sizes = tokens_up_to(length)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds",
                                                   "Time to a request's first token.", TTFT)
        self.inter_token_latency = _Gaps(f"{prefix}:inter_token_latency_seconds", model)
        self.registry.register(self.inter_token_latency)
        self.per_token = self._histogram("time_per_output_token_seconds",
                                         "Mean time of a sequence's tokens after the first.", TOKEN)
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Time of whole requests.", REQUEST)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a request's prompts.", sizes)
        self.generation_tokens = self._histogram("request_generation_tokens", "Tokens of a sequence.", sizes)
        self.max_tokens = self._histogram("request_params_max_tokens", "max_tokens of requests.", sizes)
        self.n = self._histogram("request_params_n", "n of requests.", (1, 2, 5, 10, 20))
        self.success = Counter(f"{prefix}:request_success", "Sequences that ended, by reason.",
                               ["model_name", "finished_reason"], registry=self.registry)
        self.http_requests = Counter(f"{prefix}:http_requests", "Requests answered, by path and status; 499: "
                                     "the client disconnected.", ["method", "path", "status"],
                                     registry=self.registry)

    def _histogram(self, name: str, words: str, edges: Iterable[float]) -> Histogram:
        made = Histogram(f"{self.prefix}:{name}", words, ["model_name"], buckets=tuple(edges),
                         registry=self.registry)
        return made.labels(self.model)

    def inter_token_latencies(self, seconds: list[float]) -> None:
        """Observes times between tokens."""
        for each in seconds: self.inter_token_latency.observe(each)

    def record_end(self, record: Record) -> None:
        """Records the end of a request that reached the engine."""
        if record.params is None: return
        # choices without a finish reason were aborted with their request
        unfinished = ["abort"] * (record.choices - len(record.reasons))
        for reason in record.reasons + unfinished: self.success.labels(self.model, reason).inc()
        self.prompt_tokens.observe(record.prompt_tokens)
        self.n.observe(record.params.n)
        if record.params.max_tokens is not None: self.max_tokens.observe(record.params.max_tokens)
        if record.first is None: return
        self.time_to_first_token.observe(record.first - record.started)
        self.e2e_latency.observe(time.perf_counter() - record.started)
        for answer in record.answers.values():
            self.generation_tokens.observe(answer.tokens)
            if answer.tokens > 1: self.per_token.observe((answer.last - answer.first) / (answer.tokens - 1))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
