"""Predicted times of kernels.

Protocol: `forecast(body, flops, nbytes, properties)` of a call's PROGRAM. What tuning has modelled or counted
is taken as the schedule database has it. Where a template has a cost model, that is asked, with the kernel's
spec, its schedule and the rows it has now. Everything else gets a roofline: the operations and bytes that
tinygrad counts, at a GPU's fp32 peak without tensor cores and at the share of HBM's peak that streaming
reaches, and a launch. Which of them it was, `model` says. The rates are those of tile/gpu.py; neither cost
model nor roofline was fitted to measurements.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tinygrad.uop.ops import UOp

from tinygrad_nv.runtime.driver import Properties
from tinygrad_nv.runtime.note import note_of
from tinygrad_nv.tile import database
from tinygrad_nv.tile.arguments import integers
from tinygrad_nv.tile.clock import figures_of
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gpu import GPU_MODELS, STREAMING, GPUModel, gpu_model_for
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE


@dataclass(frozen=True)
class Forecast:
    """`seconds`, the resource that takes most of them, and how it is known: "cost model", "roofline", or, of
    tuned schedules, as the database says: "modelled for h100", "counted"."""
    seconds: float
    bound: str
    model: str


def gpu_model_of(gpu: Properties) -> GPUModel | None:
    """The figures of a GPU, None where there are none of its architecture."""
    known = gpu.arch in {gpu_model.arch for gpu_model in GPU_MODELS}
    return gpu_model_for(gpu.arch, gpu.sm_count) if known else None


def forecast(body: UOp, flops: int, nbytes: int, gpu: Properties) -> Forecast | None:
    """Returns the forecast of a kernel that does `flops` operations and moves `nbytes` bytes; None of a GPU
    without figures."""
    gpu_model, note = gpu_model_of(gpu), note_of(body)
    if gpu_model is None: return None
    spec, schedule = (None, None) if note is None else (note.spec, note.schedule)
    if not isinstance(schedule, Schedule): return roofline(flops, nbytes, gpu_model)
    tried = _find_prediction(spec, schedule, gpu)
    if (cost := TABLE.of(schedule).cost) is None: found = roofline(flops, nbytes, gpu_model)
    else:
        if isinstance(spec, GemmSpec) and spec.symbolic:
            spec = replace(spec, m=max(1, flops * spec.m // spec.flops))
        predicted = cost(spec, schedule, GPU(gpu.arch, gpu.sm_count))
        found = Forecast(predicted.seconds, predicted.bound, "cost model")
    return found if tried is None else replace(found, seconds=tried.seconds, model=tried.provenance)


def _find_prediction(spec: Any, schedule: Schedule, gpu: Properties) -> database.Entry | None:
    """Returns what tuning has predicted of a kernel whose integers are all fixed. A time that was measured
    once is no prediction."""
    if integers(spec): return None
    target = GPU(gpu.arch, gpu.sm_count, model=figures_of(gpu.arch, gpu.sm_count, gpu.name))
    entry = database.find_winner(spec, gpu.arch, target)
    if entry is None or entry.schedule != schedule or entry.how == "measured": return None
    return entry


def roofline(flops: int, nbytes: int, gpu_model: GPUModel) -> Forecast:
    """Launch, and the longer of arithmetic and memory traffic."""
    parts = {"HBM": nbytes / (gpu_model.hbm_bytes_per_s * STREAMING),
             "arithmetic": flops / (2.0 * gpu_model.fp32_fma * gpu_model.sm_count * gpu_model.clock_hz),
             "launch": gpu_model.launch_s}
    seconds = gpu_model.launch_s + max(parts["HBM"], parts["arithmetic"])
    return Forecast(seconds, max(parts, key=lambda name: parts[name]), "roofline")
