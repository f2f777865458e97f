"""Our server beside vLLM's (serving/against_vllm.py), for report.py: a table of every load, and a plot."""
from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from bench.lib.measure import spread
from bench.lib.report_cpu import NOT_MEASURED, Record, markdown

OURS, THEIRS = "tinygrad_nv", "vLLM"
FIGURES = {"output_throughput": "tokens/s", "median_ttft_ms": "TTFT, ms", "median_tpot_ms": "TPOT, ms",
           "p99_tpot_ms": "P99 TPOT, ms"}
LOADS = {"random": "128 in, 64 out", "sharegpt": "conversations", "prefix": "common prefixes",
         "structured": "JSON by a schema"}


def rows(record: Record) -> list[dict[str, Any]]:
    """Returns the rows of all models; `model` says whether adapters were asked for."""
    models: dict[str, Record] = record["models"]
    return [{**row, "model": name} for name, found in models.items() for row in found.get("rows", [])]


def find(record: Record, model: str, load: str, concurrency: int) -> dict[str, Any] | None:
    """Returns one row, None where it was not measured."""
    return next((row for row in rows(record) if (row["model"], row["load"], row["concurrency"]) ==
                 (model, load, concurrency)), None)


def _relate(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({spread(ratios)})" if ratios else "—"


def section(record: Record | None) -> str:
    """Returns the paragraphs and tables of docs/performance.md."""
    if record is None: return f"Serving beside vLLM (`bench/serving/against_vllm.py`): {NOT_MEASURED}."
    lines = []
    for row in rows(record):
        clients = str(row["concurrency"] or f"{row['rate']:g} requests/s")
        cells = [f"{row[OURS][name]:.4g} / {row[THEIRS][name]:.4g} = {_relate(row['ratios'].get(name, []))}"
                 for name in FIGURES]
        lines.append([row["model"], LOADS[row["load"]], clients, *cells])
    parts = [f"Serving in bfloat16 beside vLLM {record['vllm']} for CPUs, both loaded by vLLM's own `vllm "
             f"bench serve` (`bench/serving/against_vllm.py`, {record['machine']}), in turns. tinygrad_nv / "
             "vLLM = ratio (its range over pairs of runs); for times below 1 is better. vLLM has every core "
             "and the OpenMP library that it asks for; rows of \"vLLM's cores auto\" have it as it starts by "
             "itself, which leaves one core to its scheduler:",
             markdown(["model", "load", "clients", *FIGURES.values()], lines)]
    held = [[name, *(f"{found['servers'][side][figure]:g}" for figure in ("start_s", "memory_mb")
                     for side in (OURS, THEIRS))]
            for name, found in record["models"].items() if "servers" in found]
    if held:
        parts += ["Until a server is ready, and what its processes hold:",
                  markdown(["model", "start, s", "vLLM", "memory, MB", "vLLM"], held)]
    offline = [line for name, found in record["models"].items() for line in _describe_offline(name, found)]
    if offline:
        parts += ["Tokens/s of `bench throughput` (64 requests) and `bench latency` (one), 128 in, 64 out:",
                  markdown(["model", "", OURS, THEIRS, "ratio"], offline)]
    return "\n\n".join(parts)


def _describe_offline(name: str, found: dict[str, Any]) -> list[list[str]]:
    """Returns a line for each kind that was measured without a server."""
    lines = []
    for kind, rates in found.get("offline", {}).items():
        ratios = [a / b for a, b in zip(rates[OURS], rates[THEIRS], strict=True)]
        lines.append([name, kind, *(f"{median(rates[side]):.4g}" for side in (OURS, THEIRS)),
                      _relate(ratios)])
    return lines


def plot(record: Record, folder: Path) -> Path:
    """Draws tokens/s over vLLM's by the number of clients, for each model, with its range."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    found = [row for row in rows(record) if row["load"] == "random" and row["concurrency"]]
    for name in dict.fromkeys(row["model"] for row in found):
        mine = sorted((row for row in found if row["model"] == name), key=lambda row: int(row["concurrency"]))
        low, middle, high = zip(*(row["ratios"]["output_throughput"] for row in mine), strict=True)
        clients = [row["concurrency"] for row in mine]
        [line] = axes.plot(clients, middle, "o-", label=name)
        axes.fill_between(clients, low, high, alpha=0.2, color=line.get_color())
    axes.axhline(1, color="gray", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("clients at once")
    axes.set_ylabel(f"tokens/s over vLLM {record['vllm']}'s")
    axes.set_title(f"128 tokens in, 64 out, bfloat16, {record['machine']}", fontsize=10)
    axes.legend()
    path = folder / "against_vllm.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
