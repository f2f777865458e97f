"""Persistent CTAs of the wgmma template of attention: the bits of CTAs with a tile each, in every order of
tiles; each tile once, the longest first, neighbours in L2 together. The softmax lies under the products,
in the SASS of default schedules that the tests of resources do not assemble."""
from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.tile.attention_case import arguments, attention, launched, near, run
from tests.support.tile.backward_case import backward
from tests.support.tile.flash_case import CAUSAL, F16, F32, WGMMA, W
from tests.support.tile.flash_fp8_case import attention8
from tests.support.tile.ragged_case import ragged
from tests.support.tile.resources_case import assert_overlapped, code_of, fitting
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.schedules import BackwardWgmma, FlashWgmma
from tinygrad_nv.tile.attention.spec import FULL, AttentionSpec, Band
from tinygrad_nv.tile.attention.templates import FAMILY as ATTENTION
from tinygrad_nv.tile.attention.wgmma import tile_scheduler as flash_wgmma_walk
from tinygrad_nv.tile.attention.wgmma.plan import FlashWgmmaPlan
from tinygrad_nv.tile.attention.wgmma.tile_scheduler import AttentionTileScheduler
from tinygrad_nv.tile.expression import Position, Sum
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

MANY = 10000  # multiprocessors: no CTA has more than one tile
NARROW = W.block(128, 16)
OVERLAID = NARROW.stages(8)  # with heads of 256 elements nothing else fits beside the ring
SCHEDULES = {"cooperative": NARROW, "ping-pong": NARROW.pingpong(), "3 stages": NARROW.stages(3).pingpong(),
             "1 consumer": W.block(64, 16).warps(8), "3 consumers": W.block(192, 16).warps(16).pingpong()}
BANDS = [FULL, CAUSAL, Band(-40, 0), Band(None, 20), Band(-10, None), Band(5, 60), Band(-70, -33),
         Band(None, -150)]


def same(spec: AttentionSpec, schedule: FlashWgmma, sm_count: int, seed: int = 0, **extents: int) -> None:
    """Asserts that persistent CTAs make the bits of others, which are near the exact ones."""
    given = arguments(spec, seed)
    alone, made = (TABLE.build(spec, schedule, GPU("sm_90a", count)) for count in (MANY, sm_count))
    assert made.grid == (sm_count, 1, 1)
    assert made.rows_of_cta == 0
    expected = run(alone, spec, given, "sm_90a", seed, **extents)
    near(spec, given, expected, **extents)
    for one, other in zip(run(made, spec, given, "sm_90a", seed, **extents), expected, strict=True):
        if one is not None and other is not None: assert torch.equal(one, other)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("band", "seed"), [*((band, seed) for band in BANDS[:3] for seed in range(4)),
                                            *((band, i % 4) for i, band in enumerate(BANDS[3:]))], ids=str)
def test_bands(band: Band, seed: int):
    """Eight tiles, some of which may see nothing; up to 11 blocks of 2 stages."""
    spec = attention(180, 170, 24, band=band, start=40, batch=1 + seed % 2, heads=2 - seed % 2, group=2,
                     lse=True)
    same(spec, NARROW.pingpong() if seed % 2 else NARROW, (5, 2, 7, 3)[seed], seed)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str):
    out = None if "stages" in name else F32
    spec = attention(200, 230, 40, band=CAUSAL, start=30, heads=2, d_v=64, out=out, lse=True)
    same(spec, SCHEDULES[name], 2, len(name) % 4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("band", "seed"), [*((CAUSAL, seed) for seed in range(4)), (Band(None, -100), 1)],
                         ids=str)
def test_results_where_the_queries_were(band: Band, seed: int):
    """The next queries come when the result has been read; tiles without blocks store zeros there."""
    spec = attention(200, 200, 256, band=band, heads=2, lse=True)
    assert FlashWgmmaPlan.of(spec, OVERLAID, 3).overlaid
    assert not FlashWgmmaPlan.of(spec, NARROW, 3).overlaid
    same(spec, OVERLAID.pingpong() if seed % 2 else OVERLAID, 1 + seed % 3, seed)


@pytest.mark.parametrize("s_q", [1, 128, 129, 300])
def test_rows_of_a_launch(s_q: int):
    """The grid is the same for all of them; some CTAs may have nothing to do."""
    spec = attention(300, 300, 32, band=CAUSAL, start=100, heads=2, group=2, order="brh",
                     symbolic=("s_q", "s_kv", "start"), lse=True)
    same(spec, NARROW, 5, s_q % 4, s_q=s_q, s_kv=300, start=min(100, 300 - s_q))


def test_columns_that_no_row_sees_are_cleared_in_every_tile():
    spec = attention(280, 500, 64, band=CAUSAL, start=100, heads=2, lse=True)
    given = arguments(spec)
    spoilt = {name: storage.clone() for name, storage in given.items()}
    for name in "kv": spoilt[name].view(2, 500, 64)[:, 380:] = torch.nan
    near(spec, given, run(TABLE.build(spec, WGMMA, GPU("sm_90a", 4)), spec, spoilt, "sm_90a"))


def test_copies_of_a_tile_come_under_the_end_of_the_one_before():
    """Every tile is copied once, however few CTAs there are."""
    spec = attention(384, 384, 64, band=CAUSAL, heads=2)
    found = {}
    for sm_count in (MANY, 4, 1):
        made = TABLE.build(spec, WGMMA, GPU("sm_90a", sm_count))
        _, report = launched(made, spec, arguments(spec), "sm_90a")
        assert report.findings == []
        assert report.stats.bank_conflicts == {}
        found[sm_count] = report.stats.asynchronous_bytes
    assert len(set(found.values())) == 1


# **** the order ****

def walked(spec: AttentionSpec, schedule: FlashWgmma, sm_count: int, rows: int) -> list[list[int]]:
    """By CTAs, the tiles they have: block of rows, and head, as numbers."""
    plan = FlashWgmmaPlan.of(spec, schedule, sm_count)
    k = Kernel("walk", arch="sm_90a", threads=32)
    out, s_q = k.pointer("out"), k.param("s_q", "u32")
    at = out + (k.ctaid.x * 2048).to("u64")
    with AttentionTileScheduler(k, plan, s_q if "s_q" in spec.symbolic else spec.s_q).tiles() as tile:
        _, heads, group = spec.batch
        head = (tile.batch[0] * heads + tile.batch[1]) * group + tile.batch[2]
        k.emit("st.global.u32", at.at(), tile.row // schedule.block_m * 1000 + head + 1)
        at += 4
    emu = Emulator("sm_90a")
    memory = emu.alloc(np.zeros(512 * sm_count, np.uint32))
    assert emu.launch(k.ptx(), plan.grid, 32, [memory, np.uint32(rows)]).findings == []
    lists = memory.numpy().view(np.uint32).reshape(sm_count, 512)
    return [[int(x) - 1 for x in row if x] for row in lists]


@pytest.mark.parametrize("symbolic", [(), ("s_q",)], ids=["fixed", "of a launch"])
@pytest.mark.parametrize("part", [30, 24, 3])
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-10, None)], ids=str)
def test_each_tile_once_and_the_longest_first(band: Band, part: int, symbolic: tuple[str, ...],
                                              monkeypatch: pytest.MonkeyPatch):
    """Parts of all ten key heads, of eight, of one: each is dealt in the order opposite to that before."""
    monkeypatch.setattr(flash_wgmma_walk, "part_of", lambda plan: part)
    spec = attention(900, 500, 64, band=band, heads=5, group=3, batch=2, symbolic=symbolic)
    rows, sm_count, heads = 700 if symbolic else 900, 7, 30
    blocks = range(-(-rows // 128))
    found = walked(spec, WGMMA, sm_count, rows)
    assert sorted(tile for tiles in found for tile in tiles) == \
        [1000 * block + head for block in blocks for head in range(heads)]
    expected: list[list[int]] = [[] for _ in range(sm_count)]
    for number, first in enumerate(range(0, heads, heads if band.full else part)):
        here, down = range(first, min(heads, first + part)), blocks[::-1]
        tiles = [1000 * block + head for head in range(heads) for block in blocks] if band.full else \
            [1000 * block + head for block in (blocks if band.last is None else down) for head in here]
        for i, tile in enumerate(tiles):
            back = not band.full and (i // sm_count + number) % 2
            expected[-1 - i % sm_count if back else i % sm_count].append(tile)
    assert found in [expected[i:] + expected[:i] for i in range(1 if band.full else sm_count)]


@pytest.mark.parametrize("megabytes", [64, 9, 3])
@pytest.mark.parametrize("heads", [8, 16, 30])
def test_ctas_have_about_the_same_to_do(heads: int, megabytes: int, monkeypatch: pytest.MonkeyPatch):
    """Causal, the keys of all heads in L2 together or those of few: of the blocks of columns the CTA with
    most has at most 7 % more than the mean, and CTA 0 has it."""
    monkeypatch.setattr(flash_wgmma_walk, "L2_BYTES", megabytes << 20)
    spec = attention(4096, 4096, 64, band=CAUSAL, heads=heads // 2, batch=2)
    sums = [sum(1 + -(-128 * (tile // 1000 + 1) // WGMMA.block_n) for tile in tiles)
            for tiles in walked(spec, WGMMA, 66, 4096)]
    assert max(sums) == sums[0]
    assert max(sums) <= 1.07 * sum(sums) / 66


def test_ctas_are_persistent_where_tiles_outnumber_multiprocessors():
    spec = attention(512, 64, 64, heads=3, group=2, symbolic=("s_q",))
    for sm_count, grid, rows in ((24, (4, 6, 1), 128), (23, (23, 1, 1), 0)):
        made = TABLE.build(spec, WGMMA, GPU("sm_90a", sm_count))
        assert (made.grid, made.rows_of_cta) == (grid, rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_nothing_spills(d: int):
    """A window, grouped heads, extents of a launch, l: all that takes registers."""
    spec = attention(7392, 7392, d, band=Band(-500, 0), heads=2, group=2, lse=True,
                     symbolic=("s_q", "s_kv", "start"))
    schedule = ATTENTION.choose(spec, GPU("sm_90a"))
    assert schedule is not None
    for one in (spec, replace(spec, band=FULL, symbolic=("s_q",))):
        made = TABLE.build(one, schedule, GPU("sm_90a"))
        assert made.grid == (132, 1, 1)
        fitting(made, "sm_90a")


def test_memory_is_touched_after_the_kernel_before():
    made = TABLE.build(attention(640, 128, 64, out=F32), WGMMA, GPU("sm_90a", 2))
    waits = [found.start() for found in re.finditer(r"griddepcontrol\.wait", made.ptx)]
    copies = [found.start() for found in re.finditer(r"cp\.async\.bulk\.tensor", made.ptx)]
    done = made.ptx.index("griddepcontrol.launch_dependents")
    assert len(waits) == 2
    assert waits[0] < copies[0] < copies[-1] < done < waits[1] < made.ptx.index("st.global")


LONG = 7392
ALIBI = Sum() * 0.125 + (Position("n").cast(F32) - Position("m").cast(F32)) * 0.0625
SPECS: dict[str, tuple[AttentionSpec | BackwardSpec, int]] = {
    **{f"{d}, causal": (attention(LONG, LONG, d, band=CAUSAL), 2) for d in (64, 96, 128, 192, 256)},
    "f16, persistent": (attention(LONG, 42 * 176, 128, F16, heads=16), 1),
    "e4m3, causal": (attention8(LONG, LONG, 256, band=CAUSAL), 2),
    "ALiBi, causal": (attention(LONG, LONG, 128, band=CAUSAL, score=ALIBI), 2),
    "dropout": (replace(attention(LONG, 64 * 128, 128), kept=200), 1),
    "sequences of any lengths": (ragged([(LONG, LONG)], 128, band=CAUSAL).spec, 2),
    "backward, causal": (backward(LONG, LONG, 128, band=CAUSAL), 1),
    "backward, dropout": (backward(LONG, LONG, 64, kept=200), 1)}
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECS)
def test_softmax_lies_under_the_products(name: str):
    spec, loops = SPECS[name]
    schedule = ATTENTION.choose(spec, GPU("sm_90a"))
    assert isinstance(schedule, FlashWgmma | BackwardWgmma)
    assert_overlapped(code_of(TABLE.build(spec, schedule, GPU("sm_90a")), "sm_90a"), loops)
