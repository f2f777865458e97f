"""Predicted times of kernels.

Protocol: `forecast(body, flops, nbytes, properties)` of a call's PROGRAM. Where its template has a cost
model, that is asked, with the kernel's spec, its schedule and the rows it has now. Everything else gets a
roofline: the operations and bytes that tinygrad counts, at a GPU's fp32 peak without tensor cores and at the
share of HBM's peak that streaming reaches, and a launch. Which of the two it was, `model` says. The rates
are those of tile/gpu.py; neither model was fitted to measurements.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad.uop.ops import UOp

from tinygrad_nv.runtime.driver import Properties
from tinygrad_nv.runtime.note import note_of
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.gpu import GPU_MODELS, STREAMING, GPUModel, gpu_model_for
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE


@dataclass(frozen=True)
class Forecast:
    """`seconds`, the resource that takes most of them, and how it is known: "cost model" or "roofline"."""
    seconds: float
    bound: str
    model: str


def gpu_model_of(gpu: Properties) -> GPUModel | None:
    """The figures of a GPU, None where there are none of its architecture."""
    known = gpu.arch in {gpu_model.arch for gpu_model in GPU_MODELS}
    return gpu_model_for(gpu.arch, gpu.sm_count) if known else None


def forecast(body: UOp, flops: int, nbytes: int, gpu: Properties) -> Forecast | None:
    """Of a kernel that does `flops` operations and moves `nbytes` bytes; None of a GPU without figures."""
    gpu_model, note = gpu_model_of(gpu), note_of(body)
    if gpu_model is None: return None
    spec, schedule = (None, None) if note is None else (note.spec, note.schedule)
    if not isinstance(schedule, Schedule) or (cost := TABLE.of(schedule).cost) is None:
        return roofline(flops, nbytes, gpu_model)
    if isinstance(spec, GemmSpec) and spec.symbolic:
        spec = replace(spec, m=max(1, flops * spec.m // spec.flops))
    found = cost(spec, schedule, GPU(gpu.arch, gpu.sm_count))
    return Forecast(found.seconds, found.bound, "cost model")


def roofline(flops: int, nbytes: int, gpu_model: GPUModel) -> Forecast:
    """Launch, and the longer of arithmetic and memory traffic."""
    parts = {"HBM": nbytes / (gpu_model.hbm_bytes_per_s * STREAMING),
             "arithmetic": flops / (2.0 * gpu_model.fp32_fma * gpu_model.sm_count * gpu_model.clock_hz),
             "launch": gpu_model.launch_s}
    seconds = gpu_model.launch_s + max(parts["HBM"], parts["arithmetic"])
    return Forecast(seconds, max(parts, key=lambda name: parts[name]), "roofline")
