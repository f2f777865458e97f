"""Turns bench/results/*.json into the README's section on performance, and the GPU's results into plots.

    python bench/report.py            # rewrites the section between the markers in README.md, draws the plots
    python bench/report.py --check    # exit code 1 when the README says otherwise than the results

What has no result says "not measured". Figures are medians; in brackets smallest to largest of the repeats.
Results of an emulated device are no measurements and are left out.
"""
from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import report_cpu
import report_serving
from gpu_parts import ratios_of
from measure import RESULTS, spread
from report_cpu import NOT_MEASURED, Record, markdown

README = RESULTS.parents[1] / "README.md"
BEGIN = "<!-- performance: written by bench/report.py -->"
END = "<!-- performance: end -->"
WIDTH = 118
PARTS = {"smoke": "graphs of kernels with clusters, whose arguments change",
         "correctness": "recorded launches against the emulator's answers",
         "chains": "recorded launches among programmatic ones", "gemm": "matmuls",
         "attention": "attention, forward", "backward": "attention, backward",
         "paged": "decode attention over pages", "decode": "whole decode steps",
         "memory": "memory-bound kernels"}
KINDS = {"gemm": "matmuls", "attention": "attention, forward", "backward": "attention, backward",
         "paged": "decode attention over pages", "decode": "decode"}    # parts whose kinds have a table
L2 = "L2 access-policy windows (`bench/l2.py`)"
FEW = ("M=1", "M=2", "M=4", "M=8", "M=16", "M=32", "M=64")


def read(folder: Path, name: str) -> Record | None:
    """A result, None where there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def gpus(folder: Path) -> list[Record]:
    """Results of bench/gpu.py on hardware."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu_*.json"))]
    return [each for each in found if "parts" in each and not each["gpu"].startswith("emulated")]


# **** on a GPU ****

def on_a_gpu(folder: Path) -> str:
    """What was measured on each GPU; in words where that is nothing."""
    found = gpus(folder)
    if not found:
        rows = [*([about, NOT_MEASURED] for about in PARTS.values()), [L2, NOT_MEASURED]]
        return ("On a GPU (`bench/gpu.py`, [how to run it](bench/README.md)): nothing has been measured yet."
                "\n\n" + markdown(["on a GPU, beside torch, torch.compile, Triton and tinygrad", ""], rows))
    return "\n\n".join(one_gpu(each, folder) for each in found)


def one_gpu(record: Record, folder: Path) -> str:
    """A GPU: its parts, a line each, and matmuls by kind."""
    parts = record["parts"]
    commits = sorted({row["commit"] for rows in parts.values() for row in rows.values()})
    changed = any(row.get("dirty") for rows in parts.values() for row in rows.values())
    dirty = " with changes" if changed else ""
    head = (f"{record['gpu']}, driver {record['driver']}, torch {record['torch']}, "
            f"Triton {record['triton']}, commit {', '.join(commits)}{dirty}{clocks(parts)} (`bench/gpu.py`, "
            f"[how to run it](bench/README.md)):")
    lines = [[about, state(name, parts.get(name, {}))] for name, about in PARTS.items()]
    lines.append([L2, windows(read(folder, "l2-" + slug(record).removeprefix("gpu_")))])
    made = [head, markdown([record["gpu"], ""], lines)]
    for part in KINDS:
        if table := kinds(part, parts.get(part, {}), GROUPS[part]): made.append(table)
    plot = folder / f"{slug(record)}_gemm.png"
    if plot.exists(): made.append(f"![products beside cuBLAS](bench/results/{plot.name})")
    return "\n\n".join(made)


def slug(record: Record) -> str:
    """The name of a GPU's files."""
    return "gpu_" + record["gpu"].lower().replace("nvidia ", "").replace(" ", "-")


def clocks(parts: Mapping[str, Mapping[str, Record]]) -> str:
    """Clocks and power while rows were timed."""
    told = [row["telemetry"] for rows in parts.values() for row in rows.values() if row.get("telemetry")]
    said = []
    for name, unit in (("sm_mhz", "MHz"), ("watts", "W")):
        means = [each[name]["mean"] for each in told if each.get(name)]
        if means: said.append(f"{min(means):.0f} … {max(means):.0f} {unit}")
    return f", {', '.join(said)}" if said else ", clocks not read" if told else ""


def state(part: str, rows: Mapping[str, Record]) -> str:
    """What became of a part's rows."""
    if not rows: return NOT_MEASURED
    counts: dict[str, int] = {}
    for row in rows.values(): counts[row["status"]] = counts.get(row["status"], 0) + 1
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    if part not in ("correctness", "chains"): return f"{len(rows)} rows: {said}"
    def total(kind: str) -> int: return sum(row.get(kind, 0) for row in rows.values())
    return (f"{len(rows)} tests: {said}; {total('launches')} launches: {total('same')} bit for bit, "
            f"{total('close')} within their bounds, {total('order')} up to the order of warps, "
            f"{total('open')} in what PTX leaves open, **{total('disagrees')} disagree**")


def windows(record: Record | None) -> str:
    """The buffer sizes for which an access-policy window helps."""
    if record is None: return NOT_MEASURED
    if not record["gains_bytes"]: return "gain nowhere"
    low, high = (size / 2**20 for size in record["gains_bytes"])
    return f"gain from {low:.1f} to {high:.1f} MiB read again and again"


def matmuls(rows: Mapping[str, Record]) -> dict[str, list[str]]:
    """Names of matmuls by kind."""
    def those(*ends: str) -> list[str]:
        return [name for name in rows if name.split()[-1] in ends and "silu" not in name]
    return {"cubes": [name for name in rows if "³" in name], "layers, M = 4096": those("M=4096"),
            "layers, M = 1 … 8": those(*FEW[:4]), "layers, M = 16 … 64": those(*FEW[4:]),
            "gate and up with silu": [name for name in rows if "silu" in name]}


def heads(rows: Mapping[str, Record]) -> dict[str, list[str]]:
    """Names of attentions by the width of a head and the mask: what stands before the number of tokens."""
    made: dict[str, list[str]] = {}
    for name in rows: made.setdefault(" ".join(name.split()[:3]), []).append(name)
    return made


def lengths(rows: Mapping[str, Record]) -> dict[str, list[str]]:
    """Names of decode attentions by the number of tokens."""
    made: dict[str, list[str]] = {}
    for name in rows: made.setdefault(name.partition(", ")[2], []).append(name)
    return made


def alone(rows: Mapping[str, Record]) -> dict[str, list[str]]:
    """Every row for itself."""
    return {name: [name] for name in rows}


GROUPS = {"gemm": matmuls, "attention": heads, "backward": heads, "paged": lengths, "decode": alone}


def kinds(part: str, rows: Mapping[str, Record], groups: Any) -> str:
    """Speed relative to each contender: the median over the rows of a kind, and the range of rows."""
    contenders = dict.fromkeys(who for row in rows.values() for who in row.get("seconds", {}))
    others = [who for who in contenders if who != "ours"]
    lines = []
    for kind, names in groups(rows).items():
        have = [rows[name] for name in names if rows[name].get("seconds", {}).get("ours")]
        if not names: continue
        if not have: lines.append([kind, *[NOT_MEASURED] * (1 + len(others))])
        else: lines.append([kind, best(part, have), *(relative(have, who) for who in others)])
    if not lines: return ""
    return markdown([KINDS[part], "ours, best row",
                     *(f"times as fast as {who}" for who in others)], lines)


def best(part: str, rows: Sequence[Record]) -> str:
    """Our highest rate."""
    rates = [row["work"] / median(row["seconds"]["ours"]) for row in rows]
    if part == "decode": return f"{max(rates):.1f} tokens/s"
    moved = [row["nbytes"] / median(row["seconds"]["ours"]) for row in rows]
    return f"{max(rates) / 1e12:.0f} TFLOP/s, {max(moved) / 1e9:.0f} GB/s"


def relative(rows: Sequence[Record], who: str) -> str:
    """Our speed over another's."""
    middle = [median(theirs) / median(row["seconds"]["ours"]) for row in rows
              if (theirs := row["seconds"].get(who))]
    return f"{median(middle):.2f} ({spread(middle)})" if middle else NOT_MEASURED


def plotted(record: Record, folder: Path) -> Path | None:
    """Every product's speed relative to torch, with its spread; None where there is none."""
    rows = {name: ratios for name, row in record["parts"].get("gemm", {}).items()
            if (ratios := ratios_of(row.get("seconds", {}), "ours", "torch"))}
    if not rows: return None
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.2 * len(rows)), layout="constrained")
    for i, ratios in enumerate(rows.values()):
        axes.plot([min(ratios), max(ratios)], [i, i], color="#2a6f97", linewidth=1)
        axes.plot([median(ratios)], [i], "o", color="#2a6f97", markersize=4)
    axes.axvline(1, color="gray", linewidth=1)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"speed relative to cuBLAS (torch), bfloat16, {record['gpu']}")
    path = folder / f"{slug(record)}_gemm.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


# **** without one ****

def loading(record: Record | None) -> str:
    """Reading a model."""
    if record is None: return f"Loading (`bench/load.py`): {NOT_MEASURED}."
    return (f"Loading (`bench/load.py`, {record['gb']:.0f} GB in shards, {record['dtype']}, "
            f"{'cold' if record['cold'] else 'warm'} page cache): {record['ratio']:.1f} times the rate of a "
            "plain single-threaded read of the files, with a peak of "
            f"{record['peak_over_model']:.2f} times the model in memory.")


def emulator(record: Record | None) -> str:
    """What the emulator takes."""
    if record is None: return f"The emulator (`bench/emulator.py`): {NOT_MEASURED}."
    said = [f"{name}: {median(found['on']['seconds']):.2f} / {median(found['off']['seconds']):.2f} s"
            for name, found in list(record["results"].items())[:2]]
    return (f"The emulator (`bench/emulator.py`, {record['cores']} core, checks on / off, parsing and "
            f"lowering included), kernels that Triton compiled: {'; '.join(said)}.")


def producing(record: Record | None) -> str:
    """Time to produce a kernel."""
    if record is None: return f"Time to produce a kernel (`bench/compile_time.py`): {NOT_MEASURED}."
    ours = [median(each["ours"]["whole"]) for each in record["results"].values()]
    theirs = [median(each["triton"]["whole"]) for each in record["results"].values()]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return (f"Time to produce a matmul's kernel, ptxas included (`bench/compile_time.py`): "
            f"{1e3 * min(ours):.0f} … {1e3 * max(ours):.0f} ms, {median(ratios):.2f} ({spread(ratios)}) of "
            f"Triton {record['triton']}'s.")


def matching(record: Record | None) -> str:
    """Time to find matmuls in a graph."""
    if record is None: return f"Time to find matmuls in a graph (`bench/match_time.py`): {NOT_MEASURED}."
    return (f"Finding matmuls in the graph of a model of {record['layers']} layers (`bench/match_time.py`): "
            f"{median(record['rewrite_s']):.2f} s, {record['rewrite_share']:.0%} of its scheduling; "
            f"{record['ours']} of {record['kernels_with']} kernels are ours (tinygrad alone: "
            f"{record['kernels']}).")


def host(record: Record | None) -> str:
    """What a replayed step costs the CPU."""
    if record is None: return f"A replayed step on the host (`bench/host_overhead.py`): {NOT_MEASURED}."
    us = record["us"]
    def told(name: str) -> str:
        return f"{us[name]['median']:.0f} µs ({us[name]['p10']:.0f} … {us[name]['p90']:.0f})"
    names = {"pool": "a graph pool", "TinyJit, Tensors that are there": "TinyJit with us",
             "NULL, TinyJit, Tensors that are there": "TinyJit alone, on a device that launches nothing"}
    said = ", ".join(f"{words} {told(name)}" for name, words in names.items() if name in us)
    return (f"What a replayed step of {record['kernels']} kernels costs the CPU, launches stubbed out "
            f"(`bench/host_overhead.py`, median, in brackets the 10th and 90th of a hundred): {said}.")


def section(folder: Path) -> str:
    """The README's section, markers included."""
    parts = [on_a_gpu(folder), "Without a GPU:", report_cpu.decode(read(folder, "cpu_decode")),
             report_cpu.gguf(read(folder, "cpu_gguf")), report_cpu.kernels(read(folder, "cpu_kernels")),
             report_serving.serving(read(folder, "serving")), loading(read(folder, "load")),
             emulator(read(folder, "emulator-x86_64")), producing(read(folder, "compile_time")),
             matching(read(folder, "match_time")), host(read(folder, "host_overhead"))]
    return "\n\n".join([BEGIN, *(wrapped(text) for part in parts for text in part.split("\n\n")), END])


def wrapped(text: str) -> str:
    """A paragraph in lines of `WIDTH`; tables and pictures stay as they are."""
    if text[0] in "|!": return text
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def replaced(text: str, made: str) -> str:
    """The text with the section between the markers replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end: raise SystemExit(f"no {BEGIN} … {END} in the text")
    return before + made + after


def main() -> int:
    """Writes the section and the plots, or compares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="(default bench/results)")
    parser.add_argument("--readme", type=Path, default=README, help="(default README.md)")
    arguments = parser.parse_args()
    if not arguments.check:
        for record in gpus(arguments.results): plotted(record, arguments.results)
    text = arguments.readme.read_text()
    made = replaced(text, section(arguments.results))
    if arguments.check:
        if made == text: return 0
        print(f"{arguments.readme}: not what bench/report.py makes of the results", file=sys.stderr)
        return 1
    arguments.readme.write_text(made)
    print(f"{arguments.readme}: {'as it was' if made == text else 'written'}")
    return 0


if __name__ == "__main__": sys.exit(main())
