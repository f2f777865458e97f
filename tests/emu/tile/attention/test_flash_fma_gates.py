"""What every default schedule of flash_fma must keep to: registers, shared memory, no spill, no bank conflict
and full sectors in the loop; and loops that do little but multiply and add."""
from __future__ import annotations

import math

import pytest
from attention_case import arguments, attention, launched
from flash_fma_case import CAUSAL, F32, scheduled
from tinygrad.dtype import dtypes

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.emulator.report import Stats
from tinygrad_nv.ptx.sass import TENSOR, disassembled, functions, loops
from tinygrad_nv.tile.attention.defaults import FEW_FMA, FMA
from tinygrad_nv.tile.attention.schedules import FlashFma
from tinygrad_nv.tile.attention.spec import AttentionSpec, Band
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, tanh, where
from tinygrad_nv.tile.kernel import AttentionKernel
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

REGISTERS = 65536  # of an SM
TILES = [(d, scheduled(*tile)) for d, tiles in FMA.items() for tile in tiles]
TILES += [(d, scheduled(*tile)) for tile, d in zip(FEW_FMA, (96, 96, 128, 192, 128, 256, 256), strict=True)]
SCALED = Sum() * 0.1
SCORES: dict[str, Expression] = {
    "mask": where(Load(0, dtypes.bool, 512, 1), SCALED, Constant(-math.inf)),
    "bias": SCALED + Load(0, F32, 512, 1), "soft-cap": tanh(SCALED * 0.02) * 50.0,
    "ALiBi": SCALED + Load(0, F32, 0, 0, (0, 2, 1)) * (Position("n").cast(F32) - Position("m").cast(F32))}


def fits(spec: AttentionSpec, schedule: FlashFma, arch: str) -> AttentionKernel:
    """The kernel, that neither spills nor takes more than there is."""
    made = TABLE.build(spec, schedule, GPU(arch))
    used = assemble(made.ptx, arch).kernels[made.name]
    assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0)
    assert -(-used.registers // 8) * 8 * made.threads <= REGISTERS
    assert used.shared_bytes + made.dynamic_smem <= SMEM_BYTES[arch]
    return made


def counted(spec: AttentionSpec, schedule: FlashFma) -> Stats:
    """Counters of a launch without findings."""
    _, report = launched(TABLE.build(spec, schedule, GPU("sm_90a")), spec, arguments(spec), "sm_90a")
    assert report.findings == [], "\n".join(map(str, report.findings))
    return report.stats


@pytest.mark.parametrize(("d", "schedule"), TILES, ids=str)
def test_default_schedules_keep_to_their_resources(d: int, schedule: FlashFma):
    """The causal kernel has all code. The architectures that have room take turns."""
    spec = attention(1024, 1024, d, F32, band=CAUSAL, lse=True)
    archs = [arch for arch in SMEM_BYTES if not TABLE.problems(spec, schedule, GPU(arch))]
    fits(spec, schedule, archs[TILES.index((d, schedule)) % len(archs)])


@pytest.mark.parametrize(("d", "schedule"), TILES, ids=str)
def test_loops_lose_no_pass_and_fill_sectors(d: int, schedule: FlashFma):
    """Two blocks of columns more: what they cost."""
    blocks = schedule.depth + 2
    few, many = (counted(attention(schedule.block_m, schedule.block_n * count, d, F32), schedule)
                 for count in (blocks, blocks + 2))
    assert sum(many.bank_conflicts.values()) == sum(few.bank_conflicts.values()) == 0
    asked = many.asynchronous_bytes - few.asynchronous_bytes
    assert asked == 2 * schedule.block_n * 2 * d * 4
    assert many.l2_bytes - few.l2_bytes == asked


@pytest.mark.parametrize("d", [20, 36, 72, 96])
def test_heads_of_other_widths_lose_no_pass(d: int):
    for schedule in (scheduled(64, 32, 2), scheduled(16, 32, 1, 4)):
        stats = counted(attention(64, 100, d, F32, band=CAUSAL, start=30), schedule)
        assert sum(stats.bank_conflicts.values()) == 0


@pytest.mark.parametrize("name", SCORES)
def test_scores_do_not_spill(name: str):
    for d in (64, 128, 256):
        spec = attention(512, 512, d, F32, heads=2, group=2, band=CAUSAL, score=SCORES[name], lse=True)
        schedule = ATTENTION.choose(spec, GPU("sm_80"))
        assert schedule is not None
        fits(spec, schedule, "sm_80")


@pytest.mark.parametrize("d", [1, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("arch", SMEM_BYTES)
def test_there_is_a_default(arch: str, d: int):
    """For any number of rows; of few, warps share the keys."""
    for rows in (1, 16, 17, 40, 100, 4096):
        spec = attention(rows, 4096, d, F32, symbolic=("s_q", "s_kv", "start"), band=Band(-500, 0),
                         lse=True)
        schedule = ATTENTION.choose(spec, GPU(arch))
        assert schedule is not None
        assert schedule in [scheduled(*tile) for tiles in (*FMA.values(), FEW_FMA) for tile in tiles]
        assert schedule.block_m < 2 * max(rows, 16)
        if rows <= 16: assert schedule.warps_n > 1


@pytest.mark.parametrize("d", [64, 96])
def test_loops_multiply_and_add(d: int):
    """Seven of eight instructions of both products are FFMA, and no other unit multiplies."""
    spec = attention(4096, 4096, d, F32, band=CAUSAL)
    schedule = ATTENTION.choose(spec, GPU("sm_90a"))
    assert schedule is not None
    code = functions(disassembled(assemble(TABLE.build(spec, schedule, GPU("sm_90a")).ptx, "sm_90a").cubin))
    found = [loop.counts for loop in loops(code["flash_fma"]) if loop.counts["FFMA"] >= 256]
    inner = [counts for counts in found if not counts["BAR"]]
    assert len(inner) >= 2
    for counts in inner: assert counts["FFMA"] >= 0.87 * counts.total()
    assert not {each.opcode for each in code["flash_fma"]} & set(TENSOR)


REFUSED: dict[str, tuple[FlashFma, dict[str, object]]] = {
    "operands of bf16 are not float32": (scheduled(32, 32, 2), {"dtype": dtypes.bfloat16}),
    "48 is not a power of two": (scheduled(48, 32, 1), {}),
    "2 warps × 16 = 32 or more": (scheduled(16, 32, 2), {}),
    "3 x 1 warps are not 1, 2": (scheduled(64, 32, 3), {}),
    "block_n=32 of 8 warps": (scheduled(16, 32, 1, 8), {}),
    "9 stages are not 2 to 8": (scheduled(16, 32, 1, 4, 9), {}),
    "272 sums a thread, at most 152": (scheduled(32, 64, 1, 4), {"d": 256}),
    "133120 B of shared memory, sm_89 has 101376": (scheduled(64, 64, 4), {"d": 64, "d_v": 128})}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words: str):
    schedule, changed = REFUSED[words]
    spec = attention(64, 64, **{"d": 64, "dtype": F32} | changed)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="cannot be") as raised: TABLE.build(spec, schedule, GPU("sm_89"))
    assert words in str(raised.value)
