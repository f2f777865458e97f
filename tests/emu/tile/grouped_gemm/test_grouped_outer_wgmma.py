"""grouped_outer_wgmma on the emulator: integers to the bit for many routings, random numbers near float64's,
orders of copies; and what ptxas makes of it."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tinygrad.dtype import dtypes

from tests.support.cpu.cpu_outer_case import given
from tests.support.tile.grouped_case import routings
from tests.support.tile.outer_case import built, exact, launched, near
from tinygrad_nv.ptx.assemble import assemble, find_program
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.ptx.sass import disassemble, functions, main_loop
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedOuterMma, GroupedOuterWgmma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BF16, F16, S = dtypes.bfloat16, dtypes.float16, GroupedOuterWgmma()
HOPPER = GPU("sm_90a", 4)
GROUPS, ROWS = 5, 150
# columns end within a tile; the rows of a group are more stages than the ring, or fewer
PLAIN = GroupedOuterSpec(GROUPS, ROWS, 136, 72, BF16)
X_GATHERED = replace(PLAIN, x_rows=50, gather_x=3)
Y_GATHERED = replace(PLAIN, gather_y=1, dtype=F16)
SPECS = {"plain": PLAIN, "x gathered": X_GATHERED, "y gathered": Y_GATHERED}
SCHEDULES = {"128x64": S.block(128, 64).k(16).stages(3), "64x128": S.block(64, 128).k(32).warps(8).stages(2),
             "128x128": S.block(128, 128).stages(2)}
COUNTS, BEFORE = [70, 0, 17, 60, 1], 1
QUICK = {"128x64": ("ragged 7", "none"), "64x128": ("every other",)}
LARGE = {"gate and up": GroupedOuterSpec(8, 16384, 28672, 4096, BF16, x_rows=8192, gather_x=2),
         "down": GroupedOuterSpec(8, 16384, 4096, 14336, F16, gather_y=1),
         "rows in order": GroupedOuterSpec(128, 65536, 1536, 2048, BF16)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", QUICK)
def test_integers_are_exact(name: str, spec: str):
    for routing in QUICK[name]:
        exact(built(SPECS[spec], SCHEDULES[name], HOPPER), SPECS[spec], *routings(GROUPS, ROWS)[routing],
              arch="sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("routing", routings(GROUPS, ROWS))
def test_routings(routing: str):
    assert len(routings(GROUPS, ROWS)) >= 40
    for schedule in SCHEDULES.values():
        for spec in SPECS.values():
            exact(built(spec, schedule, HOPPER), spec, *routings(GROUPS, ROWS)[routing], arch="sm_90a")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SPECS)
def test_numbers(name: str, schedule: str):
    near(built(SPECS[name], SCHEDULES[schedule], HOPPER), SPECS[name], COUNTS, BEFORE, "sm_90a")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [1, 2, 3, LATE])
@pytest.mark.parametrize("name", SPECS)
def test_orders_of_copies(name: str, seed: int | str):
    spec = SPECS[name]
    for schedule in SCHEDULES.values():
        exact(built(spec, schedule, HOPPER), spec, COUNTS, BEFORE, "sm_90a", seed)


@pytest.mark.parametrize("name", ["plain", pytest.param("y gathered", marks=pytest.mark.slow)])
def test_rows_of_other_groups_are_not_read(name: str):
    """Every row that is NaN spoils its own group, and no other."""
    spec, made = SPECS[name], built(SPECS[name], SCHEDULES["128x64"], HOPPER)
    held = given(spec, COUNTS, BEFORE, True)
    clean = launched(made, spec, held, "sm_90a")[0]
    first = BEFORE + COUNTS[0]
    rows = held["order"][first:first + COUNTS[2]].long() if spec.gather_y else slice(first, first + COUNTS[2])
    held["y"][rows] = torch.nan
    spoilt = launched(made, spec, held, "sm_90a")[0]
    others = [group for group in range(GROUPS) if group != 2]
    assert torch.equal(spoilt[others], clean[others])
    assert spoilt[2].isnan().all()


@pytest.mark.skipif(find_program("ptxas") is None, reason="needs ptxas")
@pytest.mark.parametrize(("name", "tile"), [
    pytest.param(name, tile, marks=[pytest.mark.slow] * ((name, tile) != ("gate and up", (128, 256))))
    for name in LARGE for tile in ((128, 256), (256, 128), (128, 128))])
def test_the_loop(name: str, tile: tuple[int, int]):
    """It multiplies, waits for nothing but stages and the wgmmas of the one before, and nothing spills."""
    spec, schedule = LARGE[name], S.block(*tile).stages(4)
    found = assemble(TABLE.build(spec, schedule, GPU("sm_90a")).ptx, "sm_90a")
    used = found.kernels["grouped_outer_wgmma"]
    assert (used.spill_store_bytes, used.spill_load_bytes) == (0, 0), str(schedule)
    loop = main_loop(functions(disassemble(found.cubin))["grouped_outer_wgmma"])
    assert loop is not None
    rows = schedule.block_m // schedule.consumers // 64
    assert loop.tensor == loop.counts["HGMMA"] == schedule.block_k // 16 * rows
    assert not {"LDG", "STG", "LDS", "STS", "LDL", "STL"} & set(loop.counts)


def test_it_waits_before_it_reads():
    """For the kernel before."""
    made = built(X_GATHERED, SCHEDULES["128x64"], HOPPER)
    reads = ("ld.global", "cp.async.")
    assert made.pdl
    assert made.ptx.index("griddepcontrol.wait") < min(made.ptx.index(each) for each in reads)


REFUSED = {
    "operands of float": (replace(PLAIN, dtype=dtypes.float32), S),
    "rows of x have 74 B": (replace(PLAIN, k=37), S),
    "y and x gathered": (replace(PLAIN, gather_y=1, x_rows=50, gather_x=3), S),
    "rows gathered beside 3 consumers": (X_GATHERED, S.block(192, 128).warps(16)),
    "a CTA has a tile": (PLAIN, S.pingpong()),
    "multiples of 64, and up to 64": (PLAIN, S.block(128, 96)),
    "of shared memory": (PLAIN, S.block(128, 256).stages(8))}


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str):
    spec, schedule = REFUSED[words]
    assert words in "; ".join(TABLE.problems(spec, schedule, HOPPER))
    assert "needs sm_90a" in "; ".join(TABLE.problems(spec, schedule, GPU("sm_80")))


def test_what_it_cannot_have_is_left_to_mma():
    both = replace(PLAIN, gather_y=1, x_rows=50, gather_x=3)
    assert isinstance(TABLE.choose(both, HOPPER), GroupedOuterMma)
    assert isinstance(TABLE.choose(LARGE["down"], HOPPER), GroupedOuterWgmma)
    assert TABLE.read("gpu", (chosen := TABLE.choose(LARGE["down"], HOPPER)).to_json()) == chosen
