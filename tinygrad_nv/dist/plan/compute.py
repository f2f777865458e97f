"""How long kernels take on one device.

Protocol: matmuls and grouped matmuls are asked of the tile cost models (tile/gemm/cost.py,
tile/grouped_gemm/cost.py), with the schedule that would run; they were not fitted to whole steps. Where no
template takes a matmul, and for weights of int8 or int4, a roofline stands in: all bytes at the share of HBM
that streaming reaches, or all operations at the share of the tensor cores' peak that is sustained, whichever
takes longer. Attention is a roofline whose shares figures.toml states; other kernels take as long as HBM
takes to move their bytes.
"""
from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv.dist.plan.cluster import Device, figures
from tinygrad_nv.dist.plan.layout import DTYPES
from tinygrad_nv.tile.gemm.cost import CostModel
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gpu import STREAMING, gpu_model_for
from tinygrad_nv.tile.grouped_gemm.cost import Prediction
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec, ScaledGroupedGemmSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

WORDS = {"bf16": "bf16", "fp8": "e4m3"}
SPARSE_ROWS = 0.6       # of the tensor cores' peak that grouped matmuls without a template are taken to reach


def launch_s(device: Device) -> float:
    """Returns the seconds of the launch of a kernel in a graph, beside others."""
    return device.model.early_launch_s or device.model.launch_s


@lru_cache(8192)
def matmul(device: Device, m: int, n: int, k: int, kind: str = "bf16") -> float:
    """Seconds of x @ w.T, x of m rows, w (n, k) of a type of `DTYPES`."""
    if kind in WORDS:
        spec = dense(m, n, k, WORDS[kind])
        s = TABLE.choose(spec, GPU(device.model.arch, device.model.sm_count))
        if s is not None: return CostModel(spec, device.model).predict(s).seconds
    nbytes = n * k * DTYPES[kind] + 2 * m * (n + k)
    return launch_s(device) + max(nbytes / stream_rate(device),
                                  2.0 * m * n * k / tensor_core_rate(device, kind))


@lru_cache(4096)
def expert_matmul(device: Device, experts: int, rows: int, n: int, k: int, kind: str = "bf16") -> float:
    """Seconds of `rows` rows, dealt at random to the matrices (n, k) of experts."""
    if kind in WORDS:
        spec = GroupedGemmSpec(experts, rows, n, k, dtypes.bfloat16) if kind == "bf16" else \
            ScaledGroupedGemmSpec(experts, rows, n, k)
        target = GPU(device.model.arch, device.model.sm_count)
        s = TABLE.choose(spec, target)
        cost: Any = None if s is None else TABLE.of(s).cost
        if cost is not None: return _on(device, cost(spec, s, target), target)
    read = experts * (1 - (1 - 1 / experts) ** rows) * n * k * DTYPES[kind]
    rate = SPARSE_ROWS * device.peak_flops_per_s
    return launch_s(device) + max(read / stream_rate(device), 2.0 * rows * n * k / rate)


def _on(device: Device, found: Any, target: GPU) -> float:
    """A prediction of an architecture's first GPU, with the memory and the clock of this device. That of few
    rows is of memory alone."""
    known = gpu_model_for(target.arch, target.sm_count)
    slower, longer = (known.clock_hz / device.model.clock_hz,
                      known.hbm_bytes_per_s / device.model.hbm_bytes_per_s)
    if not isinstance(found, Prediction): return float(found.seconds * longer)
    return replace(found, computing=found.computing * slower, hbm=found.hbm * longer).seconds


def stream_rate(device: Device) -> float:
    """Bytes a second of HBM, read in order."""
    return device.model.hbm_bytes_per_s * STREAMING


def tensor_core_rate(device: Device, kind: str) -> float:
    """Operations a second of tensor cores with weights of a type; those of few bits are multiplied as
    bf16."""
    return device.peak_flops_per_s * device.model.sustained * (2 if kind == "fp8" else 1)


def move(device: Device, nbytes: float, launches: int = 1) -> float:
    """Seconds of kernels that read and write so many bytes."""
    return launches * launch_s(device) + nbytes / stream_rate(device)


def attention(device: Device, operations: float, length: int, d: int, backward: bool = False) -> float:
    """Seconds of an attention of so many operations over sequences of a length."""
    given = figures()["attention"][device.model.arch]
    share = given["backward" if backward else "forward"] * length / (length + given["half"])
    if d <= 64: share *= given["narrow"]
    return launch_s(device) + operations / (device.peak_flops_per_s * share)


def decode_attention(device: Device, nbytes: float, operations: float) -> float:
    """Seconds of an attention of new tokens over so many bytes of keys and values: splits, and what combines
    them. Heads that share keys are rows of one matmul."""
    share = figures()["attention"][device.model.arch]["forward"]
    return max(move(device, nbytes, launches=2), operations / (device.peak_flops_per_s * share))
