"""Measurements on a CPU, for report.py: decoding (cpu/decode.py), kernels (cpu/kernel_times.py) and serving
beside transformers (serving/throughput.py)."""
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.lib.measure import spread

Record = dict[str, Any]
OURS, THEIRS, LLAMA_CPP = "tinygrad_nv", "transformers", "llama.cpp"
NOT_MEASURED = "not measured"
SERVER = "tinygrad_nv, server"


def read(folder: Path, name: str) -> Record | None:
    """A result, None where there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def decode(record: Record | None) -> str:
    """Whole models beside transformers, and llama.cpp."""
    if record is None: return f"Decoding on a CPU (`bench/cpu/decode.py`): {NOT_MEASURED}."
    there = any(LLAMA_CPP in runs for result in record["results"] for runs in result["runs"].values())
    engines = [OURS, THEIRS, *[LLAMA_CPP] * there]
    lines = [line for result in record["results"] for line in _model(result, engines)]
    header = [f"tokens/s, {record['machine']}", *engines, *(f"/ {name} (spread)" for name in engines[1:])]
    return (f"Decoding on a CPU beside {' and '.join(engines[1:])}, in one interleaved run "
            f"(`bench/cpu/decode.py`: a prompt of 32 tokens and {record['tokens']} after it; prefill: a "
            "prompt of 512):\n\n" + markdown(header, lines))


def _model(result: Record, engines: list[str]) -> list[list[str]]:
    lines = []
    for mode, runs in result["runs"].items():
        rates = {name: [run["tokens_per_s"] for run in each] for name, each in runs.items()}
        line = [f"{result['name']}, {result['dtype']}, {mode}"]
        line += [f"{median(rates[name]):.3g}" if name in rates else "" for name in engines]
        for name in engines[1:]:
            ratios = [a / b for a, b in zip(rates[OURS], rates.get(name, []), strict=False)]
            line.append(f"{median(ratios):.2f} ({spread(ratios)})" if ratios else "")
        lines.append(line)
    first, peak, blank = [], [], [""] * (len(engines) - 1)
    for name in engines:
        mine = [run for runs in result["runs"].values() for run in runs.get(name, [])]
        greedy = result["runs"]["greedy"].get(name, [])
        first.append(f"{1e3 * median(run['ttft_s'] for run in greedy):.0f}" if greedy else "")
        peak.append(f"{max(run['rss_peak'] for run in mine) / 1e6:.0f}" if mine else "")
    return [*lines, [f"{result['name']}, first token, ms", *first, *blank],
            [f"{result['name']}, peak memory, MB", *peak, *blank]]


def gguf(record: Record | None) -> str:
    """GGUF files beside llama.cpp."""
    if record is None: return f"GGUF files on a CPU (`bench/cpu/gguf_decode.py`): {NOT_MEASURED}."
    names = {"tg": f"decode, {record['tokens'] - 1} tokens", "pp": f"prefill, {record['prompt']} tokens"}
    lines = []
    for result in record["results"]:
        for mode, runs in result["runs"].items():
            ours, theirs = runs[OURS], runs[LLAMA_CPP]
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            lines.append([f"{result['file'].removesuffix('.gguf')}, {names[mode]}", f"{median(ours):.0f}",
                          f"{median(theirs):.0f}", f"{median(ratios):.2f} ({spread(ratios)})",
                          f"{result['others'][mode]:.0%}"])
    header = [f"tokens/s, {record['machine']}", OURS, LLAMA_CPP, "ratio (spread)", "other load, at most"]
    return ("GGUF files on a CPU beside llama.cpp, in one interleaved run (`bench/cpu/gguf_decode.py`); "
            "other load is the share of the cores that other processes took:\n\n" + markdown(header, lines))


def tinygrad(record: Record | None) -> str:
    """Decoding a GGUF file beside tinygrad's own engine."""
    if record is None:
        return f"Decoding beside tinygrad's engine (`bench/cpu/tinygrad_engine.py`): {NOT_MEASURED}."
    ours, theirs = record["tokens_per_s"][OURS], record["tokens_per_s"]["tinygrad"]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    same = "" if record["same_tokens"] else ("; the texts differ, as activations are rounded to int8 "
                                             "here and weights to float16 there")
    return (f"Decoding {record['file']} beside tinygrad's own engine, `tinygrad.llm`, without BEAM, in one "
            f"interleaved run on a busy machine (`bench/cpu/tinygrad_engine.py`, {record['machine']}): "
            f"{median(ours):.0f} and {median(theirs):.1f} tokens/s, {median(ratios):.0f} times as fast "
            f"({min(ratios):.0f} … {max(ratios):.0f}){same}.")


def kernels(record: Record | None) -> str:
    """Kernels beside torch: of each part and dtype the range of its ratios."""
    if record is None: return f"CPU kernels beside torch (`bench/cpu/kernel_times.py`): {NOT_MEASURED}."
    lines = []
    for part, dtype in dict.fromkeys((done["part"], done["dtype"]) for done in record["results"]):
        mine = [done for done in record["results"] if (done["part"], done["dtype"]) == (part, dtype)]
        ratios = [done["ratio"] for done in mine]
        rates = [_rate(done) for done in mine]
        unit = "GB/s" if part in ("gemv", "decode") else "GFLOP/s"
        lines.append([f"{part}, {dtype}, {len(mine)} shapes", f"{min(rates):.0f} … {max(rates):.0f} {unit}",
                      f"{median(ratios):.2f} ({spread(ratios)})"])
    return (f"CPU kernels beside torch {record['torch']} on {record['threads']} threads, {record['isa']} "
            f"(`bench/cpu/kernel_times.py`, {record['machine']}):\n\n"
            + markdown(["", "tinygrad_nv", "times as fast as torch: middle (range over shapes)"], lines))


def _rate(done: Record) -> float:
    """GB/s of what is bound by memory, else GFLOP/s."""
    amount = done["bytes"] if done["part"] in ("gemv", "decode") else done["flops"]
    return float(amount / median(done["seconds"]["ours"]) / 1e9)


def serving(record: Record | None) -> str:
    """The server beside generate in batches, and both one request at a time."""
    if record is None: return f"Serving (`bench/serving/throughput.py`): {NOT_MEASURED}."
    runs, told = record["tokens_per_s"], record["server"]
    lines = []
    for name, rates in runs.items():
        ratios = [a / b for a, b in zip(runs[SERVER], rates, strict=True)]
        lines.append([name, f"{median(rates):.0f}",
                      "" if name == SERVER else f"{median(ratios):.2f} ({spread(ratios)})"])
    said = (f"Serving (`bench/serving/throughput.py`, {record['machine']}: {record['requests']} requests of "
            f"about {record['input_len']} tokens and {record['output_len']} after them, model "
            f"{record['model']}, {record['dtype']}, transformers in batches of {record['batch']}; contenders "
            f"take turns). The server's median time to first token is {median(told['median_ttft_ms']):.0f} "
            f"ms with all requests at once, {median(told['median_tpot_ms']):.1f} ms for each token after it:")
    return said + "\n\n" + markdown(["output tokens/s", "median", "the server / it (spread)"], lines)
