"""What every default schedule of flash_mma must keep to: registers, shared memory, no spill, no bank conflict
and full sectors in the loop; and a loop no longer than that of Triton's flash attention."""
from __future__ import annotations

import math

import pytest
import triton_attention
import triton_case
from attention_case import arguments, attention, launched
from flash_mma_case import CAUSAL, F32, scheduled
from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.assemble import Resources, assemble
from tinygrad_nv.ptx.emulator.report import Stats
from tinygrad_nv.ptx.sass import TENSOR, disassembled, functions, main_loop
from tinygrad_nv.tile.attention.defaults import FEW, MMA
from tinygrad_nv.tile.attention.schedules import FlashMma
from tinygrad_nv.tile.attention.spec import FULL, AttentionSpec, Band
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.kernel import AttentionKernel
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

REGISTERS = 65536  # of an SM
HEADS = {64: (64, 40), 128: (128, 96), 192: (192, 136), 256: (256, 200)}  # of each row of the table
TILES = [(d, scheduled(*tile)) for most, heads in HEADS.items()
         for d, tiles in zip(heads, (MMA[most], MMA[most][:1]), strict=True) for tile in tiles]
TILES += [(128, scheduled(*tile)) for tile in FEW]
SCALED = Sum() * 0.1
SCORES: dict[str, Expression] = {
    "mask": where(Load(0, dtypes.bool, 512, 1), SCALED, Constant(-math.inf)),
    "bias": SCALED + Load(0, F32, 512, 1), "soft-cap": tanh(SCALED * 0.02) * 50.0,
    "ALiBi": SCALED + Load(0, F32, 0, 0, (0, 2, 1)) * (Position("n").cast(F32) - Position("m").cast(F32))}


def fits(spec: AttentionSpec, schedule: FlashMma, arch: str) -> AttentionKernel:
    """The kernel, that neither spills nor takes more than there is."""
    made = TABLE.build(spec, schedule, GPU(arch))
    used: Resources = assemble(made.ptx, arch).kernels[made.name]
    assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0)
    assert -(-used.registers // 8) * 8 * made.threads <= REGISTERS
    assert used.shared_bytes + made.dynamic_smem <= SMEM_BYTES[arch]
    return made


def counted(spec: AttentionSpec, schedule: FlashMma) -> Stats:
    """Counters of a launch without findings."""
    _, report = launched(TABLE.build(spec, schedule, GPU("sm_80")), spec, arguments(spec), "sm_80")
    assert report.findings == [], "\n".join(map(str, report.findings))
    return report.stats


@pytest.mark.parametrize(("d", "schedule"), TILES, ids=str)
def test_default_schedules_keep_to_their_resources(d: int, schedule: FlashMma):
    """The causal kernel has all code; in the full one the loop is a single block of instructions, which ptxas
    schedules more freely. The newer architectures take turns."""
    causal = attention(1024, 1024, d, band=CAUSAL, lse=True)
    for spec, arch in ((causal, "sm_80"), (attention(1024, 1024, d), "sm_80"),
                       (causal, ("sm_89", "sm_90a")[TILES.index((d, schedule)) % 2])):
        if not TABLE.problems(spec, schedule, GPU(arch)): fits(spec, schedule, arch)


@pytest.mark.parametrize(("d", "schedule"), TILES, ids=str)
def test_loops_lose_no_pass_and_fill_sectors(d: int, schedule: FlashMma):
    """Two blocks of columns more: what they cost. Heads of an odd number of 8 elements straddle sectors."""
    blocks = schedule.depth + 2
    few, many = (counted(attention(schedule.block_m, schedule.block_n * count, d), schedule)
                 for count in (blocks, blocks + 2))
    assert sum(many.bank_conflicts.values()) == sum(few.bank_conflicts.values())
    asked = many.asynchronous_bytes - few.asynchronous_bytes
    assert asked == 2 * schedule.block_n * 2 * d * 2
    touched = many.l2_bytes - few.l2_bytes
    assert touched == asked if d % 16 == 0 else touched <= 2 * asked
    padded = -(-d // 16) * 16
    assert many.tensor_flops - few.tensor_flops == 2 * schedule.block_m * 2 * schedule.block_n * 2 * padded


@pytest.mark.parametrize("name", SCORES)
def test_scores_do_not_spill(name: str):
    for d in (64, 128, 256):
        spec = attention(512, 512, d, heads=2, group=2, band=CAUSAL, score=SCORES[name], lse=True)
        schedule = ATTENTION.choose(spec, GPU("sm_80"))
        assert schedule is not None
        fits(spec, schedule, "sm_80")


@pytest.mark.parametrize("d", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("arch", SMEM_BYTES)
def test_there_is_a_default(arch: str, d: int):
    """For any number of rows; the gates above are about what runs."""
    for rows in (1, 16, 40, 100, 4096):
        spec = attention(rows, 4096, d, symbolic=("s_q", "s_kv", "start"), band=Band(-500, 0), lse=True)
        schedule = ATTENTION.choose(spec, GPU(arch))
        assert schedule is not None
        if schedule.template != "flash_mma": continue
        assert schedule in [scheduled(*tile) for tiles in (*MMA.values(), FEW) for tile in tiles]
        assert schedule.block_m < 2 * max(rows, 16)


def triton_loop(d: int, schedule: FlashMma, causal: bool) -> float:
    """Instructions around the loop of Triton's kernel for each product of 16 × 8 × 16."""
    types = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | {"lse": "*fp32", "S": "i32", "scale": "fp32"}
    constants = {"D": d, "BM": schedule.block_m, "BN": schedule.block_n, "CAUSAL": causal, "SPLIT": False}
    made = triton_case.compile(triton_attention.forward_kernel, types | dict.fromkeys(constants, "constexpr"),
                               constants, 80, ("q", "k", "v", "out", "lse", "S"),
                               num_warps=schedule.warps_m, num_stages=schedule.depth)
    return around(made.ptx, made.entry)


def around(ptx: str, name: str) -> float:
    loop = main_loop(functions(disassembled(assemble(ptx, "sm_80").cubin))[name])
    assert loop is not None
    return loop.around / loop.tensor


@pytest.mark.parametrize("band", [FULL, CAUSAL], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_loops_are_no_longer_than_those_of_triton(d: int, band: Band):
    """Both compiled here by the same ptxas, with the same blocks, warps and stages."""
    spec = attention(4096, 4096, d, band=band)
    schedule = ATTENTION.choose(spec, GPU("sm_80"))
    assert schedule is not None
    ours = around(TABLE.build(spec, schedule, GPU("sm_80")).ptx, "flash_mma")
    assert ours <= triton_loop(d, schedule, not band.full)


def test_only_tensor_cores_multiply():
    spec = attention(1024, 1024, 128, band=CAUSAL)
    made = TABLE.build(spec, scheduled(*MMA[128][0]), GPU("sm_80"))
    code = functions(disassembled(assemble(made.ptx, "sm_80").cubin))[made.name]
    assert {each.opcode for each in code} & set(TENSOR) == {"HMMA"}
