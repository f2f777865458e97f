"""Grouped matmuls on the emulator for tests: arguments and answers of cpu_grouped_case.py, routings.

Protocol: `run` returns the result in float64, NaN where nothing was written; any finding, and anything
written beside rows of groups, fails. `exact` and `near` hold it against the answer: integers to the bit;
else as far from float64 as sums of float32 are, twice, and two roundings.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tinygrad.dtype import dtypes

from tests.support.cpu import cpu_grouped_case
from tests.support.cpu.cpu_grouped_case import Given
from tests.support.tile.gemm_case import TORCH, bits, tensor_map
from tests.support.tile.report_case import told
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedGemv
from tinygrad_nv.tile.grouped_gemm.spec import GROUP, GroupedGemmSpec, ScaledGroupedGemmSpec
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

CUT = 2.0**-10  # of the largest, what tensor cores may cut of sums of 8-bit floats (14 bits of 128 products)
C = 2.0     # times the error of float32 sums from first to last
UNIT = {dtypes.float32: 2.0**-24, dtypes.bfloat16: 2.0**-8, dtypes.float16: 2.0**-11}


def given(spec: GroupedGemmSpec, counts: Sequence[int], before: int = 0, integers: bool = False,
          seed: int = 0) -> Given:
    """Arguments; scales, where there are any, are powers of two beside integers, and NaN where no row of a
    group has them."""
    if not isinstance(spec, ScaledGroupedGemmSpec):
        made = cpu_grouped_case.given(spec, counts, before, integers, seed)
        if spec.transposed: made["w"] = made["w"].transpose(1, 2).contiguous()
        return made
    held = cpu_grouped_case.given(replace(spec, biased=False), counts, before, integers, seed)
    random = np.random.default_rng(seed)

    def scales(*shape: int) -> torch.Tensor:
        values = 2.0 ** random.integers(-2, 3, shape) if integers else random.uniform(0.1, 2, shape)
        return torch.from_numpy(values).float()
    x, w = scales(spec.x_rows, spec.k_groups), scales(spec.groups, spec.n_groups, spec.k_groups)
    x[held["x"].float().isnan().any(-1)] = torch.nan
    w[held["w"].float().isnan().flatten(1).any(-1)] = torch.nan
    made = {"x": held.pop("x"), "w": held.pop("w"), "scale_x": x, "scale_w": w, **held}
    if spec.biased: made["bias"] = scales(spec.groups, spec.n).to(TORCH[spec.out])
    return made


def answer(spec: GroupedGemmSpec, held: Given, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """As cpu_grouped_case.py has it, of operands times their scales."""
    if spec.transposed: held = {**held, "w": held["w"].transpose(1, 2)}
    if not isinstance(spec, ScaledGroupedGemmSpec): return cpu_grouped_case.answer(spec, held, dtype)
    x = held["x"].double() * held["scale_x"].double().repeat_interleave(GROUP, -1)[:, :spec.k]
    w = held["scale_w"].double().repeat_interleave(GROUP, -1).repeat_interleave(GROUP, -2)
    w = held["w"].double() * w[:, :spec.n, :spec.k]
    return cpu_grouped_case.answer(spec, {**held, "x": x, "w": w}, dtype)


@functools.cache
def built(spec: GroupedGemmSpec, schedule: Any, gpu: GPU) -> TileKernel:
    """The kernel. Its loop has two stages more than its ring, where it has one."""
    assert isinstance(schedule, GroupedGemv) or spec.k > schedule.block_k * (schedule.depth + 1)
    made = TABLE.build(spec, schedule, gpu)
    assert isinstance(made, TileKernel)
    return made


def launched(made: TileKernel, spec: GroupedGemmSpec, held: Given, arch: str = "sm_90a",
             seed: int | str = 0) -> tuple[torch.Tensor, Report]:
    """The result, and the report."""
    emu = Emulator(arch, seed=seed)
    out = torch.full((spec.rows, spec.columns), torch.nan).to(TORCH[spec.out])
    order = [emu.alloc(bits(each)) for each in (out, *held.values())]
    scratch = [emu.alloc(each.count * each.dtype.itemsize) for each in made.scratch]
    order[1:1] = scratch
    for zero in made.launch.zeroed:
        order[zero.pointer].data[:zero.nbytes] = 0
        order[zero.pointer].valid = None
    maps = [tensor_map(order, each, 0) for each in made.maps]
    report = emu.launch(made.ptx, made.grid, made.threads, [*order, *maps], made.name,
                        made.cluster, made.dynamic_smem)
    found = told(report)
    assert found == [], "\n".join(map(str, found))
    data = np.frombuffer(order[0].numpy().tobytes(), np.uint8).copy()
    return torch.from_numpy(data).view(out.dtype).view(out.shape).double(), report


def run(made: TileKernel, spec: GroupedGemmSpec, held: Given, arch: str = "sm_90a",
        seed: int | str = 0) -> torch.Tensor:
    """The result."""
    return launched(made, spec, held, arch, seed)[0]


def exact(made: TileKernel, spec: GroupedGemmSpec, counts: Sequence[int], before: int = 0,
          arch: str = "sm_90a", seed: int | str = 0) -> None:
    """Asserts that integers come out to the bit, of rows that are the group's, and no other row."""
    held = given(spec, counts, before, integers=True, seed=sum(counts) + before)
    wanted = answer(spec, held).to(TORCH[spec.out]).double()
    got = run(made, spec, held, arch, seed)
    assert torch.equal(got.isnan(), wanted.isnan()), "rows of no group were written, or rows of one were not"
    inside = ~wanted.isnan()
    assert torch.equal(got[inside], wanted[inside])


def near(made: TileKernel, spec: GroupedGemmSpec, counts: Sequence[int], before: int = 0,
         arch: str = "sm_90a", seed: int | str = 0) -> None:
    """Asserts that random numbers come out near what float64 makes of them."""
    held = given(spec, counts, before, seed=sum(counts))
    true, usual = answer(spec, held), answer(spec, held, torch.float32)
    got = run(made, spec, held, arch, seed)
    inside = ~true.isnan()
    assert torch.equal(got.isnan(), ~inside)
    true, usual, got = true[inside], usual[inside], got[inside]
    bound = C * (usual - true).abs().max() + 2 * UNIT[spec.out] * true.abs()
    if spec.scaled: bound += CUT * true.abs().max()
    worst = ((got - true).abs() - bound).max()
    assert worst <= 0, f"an error {worst:g} above the bound"


# **** routings ****

def routings(groups: int, rows: int, seed: int = 0) -> dict[str, tuple[list[int], int]]:
    """Rows of each group, and how many rows before the first are of none."""
    random = np.random.default_rng(seed)

    def only(*places: tuple[int, int]) -> list[int]:
        made = [0] * groups
        for group, count in places: made[group % groups] += count
        return made

    def ragged(share: float) -> list[int]:
        weights = random.random(groups) ** 4 / 4
        return [int(each) for each in rows * share * weights / weights.sum()]
    even, most = [rows // groups] * groups, rows
    made = {"all to the first": (only((0, most)), 0), "all to the last": (only((-1, most)), 0),
            "all to a middle one": (only((groups // 2, most)), 0), "none": (only(), 0), "even": (even, 0),
            "a row": (only((groups // 2, 1)), 0), "the last row": (only((-1, 1)), rows - 1),
            "a row each": ([1] * groups, 0), "first empty": ([0, *even[1:]], 0),
            "last empty": ([*even[:-1], 0], 0), "first and last": (only((0, 3), (-1, rows - 3)), 0),
            "every other": ([each * (i % 2) for i, each in enumerate(even)], 1),
            "one short of all": (only((1, rows - 1)), 0),
            "one and the rest": (only((0, 1), (1, rows - 1)), 0)}
    for tile in (8, 16, 64, 128):
        for more in (-1, 0, 1):
            if 0 < tile + more <= rows: made[f"{tile}{more:+} rows"] = (only((1, tile + more)), 0)
            if 0 < 2 * (tile + more) <= rows:
                made[f"{tile}{more:+} rows twice"] = (only((0, tile + more), (2, tile + more)), 0)
    for i in range(12): made[f"ragged {i}"] = (ragged((i + 1) / 12), i % 3 if i < 11 else 0)
    return {name: (counts, before) for name, (counts, before) in made.items() if sum(counts) + before <= rows}
