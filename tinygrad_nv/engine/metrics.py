"""Statistics of an engine as vLLM's metric objects.

Protocol: `metrics(stats, latencies)` makes a list of `Counter`s, `Gauge`s, `Histogram`s and `Vector`s, with
vLLM's names. `Latencies` has a histogram for each of what `LLM.generate` measures.
"""
from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from tinygrad_nv.engine.core import EngineStats
from tinygrad_nv.engine.request_output import RequestOutput

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
           40.0, 80.0, 160.0)
TOKENS = tuple(float(each * 10 ** power) for power in range(6) for each in (1, 2, 5))
MEASURED = {"vllm:time_to_first_token_seconds": SECONDS, "vllm:e2e_request_latency_seconds": SECONDS,
            "vllm:request_prompt_tokens": TOKENS, "vllm:request_generation_tokens": TOKENS}


@dataclass(frozen=True)
class Metric:
    """A metric, by name."""
    name: str
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A number that grows."""
    value: int


@dataclass(frozen=True)
class Gauge(Metric):
    """A number now."""
    value: float


@dataclass(frozen=True)
class Vector(Metric):
    """Numbers that grow."""
    values: list[int]


@dataclass(frozen=True)
class Histogram(Metric):
    """How many values there were, their sum, and how many are at most each bound, by its text."""
    count: int
    sum: float
    buckets: dict[str, int]


@dataclass
class Latencies:
    """Histograms of finished requests, from any thread."""
    counts: dict[str, list[int]] = field(default_factory=lambda: {
        name: [0] * (len(bounds) + 1) for name, bounds in MEASURED.items()})
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MEASURED, 0.0))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, output: RequestOutput) -> None:
        """Counts a finished request."""
        values = (output.ttft_s, output.ttft_s + output.decode_s, len(output.prompt_token_ids),
                  sum(len(each.token_ids) for each in output.outputs))
        with self.lock:
            for (name, bounds), value in zip(MEASURED.items(), values, strict=True):
                self.counts[name][bisect_left(bounds, value)] += 1
                self.sums[name] += value

    def histograms(self, labels: dict[str, str]) -> list[Metric]:
        """A metric for each."""
        with self.lock:
            return [_histogram(name, labels, self.counts[name], self.sums[name]) for name in MEASURED]


def _histogram(name: str, labels: dict[str, str], counts: Sequence[int], total: float) -> Histogram:
    bounds = [*map(str, MEASURED[name]), "+Inf"]
    return Histogram(name, labels, sum(counts), total, dict(zip(bounds, accumulate(counts), strict=True)))


def metrics(stats: EngineStats, latencies: Latencies, model: str) -> list[Metric]:
    """All metrics of the engine of `model`."""
    labels = {"model_name": model, "engine": "0"}
    gauges = {"vllm:num_requests_running": stats.running, "vllm:num_requests_waiting": stats.waiting,
              "vllm:kv_cache_usage_perc": stats.kv_used}
    counters = {"vllm:num_preemptions": stats.preempted, "vllm:prefix_cache_queries": stats.prefix_queries,
                "vllm:prefix_cache_hits": stats.prefix_hits, "vllm:prompt_tokens": stats.prompt_tokens,
                "vllm:generation_tokens": stats.generated_tokens,
                "vllm:spec_decode_num_draft_tokens": stats.drafted,
                "vllm:spec_decode_num_accepted_tokens": stats.accepted}
    lora = [] if stats.adapters is None else [Gauge("vllm:lora_requests_info", stats.adapters.labels(),
                                                    time.time())]
    return [*lora, *(Gauge(name, labels, float(value)) for name, value in gauges.items()),
            *(Counter(name, labels, value) for name, value in counters.items()),
            Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, list(stats.accepted_at)),
            *latencies.histograms(labels)]
