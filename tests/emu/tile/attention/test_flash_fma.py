"""Attention in float32 on the emulator: heads, bands, layouts, schedules, extents of a launch; what is exact
comes out bit for bit."""
from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from attention_case import arguments, attention, launched, matrix, near, run
from attention_exact import equal_scores_are_a_mean, one_column_is_its_value
from flash_fma_case import CAUSAL, F32, SHARED, SMALL, close, scheduled
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.attention.schedules import FlashFma
from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

BOTH = pytest.mark.parametrize("schedule", [SMALL, SHARED], ids=str)

# **** heads ****

@pytest.mark.parametrize("d", [1, 8, 20, 33, 64, 96, 128, 256])
def test_heads(d: int):
    """Of any number of elements. The band is a window that begins and ends within blocks."""
    close(attention(40, 150, d, F32, band=Band(-90, 3), start=60, lse=True),
          SMALL if d <= 200 else scheduled(32, 16, 2), seed=d % 4)
    close(attention(9, 150, d, F32), SHARED, seed=d % 4)


@pytest.mark.parametrize(("d", "d_v"), [(64, 128), (128, 64), (192, 40), (7, 256), (24, 5)])
def test_values_of_another_width_than_keys(d: int, d_v: int):
    close(attention(50, 130, d, F32, d_v=d_v, band=CAUSAL, start=70, heads=2, lse=True),
          scheduled(32, 16, 2))


@pytest.mark.parametrize("out", [F32, dtypes.bfloat16, dtypes.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_architectures_and_results(arch: str, out: DType):
    for gap, d_v in ((0, 64), (1, 61), (2, 62)):
        close(attention(35, 130, 64, F32, d_v=d_v, out=out, heads=2, group=2, gap=gap, lse=True),
              arch=arch)


# **** bands ****

@BOTH
@pytest.mark.parametrize("band", [CAUSAL, Band(-40, 0), Band(-31, 0), Band(None, 20), Band(-10, None),
                                  Band(5, 60), Band(None, -7), Band(-70, -33)], ids=str)
def test_bands(band: Band, schedule: FlashFma):
    """Rows may see nothing: zeros, and l = −inf."""
    spec = attention(40, 170, 16, F32, band=band, start=150, symbolic=("start",), lse=True)
    made = TABLE.build(spec, schedule, GPU("sm_80"))
    for start in (0, 31, 33, 150):
        given = arguments(spec, start % 4)
        near(spec, given, run(made, spec, given, seed=start % 4, start=start), start=start)


def test_columns_that_no_row_sees_are_not_read():
    """Keys and values beyond the band are NaN, within the last block too."""
    spec = attention(40, 300, 64, F32, band=CAUSAL, start=150)
    given = arguments(spec)
    spoilt = {name: storage.clone() for name, storage in given.items()}
    for name in "kv": matrix(spec, spoilt, name)[..., 190:, :] = torch.nan
    near(spec, given, run(TABLE.build(spec, scheduled(64, 64, 2, 2), GPU("sm_80")), spec, spoilt))


def test_blocks_that_no_row_sees_are_skipped():
    """Bytes copied: each of 8 blocks of rows sees its own keys and those before; of a window, two blocks."""
    rows, nbytes = 256, 32 * 16 * 4
    found = {}
    for band in (FULL, CAUSAL, Band(-31, 0)):
        spec = attention(rows, rows, 16, F32, band=band, d_v=32)
        _, report = launched(TABLE.build(spec, SMALL, GPU("sm_80")), spec, arguments(spec), "sm_80")
        found[band] = report.stats.asynchronous_bytes - rows * 16 * 4
    assert found == {FULL: 64 * 3 * nbytes, CAUSAL: 36 * 3 * nbytes, Band(-31, 0): 15 * 3 * nbytes}


# **** exact ****

@BOTH
def test_a_row_that_sees_one_column_is_its_value(schedule: FlashFma):
    one_column_is_its_value(lambda spec: TABLE.build(spec, schedule, GPU("sm_80")), "sm_80", F32)


@BOTH
@pytest.mark.parametrize("band", [FULL, Band(-63, 0)], ids=["full", "window"])
def test_equal_scores_are_a_mean(band: Band, schedule: FlashFma):
    equal_scores_are_a_mean(lambda spec: TABLE.build(spec, schedule, GPU("sm_80")), "sm_80", band, F32)


@BOTH
def test_a_rows_bits_do_not_depend_on_other_rows(schedule: FlashFma):
    spec = attention(37, 170, 24, F32, heads=2, lse=True)
    given = arguments(spec)
    alone = replace(spec, s_q=5)
    few = run(TABLE.build(alone, schedule, GPU("sm_80")), alone, given | {"l": given["l"][:10].clone()})
    many = run(TABLE.build(spec, schedule, GPU("sm_80")), spec, given)
    assert torch.equal(few[0], many[0][..., :5, :])
    assert few[1] is not None
    assert many[1] is not None
    assert torch.equal(few[1], many[1][..., :5])


def test_nothing_is_rounded_to_tensor_cores_formats():
    """A row whose result lies in the last bits of values that are large."""
    spec = attention(1, 2, 4, F32, score=None)
    given = arguments(spec)
    given["q"].zero_()
    matrix(spec, given, "v")[..., 0, :] = 1 + 2.0**-22
    matrix(spec, given, "v")[..., 1, :] = -1.0
    out, _ = run(TABLE.build(spec, SHARED, GPU("sm_80")), spec, given)
    assert (out == 2.0**-23).all()


@pytest.mark.parametrize("scale", [1e-6, 30.0, 1e4, 1e15])
def test_very_large_and_very_small_scores(scale: float):
    """Beyond 10⁹ a row is its largest score's value, as far as float32 tells scores apart."""
    spec = attention(40, 100, 32, F32, band=CAUSAL, start=60, lse=True)
    given = arguments(spec)
    given["q"].mul_(scale)
    if scale > 100: given["k"].mul_(scale)
    got = run(TABLE.build(spec, SMALL, GPU("sm_80")), spec, given)
    if scale <= 100: return near(spec, given, got)
    largest = matrix(spec, given, "q").double() @ matrix(spec, given, "k").double().transpose(-1, -2)
    size = largest.abs().amax()
    largest.masked_fill_(torch.arange(100)[None] > torch.arange(40)[:, None] + 60, -torch.inf)
    top = largest.topk(2).values
    clear = top[..., 0] - top[..., 1] > 1e-5 * size
    exact = matrix(spec, given, "v")[0, 0, 0][largest.argmax(-1)].double()
    assert clear.float().mean() > 0.5
    assert torch.equal(got[0][clear], exact[clear])
    return None


# **** layouts ****

@pytest.mark.parametrize(("order", "schedule"), [("bhr", SMALL), ("brh", SHARED)], ids=str)
@pytest.mark.parametrize("gap", [0, 1, 2, 4])
def test_layouts(order: str, gap: int, schedule: FlashFma):
    """Rows aligned to 4 bytes and more, heads in either order, shared by a group."""
    close(attention(20, 70, 40, F32, batch=2, heads=2, group=3, order=order, gap=gap, lse=True), schedule)


def test_offsets():
    spec = attention(40, 130, 64, F32)
    offsets = {"q": 8, "k": 1, "v": 2, "out": 3}
    close(replace(spec, **{name: replace(getattr(spec, name), offset=at) for name, at in offsets.items()}))


# **** schedules ****

@pytest.mark.parametrize("stages", [2, 3, 5])
def test_rings(stages: int):
    """At least `stages` + 2 blocks, and fewer blocks than stages."""
    for s_kv in (16 * (stages + 2), 16 * stages * 3 - 5, 16):
        close(attention(20, s_kv, 32, F32), scheduled(32, 16, 2, 1, stages))
        close(attention(20, s_kv, 32, F32), scheduled(16, 16, 1, 2, stages))


@pytest.mark.parametrize("schedule", [
    scheduled(128, 32, 4), scheduled(64, 64, 2, 2), scheduled(64, 16, 2), scheduled(16, 8, 1),
    scheduled(64, 8, 1), scheduled(64, 64, 4, 4), scheduled(16, 128, 1, 16), scheduled(32, 64, 1, 2, 3)],
    ids=str)
def test_blocks_and_warps(schedule: FlashFma):
    for d, d_v in ((48, 32), (40, 60)):
        close(attention(100, 150, d, F32, d_v=d_v, band=CAUSAL, start=30, lse=True), schedule)


@pytest.mark.parametrize("seed", range(4))
def test_interleavings(seed: int):
    """Warps run in another order for every seed."""
    for schedule in (scheduled(64, 32, 4, 1, 3), scheduled(32, 64, 2, 4, 3)):
        close(attention(64, 320, 32, F32, heads=2, band=CAUSAL, start=256), schedule, seed=seed)



# **** extents of a launch ****

@BOTH
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-20, 0)], ids=str)
def test_symbolic_extents(band: Band, schedule: FlashFma):
    """About the edges of blocks. What lies beyond is memory that was never written."""
    spec = attention(100, 300, 16, F32, band=band, symbolic=("s_q", "s_kv", "start"), start=200, lse=True)
    made, given = TABLE.build(spec, schedule, GPU("sm_80")), arguments(spec)
    for extents in ((1, 1, 0), (5, 70, 65), (100, 300, 200), (64, 64, 0), (33, 256, 7), (65, 31, 3),
                    (15, 127, 113), (16, 128, 112), (17, 129, 112), (1, 33, 32), (1, 32, 31)):
        named = dict(zip(spec.symbolic, extents, strict=True))
        near(spec, given, run(made, spec, given, **named), **named)


@BOTH
def test_no_keys_at_all(schedule: FlashFma):
    spec = attention(40, 100, 16, F32, symbolic=("s_kv",), lse=True)
    out, log = run(TABLE.build(spec, schedule, GPU("sm_80")), spec, arguments(spec), s_kv=0)
    assert (out == 0).all()
    assert log is not None
    assert (log == -torch.inf).all()


def test_on_hopper_memory_is_touched_after_the_kernel_before():
    """And the next kernel may begin when the last copies are there."""
    made = TABLE.build(attention(64, 128, 64, F32), SMALL, GPU("sm_90a"))
    wait, done = (made.ptx.index(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
    assert made.pdl
    copies = [found.start() for found in re.finditer(r"cp\.async\.cg", made.ptx)]
    assert wait < copies[0] < copies[-1] < done < made.ptx.index("st.global")
    assert not TABLE.build(attention(64, 128, 64, F32), SMALL, GPU("sm_80")).pdl
