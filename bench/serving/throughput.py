"""Throughput of our server beside transformers' `generate` in batches, and both one request at a time.

    python bench/serving/throughput.py                     # the model in the box
    python bench/serving/throughput.py DIR --requests 64 --repeats 5

One load, prompts and answers of mixed lengths: the server gets all requests at once, over HTTP, and one after
the other; transformers gets them in batches, padded on the left, and one by one. Contenders take turns, and
each has run the load once before. Rates count the tokens that were asked for: what a batch computes for the
shorter ones while the longest goes on does not count. transformers runs in a process of its own.
"""
from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import ask, each, end_with_parent, save, spread, table
from tinygrad_nv.benchmarks import client, figures
from tinygrad_nv.benchmarks.engines import Transformers
from tinygrad_nv.benchmarks.workload import BenchRequest, random_requests, total
from tinygrad_nv.cli import DEFAULT_MODEL
from tinygrad_nv.cli.bench_serve import our_server
from tinygrad_nv.models.config import read_config

SERVER, BATCHES = "tinygrad_nv, server", "transformers, batches"
ALONE, THEIRS_ALONE = "tinygrad_nv, server, one at a time", "transformers, one at a time"
BATCH = 32
WHOLE = {"temperature": 0.0, "ignore_eos": True}      # answers to their full length


class Worker:
    """transformers in another process: a line with a batch size in, a line with seconds out."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--worker"],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, batch: int) -> float:
        """Seconds for the load."""
        return float(json.loads(ask(self.process, str(batch))))

    def close(self) -> None:
        """Ends it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def work(arguments: argparse.Namespace, workload: list[BenchRequest]) -> None:
    """The other process."""
    end_with_parent()
    engine = Transformers(arguments.model, arguments.dtype, 1)
    for line in sys.stdin:
        engine.batch = int(line)
        print(json.dumps(engine.run(workload)), flush=True)


def load(arguments: argparse.Namespace) -> list[BenchRequest]:
    """The same for all contenders."""
    vocab = read_config(arguments.model).vocab_size
    return random_requests(arguments.requests, arguments.input_len, arguments.output_len, vocab, ratio=0.5)


def serve_load(url: str, workload: list[BenchRequest], concurrency: int | None) -> dict[str, Any]:
    """Figures of the server under this load."""
    async def run() -> dict[str, Any]:
        name = (await client.fetch(client.Endpoint(url, ""), "/v1/models"))["data"][0]["id"]
        target = client.Endpoint(url, name, body=WHOLE)
        answers, seconds = await client.load(target, workload, [0.0] * len(workload), concurrency)
        if failed := [answer.error for answer in answers if answer.error]: raise SystemExit(failed[0])
        return figures.summarise_serving(answers, seconds)
    return asyncio.run(run())


def measure(arguments: argparse.Namespace, workload: list[BenchRequest], url: str,
            worker: Worker) -> dict[str, Any]:
    """Output tokens a second of each contender's turns, and the server's latencies."""
    _, outputs = total(workload)
    latencies: list[dict[str, Any]] = []

    def ours(concurrency: int | None) -> float:
        made = serve_load(url, workload, concurrency)
        assert made["total_output_tokens"] == outputs
        if concurrency is None: latencies.append(made)
        return float(made["duration"])

    contenders: dict[str, Callable[[], float]] = {
        SERVER: lambda: ours(None), BATCHES: lambda: worker.run(BATCH), ALONE: lambda: ours(1),
        THEIRS_ALONE: lambda: worker.run(1)}
    for run in contenders.values(): run()
    latencies.clear()
    turns = [name for _ in range(arguments.repeats) for name in contenders]
    runs: dict[str, list[float]] = {name: [] for name in contenders}
    for name in each(turns): runs[name].append(outputs / contenders[name]())
    told = {name: [made[name] for made in latencies] for name in ("median_ttft_ms", "median_tpot_ms")}
    return {"tokens_per_s": runs, "server": told}


def main() -> None:
    """Measures, prints, saves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=48)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    workload = load(arguments)
    if arguments.worker: return work(arguments, workload)
    options = argparse.Namespace(dtype=arguments.dtype, enable_prefix_caching=False, deterministic=False,
                                 vllm={})
    worker = Worker(arguments)
    try:
        with our_server(options, arguments.model) as url: made = measure(arguments, workload, url, worker)
    finally: worker.close()
    rows = []
    for name, rates in made["tokens_per_s"].items():
        ratios = [a / b for a, b in zip(made["tokens_per_s"][SERVER], rates, strict=True)]
        rows.append([name, f"{median(rates):.0f}", f"{median(ratios):.2f} ({spread(ratios)})"])
    print(table(["output tokens/s", "median", "the server / it"], rows))
    save("serving", {"model": arguments.model.name, "dtype": arguments.dtype, "batch": BATCH,
                     "requests": arguments.requests, "input_len": arguments.input_len,
                     "output_len": arguments.output_len, **made})


if __name__ == "__main__": main()
