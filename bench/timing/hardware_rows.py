"""Kernels that an H100 timed and that can be built again: rows of timing/hardware.py, and their predictions.

Protocol: `load_rows()` reads hardware_rows.json: a workload of bench/gpu, a schedule as plain data, the time
that was measured, and the hash of the PTX that ran. `predict(row)` builds the kernels and predicts them; a
prediction is kept on disk by the PTX, the operands and the model (`model_digest`), so that the next run reads
it. Of norms hardware_kernels.json has the kernels themselves: the template that made them is gone.
"""
from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from bench.gpu import run as gpu_run  # noqa: F401 (registers the workloads)
from bench.gpu.parts import all_workloads
from bench.timing.gate_cases import GPU_NAME, HOPPER
from bench.timing.rows import total_seconds
from bench.timing.rows_moe import Model
from bench.timing.table import model as model_digest
from tinygrad_nv import cache as cache_folder
from tinygrad_nv.errors import NVError
from tinygrad_nv.ptx.timing.gpu import GPUFigures, figures
from tinygrad_nv.ptx.timing.l2 import KEPT
from tinygrad_nv.tile.emulated import timings
from tinygrad_nv.tile.kernel import Chain, TileKernel
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.templates import TABLE

FILE, KERNELS = (Path(__file__).with_name(f"hardware_{name}.json") for name in ("rows", "kernels"))
FAMILIES = {"gemm": "gemm", "moe": "experts", "attention": "attention forward",
            "backward": "attention backward", "paged": "paged", "quant": "quantised", "memory": "norms"}


@dataclass(frozen=True)
class HardwareRow:
    """A workload of a part of bench/gpu and a schedule of it, that took `us` in a sweep. `beside_us`: of
    these, what torch's own kernels took; `ptx`: a hash of the kernels that ran; `cost_s`: seconds of one core
    to predict it."""
    part: str
    spec: str
    sweep: str
    schedule: Mapping[str, Any] = field(hash=False)
    us: float
    ptx: str
    beside_us: float = 0.0
    mhz: int = 0
    cost_s: float = 0.0

    @property
    def family(self) -> str: return FAMILIES[self.part]

    @property
    def time_us(self) -> float:
        """Microseconds of ours alone."""
        return self.us - self.beside_us

    @property
    def sweep_of_spec(self) -> tuple[str, str, str]:
        """Names the schedules that were timed together: of a spec, in one sweep."""
        return self.part, self.spec, self.sweep

    @property
    def plan(self) -> str:
        """Its schedule in words."""
        return "as it ran" if self.spec in load_kernels() else str(TABLE.read("gpu", self.schedule))

    def __str__(self) -> str: return f"{self.part} {self.spec}: {self.plan}"


@dataclass(frozen=True)
class Predicted:
    """A row with its prediction; `cost_us`: by the cost model of its template, None without one; `as_ran`:
    the kernels are those that ran; `clock_mhz`, `limiter`: of the longest launch."""
    row: HardwareRow
    us: float
    cost_us: float | None
    as_ran: bool
    clock_mhz: float
    limiter: str

    @property
    def error(self) -> float: return self.us / self.row.time_us - 1


def load_rows() -> list[HardwareRow]:
    """All rows, in the file's order."""
    return [HardwareRow(**row) for row in json.loads(FILE.read_text())["rows"]]


@cache
def load_kernels() -> Mapping[str, TileKernel]:
    """The kernels that ran, of workloads whose template is gone."""
    data = json.loads(KERNELS.read_text())
    made = {}
    for workload, each in data["launches"].items():
        kernel = data["kernels"][each["ptx"]]
        made[workload] = TileKernel(kernel["name"], "\n".join([*kernel["ptx"], ""]), tuple(each["grid"]),
                                    each["threads"], pdl=True)
    return made


@cache
def workloads(part: str) -> Mapping[str, Any]:
    """The workloads of a part of bench/gpu, by name."""
    return all_workloads(part)


def spec_of(row: HardwareRow) -> Any:
    """Returns the spec of what is computed."""
    workload = workloads(row.part)[row.spec]
    return workload.stages[0][0] if row.part == "moe" else workload.spec


def contents(row: HardwareRow) -> dict[str, np.ndarray]:
    """Operands that decide what runs: the routing of tokens, at random as it was measured."""
    if row.part != "moe": return {}
    workload = workloads(row.part)[row.spec]
    shape = workload.shape
    return Model(row.spec, shape.experts, shape.k, shape.hidden, shape.width).routing(workload.tokens)


def hash_kernels(made: Any) -> str:
    """A hash of the PTX of all kernels that a template built."""
    kernels = [kernel for one in ([made.first, made.second] if isinstance(made, Chain) else [made])
               for kernel in one.kernels]
    return hashlib.sha256("\0".join(kernel.ptx for kernel in kernels).encode()).hexdigest()[:16]


def predict(row: HardwareRow) -> Predicted:
    """Predicts a row, or reads what the same model said of the same kernels. Raises the project's errors
    where a kernel can no longer be built, or the model refuses it."""
    spec, made, cost = spec_of(row), load_kernels().get(row.spec), None
    if made is None:
        schedule = TABLE.read("gpu", row.schedule)
        made, cost = TABLE.build(spec, schedule, HOPPER), cost_us(spec, schedule)
    ptx = hash_kernels(made)
    key = hashlib.sha256(f"{ptx} {row.part} {row.spec} {model_digest()}".encode()).hexdigest()
    kept = cache_folder.folder("hardware") / f"{key}.json"
    if kept.exists(): found = json.loads(kept.read_text())
    else:
        found = _predict(made, spec, figures_for(row), contents(row))
        kept.write_text(json.dumps(found))
    return Predicted(row, cost_us=cost, as_ran=ptx == row.ptx,
                     **{name: found[name] for name in ("us", "clock_mhz", "limiter")})


def figures_for(row: HardwareRow) -> GPUFigures:
    """The H100's figures. Where L2 keeps all sets of operands that took turns, as of small norms, nothing is
    read from HBM."""
    gpu, workload = figures(GPU_NAME), workloads(row.part)[row.spec]
    sets = getattr(workload, "most_sets", None)
    if sets is None or sets * workload.nbytes > KEPT * gpu.l2_bytes: return gpu
    return replace(gpu, hbm_latency=gpu.l2_latency, hbm_bytes_per_s=math.inf, hbm_crowding=0.0)


def _predict(made: Any, spec: Any, gpu: GPUFigures, given: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Predicts the launches as nodes of a graph of many, as they were timed, and counts what that costs."""
    begin = process_time()
    launches = timings(made, spec, gpu, given=given)
    longest = max(launches, key=lambda one: one.seconds)
    return {"us": 1e6 * (total_seconds(launches) + gpu.gap_s),
            "clock_mhz": longest.clock_hz / 1e6, "limiter": longest.limiter,
            "cost_s": round(process_time() - begin, 2)}


def cost_us(spec: Any, schedule: Schedule) -> float | None:
    """Microseconds by the cost model of the schedule's template."""
    cost = TABLE.of(schedule).cost
    return None if cost is None else 1e6 * float(cost(spec, schedule, HOPPER).seconds)


def predict_all(rows: Sequence[HardwareRow]) -> tuple[list[Predicted], dict[str, str]]:
    """Predicts rows; with those that were refused, and why."""
    found, refused = [], dict[str, str]()
    for row in rows:
        try: found.append(predict(row))
        except NVError as error: refused[str(row)] = error.found.splitlines()[0]
    return found, refused


def to_record(one: Predicted) -> dict[str, Any]:
    """Plain data for the record."""
    made = {"family": one.row.family, "spec": one.row.spec,
            "schedule": one.row.plan, "sweep": one.row.sweep,
            "measured_us": round(one.row.time_us, 3)}
    return {**made, **{name: round(value, 3) if isinstance(value, float) else value
                       for name, value in asdict(one).items() if name != "row"}}
