"""What every template of attention must do, on the emulator: heads, bands, layouts, schedules, extents of a
launch; what is exact comes out bit for bit. A template is a `Kind`; a new one is tested by a row of KINDS."""
from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import pytest
import torch
from tinygrad.dtype import DType

from tests.support.tile.attention_case import arguments, attention, launched, matrix, near
from tests.support.tile.flash_case import (
    BF16,
    CAUSAL,
    F16,
    F32,
    FMA,
    MMA,
    SHARED,
    WGMMA,
    FlashSchedule,
    W,
    arch_of,
    built,
    close,
    fma,
    launch,
    mma,
)
from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.expression import Load, Sum


@dataclass(frozen=True)
class Kind:
    """A template: `small` is its schedule of few rows, `narrow` one of short blocks of columns that holds
    heads of every width; what operands it has."""
    small: FlashSchedule
    narrow: FlashSchedule
    dtypes: tuple[DType, ...]
    heads: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]     # of keys and of values
    archs: tuple[str, ...]
    gaps: tuple[int, ...]
    offsets: tuple[int, int, int, int]      # of q, k, v, out
    stages: tuple[int, ...]
    shapes: tuple[FlashSchedule, ...]
    orders: tuple[FlashSchedule, ...]       # schedules whose warps run in any order
    edges: tuple[tuple[int, int, int], ...] # s_q, s_kv and start of a launch


PAIRS = ((64, 128), (128, 64), (192, 128), (72, 40), (16, 256), (24, 8))
EXTENTS = ((1, 1, 0), (5, 70, 65), (100, 300, 200), (64, 64, 0), (33, 256, 7), (65, 31, 3))
OF_16 = ((15, 127, 113), (16, 128, 112), (17, 129, 112), (1, 33, 32), (1, 32, 31))
OF_128 = tuple((s_q, s_kv, max(0, min(120, s_kv - s_q))) for s_q in (1, 127, 129, 200)
               for s_kv in (1, 63, 64, 65, 300))
TURNS = (WGMMA.pingpong(), W.block(192, 64).warps(16).pingpong())
FMAS = ("sm_80", "sm_89", "sm_90a")
KINDS = {
    "mma": Kind(MMA, MMA, (BF16, F16), (8, 16, 32, 40, 64, 72, 80, 96, 128, 136, 192, 256), PAIRS, FMAS,
                (0, 2, 4, 8), (8, 2, 4, 1), (2, 3, 4, 6),
                (mma(128, 32, 8), mma(128, 16, 4), mma(16, 128, 1), mma(64, 16, 2), mma(96, 32, 2),
                 mma(256, 32, 16), mma(256, 16, 16), mma(48, 64, 1, 3)), (mma(128, 32, 4, 3),), EXTENTS),
    "wgmma": Kind(WGMMA, W.block(128, 32), (BF16, F16), (8, 16, 40, 64, 72, 96, 128, 192, 256), PAIRS,
                  ("sm_90a",), (0, 8), (8, 16, 24, 8), (2, 3, 5),
                  (W.block(64, 128).warps(8), W.block(128, 176), W.block(192, 128).warps(16),
                   W.block(192, 16).warps(16), W.block(192, 80).warps(16).pingpong(), W.block(128, 240),
                   W.block(64, 256).warps(8)), (WGMMA, *TURNS), (*EXTENTS, *OF_128)),
    "fma": Kind(FMA, fma(32, 16, 2), (F32,), (1, 8, 20, 33, 64, 96, 128, 256),
                ((64, 128), (128, 64), (192, 40), (7, 256), (24, 5)), FMAS, (0, 1, 2, 4), (8, 1, 2, 3),
                (2, 3, 5),
                (fma(128, 32, 4), fma(64, 64, 2, 2), fma(64, 16, 2), fma(16, 8, 1), fma(64, 8, 1),
                 fma(64, 64, 4, 4), fma(16, 128, 1, 16), fma(32, 64, 1, 2, 3)),
                (fma(64, 32, 4, 1, 3), fma(32, 64, 2, 4, 3)), (*EXTENTS, *OF_16)),
    # warps that share keys
    "fma-shared": Kind(SHARED, SHARED, (F32,), (1, 8, 20, 33, 64, 96, 128, 256), ((64, 40),), ("sm_80",),
                       (0, 1, 2, 4), (8, 1, 2, 3), (2, 3, 5), (), (), (*EXTENTS, *OF_16))}
EACH = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
BANDS = [CAUSAL, Band(-40, 0), Band(-31, 0), Band(-63, 0), Band(None, 20), Band(-10, None), Band(5, 60),
         Band(None, -7), Band(-70, -33)]


# **** heads ****

@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "d", "dtype"), [
    pytest.param(kind, d, dtype, id=f"{name}-{d}-{dtype.name}") for name, kind in KINDS.items()
    for d in kind.heads for dtype in kind.dtypes])
def test_heads(kind: Kind, d: int, dtype: DType):
    """The band is a window that begins and ends within blocks; 200 keys are 7 blocks."""
    close(attention(40, 200, d, dtype, band=Band(-90, 3), start=100, lse=True), kind.narrow, seed=d % 4)
    close(attention(40, 200, d, dtype, out=F32), kind.narrow, seed=d % 4)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kind", "d", "d_v"), [
    pytest.param(kind, *pair, id=f"{name}-{pair}") for name, kind in KINDS.items() for pair in kind.widths])
def test_values_of_another_width_than_keys(kind: Kind, d: int, d_v: int):
    """wgmma: the result's rows fit where the queries were, or have their own shared memory."""
    wgmma = kind is KINDS["wgmma"]
    close(attention(50, 150, d, kind.dtypes[0], d_v=d_v, band=CAUSAL, start=90, heads=2, lse=True),
          kind.small if wgmma else kind.narrow)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("out", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize(("kind", "arch"), [pytest.param(kind, arch, id=f"{name}-{arch}")
                                            for name, kind in KINDS.items() for arch in kind.archs])
def test_architectures_and_results(kind: Kind, arch: str, out: DType):
    """In float32 rows of values may begin anywhere."""
    for gap, d_v in ((0, 64), (1, 61), (2, 62)) if kind.dtypes == (F32,) else ((0, 64),):
        close(attention(70, 130, 64, kind.dtypes[-1], out=out, heads=2, group=2, d_v=d_v, gap=gap,
                        lse=True), kind.small, arch)


# **** bands ****

@pytest.mark.sampled(1)
@EACH
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_bands(kind: Kind, band: Band):
    """Rows may see nothing: zeros, and l = −inf."""
    rows, keys = (140, 330) if kind is KINDS["wgmma"] else (70, 170)
    schedule = mma(64, 32, 4, 3) if kind is KINDS["mma"] else kind.narrow
    spec = attention(rows, keys, 32, kind.dtypes[0], band=band, start=150, symbolic=("start",), lse=True)
    for start in (0, 1, 31, 33, 63, 150): close(spec, schedule, seed=start % 4, start=start)
    close(replace(spec, symbolic=()), schedule)


@EACH
def test_rows_whose_window_begins_in_a_later_block(kind: Kind):
    close(attention(70, 170, 32, kind.dtypes[0], band=Band(-20, 0), start=100), kind.narrow)


@EACH
def test_the_last_column_of_a_block_that_one_row_does_not_see(kind: Kind):
    """Of 128 columns the first row sees 127."""
    close(attention(5, 131, 32, kind.dtypes[0], band=CAUSAL, start=126), kind.narrow)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "schedule"), [
    (KINDS["mma"], mma(64, 64, 4)), (KINDS["fma"], fma(64, 64, 2, 2)), (KINDS["wgmma"], WGMMA)],
    ids=["mma", "fma", "wgmma"])
@pytest.mark.parametrize("s_q", [40, 128, 150])
def test_columns_that_no_row_sees_are_not_read(kind: Kind, schedule: FlashSchedule, s_q: int):
    """Keys and values beyond the band are NaN, within the last block too."""
    spec = attention(s_q, 500, 96 if kind is KINDS["wgmma"] else 64, kind.dtypes[0], band=CAUSAL, start=150)
    for seed in range(4 if kind is KINDS["wgmma"] else 1):
        given = arguments(spec, seed)
        spoilt = {name: storage.clone() for name, storage in given.items()}
        for name in "kv": matrix(spec, spoilt, name)[..., 150 + s_q:, :] = torch.nan
        near(spec, given, launch(spec, schedule, spoilt, seed=seed))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("schedule", "dtype", "d", "d_v", "blocks"), [
    (MMA, BF16, 64, 64, {FULL: 64, CAUSAL: 36, Band(-31, 0): 15}),
    (FMA, F32, 16, 32, {FULL: 64, CAUSAL: 36, Band(-31, 0): 15}),
    (WGMMA, BF16, 64, 64, {FULL: 32, CAUSAL: 20, Band(-63, 0): 11})], ids=["mma", "fma", "wgmma"])
def test_blocks_that_no_row_sees_are_skipped(schedule: FlashSchedule, dtype: DType, d: int, d_v: int,
                                             blocks: dict[Band, int]):
    """Bytes copied: each of the blocks of rows sees its own keys and those before; of a window, two blocks
    (wgmma: three)."""
    rows, found = (512 if schedule is WGMMA else 256), {}
    for band in blocks:
        spec = attention(rows, rows, d, dtype, band=band, d_v=d_v, out=F32)
        _, report = launched(built(spec, schedule), spec, arguments(spec), arch_of(schedule))
        copied = report.stats.asynchronous_bytes - rows * d * dtype.itemsize
        found[band] = copied / (schedule.block_n * (d + d_v) * dtype.itemsize)
    assert found == blocks


# **** exact ****

@pytest.mark.sampled(2)
@EACH
def test_a_row_that_sees_one_column_is_its_value(kind: Kind):
    for dtype in kind.dtypes:
        spec = attention(70, 170, 64, dtype, band=Band(0, 0), start=60, heads=2)
        given = arguments(spec)
        out, _ = launch(spec, kind.small, given)
        assert torch.equal(out, matrix(spec, given, "v")[..., 60:130, :].double())


@pytest.mark.sampled(4)
@EACH
@pytest.mark.parametrize("band", [FULL, Band(-63, 0)], ids=["full", "window"])
def test_equal_scores_are_a_mean(kind: Kind, band: Band):
    """Of 256 or 64 small integers: nothing is rounded."""
    spec = attention(64, 256, 48, kind.dtypes[0], out=F32, band=band, start=63, lse=True)
    given = arguments(spec)
    given["q"].zero_()
    given["v"].copy_(torch.randint(-8, 9, given["v"].shape, generator=torch.Generator().manual_seed(1)))
    out, log = launch(spec, kind.small, given)
    v, count = matrix(spec, given, "v").double(), 256 if band.full else 64
    firsts = [0 if band.full else row for row in range(64)]
    assert torch.equal(out, torch.stack([v[..., at:at + count, :].sum(-2) / count for at in firsts], -2))
    assert log is not None
    assert (log - math.log(count)).abs().max() < 1e-6


@pytest.mark.sampled(1)
@EACH
def test_a_rows_bits_do_not_depend_on_other_rows(kind: Kind):
    """Nor on when a warp multiplies its result: scores grow, so that rows' tops move at different times."""
    spec = attention(37, 270, 24 if kind.dtypes == (F32,) else 64, kind.dtypes[0], heads=2, lse=True)
    given, alone = arguments(spec, scale=2.0), replace(spec, s_q=5)
    few = launch(alone, kind.small, given | {"l": given["l"][:10].clone()})
    many = launch(spec, kind.small, given)
    assert torch.equal(few[0], many[0][..., :5, :])
    assert few[1] is not None
    assert many[1] is not None
    assert torch.equal(few[1], many[1][..., :5])


# **** layouts ****

@pytest.mark.sampled(4)
@pytest.mark.parametrize("order", ["bhr", "brh"])
@pytest.mark.parametrize(("kind", "gap"), [pytest.param(kind, gap, id=f"{name}-{gap}")
                                           for name, kind in KINDS.items() for gap in kind.gaps])
def test_layouts(kind: Kind, gap: int, order: str):
    """Rows aligned as little as may be, heads in either order, shared by a group."""
    close(attention(40, 130, 40, kind.dtypes[0], batch=2, heads=2, group=3, order=order, gap=gap,
                    lse=True), kind.small)


@pytest.mark.sampled(2)
@EACH
def test_offsets_and_heads_that_are_the_same(kind: Kind):
    spec = attention(40, 130, 64, kind.dtypes[0], heads=3, batch=2)
    offsets = dict(zip(("q", "k", "v", "out"), kind.offsets, strict=True))
    moved = {name: replace(getattr(spec, name), offset=at) for name, at in offsets.items()}
    close(replace(spec, **moved), kind.small)
    once = {name: replace(getattr(spec, name), batch=(0, getattr(spec, name).batch[1], 0)) for name in "qkv"}
    close(replace(spec, **once), kind.small)


# **** schedules ****

def narrowest(kind: Kind, stages: int) -> list[FlashSchedule]:
    """Blocks of 16 columns."""
    if kind is KINDS["wgmma"]:
        made = W.block(128, 16).stages(stages)
        return [made, made.pingpong()]
    if kind is KINDS["mma"]: return [mma(32, 16, 2, stages)]
    return [fma(32, 16, 2, 1, stages) if kind is KINDS["fma"] else fma(16, 16, 1, 2, stages)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "stages"), [pytest.param(kind, stages, id=f"{name}-{stages}")
                                              for name, kind in KINDS.items() for stages in kind.stages])
def test_rings(kind: Kind, stages: int):
    """At least `stages` + 2 blocks, fewer blocks than stages, and one."""
    rows, d = (100, 64) if kind is KINDS["wgmma"] else (20, 32 if kind.dtypes == (F32,) else 64)
    for schedule in narrowest(kind, stages):
        for s_kv in (16 * (stages + 2), 16 * stages * 3 - 5, 16):
            close(attention(rows, s_kv, d, kind.dtypes[0]), schedule)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "schedule"), [pytest.param(kind, schedule, id=str(schedule))
                                                for kind in KINDS.values() for schedule in kind.shapes])
def test_blocks_and_warps(kind: Kind, schedule: FlashSchedule):
    rows, keys, start = (300, 700, 400) if kind is KINDS["wgmma"] else (140, 300, 130)
    widest = {"wgmma": (64, 64), "mma": (128, 64), "fma": (40, 60)}
    for d, d_v in ((48, 32), (16, 8), next(pair for name, pair in widest.items() if kind is KINDS[name])):
        close(attention(rows, keys, d, kind.dtypes[0], d_v=d_v, band=CAUSAL, start=start, lse=True),
              schedule)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("kind", "schedule"), [pytest.param(kind, schedule, id=str(schedule))
                                                for kind in KINDS.values() for schedule in kind.orders])
def test_interleavings(kind: Kind, schedule: FlashSchedule, seed: int):
    """Warps run in another order for every seed."""
    d = 32 if kind.dtypes == (F32,) else 64
    spec = attention(192, 384, d, kind.dtypes[-1], heads=2, band=Band(-300, 0), start=192)
    close(spec, schedule, seed=seed)


@EACH
def test_memory_is_touched_after_the_kernel_before(kind: Kind):
    """And the next kernel may begin when the last copies are there (wgmma: on their way)."""
    spec = attention(64, 128, 64, kind.dtypes[0], out=F32)
    made = built(spec, kind.small, "sm_90a")
    waits = [found.start() for found in re.finditer(r"griddepcontrol\.wait", made.ptx)]
    copies = [found.start() for found in re.finditer(r"cp\.async\.(cg|ca|bulk\.tensor)", made.ptx)]
    done, stored = made.ptx.index("griddepcontrol.launch_dependents"), made.ptx.index("st.global")
    assert made.pdl
    assert waits[0] < copies[0] < copies[-1] < done < stored
    if kind is KINDS["wgmma"]: assert (len(waits), done < waits[1] < stored) == (2, True)
    else: assert not built(spec, kind.small).pdl


# **** extents of a launch ****

@pytest.mark.sampled(1)
@EACH
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-20, 0)], ids=str)
def test_extents_of_a_launch(kind: Kind, band: Band):
    """About the edges of blocks. What lies beyond is memory that was never written."""
    spec = attention(200, 300, 16 if kind.dtypes == (F32,) else 64, kind.dtypes[0], band=band, start=200,
                     symbolic=("s_q", "s_kv", "start"), heads=2, group=2, order="brh", lse=True)
    schedule = mma(64, 32, 4, 3) if kind is KINDS["mma"] else kind.small
    for seed, extents in enumerate(kind.edges):
        given, named = arguments(spec, seed % 4), dict(zip(spec.symbolic, extents, strict=True))
        near(spec, given, launch(spec, schedule, given, seed=seed % 4, **named), **named)


@pytest.mark.sampled(4)
@EACH
@pytest.mark.parametrize("symbolic", [("s_q",), ("s_kv",), ("start",), ("s_q", "start")], ids="+".join)
def test_some_symbolic_extents(kind: Kind, symbolic: tuple[str, ...]):
    counts = {"s_q": 130, "s_kv": 131, "start": 1}
    close(attention(150, 260, 40, kind.dtypes[0], band=Band(-100, 0), start=110, symbolic=symbolic, out=F32,
                    score=Sum() * 0.1 + Load(0, F32, 260, 1)),
          kind.small, **{name: counts[name] for name in symbolic})


@EACH
def test_no_keys_at_all(kind: Kind):
    spec = attention(40, 100, 64, kind.dtypes[0], symbolic=("s_kv",), lse=True)
    out, log = launch(spec, kind.small, arguments(spec), s_kv=0)
    assert (out == 0).all()
    assert log is not None
    assert (log == -torch.inf).all()
