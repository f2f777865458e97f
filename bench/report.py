"""Writes pages from bench/results/*.json, and the GPU's results into plots.

    python bench/report.py            # writes the pages below, and draws the plots
    python bench/report.py --check    # exit code 1 when a page says otherwise than the results

    docs/performance.md     all of it
    docs/hardware.md        what became of each row, between markers
    docs/timing.md          predicted times beside measured ones, between markers
    docs/status.json        what ran on which GPU at which commit
    docs/status.md          the same as a table, between markers
    README.md               six rows, between markers

What has no result says "not measured". Figures are medians; in brackets smallest to largest of the repeats.
Results of an emulated device are no measurements and are left out.
"""
from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.lib import report_cpu, report_gpu, report_status, report_summary, report_timing, report_vllm
from bench.lib.measure import RESULTS, spread
from bench.lib.report_cpu import NOT_MEASURED, Record, read

BY = "written by bench/report.py"
WIDTH = 118


def loading(record: Record | None) -> str:
    """Reading a model."""
    if record is None: return f"Loading (`bench/cpu/load.py`): {NOT_MEASURED}."
    return (f"Loading (`bench/cpu/load.py`, {record['gb']:.0f} GB in shards, {record['dtype']}, "
            f"{'cold' if record['cold'] else 'warm'} page cache): {record['ratio']:.1f} times the rate of a "
            "plain single-threaded read of the files, with a peak of "
            f"{record['peak_over_model']:.2f} times the model in memory.")


def emulator(record: Record | None) -> str:
    """Returns the text on the emulator's times."""
    if record is None: return f"The emulator (`bench/cpu/emulator.py`): {NOT_MEASURED}."
    said = [f"{name}: {median(found['on']['seconds']):.2f} / {median(found['off']['seconds']):.2f} s"
            for name, found in list(record["results"].items())[:2]]
    return (f"The emulator (`bench/cpu/emulator.py`, {record['cores']} core, checks on / off, parsing and "
            f"lowering included), kernels that Triton compiled: {'; '.join(said)}.")


def producing(record: Record | None) -> str:
    """Time to produce a kernel."""
    if record is None: return f"Time to produce a kernel (`bench/timing/compile_time.py`): {NOT_MEASURED}."
    ours = [median(each["ours"]["whole"]) for each in record["results"].values()]
    theirs = [median(each["triton"]["whole"]) for each in record["results"].values()]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return (f"Time to produce a matmul's kernel, ptxas included (`bench/timing/compile_time.py`): "
            f"{1e3 * min(ours):.0f} … {1e3 * max(ours):.0f} ms, {median(ratios):.2f} ({spread(ratios)}) of "
            f"Triton {record['triton']}'s.")


def matching(record: Record | None) -> str:
    """Time to find matmuls in a graph."""
    if record is None: return f"Time to find matmuls in a graph (`bench/cpu/match_time.py`): {NOT_MEASURED}."
    return (f"Finding matmuls in the graph of a model of {record['layers']} layers "
            f"(`bench/cpu/match_time.py`): {median(record['rewrite_s']):.2f} s, "
            f"{record['rewrite_share']:.0%} of its scheduling; "
            f"{record['ours']} of {record['kernels_with']} kernels are of tinygrad_nv (tinygrad alone: "
            f"{record['kernels']}).")


def host(record: Record | None) -> str:
    """Returns the text on the CPU time of a replayed step."""
    if record is None: return f"A replayed step on the host (`bench/cpu/host_overhead.py`): {NOT_MEASURED}."
    us = record["us"]
    def describe(name: str) -> str:
        return f"{us[name]['median']:.0f} µs ({us[name]['p10']:.0f} … {us[name]['p90']:.0f})"
    names = {"pool": "a graph pool", "TinyJit, Tensors that are there": "TinyJit with tinygrad_nv",
             "NULL, TinyJit, Tensors that are there": "TinyJit alone, on a device that launches nothing"}
    said = ", ".join(f"{words} {describe(name)}" for name, words in names.items() if name in us)
    return (f"What a replayed step of {record['kernels']} kernels costs the CPU, launches stubbed out "
            f"(`bench/cpu/host_overhead.py`, median, in brackets the 10th and 90th of a hundred): {said}.")


def performance(folder: Path) -> str:
    """Returns docs/performance.md."""
    gpus = report_gpu.gpus(folder)
    parts = ["# Performance: medians, ratios and spread",
             f"<!-- {BY} -->",
             "Every figure is a median of repeats. Ratios are above 1 where tinygrad_nv is faster; in "
             "brackets is the range, from smallest to largest. What has no result says so. What hardware "
             "disproved, and how it was mended, is in [H100 results](hardware.md).",
             "## In short", report_summary.table(folder)]
    if not gpus: parts.append("On a GPU nothing has been measured yet (`bench/gpu/run.py`).")
    for record in gpus:
        parts += [f"## {record['gpu']}", report_gpu.head(record) + " (`bench/gpu/run.py`, [how to run it]"
                  "(../bench/README.md)). Medians over the rows of a kind, in brackets the range of rows:",
                  *report_gpu.tables(record)]
        plot = folder / f"{report_gpu.slug(record)}_gemm.png"
        if plot.exists():
            parts += [f"![GEMM beside cuBLAS](../bench/results/{plot.name})",
                      "How many rows were measured, and which disagreed: [H100 results]"
                      "(hardware.md#measured-and-failed-rows)."]
    parts += ["## CPU", report_cpu.decode(read(folder, "cpu_decode")),
              report_cpu.tinygrad(read(folder, "cpu_tinygrad")), report_cpu.gguf(read(folder, "cpu_gguf")),
              report_cpu.kernels(read(folder, "cpu_kernels")),
              "## Serving on a CPU", report_vllm.section(read(folder, "against_vllm")),
              *["![tokens/s over vLLM's](../bench/results/against_vllm.png)"] *
              (folder / "against_vllm.png").exists(), report_cpu.serving(read(folder, "serving")),
              "## Loading, compiling, scheduling", loading(read(folder, "load")),
              emulator(read(folder, "emulator-x86_64")), producing(read(folder, "compile_time")),
              matching(read(folder, "match_time")), host(read(folder, "host_overhead"))]
    return "\n\n".join(wrap(text) for part in parts for text in part.split("\n\n")) + "\n"


def wrap(text: str) -> str:
    """Fills a paragraph to lines of `WIDTH`; tables, pictures, headings and comments stay as they are."""
    if text[0] in "|!#<": return text
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def replace_section(text: str, name: str, made: str) -> str:
    """Returns the text with what stands between the markers of `name` replaced."""
    begin, end = f"<!-- {name}: {BY} -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended: raise SystemExit(f"no {begin} … {end} in the text")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def pages(folder: Path, root: Path) -> dict[Path, str]:
    """Returns every page that this script writes, by its path."""
    status = report_status.status(folder)
    rows = "\n\n".join(report_gpu.states(each, folder) for each in report_gpu.gpus(folder)) or NOT_MEASURED
    between = [("README.md", "measured", report_summary.table(folder)),
               ("docs/hardware.md", "rows", rows),
               ("docs/timing.md", "hardware", report_timing.section(read(folder, "timing_hardware"))),
               ("docs/status.md", "status", report_status.table(status))]
    return {root / "docs" / "performance.md": performance(folder),
            root / "docs" / "status.json": json.dumps(status, indent=1, ensure_ascii=False) + "\n",
            **{root / path: replace_section((root / path).read_text(), name, made) for path, name,
               made in between}}


def main() -> int:
    """Writes the pages and the plots, or compares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="(default bench/results)")
    parser.add_argument("--root", type=Path, default=RESULTS.parents[1], help="where README.md and docs/ are")
    arguments = parser.parse_args()
    if not arguments.check:
        for record in report_gpu.gpus(arguments.results): report_gpu.plot(record, arguments.results)
        if vllm := read(arguments.results, "against_vllm"): report_vllm.plot(vllm, arguments.results)
    stale = 0
    for path, text in pages(arguments.results, arguments.root).items():
        same = path.exists() and path.read_text() == text
        stale += not same
        if not arguments.check: path.write_text(text)
        elif not same: print(f"{path}: not what bench/report.py makes of the results", file=sys.stderr)
        if not arguments.check: print(f"{path}: {'as it was' if same else 'written'}")
    return int(arguments.check and stale > 0)


if __name__ == "__main__": sys.exit(main())
