"""Our server beside vLLM's on the same model and machine, loaded by vLLM's own client, `vllm bench serve`.

    python bench/serving/against_vllm.py                                # 97M weights and SmolLM2, all loads
    python bench/serving/against_vllm.py --models qwen3-97m --loads random --concurrency 1 16 --repeats 5
    python bench/serving/against_vllm.py --models qwen3-97m --lora --loads random

The first run makes vLLM's environment (tinygrad_nv/benchmarks/vllm_environment.py) and the models. Both
servers stay loaded and take turns; the one whose turn it is not is stopped by a signal. Each answers a load
once before it counts, and every second pair begins with the other side. Figures are medians with their range.
--offline adds `bench throughput` and `bench latency` of both sides, which need no server. Results of other
models are kept.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import zlib
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import RESULTS, each, save, table
from bench.serving.vllm_models import MODELS, write_adapters, write_model
from bench.serving.vllm_servers import OURS, THEIRS, Load, Server, make_loads, run_client, run_offline
from tinygrad_nv import cache
from tinygrad_nv.benchmarks import vllm_environment

FIGURES = {"output_throughput": "tokens/s", "median_ttft_ms": "TTFT ms", "median_tpot_ms": "TPOT ms",
           "p99_tpot_ms": "P99 TPOT ms"}
HEADER = ["model", "load", "clients", *(f"{name}, ours / vLLM" for name in FIGURES.values())]
LOADS = ("random", "sharegpt", "prefix", "structured")
Runs = dict[str, list[dict[str, Any]]]


def compare(model: str, load: str, concurrency: int, rate: float, runs: Runs) -> dict[str, Any]:
    """Returns a row of the results: medians of both sides, and the ranges of the ratios ours ÷ vLLM's."""
    ratios = {}
    for name in FIGURES:
        pairs = [ours[name] / theirs[name] for ours, theirs in zip(runs[OURS], runs[THEIRS], strict=True)
                 if theirs[name]]
        if pairs: ratios[name] = [round(value, 3) for value in (min(pairs), median(pairs), max(pairs))]
    medians = {side: {name: round(median(one[name] for one in found), 2) for name in found[0]}
               for side, found in runs.items()}
    return {"model": model, "load": load, "concurrency": concurrency, "rate": rate, **medians,
            "ratios": ratios}


def describe(row: dict[str, Any]) -> list[str]:
    """Returns a row as people read it: ours, vLLM's, and the ratio with its range."""
    cells = [row["model"], row["load"], str(row["concurrency"] or f"{row['rate']:g}/s")]
    for name in FIGURES:
        if name not in row["ratios"]: cells.append("—")
        else:
            low, middle, high = row["ratios"][name]
            cells.append(f"{row[OURS][name]:.1f} / {row[THEIRS][name]:.1f} = {middle:.2f} "
                         f"({low:.2f} … {high:.2f})")
    return cells


def take_turns(servers: list[Server], model: Path, load: Load, concurrency: int, rate: float, repeats: int,
               prompts: int, adapters: tuple[str, ...]) -> Runs:
    """Returns the figures of `repeats` pairs of runs, behind one that does not count."""
    runs: Runs = {OURS: [], THEIRS: []}
    for repeat in range(-1, repeats):
        number = min(prompts, max(8, concurrency)) if repeat < 0 else prompts
        for server in servers if repeat % 2 else servers[::-1]:
            # no prompts of earlier runs, which a prefix cache would have
            seed = zlib.crc32(repr((load.options[1], concurrency, rate, repeat)).encode()) >> 1
            figures = run_client(server, model, load, concurrency, rate, number, seed, adapters)
            if repeat >= 0: runs[server.side].append(figures)
    return runs


def measure_servers(name: str, model: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Returns the rows of a model, and what the servers took to start and hold."""
    adapters = write_adapters(model) if given.lora else {}
    options = ("--enable-lora", "--max-loras", str(len(adapters)), "--lora-modules",
               *(f"{one}={where}" for one, where in adapters.items())) if adapters else ()
    rows = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for side in (OURS, THEIRS):
            servers.append(Server(side, model, folder / f"{side}.log", options, given.bind))
            stack.callback(servers[-1].close)
        loads = make_loads(folder)
        points = [(load, concurrency, 0.0) for load in given.loads for concurrency in given.concurrency] + \
                 [("random", 0, rate) for rate in given.rates]
        for load, concurrency, rate in each(points):
            prompts = given.prompts or max(8, 3 * (concurrency or 8))
            runs = take_turns(servers, model, loads[load], concurrency, rate, given.repeats, prompts,
                              tuple(adapters))
            rows.append(compare(name, load, concurrency, rate, runs))
            print(table(HEADER, [describe(rows[-1])]), flush=True)
        held = {server.side: {"start_s": round(server.start_s, 1), "memory_mb": round(server.memory_mb())}
                for server in servers}
    return {"rows": rows, "servers": held}


def measure_offline(model: Path, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Returns tokens a second of `bench throughput` and `bench latency` of both sides, in turns."""
    found: dict[str, dict[str, list[float]]] = {}
    for kind in ("throughput", "latency"):
        found[kind] = {OURS: [], THEIRS: []}
        for repeat in range(repeats):
            for side in (OURS, THEIRS)[::-1 if repeat % 2 else 1]:
                found[kind][side].append(round(run_offline(side, kind, model), 1))
        print(kind, found[kind], flush=True)
    return found


def merge(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of earlier runs, those that were measured again in their new form, then the others."""
    def point(row: dict[str, Any]) -> tuple[Any, ...]: return row["load"], row["concurrency"], row["rate"]
    found = {point(row): row for row in (*before, *rows)}
    return [*found.values()]


def read_before() -> dict[str, Any]:
    """Returns the results of earlier runs with the same vLLM, by name of the model."""
    path = RESULTS / "against_vllm.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    models: dict[str, Any] = record["models"] if record.get("vllm") == vllm_environment.VERSION else {}
    return models


def main() -> None:
    """Measures, prints a table and writes bench/results/against_vllm.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3-97m", "smollm2-135m"],
                        help="which")
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=LOADS, help="which")
    parser.add_argument("--concurrency", nargs="*", type=int, default=[1, 4, 16, 64], help="clients at once")
    parser.add_argument("--rates", nargs="*", type=float, default=[],
                        help="requests a second, of load random")
    parser.add_argument("--lora", action="store_true", help="with requests to four adapters, drawn at random")
    parser.add_argument("--bind", default="", metavar="CORES",
                        help="cores of vLLM's threads; auto: its own choice (all cores)")
    parser.add_argument("--offline", action="store_true", help="run `bench throughput` and `latency` too")
    parser.add_argument("--prompts", type=int, default=0,
                        help="requests of a run (3 for each client, at least 8)")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs that count")
    parser.add_argument("--root", type=Path, help="where models go (the cache directory)")
    given = parser.parse_args()
    models = read_before()
    for name in given.models:
        directory = write_model(name, given.root or cache.folder("bench-models"))
        found = measure_servers(name, directory, given) if given.loads or given.rates else {}
        if given.offline: found["offline"] = measure_offline(directory, given.repeats)
        kept = name + ", adapters" * given.lora + f", vLLM's cores {given.bind}" * bool(given.bind)
        before = models.get(kept, {})
        models[kept] = before | found | {"rows": merge(before.get("rows", []), found.get("rows", []))}
        print(kept, found.get("servers", ""))
        save("against_vllm", {"vllm": vllm_environment.VERSION, "models": models})


if __name__ == "__main__": main()
