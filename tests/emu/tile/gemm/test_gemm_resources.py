"""What ptxas and the emulator count of kernels of matmuls: registers, no spill, the main loop's instructions,
bank conflicts, sectors and bytes."""
from __future__ import annotations

import re
import time

import pytest
import torch
from tinygrad.dtype import DType, dtypes

from tests.support.tile.gemm_case import GUARD, arguments, launched, product, reference
from tests.support.tile.gemv_case import best
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.emulator.report import Stats
from tinygrad_nv.ptx.sass import disassemble, functions, main_loop
from tinygrad_nv.tile.expression import Load, Sum, silu
from tinygrad_nv.tile.gemm.gemv.plan import GemvPlan
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Mma, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec, Result
from tinygrad_nv.tile.gemm.wgmma.plan import REGISTERS
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

W = Wgmma()
BF16, F16, F32, E4M3, S8 = dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.fp8e4m3, dtypes.int8
MAJORS = ("KK", "KM", "MK", "MM")
OUTS = {S8: dtypes.int32, E4M3: F32, F32: F32}


def unspilt(made: GemmKernel, arch: str) -> int:
    """Registers of a kernel, of which none is spilt; raises where ptxas serialised or ignored anything."""
    found = assemble(made.ptx, arch).kernels[made.name]
    assert (found.spill_store_bytes, found.spill_load_bytes, found.stack_bytes) == (0, 0, 0)
    return found.registers


# **** mma ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "arch", "schedule"), [
    *[(BF16, arch, Mma()) for arch in ("sm_80", "sm_89", "sm_90a")], (F32, "sm_80", Mma().k(16)),
    (S8, "sm_80", Mma().k(64)), (E4M3, "sm_89", Mma().block(64, 128).k(64))])
@pytest.mark.parametrize("majors", MAJORS)
def test_mma_neither_spills_nor_meets_bank_conflicts(dtype: DType, arch: str, schedule: GemmSchedule,
                                                     majors: str):
    size = 256 if dtype == BF16 else 128
    spec = product(size, size, 512, dtype, OUTS.get(dtype), majors)
    made = TABLE.build(spec, schedule, GPU(arch))
    unspilt(made, arch)
    given = arguments(spec)
    storage, report = launched(made, spec, given, arch)
    assert report.findings == []
    assert report.stats.bank_conflicts == {}
    assert report.stats.tensor_flops == spec.flops
    if dtype != BF16: return
    assert set(report.stats.sectors_per_request.values()) == {16.0}  # 16 bytes a thread, all of each sector
    assert torch.equal(storage.double().view(256, 256), reference(spec, given))


def test_what_lies_beside_the_result_would_be_seen():
    """The harness itself: a storage larger than the result starts and ends as GUARD."""
    spec = product(8, 8, 16, F16, F32, gap=3)
    assert spec.out == Result(F32, 11, 1)
    made = TABLE.build(spec, Mma().block(64, 64).warps(2, 2), GPU("sm_80"))
    storage, _ = launched(made, spec, arguments(spec), "sm_80")
    assert (storage.view(-1)[8:11] == GUARD).all()


@pytest.mark.parametrize(("rows", "row_bytes"), [(16, 32), (32, 64), (64, 128), (32, 256), (8, 384)])
def test_a_tile_is_a_permutation_in_which_eight_rows_have_eight_places(rows: int, row_bytes: int):
    tile = SharedTile(rows, row_bytes)
    places = [tile.offset(row, byte) for row in range(rows) for byte in range(0, row_bytes, 16)]
    assert sorted(places) == list(range(0, tile.nbytes, 16))
    for row in range(0, rows, 8):
        for byte in range(0, row_bytes, 16):
            assert len({tile.offset(row + i, byte) // 16 % 8 for i in range(8)}) == 8


# **** wgmma ****

# schedule, dtype, majors, the most SASS instructions for an HGMMA of the main loop; Triton 3.9 has 15.5 for
# 128x256x64 of bf16
DEFAULTS = {
    "128x256": (W.block(128, 256), BF16, "KK", 12),
    "128x256 MN": (W.block(128, 256), F16, "MM", 12),
    "256x128": (W.block(256, 128), BF16, "KK", 8),
    "128x128 ping-pong": (W.block(128, 128).pingpong(), BF16, "KK", 8),
    "128x256 cluster": (W.block(128, 256).cluster(2), BF16, "KM", 12),
    "128x256 cluster 2x2": (W.block(128, 256).cluster(2, 2), BF16, "KK", 12),
    "128x256 split": (W.block(128, 256).split(4), BF16, "KK", 12),
    "128x256 stream": (W.block(128, 256).stream_k(), BF16, "KK", 12),
    "128x256 cluster stream": (W.block(128, 256).cluster(2).stream_k(), BF16, "KK", 12),
    "192x128": (W.block(192, 128).warps(16), BF16, "KK", 12),
    "64x256": (W.block(64, 256).warps(8), BF16, "KK", 12),
    "fp8": (W.block(128, 128).k(128), E4M3, "KK", 28),
    "fp8 cluster stream": (W.block(256, 128).k(128).cluster(1, 2).stream_k(), E4M3, "KK", 28),
    "int8": (W.block(128, 256).k(128), S8, "KK", 12),
    "tf32": (W.block(128, 256).k(32), F32, "KK", 12)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", DEFAULTS)
def test_main_loops_are_short_and_nothing_spills(name: str):
    schedule, dtype, majors, most = DEFAULTS[name]
    made = TABLE.build(product(4096, 4096, 4096, dtype, OUTS.get(dtype), majors), schedule, GPU("sm_90a"))
    unspilt(made, "sm_90a")
    loop = main_loop(functions(disassemble(assemble(made.ptx, "sm_90a").cubin))["gemm_wgmma"])
    assert loop is not None
    assert loop.around <= most * loop.tensor, loop.counts
    # fp8 sums are promoted by FADD
    assert dtype == E4M3 or not {"FFMA", "FMUL", "FADD", "LDL", "STL"} & set(loop.counts)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DEFAULTS)
def test_no_bank_conflicts_and_all_of_memory_by_tma(name: str):
    """No request of a warp to global memory at all: TMA moves whole sectors. Sums of stream-K go by 16 whole
    sectors, flags by one."""
    schedule, dtype, majors, _ = DEFAULTS[name]
    spec = product(2 * schedule.block_m, 256, 6 * schedule.block_k, dtype, OUTS.get(dtype), majors)
    _, report = launched(TABLE.build(spec, schedule, GPU("sm_90a", 4)), spec, arguments(spec), "sm_90a")
    assert report.findings == []
    assert report.stats.bank_conflicts == {}
    assert set(report.stats.sectors_per_request.values()) <= ({1.0, 16.0} if schedule.stream else set())


WIDEST = {"one consumer": W.block(128, 192).warps(8), "two": W.block(256, 200).stages(2),
          "three": W.block(192, 200).warps(16).stages(2), "turns": W.block(128, 200).stages(2).pingpong(),
          "three turns": W.block(64, 200).warps(16).stages(3).pingpong(),
          "8 splits": W.block(128, 256).split(8), "stream-K": W.block(256, 160).stages(3).stream_k()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WIDEST)
def test_the_most_sums_fit_beside_a_long_epilogue(name: str):
    """A bias along rows, silu in the result's dtype, a residual."""
    bias, residual = Load(0, BF16, 0, 1), Load(1, BF16, 4096, 1)
    spec = product(4096, 4096, 4096, epilogue=silu(Sum().cast(BF16) + bias) + residual)
    unspilt(TABLE.build(spec, WIDEST[name], GPU("sm_90a")), "sm_90a")


def test_registers_are_within_the_pool():
    """Of 65536 registers, a warpgroup of 128 threads can have 512 a thread, shared by all warpgroups."""
    for consumers, (fewer, more) in REGISTERS.items():
        assert fewer + consumers * more <= 512


def test_the_text_is_written_in_a_tenth_of_a_second():
    """Of one processor; best of five."""
    spec = product(4096, 4096, 4096)

    def once() -> float:
        start = time.process_time()
        TABLE.build(spec, W.block(128, 256), GPU("sm_90a"))
        return time.process_time() - start

    assert min(once() for _ in range(5)) < 0.1


# **** gemv ****

WEIGHTS = ".L1::no_allocate"
KINDS = [BF16, F32, E4M3, S8]


def made(spec: GemmSpec, arch: str, sm_count: int = 0) -> GemmKernel:
    """The kernel of the schedule that the cost model likes best."""
    return TABLE.build(spec, best(spec, arch, sm_count), GPU(arch))


def decode(m: int, n: int, k: int, dtype: DType, majors: str) -> GemmSpec:
    return product(m, n, k, dtype, OUTS.get(dtype), majors)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("m", [1, 5, 16])
@pytest.mark.parametrize("majors", ["KK", "KM"])
def test_schedules_that_are_chosen_do_not_spill(arch: str, dtype: DType, m: int, majors: str):
    """And as many CTAs have room on an SM as the plan says."""
    spec = decode(m, 4096, 4096, dtype, majors)
    schedule = best(spec, arch)
    kernel = TABLE.build(spec, schedule, GPU(arch))
    registers = unspilt(kernel, arch)
    ctas = GemvPlan.of(spec, schedule).ctas_an_sm
    assert ctas * -(-registers // 8) * 8 * kernel.threads <= 65536
    shared = assemble(kernel.ptx, arch).kernels[kernel.name].shared_bytes
    assert max(shared, kernel.dynamic_smem) <= SMEM_BYTES[arch]


def loop_lines(kernel: GemmKernel) -> range:
    """Of the loop over K, in the text."""
    lines = kernel.ptx.splitlines()
    start = next(i for i, line in enumerate(lines) if "// the sum" in line)
    end = next(i for i, line in enumerate(lines) if i > start and line.strip().startswith("$endloop"))
    return range(start + 1, end + 2)


def weight_sectors(stats: Stats) -> tuple[int, int]:
    """Requests and sectors of loads of weights."""
    sites = [site for site in stats.sites if WEIGHTS in site.opcode]
    return sum(site.requests for site in sites), sum(site.sectors for site in sites)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("m", [1, 5, 16])
@pytest.mark.parametrize("majors", ["KK", "KM"])
def test_weights_are_read_once_and_activations_without_conflicts(dtype: DType, m: int, majors: str):
    """16 sectors a request, which is 16 bytes a lane of whole sectors, and not a byte more than there is."""
    spec = decode(m, 256, 2048, dtype, majors)
    kernel = made(spec, "sm_90a", sm_count=8)
    _, report = launched(kernel, spec, arguments(spec), "sm_90a")
    assert report.findings == []
    inside = loop_lines(kernel)
    assert any(site.line in inside and "ld.shared" in site.opcode for site in report.stats.sites)
    assert {line for line in report.stats.bank_conflicts if line in inside} == set()
    requests, sectors = weight_sectors(report.stats)
    assert sectors == 16 * requests
    assert 32 * sectors == spec.n * spec.k * dtype.itemsize


@pytest.mark.parametrize(("n", "k"), [(1000, 264), (100, 2000)])
def test_edges_are_not_read_beyond(n: int, k: int):
    """Bytes asked for by threads are those of the weights, at edges of tiles and iterations as well."""
    for majors in ("KK", "KM"):
        spec = decode(4, n, k, BF16, majors)
        _, report = launched(made(spec, "sm_80"), spec, arguments(spec), "sm_80")
        sites = [site for site in report.stats.sites if WEIGHTS in site.opcode]
        assert sum(site.threads * width(site.opcode) for site in sites) == 2 * n * k


def width(opcode: str) -> int:
    """Bytes a thread loads."""
    found = re.search(r"(?:\.v(\d))?\.[bu](\d+)$", opcode)
    assert found is not None
    return int(found.group(1) or 1) * int(found.group(2)) // 8


@pytest.mark.parametrize(("dtype", "m", "majors", "most"), [
    (BF16, 1, "KK", 25), (BF16, 4, "KK", 6), (BF16, 16, "KK", 8),
    (BF16, 4, "KM", 9), (F32, 1, "KK", 8), (E4M3, 4, "KK", 23)])
def test_instructions_of_the_loop(dtype: DType, m: int, majors: str, most: int):
    """PTX instructions a request of 512 bytes. An SM takes 14 bytes a cycle from memory and issues 4
    instructions: up to 146 would keep up."""
    kernel = made(decode(m, 4096, 4096, dtype, majors), "sm_90a")
    inside = [line for number, line in enumerate(kernel.ptx.splitlines(), 1) if number in loop_lines(kernel)]
    code = [line for line in inside if line.strip().endswith(";")]
    assert len(code) <= most * sum(WEIGHTS in line for line in code)
