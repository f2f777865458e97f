"""Matmuls with scales of groups for tests: specs, operands in memory, the answer in float64."""
from __future__ import annotations

import numpy as np
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.gemm_case import arguments, run, scales, view
from tinygrad_nv.tile.gemm.spec import Operand, Result
from tinygrad_nv.tile.scaled_gemm.spec import GROUP, BlockScales, ScaledGemmSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

E4M3, F32 = dtypes.fp8e4m3, dtypes.float32


def scaled(m: int, n: int, k: int, out: DType = F32, symbolic: bool = False, rows: int = 128,
           along_m: bool = False) -> ScaledGemmSpec:
    """1 x 128 of a, rows x 128 of b. `along_m`: scales of a lie side by side along its rows, as DeepGEMM has
    them."""
    groups, pitch = -(-k // GROUP), -(-k // 16) * 16
    a_scale = BlockScales(1, 1, m) if along_m else BlockScales(1, groups)
    return ScaledGemmSpec(m, n, k, Operand(E4M3, pitch, 1), Operand(E4M3, pitch, 1), Result(out, n, 1),
                          symbolic=symbolic, a_scale=a_scale, b_scale=BlockScales(rows, groups))


def given(spec: ScaledGemmSpec, seed: int = 0, integers: bool = True) -> dict[str, torch.Tensor]:
    """Storages; scales are powers of two beside integers."""
    made, random = arguments(spec, seed, integers), np.random.default_rng(seed)
    out: dict[str, torch.Tensor] = {name: made.pop(name) for name in ("out", "a", "b")}
    for name, one, rows in (("a_scale", spec.a_scale, spec.m), ("b_scale", spec.b_scale, spec.n)):
        shape = -(-rows // one.rows), spec.groups
        values = 2.0 ** random.integers(-2, 3, shape) if integers else random.uniform(0.1, 2, shape)
        storage = torch.full(((shape[0] - 1) * one.mn + (shape[1] - 1) * one.k + 1,), torch.nan)
        view(storage, shape, (one.mn, one.k), 0).copy_(torch.from_numpy(values))
        out[name] = storage
    return {**out, **made}


def wide(spec: ScaledGemmSpec, held: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands with their scales, in float64."""
    made = [view(held[name].double(), (rows, spec.k), (one.mn, one.k), 0) * scales(spec, name, held)
            for name, one, rows in (("a", spec.a, spec.m), ("b", spec.b, spec.n))]
    return made[0], made[1]


def near(spec: ScaledGemmSpec, schedule: Schedule, gpu: GPU) -> None:
    """Random numbers, to 2^-10 of the magnitudes that are added up, where tensor cores keep some 13 bits of
    sums of 128, and an error of 2^-22 for each of the groups' roundings in float32."""
    held = given(spec, integers=False)
    got = run(TABLE.build(spec, schedule, gpu), spec, held, gpu.arch)
    left, right = wide(spec, held)
    unit = 2.0**-10 + spec.groups * 2.0**-22
    assert ((got - left @ right.T).abs() <= unit * (left.abs() @ right.T.abs())).all()
