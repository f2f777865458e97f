"""What every default schedule of flash_backward_mma must keep to: registers, shared memory, no spill, no bank
conflict in the loop; and a loop no longer than those of Triton's kernels for the same work."""
from __future__ import annotations

import math
from typing import Any

import pytest
import triton_attention
import triton_case
from backward_case import arguments, backward, launched
from flash_backward_mma_case import CAUSAL, F32, scheduled
from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.assemble import Resources, assemble
from tinygrad_nv.ptx.emulator.report import Stats
from tinygrad_nv.ptx.sass import TENSOR, disassembled, functions, main_loop
from tinygrad_nv.tile.attention.backward_defaults import FEW, MMA, mma
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.schedules import BackwardMma
from tinygrad_nv.tile.attention.spec import Band
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.kernel import BackwardKernel
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

REGISTERS = 65536  # of an SM
TILES = [(d, tile) for d, tiles in MMA.items() for tile in tiles]
SCALED = Sum() * 0.1
SCORES: dict[str, Expression] = {
    "mask": where(Load(0, dtypes.bool, 512, 1), SCALED, Constant(-math.inf)),
    "bias": SCALED + Load(0, F32, 512, 1), "soft-cap": tanh(SCALED * 0.02) * 50.0,
    "ALiBi": SCALED + Load(0, F32, 0, 0, (0, 2, 1)) * (Position("n").cast(F32) - Position("m").cast(F32))}


def of(tile: tuple[int, int, int, int]) -> BackwardMma:
    """A row of the table."""
    m, n, warps, sharing = tile
    return scheduled(m, n, warps).warps(warps, sharing)


def mma_default(spec: BackwardSpec, arch: str) -> BackwardMma:
    """The first schedule of this template."""
    return next(s for s in mma(spec, GPU(arch)) if not TABLE.problems(spec, s, GPU(arch)))


def fits(spec: BackwardSpec, schedule: BackwardMma, arch: str) -> BackwardKernel:
    """The kernel, that neither spills nor takes more than there is."""
    made = TABLE.build(spec, schedule, GPU(arch))
    used: Resources = assemble(made.ptx, arch).kernels[made.name]
    assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0)
    assert -(-used.registers // 8) * 8 * made.threads <= REGISTERS
    assert used.shared_bytes + made.dynamic_smem <= SMEM_BYTES[arch]
    return made


def counted(spec: BackwardSpec, schedule: BackwardMma) -> Stats:
    """Counters of a launch without findings."""
    _, report = launched(TABLE.build(spec, schedule, GPU("sm_80")), spec, arguments(spec), "sm_80")
    assert report.findings == [], "\n".join(map(str, report.findings))
    return report.stats


@pytest.mark.parametrize(("d", "tile"), TILES, ids=str)
def test_default_schedules_keep_to_their_resources(d: int, tile: tuple[int, int, int, int]):
    """The causal kernel has all code, in the full one the loop is a single block of instructions. The newer
    architectures take turns."""
    schedule = of(tile)
    causal = backward(1024, 1024, d, heads=2, group=4, band=CAUSAL)
    for spec, arch in ((causal, "sm_80"), (backward(1024, 1024, d), "sm_80"),
                       (causal, ("sm_89", "sm_90a")[TILES.index((d, tile)) % 2])):
        if not TABLE.problems(spec, schedule, GPU(arch)): fits(spec, schedule, arch)


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_windows_and_turns_do_not_spill(d: int):
    for spec in (backward(512, 512, d, heads=2, group=2, band=Band(-200, 0)),
                 backward(512, 512, d, band=CAUSAL, deterministic=True)):
        fits(spec, mma_default(spec, "sm_80"), "sm_80")


@pytest.mark.parametrize("name", SCORES)
def test_scores_do_not_spill(name: str):
    for d in (64, 128, 256):
        spec = backward(512, 512, d, heads=2, group=2, band=CAUSAL, score=SCORES[name])
        fits(spec, mma_default(spec, "sm_80"), "sm_80")


@pytest.mark.parametrize(("d", "tile"), [*TILES, (80, FEW[0]), (40, FEW[1])], ids=str)
def test_loops_lose_no_pass(d: int, tile: tuple[int, int, int, int]):
    """Two blocks of rows more: what they cost. dq is added where it lies."""
    schedule = of(tile)
    few, many = (counted(backward(schedule.block_m * count, schedule.block_n, d), schedule)
                 for count in (4, 6))
    assert sum(many.bank_conflicts.values()) == sum(few.bank_conflicts.values())
    rows = 2 * schedule.block_m
    assert many.asynchronous_bytes - few.asynchronous_bytes == 2 * rows * d * 2
    steps = -(-d // 16) * 16
    assert many.tensor_flops - few.tensor_flops == 5 * 2 * rows * schedule.block_n * steps


@pytest.mark.parametrize("d", [8, 64, 80, 128, 144, 200, 256])
@pytest.mark.parametrize("arch", SMEM_BYTES)
def test_there_is_a_default(arch: str, d: int):
    """But for the widest heads on the architecture with the least shared memory."""
    for keys in (1, 16, 40, 100, 4096):
        spec = backward(4096, keys, d, symbolic=("s_q", "s_kv", "start"), band=Band(-500, 0))
        schedule = ATTENTION.choose(spec, GPU(arch))
        assert (schedule is None) == (arch == "sm_89" and d == 256)
        if schedule is not None and schedule.template == "flash_backward_mma":
            assert schedule.block_n < 2 * max(keys, 32)


def around(ptx: str, name: str) -> tuple[int, int]:
    """Instructions around the loop, and products of 16 × 8 × 16 among them."""
    loop = main_loop(functions(disassembled(assemble(ptx, "sm_80").cubin))[name])
    assert loop is not None
    return loop.around, loop.tensor


def triton_work(kernel: Any, names: tuple[str, ...], d: int, warps: int) -> float:
    """Instructions of a Triton kernel's loop for each product that it makes."""
    types = dict.fromkeys(("q", "k", "v", "dout"), "*bf16") | dict.fromkeys(("lse", "delta", *names), "*fp32")
    types = {name: types.get(name, "i32" if name == "S" else "fp32") for name in kernel.arg_names[:-4]}
    constants = {"D": d, "BM": 64, "BN": 64, "CAUSAL": False}
    made = triton_case.compile(kernel, types | dict.fromkeys(constants, "constexpr"), constants, 80,
                               tuple(name for name, kind in types.items() if kind[0] == "*" or name == "S"),
                               num_warps=warps, num_stages=2)
    instructions, products = around(made.ptx, made.entry)
    return instructions / products


@pytest.mark.parametrize("d", [64, 128])
def test_loops_are_no_longer_than_those_of_triton(d: int):
    """Triton's two kernels make seven products where ours makes five: all are counted."""
    spec = backward(4096, 4096, d)
    made = TABLE.build(spec, mma_default(spec, "sm_80"), GPU("sm_80"))
    instructions, products = around(made.ptx, made.name)
    theirs = min(4 * triton_work(triton_attention.dkdv_kernel, ("dk", "dv"), d, warps)
                 + 3 * triton_work(triton_attention.dq_kernel, ("dq",), d, warps) for warps in (4, 8))
    assert 5 * instructions / products <= theirs


def test_only_tensor_cores_multiply():
    spec = backward(1024, 1024, 128, band=CAUSAL)
    made = TABLE.build(spec, of(MMA[128][0]), GPU("sm_80"))
    code = functions(disassembled(assemble(made.ptx, "sm_80").cubin))[made.name]
    assert {each.opcode for each in code} & set(TENSOR) == {"HMMA"}
