"""csrc/sm.c, compiled and called.

Protocol: `run(job, gpu)` gives a `Run`: how long, what warps waited for, what units did, and its critical
path: the moments of steps, from the first to the last, each of which followed the one before it.
"""
from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np

from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.timing.gpu import GPUFigures
from tinygrad_nv.ptx.timing.job import Job
from tinygrad_nv.ptx.timing.units import Unit
from tinygrad_nv.toolchain import build_shared_library

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-g0")
MOST_CYCLES = 2_000_000_000
L2_BYTES_OF_SM = 64.0   # bytes a cycle that one SM gets at most (DeepGEMM's model has as many)
SHARED_AHEAD = 32   # cycles of work that shared memory takes before it is free: assumed
REASONS = ("issued", "stall", "result", "unit", "barrier", "group", "turn")
DONE, STUCK, LIMIT = range(3)
NODE = np.dtype([("at", "<i8"), ("by", "<i4"), ("cause", "<i4")])
MOMENTS = 4     # of a step: issued, posted at a barrier, served, ended
i32, i64, f64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class FiguresStruct(ctypes.Structure):
    """moments.h: Figures."""
    _fields_ = (*((name, f64) for name in ("beside_wgmma", "xu_beside_wgmma", "l2_bytes", "hbm_bytes",
                                           "hbm_crowding", "port_bytes")), *((name, i32) for name in (
        "begin_latency", "l2_latency", "hbm_latency", "tma_latency", "tma_issue", "write_latency",
        "wgmma_latency", "wgmma_ahead", "shared_ahead")))


class JobStruct(ctypes.Structure):
    """moments.h: Job."""
    _fields_ = (*((name, pointer) for name in ("instrs", "steps", "effects", "warps", "need", "happened",
                                               "waited", "busy", "ends", "log", "nodes", "event_by")),
                *((name, i64) for name in ("log_room", "log_count", "most_cycles", "cycles")),
                ("l2_busy", f64), ("hbm_busy", f64),
                *((name, i32) for name in ("warp_count", "event_count", "instr_count", "sm_count",
                                           "cta_count", "stuck", "cluster")),
                ("figures", FiguresStruct))


class Cause(IntEnum):
    """Causes of the cycles between two moments of a critical path: csrc/moments.h."""
    BEGINS = 0
    IN_ORDER = 1
    ISSUE_SLOT = 2
    PIPE = 3
    RESULT = 4
    TENSOR_RATE = 5
    TENSOR_LATENCY = 6
    SHARED_RATE = 7
    SHARED_LATENCY = 8
    L2_RATE = 9
    HBM_RATE = 10
    COPY_RATE = 11
    MEMORY_LATENCY = 12
    SYNC = 13


@dataclass(frozen=True)
class Run:
    """Result of a simulation. `waited`: warp-cycles [instruction, REASONS]; `busy`: cycles [SM, Unit],
    `l2_busy`, `hbm_busy`: of the SMs' part of both; `ends`: of each warp; `log`: [warp, instruction, issue,
    cycles since the warp's last] of each issue, where it was kept; `path`: the critical path, [step, begin,
    end, Cause] of each moment, in time."""
    cycles: int
    waited: np.ndarray
    busy: np.ndarray
    ends: np.ndarray
    l2_busy: float
    hbm_busy: float
    log: np.ndarray
    path: np.ndarray


@functools.cache
def library() -> ctypes.CDLL:
    """The simulator, compiled when its source or the compiler is new. Raises `ToolchainError`."""
    return ctypes.CDLL(str(build_shared_library(SOURCES, "sm.c", FLAGS, "timing", "the timing model")))


def run(job: Job, gpu: GPUFigures, sms: float = 0, log: int = 0) -> Run:
    """Runs a job. `sms`: that share L2 and HBM, in equal parts, 0 for all of the GPU's; `log`: issues to
    keep. Raises `PTXError` where warps wait for what no tape has."""
    waited = np.zeros((len(job.instrs), len(REASONS)), np.int64)
    busy = np.zeros((job.sms, len(Unit)), np.int64)
    ends, happened = np.zeros(len(job.warps), np.int64), np.zeros(len(job.need) + 1, np.int64)
    need, kept = np.append(job.need, 0).astype(np.int32), np.zeros((max(log, 1), 4), np.int64)
    nodes, event_by = np.empty(len(job.steps) * MOMENTS, NODE), np.empty(len(need), np.int32)
    arrays = (job.instrs, job.steps, job.effects, job.warps, need, happened, waited, busy, ends, kept, nodes,
              event_by)
    struct = JobStruct(*(each.ctypes.data for each in arrays), log, 0, MOST_CYCLES, 0, 0, 0, len(job.warps),
                       len(job.need), len(job.instrs), job.sms, job.ctas, -1, job.cluster,
                       _figures(gpu, sms or gpu.sms))
    state = library().sm_run(ctypes.byref(struct))
    if state != DONE:
        raise PTXError(f"the timing model does not go on after {struct.cycles} cycles: warp {struct.stuck} "
                       "waits for a barrier that no recorded warp completes", 0,
                       "tapes of all CTAs that meet there")
    return Run(struct.cycles, waited, busy, ends, struct.l2_busy, struct.hbm_busy, kept[:struct.log_count],
               _path(struct))


def _path(struct: JobStruct) -> np.ndarray:
    """The critical path of what ran."""
    trace = library().sm_path
    trace.restype, trace.argtypes = i64, (pointer, pointer, i64)
    rows = np.empty((trace(ctypes.byref(struct), None, 0), 4), np.int64)
    trace(ctypes.byref(struct), rows.ctypes.data, len(rows))
    rows[:, 0] //= MOMENTS
    return rows[::-1]


def _figures(gpu: GPUFigures, sms: float) -> FiguresStruct:
    hbm = gpu.hbm_bytes_per_s / gpu.clock_hz
    return FiguresStruct(
        gpu.beside_wgmma, gpu.xu_beside_wgmma,
        min(L2_BYTES_OF_SM, gpu.l2_bytes_per_cycle / sms), min(L2_BYTES_OF_SM, hbm / sms),
        gpu.hbm_crowding * gpu.clock_hz, L2_BYTES_OF_SM,
        gpu.begin_latency, gpu.l2_latency, gpu.hbm_latency, gpu.tma_latency, gpu.tma_issue,
        gpu.write_latency, gpu.wgmma_latency, gpu.wgmma_ahead, SHARED_AHEAD)
