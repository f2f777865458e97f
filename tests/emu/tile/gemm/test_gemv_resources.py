"""What gemv kernels take: registers, shared memory, bytes of weights, passes of shared memory; and what is
refused."""
from __future__ import annotations

import re

import pytest
from gemm_case import arguments, launched, operand, product, result
from gemv_case import GEMV, best
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.ptx.emulator.report import Stats
from tinygrad_nv.tile.expression import Sum
from tinygrad_nv.tile.gemm.gemv.plan import GemvPlan
from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

WEIGHTS = ".L1::no_allocate"
KINDS = [dtypes.bfloat16, dtypes.float32, dtypes.fp8e4m3, dtypes.int8]


def made(spec: GemmSpec, arch: str, sm_count: int = 0) -> GemmKernel:
    """The kernel of the schedule that the cost model likes best."""
    return TABLE.build(spec, best(spec, arch, sm_count), GPU(arch))


def decode(m: int, n: int, k: int, dtype: DType, majors: str) -> GemmSpec:
    out = dtypes.float32 if dtype in (dtypes.fp8e4m3, dtypes.fp8e5m2) else None
    return product(m, n, k, dtype, out, majors)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("m", [1, 5, 16])
@pytest.mark.parametrize("majors", ["KK", "KM"])
def test_schedules_that_are_chosen_do_not_spill(arch: str, dtype: DType, m: int, majors: str):
    """And as many CTAs have room on an SM as the plan says."""
    spec = decode(m, 4096, 4096, dtype, majors)
    schedule = best(spec, arch)
    kernel = TABLE.build(spec, schedule, GPU(arch))
    resources = assemble(kernel.ptx, arch).kernels[kernel.name]
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)
    ctas = GemvPlan.of(spec, schedule).ctas_an_sm
    assert ctas * -(-resources.registers // 8) * 8 * kernel.threads <= 65536
    assert max(resources.shared_bytes, kernel.dynamic_smem) <= SMEM_BYTES[arch]


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
        spec = decode(4, n, k, dtypes.bfloat16, majors)
        _, report = launched(made(spec, "sm_80"), spec, arguments(spec), "sm_80")
        sites = [site for site in report.stats.sites if WEIGHTS in site.opcode]
        assert sum(site.threads * width(site.opcode) for site in sites) == 2 * n * k


def width(opcode: str) -> int:
    """Bytes a thread loads."""
    found = re.search(r"(?:\.v(\d))?\.[bu](\d+)$", opcode)
    assert found is not None
    return int(found.group(1) or 1) * int(found.group(2)) // 8


@pytest.mark.parametrize(("dtype", "m", "majors", "most"), [
    (dtypes.bfloat16, 1, "KK", 25), (dtypes.bfloat16, 4, "KK", 6), (dtypes.bfloat16, 16, "KK", 8),
    (dtypes.bfloat16, 4, "KM", 9), (dtypes.float32, 1, "KK", 8), (dtypes.fp8e4m3, 4, "KK", 23)])
def test_instructions_of_the_loop(dtype: DType, m: int, majors: str, most: int):
    """PTX instructions a request of 512 bytes. An SM takes 14 bytes a cycle from memory and issues 4
    instructions: up to 146 would keep up."""
    kernel = made(decode(m, 4096, 4096, dtype, majors), "sm_90a")
    inside = [line for number, line in enumerate(kernel.ptx.splitlines(), 1) if number in loop_lines(kernel)]
    code = [line for line in inside if line.strip().endswith(";")]
    assert len(code) <= most * sum(WEIGHTS in line for line in code)


@pytest.mark.parametrize(("schedule", "m", "words"), [
    (GEMV.columns(32).k(512), 17, ["m=17 is above 16"]),
    (GEMV.columns(40).k(128), 4, ["block_n=40 is not a multiple of the 16 columns"]),
    (GEMV.columns(32).k(100), 4, ["block_k=100 is not a multiple of the 32"]),
    (GEMV.columns(64).k(1024), 4, ["32 steps × 2 chunks × 1 parts × 4 = 256 registers"]),
    (GEMV.columns(4096).k(32), 16, ["512 columns of a warp × 16 rows × 1 parts = 256 sums"]),
    (GEMV.columns(64).k(128), 16, ["16 rows × 16384 of K × 2 B = 525312 B of shared", "166912"]),
    (GEMV.columns(1024).k(64).warps(32), 16,
     ["16 sums + 32 of loads + 8 of activations + 28 = 84 registers, 1024 threads have 64 each"]),
    (GEMV.columns(64).k(256).split(65), 1, ["65 splits of 16384 / 256 = 64 iterations"]),
    (GEMV.columns(64).k(256).warps(33), 1, ["33 warps are 1056 threads"]),
])
def test_impossible_schedules_are_refused_with_the_arithmetic(schedule: GemmSchedule, m: int,
                                                              words: list[str]):
    with pytest.raises(ScheduleError) as error: TABLE.build(product(m, 4096, 16384), schedule, GPU("sm_80"))
    assert [word for word in words if word not in str(error.value)] == []


def test_a_swap_has_its_conditions():
    swap = GEMV.swapped()
    plain = TABLE.problems(product(50, 4, 64), GEMV, GPU("sm_80"))
    assert plain == ["m=50 is above 16; n is not: swapped()"]
    a100 = GPU("sm_80")
    assert TABLE.problems(product(50, 40, 64), swap, a100) == ["n=40 is above 16"]
    symbolic = product(50, 4, 64, symbolic=True)
    assert TABLE.problems(symbolic, swap, a100) == ["the transposed product would have symbolic columns"]
    gated = GemmSpec(50, 4, 64, operand(dtypes.bfloat16, 50, 64), operand(dtypes.bfloat16, 8, 64),
                     result(dtypes.bfloat16, 50, 4), parts=2, part=256,
                     epilogue=(Sum() + Sum(part=1)).cast(dtypes.bfloat16))
    assert TABLE.problems(gated, swap, a100) == ["the transposed product of 2 parts"]
