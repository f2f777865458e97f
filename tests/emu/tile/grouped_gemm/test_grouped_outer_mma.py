"""grouped_outer_mma on the emulator: integers to the bit for many routings, random numbers near float64's,
orders of copies; and what ptxas makes of it."""
from __future__ import annotations

from dataclasses import replace

import pytest
from tinygrad.dtype import dtypes

from tests.support.cpu.cpu_outer_case import given
from tests.support.tile.grouped_case import routings
from tests.support.tile.outer_case import built, exact, launched, near
from tinygrad_nv.ptx.assemble import assemble, find_program
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.ptx.sass import disassemble, functions, main_loop
from tinygrad_nv.tile.grouped_gemm.cost import cheapest
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedOuterMma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, F16, S = dtypes.bfloat16, dtypes.float16, GroupedOuterMma()
GPUS = AMPERE, _, HOPPER = GPU("sm_80", 4), GPU("sm_89", 4), GPU("sm_90a", 4)
GROUPS, ROWS = 5, 150
# all rows are three stages more than the ring, or more; columns end within a tile
PLAIN = GroupedOuterSpec(GROUPS, ROWS, 72, 40, BF16)
X_GATHERED = replace(PLAIN, x_rows=50, gather_x=3)
Y_GATHERED = replace(PLAIN, gather_y=1, dtype=F16)
BOTH = replace(PLAIN, y_rows=150, gather_y=1, x_rows=75, gather_x=2)
ODD = replace(X_GATHERED, n=37, k=61)                       # elements one by one
COLUMN = replace(BOTH, k=1)                                 # as gradients of biases are
SPECS = {"plain": PLAIN, "x gathered": X_GATHERED, "y gathered": Y_GATHERED, "both": BOTH, "odd": ODD,
         "a column": COLUMN}
SCHEDULES = {"64x64": S.block(64, 64).k(16).warps(2, 2).stages(3),
             "128x64": S.block(128, 64).k(32).warps(2, 2).stages(2),
             "16x16": S.block(16, 16).k(16).warps(1, 1).stages(6)}
COUNTS, BEFORE = [70, 0, 17, 60, 1], 1
QUICK = {"64x64": ("ragged 7", "none"), "128x64": ("every other", "all to a middle one")}
LARGE = {"gate and up": GroupedOuterSpec(8, 16384, 28672, 4096, BF16, x_rows=8192, gather_x=2),
         "down": GroupedOuterSpec(8, 16384, 4096, 14336, F16, gather_y=1),
         "rows in order": GroupedOuterSpec(128, 65536, 1536, 2048, BF16)}


@pytest.mark.parametrize("name", QUICK)
def test_integers_are_exact(name: str):
    for spec in (X_GATHERED, Y_GATHERED):
        for routing in QUICK[name]:
            exact(built(spec, SCHEDULES[name], AMPERE), spec, *routings(GROUPS, ROWS)[routing])


@pytest.mark.slow
@pytest.mark.parametrize("routing", routings(GROUPS, ROWS))
def test_routings(routing: str):
    assert len(routings(GROUPS, ROWS)) >= 40
    for schedule in SCHEDULES.values():
        for spec in (PLAIN, X_GATHERED, Y_GATHERED, BOTH):
            exact(built(spec, schedule, AMPERE), spec, *routings(GROUPS, ROWS)[routing])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SPECS)
def test_numbers(name: str, schedule: str, gpu: GPU):
    near(built(SPECS[name], SCHEDULES[schedule], gpu), SPECS[name], COUNTS, BEFORE, gpu.arch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [1, 2, 3, LATE])
@pytest.mark.parametrize("name", SPECS)
def test_orders_of_copies(name: str, seed: int | str):
    for schedule in SCHEDULES.values():
        exact(built(SPECS[name], schedule, AMPERE), SPECS[name], COUNTS, BEFORE, seed=seed)


def test_a_ring_longer_than_all_rows():
    """Fewer rows in all than two stages have: the ring is cut to what there may be."""
    spec = GroupedOuterSpec(3, 20, 24, 24, BF16, x_rows=10, gather_x=2)
    for counts in ([20, 0, 0], [1, 18, 1], [0, 0, 0]):
        exact(built(spec, S.block(32, 32).k(32).warps(1, 1).stages(4), AMPERE), spec, counts)


def test_no_bank_conflicts():
    for spec in (X_GATHERED, Y_GATHERED):
        for schedule in (SCHEDULES["64x64"], SCHEDULES["128x64"]):
            held = given(spec, COUNTS, BEFORE, True)
            report = launched(built(spec, schedule, AMPERE), spec, held, "sm_80")[1]
            assert sum(report.stats.bank_conflicts.values()) == 0


@pytest.mark.skipif(find_program("ptxas") is None, reason="needs ptxas")
@pytest.mark.parametrize(("name", "arch", "largest"), [
    pytest.param(name, arch, largest, id=f"{name}, {arch}{', largest tiles' * largest}",
                 marks=[pytest.mark.slow] * ((name, arch, largest) != ("gate and up", "sm_90a", False)))
    for name in LARGE for arch in ("sm_80", "sm_90a") for largest in (False, True)])
def test_the_loop(name: str, arch: str, largest: bool):
    """Of the default, and of the largest tiles: it multiplies, reads fragments, copies, and with an order
    reads the slots of one stage. Nothing else goes to memory, and nothing spills."""
    spec, gpu = LARGE[name], GPU(arch)
    template = TABLE.find_template("gpu", "grouped_outer_mma")
    chosen = cheapest((template,), spec, gpu)
    assert isinstance(chosen, GroupedOuterMma)
    legal = [s for s in template.candidates(spec, gpu)[:3] if not template.problems(spec, s, gpu)]
    for schedule in legal if largest else [chosen]:
        found = assemble(TABLE.build(spec, schedule, gpu).ptx, arch)
        used = found.kernels["grouped_outer_mma"]
        assert (used.spill_store_bytes, used.spill_load_bytes) == (0, 0), str(schedule)
        loop = main_loop(functions(disassemble(found.cubin))["grouped_outer_mma"])
        assert loop is not None
        steps, warp_m, warp_n = schedule.block_k // 16, schedule.block_m // schedule.warps_m, \
            schedule.block_n // schedule.warps_n
        assert loop.counts["HMMA"] == loop.tensor == steps * warp_m // 16 * warp_n // 8
        assert loop.counts["LDSM"] == steps * (warp_m + warp_n) // 16
        assert loop.counts["LDGSTS"] == schedule.stage_bytes(2) // 16 // schedule.threads
        assert loop.counts["LDG"] == (schedule.block_k * 8 // schedule.threads or 1) * spec.has_order
        assert not {"STG", "LDL", "STL", "STS"} & set(loop.counts)


def test_it_waits_before_it_reads():
    """For the kernel before, on Hopper; the one after may begin when the sums are done."""
    made = built(X_GATHERED, SCHEDULES["64x64"], HOPPER)
    wait, reads = made.ptx.index("griddepcontrol.wait"), ("ld.global", "cp.async.", "prefetch")
    assert made.pdl
    assert wait < min(made.ptx.index(each) for each in reads if each in made.ptx)
    assert made.ptx.index("griddepcontrol.launch_dependents") > made.ptx.rindex("mma.sync")
    assert "griddepcontrol" not in built(X_GATHERED, SCHEDULES["64x64"], AMPERE).ptx


REFUSED = {
    "operands of float32": (replace(PLAIN, dtype=dtypes.float32), S.k(16)),
    "splits, or the transposed matmul": (PLAIN, S.split(2)),
    "block_m=24 is not a multiple": (PLAIN, S.block(24, 64))}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str):
    spec, schedule = REFUSED[words]
    assert words in "; ".join(TABLE.problems(spec, schedule, AMPERE))


def test_what_is_left_to_the_reference_says_why():
    spec = replace(PLAIN, dtype=dtypes.float32)
    assert TABLE.choose(spec, HOPPER) is None
    assert "operands of float32" in TABLE.why_not(spec, HOPPER)
    assert TABLE.read("gpu", (chosen := TABLE.choose(PLAIN, HOPPER)).to_json()) == chosen
