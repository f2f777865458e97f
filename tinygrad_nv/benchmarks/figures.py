"""Measured figures with vLLM's names: aligned text for people, JSON with raw figures for programs."""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median, pstdev
from typing import Any

WIDTH = 50
PERCENTILES = (10, 25, 50, 75, 90, 99)


def percentile(values: Sequence[float], part: float) -> float:
    """Linear interpolation, as numpy's."""
    ordered = sorted(values)
    at = part / 100 * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass
class RequestResult:
    """One request of a served workload. Times in seconds; `gaps` are inter-token latencies."""
    prompt_tokens: int
    output_tokens: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""


METRICS = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)",
           "itl": "Inter-token Latency", "e2el": "End-to-end Latency"}


def raw(answers: Sequence[RequestResult]) -> dict[str, list[float]]:
    """The seconds of each metric, over the successful requests."""
    good = [each for each in answers if not each.error]
    return {"ttft": [each.ttft for each in good],
            "tpot": [(each.latency - each.ttft) / (each.output_tokens - 1) for each in good
                     if each.output_tokens > 1],
            "itl": [gap for each in good for gap in each.gaps], "e2el": [each.latency for each in good]}


def within(answers: Sequence[RequestResult], limits: Mapping[str, float]) -> int:
    """Returns how many successful requests are within limits of ttft, tpot and e2el, in ms. A single token
    has a tpot of 0, as in vLLM."""
    def fits(one: RequestResult) -> bool:
        tpot = (one.latency - one.ttft) / (one.output_tokens - 1) if one.output_tokens > 1 else 0.0
        seconds = {"ttft": one.ttft, "tpot": tpot, "e2el": one.latency}
        return all(1e3 * seconds[name] <= limit for name, limit in limits.items())
    return sum(not each.error and fits(each) for each in answers)


def summarise_serving(answers: Sequence[RequestResult], seconds: float, percentiles: Sequence[float] = (99,),
           limits: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The figures of a served workload, with the names of vLLM's JSON. `limits` are those of goodput."""
    good = [each for each in answers if not each.error]
    inputs, outputs = sum(each.prompt_tokens for each in good), sum(each.output_tokens for each in good)
    made: dict[str, Any] = {
        "duration": seconds, "completed": len(good), "failed": len(answers) - len(good),
        "total_input_tokens": inputs, "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds, "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds}
    made["request_goodput"] = within(answers, limits) / seconds if limits else None
    for name, values in raw(answers).items():
        if not values: continue
        thousand = [1e3 * value for value in values]
        made |= {f"mean_{name}_ms": mean(thousand), f"median_{name}_ms": median(thousand),
                 f"std_{name}_ms": pstdev(thousand)}
        made |= {f"p{part:g}_{name}_ms": percentile(thousand, part) for part in percentiles}
    return made


def render_serving(figures: dict[str, Any], percentiles: Sequence[float] = (99,),
                metrics: Sequence[str] = tuple(METRICS)) -> str:
    """Returns the figures of a served workload as aligned text."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}"]

    def row(name: str, value: float) -> None:
        shown = str(value) if isinstance(value, int) else f"{value:.2f}"
        lines.append(f"{name:<40}{shown:>10}")

    row("Successful requests:", figures["completed"])
    row("Failed requests:", figures["failed"])
    row("Benchmark duration (s):", figures["duration"])
    row("Total input tokens:", figures["total_input_tokens"])
    row("Total generated tokens:", figures["total_output_tokens"])
    row("Request throughput (req/s):", figures["request_throughput"])
    if figures["request_goodput"] is not None: row("Request goodput (req/s):", figures["request_goodput"])
    row("Output token throughput (tok/s):", figures["output_throughput"])
    row("Total token throughput (tok/s):", figures["total_token_throughput"])
    for name, title in METRICS.items():
        if name not in metrics or f"mean_{name}_ms" not in figures: continue
        lines.append(f"{title:-^{WIDTH}}")
        for kind in ("mean", "median", "std", *(f"p{part:g}" for part in percentiles)):
            row(f"{kind.capitalize()} {name.upper()} (ms):", figures[f"{kind}_{name}_ms"])
    return "\n".join([*lines, "=" * WIDTH])


def compare_serving(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Returns how many times the second's tokens a second the first has."""
    if not theirs["output_throughput"]: return "the second server answered nothing: no ratio"
    return (f"output token throughput: {ours['output_throughput'] / theirs['output_throughput']:.2f} times "
            "that of the second")


def latency(seconds: Sequence[float]) -> dict[str, Any]:
    """Figures of repeated batches, with the names of vLLM's JSON."""
    return {"avg_latency": mean(seconds), "latencies": list(seconds),
            "percentiles": {str(part): percentile(seconds, part) for part in PERCENTILES}}


def latency_text(figures: dict[str, Any]) -> str:
    """The same, one line each."""
    return "\n".join([f"Avg latency: {figures['avg_latency']:.4f} seconds",
                      *(f"{part}% percentile latency: {value:.4f} seconds"
                        for part, value in figures["percentiles"].items())])


def throughput(seconds: float, requests: int, inputs: int, outputs: int) -> dict[str, Any]:
    """Figures of many prompts at once, with the names of vLLM's JSON."""
    return {"elapsed_time": seconds, "num_requests": requests, "total_num_tokens": inputs + outputs,
            "requests_per_second": requests / seconds, "tokens_per_second": (inputs + outputs) / seconds,
            "output_tokens_per_second": outputs / seconds}


def throughput_text(figures: dict[str, Any], inputs: int, outputs: int) -> str:
    """The same, as text."""
    return (f"Throughput: {figures['requests_per_second']:.2f} requests/s, "
            f"{figures['tokens_per_second']:.2f} total tokens/s, "
            f"{figures['output_tokens_per_second']:.2f} output tokens/s\n"
            f"Total num prompt tokens: {inputs}\nTotal num output tokens: {outputs}")


def compare_speed(ours: Sequence[float], theirs: Sequence[float], name: str) -> str:
    """The speed ratio of interleaved runs."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return (f"tinygrad_nv / {name}: {median(ratios):.2f} times its speed "
            f"(spread {min(ratios):.2f} … {max(ratios):.2f}, {len(ratios)} interleaved runs)")
