"""What every default schedule must keep to, on every architecture: registers, shared memory, no spill, no
remark of ptxas that it changed the kernel, no bank conflict and full sectors in the loop, only tensor cores
doing the work; and loops no longer than Triton's.

Schedules come from the table of defaults, so that a new template or tile is held to this at once. A tile is
paired with one dtype and one pair of majors, in turns; the whole product of tiles, dtypes and majors is
marked slow. What the loop costs is the difference of two launches, the second with two stages more of K.
"""
from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from itertools import product as pairs
from zlib import crc32

import pytest
import torch
from tinygrad.dtype import DType, dtypes

from bench.timing import sass_gemm
from tests.support.tile.gemm_case import TORCH, launched, product
from tinygrad_nv.ptx.assemble import Resources, assemble
from tinygrad_nv.ptx.emulator.report import Stats
from tinygrad_nv.ptx.sass import TENSOR, disassemble, functions
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.analytic import starts
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Gemv, Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

REGISTERS = 65536  # of an SM; a CTA's are taken eight to a thread
DTYPES = (dtypes.bfloat16, dtypes.float16, dtypes.int8, dtypes.fp8e4m3, dtypes.fp8e5m2, dtypes.float32,
          dtypes.uint8)
MAJORS = ("KK", "KM", "MK", "MM")
WORKERS = {"mma": {"HMMA", "IMMA", "QMMA"}, "wgmma": {"HGMMA", "QGMMA", "IGMMA"},
           "gemv": {"HMMA", "IMMA", "QMMA"}}
OUT = {dtypes.fp8e4m3: dtypes.bfloat16, dtypes.fp8e5m2: dtypes.bfloat16}


@dataclass(frozen=True)
class Case:
    """A schedule with a product of one tile for each of its CTAs."""
    arch: str
    schedule: GemmSchedule
    dtype: DType
    majors: str

    def __str__(self) -> str:
        words = re.sub(r"[ ,]+", "-", str(self.schedule))
        return f"{self.arch}-{words}-{short(self.dtype)}-{self.majors}"

    def spec(self, more: int = 0) -> GemmSpec:
        """K is `more` stages longer than two rounds past the ring, for each CTA that shares it."""
        s = self.schedule
        tile_count = 2 if s.stream else s.turns
        if isinstance(s, Gemv):
            return product(4, max(s.block_n, 64), s.block_k * 8 * s.splits * (1 + more), self.dtype,
                           OUT.get(self.dtype), self.majors)
        tile, cluster = s.tile(product(1, 1, 1)), s.cluster_shape
        m, n = tile.rows * cluster[0] * tile_count, tile.columns * cluster[1]
        if s.swap: m, n = n, m
        shares = 2 if s.stream else s.splits
        return product(m, n, s.block_k * shares * (s.depth + 2 + more), self.dtype, OUT.get(self.dtype),
                       self.majors)

    def kernel(self, more: int = 0) -> GemmKernel:
        """On one multiprocessor, so that CTAs that stay have all tiles; stream-K on three."""
        sm_count = 3 if self.schedule.stream else 1 if isinstance(self.schedule, Wgmma) else 132
        return TABLE.build(self.spec(more), self.schedule, GPU(self.arch, sm_count))

    @property
    def legal(self) -> bool: return not TABLE.problems(self.spec(), self.schedule, GPU(self.arch))

    @property
    def counted_elsewhere(self) -> bool:
        """Whether an older architecture has the same kernel but for its target, and so the same counters."""
        older = list(SMEM_BYTES)[:list(SMEM_BYTES).index(self.arch)]
        return any(replace(self, arch=arch).legal for arch in older)


def scheduled(arch: str) -> list[tuple[GemmSchedule, int]]:
    """Default tiles of every size of element, with the size; of each template's first also the variants."""
    made, seen = [], set()
    for size in (1, 2, 4):
        kind = next(dtype for dtype in DTYPES if dtype.itemsize == size)
        few = [s for s in starts(product(4, 4096, 4096, kind), GPU(arch)) if isinstance(s, Gemv)]
        for schedule in starts(product(4096, 4096, 4096, kind), GPU(arch)):
            made.append((schedule, size))
            if (schedule.template, size) in seen or size != 2: continue
            seen.add((schedule.template, size))
            tile = schedule.tile(product(1, 1, 1))
            roomy = product(8 * tile.rows, 8 * tile.columns, 64 * schedule.block_k)
            made += [(variant, size) for variant in variants(schedule, roomy)]
        made += [(schedule, size) for schedule in few[::9]]
    return made


def variants(schedule: GemmSchedule, spec: GemmSpec) -> list[GemmSchedule]:
    """Each cluster once, the first split, stream-K."""
    found = [v for v in schedule.variants(spec, 132) if v != schedule and not v.splits > 2]
    if isinstance(schedule, Wgmma): found.append(schedule.cluster(2, 2))
    return list(dict.fromkeys(found))


@functools.cache
def everything() -> list[Case]:
    """All tiles with all dtypes and majors. gemv's four rows, side by side, are less than a sector: K-major
    only."""
    return [case for arch in SMEM_BYTES for (s, size), dtype, majors in pairs(scheduled(arch), DTYPES, MAJORS)
            if dtype.itemsize == size and not (isinstance(s, Gemv) and majors[0] == "M")
            and (case := Case(arch, s, dtype, majors)).legal]


@functools.cache
def turns() -> list[Case]:
    """Every tile once, with the dtype and majors that had the fewest turns; of what an older architecture has
    but for the target, a third."""
    counts: dict[tuple[str, str, DType, str], int] = {}
    chosen: dict[tuple[str, GemmSchedule], Case] = {}
    by_tile: dict[tuple[str, GemmSchedule], list[Case]] = {}
    for case in everything():
        if case.counted_elsewhere and hash_of(case.schedule) % 3: continue
        by_tile.setdefault((case.arch, case.schedule), []).append(case)
    for tile, mine in by_tile.items():
        def had(case: Case) -> int:
            return counts.get((case.arch, case.schedule.template, case.dtype, case.majors), 0)
        case = chosen[tile] = min(mine, key=had)
        counts[case.arch, case.schedule.template, case.dtype, case.majors] = had(case) + 1
    return list(chosen.values())


def hash_of(schedule: GemmSchedule) -> int:
    """A number that is the same in every process."""
    return crc32(str(schedule).encode())


def gated(case: Case) -> None:
    """Builds, assembles and launches a case, and holds it to everything. pytest prints it where it fails."""
    made = case.kernel()
    assembly = assemble(made.ptx, case.arch)
    resources_fit(assembly.kernels[made.name], made, case.arch)
    working = {each.opcode for each in functions(disassemble(assembly.cubin))[made.name]} & set(TENSOR)
    assert working <= WORKERS[case.schedule.template], working
    if case.counted_elsewhere: return
    few, many = counted(made, case.spec(), case.arch), counted(case.kernel(2), case.spec(2), case.arch)
    lost = sum(many.bank_conflicts.values()) - sum(few.bank_conflicts.values())
    assert lost == 0, f"{lost} passes lost in two stages: {many.bank_conflicts}"
    sectors_are_full(few, many)
    # rows of padding are multiplied too
    if working: assert many.tensor_flops - few.tensor_flops >= case.spec(2).flops - case.spec().flops


def resources_fit(used: Resources, made: GemmKernel, arch: str) -> None:
    """No spill; registers and shared memory as the launch needs them."""
    assert (used.spill_store_bytes, used.spill_load_bytes, used.stack_bytes) == (0, 0, 0)
    assert -(-used.registers // 8) * 8 * made.threads <= REGISTERS
    assert used.shared_bytes + made.dynamic_smem <= SMEM_BYTES[arch]
    if not (changed := [int(number) for number in re.findall(r"setmaxnreg\.\w+\S* (\d+)", made.ptx)]): return
    consumers = made.threads // 128 - 1
    assert min(changed) * 128 + max(changed) * 128 * consumers <= REGISTERS


def counted(made: GemmKernel, spec: GemmSpec, arch: str) -> Stats:
    """Counters of a launch without findings, of zeros."""
    given = {name: torch.zeros(size, dtype=TORCH[dtype]) for name, (dtype, size) in sizes(spec).items()}
    _, report = launched(made, spec, given, arch)
    assert report.findings == [], "\n".join(map(str, report.findings))
    return report.stats


def sizes(spec: GemmSpec) -> dict[str, tuple[DType, int]]:
    """Elements of each parameter of a dense product."""
    return {"out": (spec.out.dtype, spec.m * spec.n), "a": (spec.a.dtype, spec.m * spec.k),
            "b": (spec.b.dtype, spec.n * spec.k)}


def sectors_are_full(few: Stats, many: Stats) -> None:
    """Bytes asked for in the loop are the sectors that were touched; multicast asks once for several."""
    sectors, asked = (after - before for before, after in zip(traffic(few), traffic(many), strict=True))
    assert 0 < sectors <= asked, f"{sectors} bytes of sectors for {asked} bytes"


def traffic(stats: Stats) -> tuple[int, int]:
    """Bytes of sectors, and bytes asked for, without those of flags: how often one is read until it is up has
    nothing to do with the loop."""
    flags = [site for site in stats.sites if site.opcode.startswith("ld.acquire")]
    return (stats.l2_bytes - 32 * sum(site.sectors for site in flags),
            stats.asynchronous_bytes + stats.global_read_bytes - 4 * sum(site.threads for site in flags))


# cases are found when the tests run, which takes a second: a test has every so manyth
@pytest.mark.sampled(1)
@pytest.mark.parametrize("part", range(57))
def test_default_schedules_keep_to_their_resources(part: int):
    assert turns()[part::57]
    for case in turns()[part::57]: gated(case)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(63))
def test_default_schedules_keep_to_their_resources_with_every_dtype_and_major(part: int):
    for case in everything()[part::63]: gated(case)


def test_every_template_has_defaults_under_test():
    """A template that is there but that no default schedule reaches would be held to nothing."""
    there = {template.name for template in TABLE.templates("gpu", dense(64, 64, 64))}
    assert {case.schedule.template for case in turns()} == there
    assert {case.arch for case in turns()} == set(SMEM_BYTES)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("majors", ["KK", "KM"])
def test_what_is_chosen_for_a_large_product_is_a_default_tile(arch: str, majors: str):
    """So that the gates above are about what runs."""
    spec = product(4096, 4096, 4096, dtypes.bfloat16, majors=majors)
    schedule = choose(spec, GPU(arch))
    assert schedule is not None
    assert schedule.depth <= 8
    assert schedule.key in [tile.key for tile in starts(spec, GPU(arch))]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("b_major", ["K", "MN"])
@pytest.mark.parametrize(("arch", "warps"), [("sm_80", 4), ("sm_80", 8), ("sm_90a", 0)])
def test_loops_are_no_longer_than_those_of_triton(arch: str, warps: int, b_major: str):
    """Instructions around the loop for the same tensor-core work, and all of the loop's: our best tile of
    128x128x32 (sm_80) and 128x256x64 (sm_90a) beside Triton's best, compiled here."""
    peers = [peer for peer in sass_gemm.peers(arch, b_major) if warps in (0, peer.warps) and peer.stages == 3]
    schedules = [s for s in sass_gemm.schedules(arch) if s.depth == 3 and warps in (0, s.threads // 32)]
    found = [*(sass_gemm.of_triton(peer, arch) for peer in peers),
             *(sass_gemm.of_ours(schedule, arch, b_major) for schedule in schedules)]
    ours, theirs = sass_gemm.best(found, ours=True), sass_gemm.best(found, ours=False)
    assert ours is not None
    assert theirs is not None
    assert ours.each <= theirs.each, sass_gemm.report(found)
    assert ours.instructions / ours.units <= theirs.instructions / theirs.units, sass_gemm.report(found)
    assert ours.spills == 0
