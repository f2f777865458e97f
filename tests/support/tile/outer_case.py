"""Sums of outer products on the emulator for tests: arguments and answers of cpu_outer_case.py.

Protocol: `launched` returns the results in float64, NaN where nothing was written, and the report; any
finding fails. `exact` and `near` hold them against the answer: integers to the bit; else as far from float64
as sums of float32 are, twice, and two roundings.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from tests.support.cpu.cpu_outer_case import UNIT, C, answer, given
from tests.support.tile.gemm_case import TORCH, bits
from tests.support.tile.report_case import told
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.tile.emulated import tensor_map
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

Held = dict[str, torch.Tensor]


@functools.cache
def built(spec: GroupedOuterSpec, schedule: Schedule, gpu: GPU) -> TileKernel:
    """The kernel."""
    made = TABLE.build(spec, schedule, gpu)
    assert isinstance(made, TileKernel)
    return made


def launched(made: TileKernel, spec: GroupedOuterSpec, held: Held, arch: str,
             seed: int | str = 0) -> tuple[torch.Tensor, Report]:
    """The results, and the report."""
    emu = Emulator(arch, seed=seed)
    out = torch.full((spec.groups, spec.n, spec.k), torch.nan).to(TORCH[spec.dtype])
    pointers = [emu.alloc(bits(each)) for each in (out, *held.values())]
    maps = [tensor_map(pointers, each, ()) for each in made.maps]
    report = emu.launch(made.ptx, made.grid, made.threads, [*pointers, *maps], made.name, made.cluster,
                        made.dynamic_smem)
    found = told(report)
    assert found == [], "\n".join(map(str, found))
    data = np.frombuffer(pointers[0].numpy().tobytes(), np.uint8).copy()
    return torch.from_numpy(data).view(out.dtype).view(out.shape).double(), report


def exact(made: TileKernel, spec: GroupedOuterSpec, counts: Sequence[int], before: int = 0,
          arch: str = "sm_80", seed: int | str = 0) -> None:
    """Asserts that sums of integers come out to the bit; groups without rows have zeros."""
    held = given(spec, [*counts], before, True, sum(counts) + before)
    wanted = answer(spec, held, torch.float64).to(TORCH[spec.dtype]).double()
    assert torch.equal(launched(made, spec, held, arch, seed)[0], wanted)


def near(made: TileKernel, spec: GroupedOuterSpec, counts: Sequence[int], before: int = 0,
         arch: str = "sm_80", seed: int | str = 0) -> None:
    """Asserts that random numbers come out near what float64 makes of them."""
    held = given(spec, [*counts], before, False, sum(counts))
    true, usual = (answer(spec, held, kind) for kind in (torch.float64, torch.float32))
    bound = C * (usual - true).abs().max() + 2 * UNIT[spec.dtype] * true.abs()
    worst = ((launched(made, spec, held, arch, seed)[0] - true).abs() - bound).max()
    assert worst <= 0, f"an error {worst:g} above the bound"
