"""Measurements on a GPU, for report.py: parts of bench/gpu/run.py, tables of ratios, and plots."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu.parts import ratios_of
from bench.lib.measure import spread
from bench.lib.report_cpu import NOT_MEASURED, Record, markdown, read

PARTS = {"smoke": "graphs of kernels with clusters, whose arguments change",
         "correctness": "recorded launches against the emulator's answers",
         "chains": "recorded launches among programmatic ones", "gemm": "matmuls",
         "attention": "attention, forward", "backward": "attention, backward",
         "paged": "decode attention over pages", "moe": "mixtures of experts", "decode": "whole decode steps",
         "memory": "memory-bound kernels"}
KINDS = {"gemm": "matmuls", "attention": "attention, forward", "backward": "attention, backward",
         "paged": "decode attention over pages", "moe": "mixtures of experts",
         "decode": "decode"}    # parts whose kinds have a table
L2 = "L2 access-policy windows (`bench/gpu/l2.py`)"
FEW = ("M=1", "M=2", "M=4", "M=8", "M=16", "M=32", "M=64")


def gpus(folder: Path) -> list[Record]:
    """Results of bench/gpu/run.py on hardware."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu_*.json"))]
    return [each for each in found if "parts" in each and not each["gpu"].startswith("emulated")]


def head(record: Record) -> str:
    """Names a GPU, its software, the commits that were measured, and the clocks."""
    parts = record["parts"]
    commits = sorted({row["commit"] for rows in parts.values() for row in rows.values()})
    changed = any(row.get("dirty") for rows in parts.values() for row in rows.values())
    return (f"{record['gpu']}, driver {record['driver']}, torch {record['torch']}, "
            f"Triton {record['triton']}, commit {', '.join(commits)}{' with changes' if changed else ''}"
            f"{clocks(parts)}")


def states(record: Record, folder: Path) -> str:
    """Tabulates what became of each part's rows."""
    lines = [[about, state(name, record["parts"].get(name, {}))] for name, about in PARTS.items()]
    lines.append([L2, windows(read(folder, "l2-" + slug(record).removeprefix("gpu_")))])
    return markdown([record["gpu"], ""], lines)


def tables(record: Record) -> list[str]:
    """Tables of ratios, one for each part that has any."""
    parts = record["parts"]
    return [table for part in KINDS if (table := kinds(part, parts.get(part, {}), GROUPS[part]))]


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
    """Returns the state of a part's rows."""
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


GROUPS = {"gemm": matmuls, "attention": heads, "backward": heads, "paged": lengths, "moe": alone,
          "decode": alone}


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
    return markdown([KINDS[part], "tinygrad_nv, best row",
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


def plot(record: Record, folder: Path) -> Path | None:
    """Every matmul's speed relative to torch, with its spread; None where there is none."""
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
