"""quant_grouped_wgmma on the emulator: whole numbers to the bit for many routings, random numbers near
float64's, types, orders of copies."""
from __future__ import annotations

from dataclasses import replace

import pytest
from grouped_case import routings
from quant_grouped_case import BF16, F16, ROUNDED, TYPES, each_activation, exact, near, reported, spec_of
from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.emulator.emulator import LATE
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedWgmma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

S = QuantGroupedWgmma().warps(12)
HOPPER = GPU("sm_90a", 4)
GROUPS, ROWS, STAGES = 5, 150, 6
RAGGED = [70, 0, 17, 60, 1]
# K has two stages more than the deepest ring; columns end within a tile of 16, and within one of a CTA
PLAIN = GroupedGemmSpec(GROUPS, ROWS, 152, 64 * STAGES, BF16)
GATHERED = replace(PLAIN, sources=75, gather=2, biased=True, k=64 * (STAGES - 1) + 40)
SCATTERED = replace(PLAIN, scatter=True, weighted=True, biased=True, dtype=F16)
GATED = replace(GATHERED, n=304, activation="silu")         # each half 152 columns
SCHEDULES = {"8 rows": S.block(128, 8).stages(4), "24 rows": S.block(128, 24).stages(3),
             "64 rows": S.block(256, 64).stages(4), "128 rows": S.block(256, 128).stages(2),
             "192 rows": S.block(128, 192).stages(3), "one consumer": S.block(64, 32).warps(8).stages(4),
             "ping-pong": S.block(128, 16).pingpong().stages(4)}


@pytest.mark.parametrize(("name", "routing"), [("64 rows", "ragged 7"), ("8 rows", "every other")])
def test_whole_numbers_are_exact(name: str, routing: str):
    for kind, one in (("MXFP4", GATHERED), ("awq g32", SCATTERED)):
        exact(spec_of(kind, one), SCHEDULES[name], HOPPER, *routings(GROUPS, ROWS)[routing])


@pytest.mark.slow
@pytest.mark.parametrize("routing", routings(GROUPS, ROWS))
def test_routings(routing: str):
    assert len(routings(GROUPS, ROWS)) >= 40
    for schedule in SCHEDULES.values():
        for kind, one in (("MXFP4", GATHERED), ("awq g32", SCATTERED), ("int8 channel", PLAIN)):
            exact(spec_of(kind, one), schedule, HOPPER, *routings(GROUPS, ROWS)[routing])


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_types(kind: str):
    """Of both dtypes."""
    for dtype in (BF16, F16):
        one = replace(PLAIN, dtype=dtype, k=512 if kind == "Q4_K" else PLAIN.k)
        for name in ("24 rows", "one consumer"):
            near(spec_of(kind, one), SCHEDULES[name], HOPPER, RAGGED, 2)
            if kind not in ROUNDED: exact(spec_of(kind, one), SCHEDULES[name], HOPPER, RAGGED, 2)


@each_activation
def test_activations(activation: str):
    one = replace(GATED, activation=activation)
    near(spec_of("MXFP4", one), SCHEDULES["64 rows"], HOPPER, RAGGED, 2)
