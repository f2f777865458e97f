"""The part "sweep" of bench/gpu/run.py: schedules of one spec beside each other, in turns.

Rows are workloads of the parts gemm, quant, attention and paged whose default schedule an H100 contradicted,
or where its power was limited, so that schedules timed one after the other could not be told apart.
Contenders are the default, named "ours", and the first `COUNT` that its family would try. Each is made by
the workload's own part, for which a schedule database of this process names the schedule. All results are
checked.

With --emulate: one schedule after the other on the workload scaled down, whose results must be right.
"""
from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu import attention, gemm, paged, quant  # noqa: F401 (registers workloads)
from bench.gpu.launch import device, schedule_for
from bench.gpu.parts import (
    CONTENDERS,
    EMULATED,
    Measure,
    Options,
    Part,
    Row,
    Run,
    Workload,
    all_workloads,
    compare,
    register,
)
from bench.lib.measure import table
from tinygrad_nv.tile import database
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.tune import schedules

COUNT, FEW = 11, 2      # schedules beside the default; with --emulate
SECONDS = 4.0           # of a row: so many contenders take turns
# by part: how the names of its workloads begin
SWEPT = {"gemm": ("Llama 8B gate_up M=16", "Llama 8B down M=2", "Llama 70B down M=2", "Llama 70B down M=4",
                  "8192³", "4096³", "Llama 8B gate_up M=4096", "fp8, block scales 4096x7168x16384"),
         "quant": ("int8 8B gate_up M=16", "int4 8B gate_up M=16", "int4 8B gate_up M=64"),
         "attention": ("d 128 causal 8192 tokens", "d 128 full 8192 tokens", "d 64 causal 8192 tokens"),
         "paged": tuple(f"batch {batch}, {tokens} tokens" for batch, tokens in (
             (1, 512), (1, 2048), (16, 2048), (64, 2048), (256, 2048), (64, 8192), (4, 32768)))}


def find_workloads() -> dict[str, tuple[str, Workload]]:
    """Returns part and workload of each row, by the row's name."""
    found = {}
    for part, wanted in SWEPT.items():
        known = all_workloads(part)
        for name, workload in known.items():
            if name in wanted or name.partition(", ")[0] in wanted: found[f"{part}: {name}"] = part, workload
    return found


@contextmanager
def prefer(spec: Any, schedule: Any, arch: str) -> Iterator[None]:
    """Has a spec's schedule chosen, by a database of its own."""
    before = os.environ.get("NV_SCHEDULES")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "schedules.json"
        database.store([database.Entry(spec, arch, database.toolchain(), schedule, 1e-6, "measured")], file)
        os.environ["NV_SCHEDULES"] = str(file)
        try: yield
        finally:
            if before is None: del os.environ["NV_SCHEDULES"]
            else: os.environ["NV_SCHEDULES"] = before


def candidates(spec: Any, gpu: GPU, count: int) -> list[Any]:
    """Returns the schedule that a graph would get, and so many others."""
    default = schedule_for(spec, gpu.arch)
    return [default, *(each for each in schedules(spec, gpu, count) if each != default)][:count + 1]


def make_contenders(part: str, spec: Any, gpu: GPU) -> dict[str, Callable[..., Run]]:
    """Returns the part's own contender by each schedule, the default first."""
    first, *others = candidates(spec, gpu, COUNT)

    def make(schedule: Any, workload: Any, given: Any, options: Options) -> Run:
        with prefer(spec, schedule, gpu.arch): return CONTENDERS[part]["ours"](workload, given, options)
    return {"ours": partial(make, first), **{str(each): partial(make, each) for each in others}}


def measure(part: str, workload: Any, options: Options, budget_s: float) -> Row:
    """Returns times and cycles of all schedules, in turns; `schedule` is the default."""
    properties = device().properties
    gpu = GPU(properties.arch, properties.sm_count)
    row = compare(part, workload, options, budget_s, make_contenders(part, workload.spec, gpu))
    return row | {"schedule": str(candidates(workload.spec, gpu, 0)[0])}


def run_emulated(part: str, workload: Any, options: Options) -> Row:
    """Runs the workload scaled down by the default and a few others."""
    spec, rows = workload.scale_down().spec, []
    for schedule in candidates(spec, GPU(options.arch), FEW):
        with prefer(spec, schedule, options.arch): rows.append((schedule, EMULATED[part](workload, options)))
    wrong = [f"{schedule}: {row['why']}" for schedule, row in rows if row["status"] != "emulated"]
    return {"status": "disagrees" if wrong else "emulated",
            "why": "; ".join(wrong) or ", ".join(str(schedule) for schedule, _ in rows)}


def open_worker(options: Options) -> Measure:
    """Returns what measures a row."""
    known = find_workloads()
    if options.emulate: return lambda name, budget_s: run_emulated(*known[name], options)
    return lambda name, budget_s: measure(*known[name], options, min(budget_s, max(options.seconds, SECONDS)))


def render(rows: Mapping[str, Row]) -> str:
    """Returns a table: the default, the best, and by how much it is better, in time and in cycles."""
    lines, words = [], []
    for name, row in rows.items():
        seconds = {who: median(done) for who, done in row.get("seconds", {}).items() if done}
        if "ours" not in seconds:
            words.append(f"  {name}: {row['status']}: {row.get('why', '')}")
            continue
        best = min(seconds, key=lambda who: seconds[who])
        cycles = {who: median(done) for who, done in row.get("cycles", {}).items()}
        ratio = f"{cycles['ours'] / cycles[best]:.3f}" if best in cycles else "-"
        chosen = row["schedule"] if best == "ours" else best
        lines.append([name, row["schedule"], f"{seconds['ours'] * 1e6:.1f}", chosen,
                      f"{seconds['ours'] / seconds[best]:.3f}", ratio])
    header = ["", "default", "µs", "best", "default / best", "in cycles"]
    return "\n".join([*([table(header, lines)] if lines else []), *words])


register(Part("sweep", "schedules of a spec in turns", lambda options: [*find_workloads()], open_worker,
              render, expected_s=15.0, limit_s=200.0))
